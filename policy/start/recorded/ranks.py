"""Programs by rank: who is asked first, not by name but by place in the order in which a prompt lists the workers.

The prompt `ranked` lists them by what similar questions earned them, less what their dollars take off at this place of
the dial (`worth_alone`). A program over places in that list holds for any pool, workers that nobody has met yet
included, and follows from what the prompt shows. A program over names does not: its student has to guess.

One program serves all categories of question: the list has their difference already, and a program of its own for each
of fifty categories was the best by luck (a student of such programs chose the second worker where the first was right
more often: docs/results.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from random import Random

import numpy as np

from gateway.core.loop.experience.belief import WorkerExperience
from gateway.core.loop.prompt import DIAL, worth_alone
from gateway.core.loop.shown import SHOWN_MIN
from policy.start.recorded.programs import Program, ProgramWorth, search
from policy.statistics.tuning import Nearest, Observation

SIZES_MAX = 6  # of pools, for which programs are searched: larger ones have those of the largest
FIRST_MAX = 3  # side by side: a plan of more is seldom worth its dollars, and hard to learn
EVERY = ""  # the category of all questions
Experience = Mapping[str, WorkerExperience]


def in_order(names: Sequence[str], experience: Experience, place: int) -> list[str]:
    """Names of workers as `ranked` lists them at this place of the dial; equals stay as they stand."""

    def worth(name: str) -> float:
        past = experience.get(name)
        if past is None or past.n < SHOWN_MIN:
            return worth_alone(place, 0.0, 0, 0)
        return worth_alone(place, past.success_mean, past.n, past.cost_nano_mean)

    return sorted(names, key=worth, reverse=True)


class RankChoices:
    """The best programs by size of the pool and place of the dial, whatever the category. Each is searched when it is
    first asked for."""

    places = len(DIAL)

    def __init__(self, sizes: Collection[int], searched: Callable[[int, int], ProgramWorth]) -> None:
        """`searched`: what programs over ranks gave, by size and place. Raises ValueError on no size."""
        if not sizes:
            raise ValueError("programs by rank need a pool of at least one worker")
        self._sizes = sizes
        self._worth = cache(searched)

    def best(self, place: int, category: str, names: Collection[str]) -> Program:
        """The program over `names`, the likeliest first. Raises KeyError on a pool that is smaller than all that are
        searched."""
        return _by_name(self._best(self._size(names), place), list(names))

    def other(self, place: int, category: str, names: Collection[str], n: int, rng: Random) -> Program:
        """One of the `n` best programs. Raises KeyError as `best` does."""
        worth = self._worth(self._size(names), place)
        utility = worth.utility(DIAL[place])[:, 0]
        order = np.argsort(-utility, kind="stable")[:n].tolist()
        return _by_name(worth.programs[rng.choice(order)], list(names))

    def affordable(self, usd_max: float) -> int:
        """The highest place at which a question to the largest pool costs no more than that; 0 where none does."""
        size = max(self._sizes)
        spent = [self._worth(size, at).usd_of({EVERY: self._best(size, at)}) for at in range(self.places)]
        return max((place for place, usd in enumerate(spent) if usd <= usd_max), default=0)

    def _best(self, size: int, place: int) -> Program:
        return self._worth(size, place).best(DIAL[place])[EVERY]

    def _size(self, names: Collection[str]) -> int:
        sizes = [size for size in self._sizes if size <= len(names)]
        if not sizes:
            raise KeyError(f"no program for a pool of {len(names)}")
        return max(sizes)


def ranks(
    observed: Sequence[Observation], near: Nearest, k_of_n: tuple[int, int] | None, say: Callable[[str], None]
) -> RankChoices:
    """Programs over ranks for pools of every size that `k_of_n` draws of the workers of a question (None: of all of
    them). A question's own answers never count for its order. Raises ValueError on no question."""
    most = max((len(each.results) for each in observed), default=0)
    low, high = k_of_n or (min((len(each.results) for each in observed), default=0), most)
    experiences = [near.of(each.question, without=each.question) for each in observed]

    def searched(size: int, place: int) -> ProgramWorth:
        asked = [(each, past) for each, past in zip(observed, experiences, strict=True) if len(each.results) >= size]
        pools = [Random(f"pool {size} {each.question}").sample(sorted(each.results), size) for each, _ in asked]
        ranked = [_by_rank(each, pool, past, place) for (each, past), pool in zip(asked, pools, strict=True)]
        worth = plain(search(ranked))
        say(f"searched {len(worth.programs)} programs by rank of {size} workers at place {place} of the dial")
        return worth

    return RankChoices(range(min(low, most), min(high, most) + 1)[-SIZES_MAX:], searched)


def plain(worth: ProgramWorth) -> ProgramWorth:
    """Without programs that differ in little from a simpler one: workers are asked in the list's order, and the next
    ones of the list where the first do not do."""
    keep = [at for at, program in enumerate(worth.programs) if _is_plain(program)]
    programs = tuple(worth.programs[at] for at in keep)
    return ProgramWorth(programs, worth.categories, worth.counts, worth.outcome[keep], worth.usd[keep])


def _is_plain(program: Program) -> bool:
    if program.check:
        return True
    asked = [_rank(name) for name in (*program.first, *program.then)]
    if asked != list(range(len(asked))) or len(program.first) > FIRST_MAX:
        return False
    if len(program.first) == 1:
        return True
    if not program.enough:
        return len(program.first) > 2  # two without a majority are the first of them, at the price of both
    return program.enough == 2


def _by_rank(observed: Observation, pool: Sequence[str], experience: Experience, place: int) -> Observation:
    """The same with ranks in `pool` for names."""
    order = in_order(pool, experience, place)
    checks = {str(at): observed.checks[name] for at, name in enumerate(order) if name in observed.checks}
    results = {str(at): observed.results[name] for at, name in enumerate(order)}
    return Observation(observed.question, EVERY, results, checks)


def _by_name(program: Program, names: Sequence[str]) -> Program:
    first, then = (tuple(names[_rank(rank)] for rank in side) for side in (program.first, program.then))
    return Program(first, program.enough, then, program.poll, program.check)


def _rank(name: str) -> int:
    return int(name)
