"""Drills: bare pool lines, then skill by skill the handle of the best worker. They teach how a pool is read.

Reading is one circuit (find the lines with this tag, compare, copy the handle). On texts as long as whole prompts the
model did not find it in 36,000 lessons (docs/conductor.md). So the first part of a run is drills, from two lines of one
tag up to whole pools with experience; plans then only have to learn what a question needs. None is ever asked for in
service.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from gateway.core.loop.prompt import PromptInput, ShownWorker, render
from policy.simulators.arena.families.family import SKILLS
from policy.simulators.arena.oracle import VOTERS_MAX
from policy.start.synthetic.config import WORKERS_MIN
from policy.start.synthetic.label import VOTED_SKILL, Piece, believed_pool, ranked
from policy.start.synthetic.samples import PROFILE
from policy.start.synthetic.shown import draw_pool, is_model


@dataclass(frozen=True, slots=True)
class Level:
    """How hard a drill is: pool size, tags a line, experience and built-in workers or not, one best or a ranking."""

    workers_max: int
    tags_max: int
    experience: bool
    ranking: bool


LEVELS = (
    Level(3, 1, False, False),
    Level(4, 2, False, False),
    Level(8, 4, False, False),
    Level(8, 4, True, True),
)


@dataclass(frozen=True, slots=True)
class Drill:
    """Pool lines, and pieces of text: a skill (given), its best handles (learnt), the next skill …"""

    text: str
    pieces: tuple[Piece, ...]


def make_drill(seed: int, index: int, level: Level) -> Drill:
    """Drill number `index` of that level: a pure function of its arguments."""
    rng = Random(f"drill {seed} {index}")
    needed = rng.sample(SKILLS, 1)
    workers = rng.randint(WORKERS_MIN, level.workers_max)
    drawn = draw_pool(rng, workers, needed, loops=True, plain=not level.experience)
    pool = [worker for worker in drawn.shown if level.experience or is_model(worker)]
    pool = [_simpler(worker, level) for worker in pool]
    shown = PromptInput([], tuple(pool), 5, 0)
    lines = render(PROFILE, shown)[0]["content"].split("\n")[1 : len(pool) + 1]
    return Drill("\n".join([*lines, ""]), tuple(_pieces(rng, pool, level)))


def _simpler(worker: ShownWorker, level: Level) -> ShownWorker:
    experience = worker.experience if level.experience else None
    return replace(worker, tags=worker.tags[: level.tags_max], experience=experience)


def _pieces(rng: Random, pool: list[ShownWorker], level: Level) -> list[Piece]:
    pieces: list[Piece] = []
    for skill in rng.sample(SKILLS, len(SKILLS)):
        most = VOTERS_MAX if level.ranking and skill == VOTED_SKILL else 1
        best = ranked(believed_pool(pool, {skill}), skill)[:most]
        if best:
            pieces.append(Piece(f" {skill}", learnt=False))
            pieces += [Piece(worker.handle, hint=f" {skill}") for worker in best]
    return pieces
