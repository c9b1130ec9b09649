"""Drills: the same pool text, and who is best at each skill, for all skills at once.

A plan holds one to five choices of a worker; a drill of the same length holds about ten. They come first in training
and teach how a pool is read (tags, prices, experience, copying a handle); plans then only have to learn what a
question needs. No drill is seen in the last part of a run, and none is ever asked for in service.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from gateway.core.prompt import PromptInput, render
from policy.arena.family import SKILLS
from policy.arena.oracle import VOTERS_MAX
from policy.warmstart.config import WORKERS_MIN
from policy.warmstart.label import VOTED_SKILL, believed_pool, ranked
from policy.warmstart.samples import PROFILE
from policy.warmstart.shown import draw_pool

QUESTION = "Who is best at what?"


@dataclass(frozen=True, slots=True)
class Drill:
    """A pool text and the ranking it shows, skill by skill."""

    prompt: str
    pieces: tuple[tuple[str, bool], ...]  # skill (given), handles best first (learnt), next skill …


def make_drill(seed: int, index: int, workers_max: int) -> Drill:
    """Drill number `index`: a pure function of its arguments."""
    rng = Random(f"drill {seed} {index}")
    drawn = draw_pool(rng, rng.randint(WORKERS_MIN, workers_max), rng.choices(SKILLS, k=rng.randint(1, 3)), True)
    shown = PromptInput([{"role": "user", "content": QUESTION}], drawn.shown, 5, rng.randint(0, 2))
    pieces: list[tuple[str, bool]] = []
    for skill in rng.sample(SKILLS, len(SKILLS)):
        pool = believed_pool(drawn.shown, {skill})
        best = ranked(pool, skill)[: VOTERS_MAX if skill == VOTED_SKILL else 1]
        if best:
            pieces += [(f" {skill}", False), *((worker.handle, True) for worker in best)]
    return Drill(render(PROFILE, shown)[0]["content"], tuple(pieces))
