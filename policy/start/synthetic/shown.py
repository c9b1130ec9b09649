"""Fresh pools as a prompt shows them: re-drawn handles, skills, prices, speeds, and experience that may belie tags."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from random import Random
from string import ascii_lowercase, digits

from gateway.core.loop.shown import ShownExperience, ShownWorker, price_tier
from policy.simulators import HANDLES
from policy.simulators.arena.workers import SELF_WORKER, VOTE_TOOL, ArenaWorker, Pool, random_pool
from policy.start.synthetic.label import MAJORITY, PLANNER

OTHER_TAGS = ("general", "writing", "code", "math", "reasoning", "vision", "chat", "translation", "cheap", "search")
OTHER_TAG_SHARE = 0.08  # of workers carry a tag from outside the arena
INVENTED_SHARE = 0.08  # of pools have handles of random letters, several tokens each
RENAMED_SHARE = 0.2  # of pools call `vote` and `self` something else
BUILTIN_SHARE = 0.85  # of pools have `vote`; of those with depth left, `self`
LIAR_SHARE = 0.12  # of workers are worse at the question than their tags say
GENIUS_SHARE = 0.06  # of workers without the tag are good at it all the same
OUTCOMES_MAX = 50
LATENCIES_S = (0.05, 0.1, 0.3, 0.6, 0.9, None, 2.0, 12.0)  # mostly shown as fast


@dataclass(frozen=True)
class Drawn:
    """A pool: the workers as shown, in that order, and the workers themselves (same handles) to run plans on."""

    shown: tuple[ShownWorker, ...]
    pool: Pool


def draw_pool(rng: Random, workers: int, needed: Collection[str], loops: bool, plain: bool = False) -> Drawn:
    """A pool of `workers` models for a question that needs those skills; `loops`: a child loop may be offered. `plain`:
    no invented handles, no tags but skills."""
    models = random_pool(rng, workers, builtins=False)
    handles = _handles(rng, workers, plain)
    share = rng.choice((0.0, 0.0, 0.5, 1.0, 1.0, rng.random()))
    pairs: list[tuple[ShownWorker, ArenaWorker]] = []
    for handle, model in zip(handles, models, strict=True):
        worker = replace(model, handle=handle)
        seen = _experience(rng, worker, needed) if rng.random() < share else None
        pairs.append((_shown(rng, worker, seen, plain), worker))
    renamed = rng.random() < RENAMED_SHARE
    for builtin, offered in ((VOTE_TOOL, True), (SELF_WORKER, loops)):
        if offered and rng.random() < BUILTIN_SHARE:
            handle = next(h for h in _handles(rng, 12, plain) if h not in handles) if renamed else builtin.handle
            handles.append(handle)
            seen = ShownExperience(9, rng.random(), 0, 100) if rng.random() < share / 2 else None
            pairs.append((_shown(rng, replace(builtin, handle=handle), seen, plain), replace(builtin, handle=handle)))
    rng.shuffle(pairs)
    return Drawn(tuple(shown for shown, _ in pairs), tuple(worker for _, worker in pairs))


def _handles(rng: Random, n: int, plain: bool) -> list[str]:
    if plain or rng.random() >= INVENTED_SHARE:
        return rng.sample(HANDLES, n)
    handles: dict[str, None] = {}
    while len(handles) < n:
        tail = "".join(rng.choices(ascii_lowercase, k=rng.randint(2, 7)))
        handles[tail + (rng.choice(digits) if rng.random() < 0.2 else "")] = None
    return list(handles)


def _shown(rng: Random, worker: ArenaWorker, experience: ShownExperience | None, plain: bool) -> ShownWorker:
    tags = list(worker.tags)
    if worker.kind == "openai":
        if not plain and rng.random() < OTHER_TAG_SHARE:
            tags.append(rng.choice(OTHER_TAGS))
        if rng.random() < 0.5:  # a pool file lists tags in any order
            rng.shuffle(tags)
    latency_s = rng.choice(LATENCIES_S)
    return ShownWorker(worker.handle, "", tuple(tags), price_tier(worker.price), 8192, latency_s, experience)


def _experience(rng: Random, worker: ArenaWorker, needed: Collection[str]) -> ShownExperience:
    """Outcomes of this worker on such questions: its true success there, through 1 to OUTCOMES_MAX coin flips."""
    useful = [worker.skills[skill] for skill in sorted(needed) if skill in worker.skills]
    success = sum(useful) / len(useful) if useful else 0.04
    if useful and rng.random() < LIAR_SHARE:
        success = rng.uniform(0.0, 0.5)
    elif not useful and rng.random() < GENIUS_SHARE:
        success = rng.uniform(0.7, 1.0)
    n = round(OUTCOMES_MAX ** rng.random())
    mean = sum(rng.random() < success for _ in range(n)) / n
    return ShownExperience(n, mean, 400_000, 300)


def is_model(shown: ShownWorker) -> bool:
    """Whether it is a worker proper, neither the vote nor the child loop."""
    return MAJORITY not in shown.tags and PLANNER not in shown.tags
