"""Workers as data: which skills, how often right, what they cost, how slow; and the pools made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from random import Random
from typing import Any, Literal

import yaml

from gateway.core.money.amounts import Usage, cost_nano
from gateway.core.pool.workers import VOTE_URL, PoolFile, Price
from policy.simulators import HANDLES
from policy.simulators.arena.families.family import SKILLS

Level = Literal["expert", "good", "fair"]

LEVELS: Mapping[Level, tuple[float, float]] = {"expert": (0.97, 1.0), "good": (0.88, 0.97), "fair": (0.0, 0.88)}
LEVEL_ESTIMATE: Mapping[Level, float] = {"expert": 0.99, "good": 0.93, "fair": 0.78}
HARD_LEVELS: Mapping[Level, tuple[float, float]] = {"expert": (0.72, 1.0), "good": (0.62, 0.72), "fair": (0.0, 0.62)}
HARD_LEVEL_ESTIMATE: Mapping[Level, float] = {"expert": 0.76, "good": 0.67, "fair": 0.57}
HARD_SKILLS = ("logic", "format")  # no worker is near perfect at these: a vote or a review of the draft helps
PRICE_TIERS_USD_PER_MTOK = ("0.2", "0.6", "2", "6", "20")  # output tokens; input costs a quarter
TYPICAL_CALL = Usage(prompt_tokens=150, completion_tokens=40)
TYPICAL_REPLY_TOKENS = 30
OUTPUT_TOKENS_MAX = 512
UNTOLD = "a language model"
VOTE = "vote"
SELF = "self"


@dataclass(frozen=True)
class ArenaWorker:
    """One simulated worker. `skills` maps a skill to how often it is right; without a skill it is always wrong."""

    name: str
    handle: str
    skills: Mapping[str, float] = field(hash=False)
    output_usd_per_mtok: str = "0"
    base_s: float = 0.0
    per_token_s: float = 0.0
    sentences: int = 1  # of reasoning before the answer: longer replies cost more
    kind: Literal["openai", "tool", "self"] = "openai"
    error_500_rate: float = 0.0
    error_429_rate: float = 0.0

    @property
    def tags(self) -> tuple[str, ...]:
        """Skills as tags, in the order of SKILLS; the built-in kinds say what they do."""
        if self.kind != "openai":
            return ("majority",) if self.kind == "tool" else ("planner",)
        return tuple(skill for skill in SKILLS if skill in self.skills)

    @property
    def description(self) -> str:
        """True words about each skill: `expert dates; good tables`."""
        if self.kind == "tool":
            return "gives the majority answer of the replies it sees"
        if self.kind == "self":
            return "plans its task again as a request of its own"
        by_level: dict[Level, list[str]] = {}
        for skill in self.tags:
            by_level.setdefault(level_of(skill, self.skills[skill]), []).append(skill)
        return "; ".join(f"{level} {' '.join(by_level[level])}" for level in LEVELS if level in by_level)

    @property
    def price(self) -> Price:
        """Dollars per million tokens; the built-in kinds are free here (a child loop's calls cost by themselves)."""
        output = Decimal(self.output_usd_per_mtok)
        return Price(input_usd_per_mtok=output / 4, output_usd_per_mtok=output)

    def level(self, skill: str) -> Level | None:
        """What the pool text says about this skill, or None where it says nothing."""
        return level_of(skill, self.skills[skill]) if skill in self.skills else None

    def shown_success(self, skill: str) -> float:
        """Success in one call as the pool text lets one estimate it: the middle of the level, 0 without the tag."""
        level = self.level(skill)
        if level is None:
            return 0.0
        return (HARD_LEVEL_ESTIMATE if skill in HARD_SKILLS else LEVEL_ESTIMATE)[level]

    def typical_usd(self) -> float:
        """Dollars of a typical call, for choosing only (money itself is integer nano-dollars)."""
        return cost_of(self, TYPICAL_CALL) / 1e9

    def latency_s(self, completion_tokens: int) -> float:
        """Simulated seconds of one call."""
        return self.base_s + self.per_token_s * completion_tokens


Pool = tuple[ArenaWorker, ...]


def level_of(skill: str, accuracy: float) -> Level:
    """The word for an accuracy; on hard skills the same words mean less."""
    bands = HARD_LEVELS if skill in HARD_SKILLS else LEVELS
    return next(level for level, (low, _high) in bands.items() if accuracy >= low)


@lru_cache(maxsize=1024)
def _price_of_tier(output_usd_per_mtok: str) -> Price:
    output = Decimal(output_usd_per_mtok)
    return Price(input_usd_per_mtok=output / 4, output_usd_per_mtok=output)


def cost_of(worker: ArenaWorker, usage: Usage) -> int:
    """Nano-dollars of one call."""
    return cost_nano(_price_of_tier(worker.output_usd_per_mtok), usage)


VOTE_TOOL = ArenaWorker(VOTE, VOTE, {}, kind="tool")
SELF_WORKER = ArenaWorker(SELF, SELF, {}, kind="self")

STANDARD: Pool = (
    ArenaWorker("atlas", "atlas", {"tables": 0.995, "dates": 0.93, "logic": 0.70}, "2", 0.060, 0.0010, 2),
    ArenaWorker("quill", "quill", {"strings": 0.995, "lists": 0.95, "format": 0.60}, "0.6", 0.030, 0.0006),
    ArenaWorker("ember", "ember", {"arithmetic": 0.85, "units": 0.84, "logic": 0.64}, "0.2", 0.020, 0.0003),
    ArenaWorker("cedar", "cedar", {"arithmetic": 0.998, "units": 0.996, "logic": 0.78}, "6", 0.120, 0.0015, 3),
    ArenaWorker("onyx", "onyx", {"dates": 0.997, "lists": 0.995, "review": 0.985}, "6", 0.110, 0.0014, 2),
    ArenaWorker("fjord", "fjord", {"tables": 0.86, "strings": 0.90}, "0.2", 0.025, 0.0004),
    ArenaWorker("maple", "maple", {"format": 0.55, "arithmetic": 0.94, "review": 0.90}, "0.6", 0.040, 0.0007),
    ArenaWorker("comet", "comet", {"logic": 0.76, "units": 0.975, "lists": 0.80}, "2", 0.070, 0.0010, 2),
)
HELD_OUT: Pool = (
    ArenaWorker("heron", "heron", {"tables": 0.995, "arithmetic": 0.95, "review": 0.985}, "2", 0.080, 0.0010, 2),
    ArenaWorker("basil", "basil", {"units": 0.99, "strings": 0.99, "logic": 0.68}, "0.6", 0.040, 0.0007),
    ArenaWorker("coral", "coral", {"dates": 0.995, "logic": 0.78, "format": 0.62}, "6", 0.100, 0.0013, 3),
    ArenaWorker("delta", "delta", {"lists": 0.99, "arithmetic": 0.995, "logic": 0.74}, "6", 0.110, 0.0014, 2),
    ArenaWorker("flint", "flint", {"tables": 0.87, "lists": 0.90, "format": 0.50}, "0.2", 0.020, 0.0003),
    ArenaWorker("grove", "grove", {"logic": 0.63, "dates": 0.90, "units": 0.85}, "0.2", 0.025, 0.0004),
)


def with_builtins(workers: Pool) -> Pool:
    """The workers plus the `vote` tool and `self`."""
    return (*workers, VOTE_TOOL, SELF_WORKER)


def random_worker(rng: Random, handle: str, skills: tuple[str, ...]) -> ArenaWorker:
    """A fresh worker with that handle and those skills; its name is unique, so its errors are its own."""
    accuracies = {skill: _draw_accuracy(rng, skill) for skill in skills}
    return ArenaWorker(
        name=f"{handle}-{rng.getrandbits(40):010x}",
        handle=handle,
        skills=accuracies,
        output_usd_per_mtok=rng.choice(PRICE_TIERS_USD_PER_MTOK),
        base_s=round(rng.uniform(0.02, 0.15), 3),
        per_token_s=round(rng.uniform(0.0003, 0.0015), 4),
        sentences=rng.randint(1, 3),
    )


def _draw_accuracy(rng: Random, skill: str) -> float:
    if skill in HARD_SKILLS:
        return round(rng.uniform(0.50, 0.80), 3)
    return round(rng.choice((rng.uniform(0.97, 1.0), rng.uniform(0.88, 0.97), rng.uniform(0.68, 0.87))), 3)


def random_pool(rng: Random, n: int, *, builtins: bool = True) -> Pool:
    """A fresh pool of `n` workers (1 to 64), each with two or three skills, handles re-drawn, in random order.

    Skills are dealt so that they are covered evenly: nine skills and twenty slots at n = 8, half of them missing at
    n = 2. With `builtins`, `vote` and `self` are in it at random places.
    """
    if not 1 <= n <= len(HANDLES):
        raise ValueError(f"a pool has 1 to {len(HANDLES)} workers, not {n}")
    deck: list[str] = []
    pool: list[ArenaWorker] = []
    for handle in rng.sample(HANDLES, n):
        names: list[str] = []
        while len(names) < rng.choice((2, 3, 3)):
            if not deck:
                deck = [*SKILLS, "logic"]  # a vote needs several solvers
                rng.shuffle(deck)
            skill = next((s for s in deck if s not in names), None)
            if skill is None:
                deck = [*SKILLS]
                continue
            deck.remove(skill)
            names.append(skill)
        pool.append(random_worker(rng, handle, tuple(names)))
    if builtins:
        pool += [VOTE_TOOL, SELF_WORKER]
    rng.shuffle(pool)
    return tuple(pool)


# ---------------------------------------------------------------- the pool file of `make serve`


def worker_entry(worker: ArenaWorker, base_url: str, *, profile: bool = True) -> dict[str, Any]:
    """One worker as it stands in pool.yaml; `vote` is built into the gateway and `self` is the conductor. `profile`:
    what a model is good at is said; else it has no tags and the same description as every other."""
    profile = profile or worker.kind != "openai"
    entry: dict[str, Any] = {
        "name": worker.name,
        "handle": worker.handle,
        "kind": worker.kind,
        "description": worker.description if profile else UNTOLD,
        "tags": list(worker.tags) if profile else [],
        "price": {
            "input_usd_per_mtok": f"{worker.price.input_usd_per_mtok}",
            "output_usd_per_mtok": f"{worker.price.output_usd_per_mtok}",
        },
    }
    if worker.kind == "tool":
        return {**entry, "url": VOTE_URL}
    if worker.kind == "self":
        return entry
    return {
        **entry,
        "model": worker.name,
        "url": f"{base_url.rstrip('/')}/w/{worker.name}/v1",
        "output_tokens_max": OUTPUT_TOKENS_MAX,
        "timeout_s": 20.0,
        "latency_hint_s": round(worker.latency_s(TYPICAL_REPLY_TOKENS), 3),
    }


def pool_yaml(base_url: str, standard: Pool = STANDARD, held_out: Pool = HELD_OUT, *, profile: bool = True) -> str:
    """pool.yaml with the pools `arena` (the default) and `heldout`. Raises ValueError if it would not be valid."""
    builtins = (VOTE_TOOL, SELF_WORKER)
    document = {
        "workers": [worker_entry(worker, base_url, profile=profile) for worker in (*standard, *held_out, *builtins)],
        "pools": {
            "arena": [worker.name for worker in (*standard, *builtins)],
            "heldout": [worker.name for worker in (*held_out, *builtins)],
        },
        "default": "arena",
    }
    PoolFile.model_validate(document)
    return "# The arena's simulated workers (docs/arena.md).\n" + yaml.safe_dump(document, sort_keys=False, width=120)
