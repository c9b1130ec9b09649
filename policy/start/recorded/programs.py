"""Programs: who is asked first, whose agreement is enough, and who is asked where it is not. Found by search.

Every reply is whole and recorded (or was observed), so what a program would have given on a question follows exactly
from what each worker did on it. A program is chosen for a category of questions and a price of a dollar by its mean
outcome less the dollars' price, drawn towards its mean over all categories: with a few hundred questions the best of
thousands is best by luck. Measured over 20 splits of 1,732 recorded questions: docs/recorded.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random

import numpy as np
import numpy.typing as npt

from gateway.core.loop.prompt import DIAL, QUALITY_MAX
from gateway.core.pool.workers import NANO_PER_USD
from policy.statistics.tuning import Observation, WorkerResult, vote_result, workers_in

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
FIRST_MAX = 4  # asked side by side: a vote takes the fifth step of a plan
CROWD = 8  # of larger pools fewer are asked at once, or the search would take minutes
CROWD_FIRST_MAX = 3
GAIN_MIN = 1e-4  # accuracy, for which a program is changed
USD_MIN = 1e-7  # a question: what costs nothing more counts as if it cost this
BUDGET_SHARE = 0.88  # of a budget is planned with: other questions may cost more
CHEAPEST_WORTH = 0.1  # of accuracy is the price of the cheapest worker's dollars at the dial's lowest place
BUDGET_WORTH = 0.005  # and that of the whole budget at the last place that counts dollars
CHEAPEST_SHARE = 1e-3  # of the budget: what costs less stretches the dial no further
PRIOR_QUESTIONS = 100.0  # what all categories together count for in one of them


@dataclass(frozen=True, slots=True)
class Program:
    """Names of workers. `first` are asked side by side; where `enough` of them agree, the earliest of those that do
    speaks for them (0: in any case): of equal answers not all are written equally well. A reply without an answer
    agrees with nothing, so of one worker 1 is enough unless it is empty. Else `then` are asked: the last of them
    answers, or with `poll` the majority of all. With `check` the only one of `first` is checked: its answer
    ships where the tool finds it valid, else the only one of `then` answers."""

    first: tuple[str, ...]
    enough: int = 0
    then: tuple[str, ...] = ()
    poll: bool = False
    check: bool = False


@dataclass(frozen=True, slots=True)
class ProgramWorth:
    """What programs gave: mean outcome and dollars a question, by category."""

    programs: tuple[Program, ...]
    categories: tuple[str, ...]
    counts: Floats  # [categories] questions
    outcome: Floats  # [programs, categories] sums
    usd: Floats  # [programs, categories] sums

    def utility(self, usd_weight: float) -> Floats:
        """[programs, categories]: mean outcome less `usd_weight` times mean dollars, drawn towards all categories'."""
        gained = self.outcome - usd_weight * self.usd
        overall = gained.sum(1, keepdims=True) / self.counts.sum()
        rates: Floats = (gained + PRIOR_QUESTIONS * overall) / (self.counts + PRIOR_QUESTIONS)
        return rates

    def best(self, usd_weight: float) -> dict[str, Program]:
        """By category; ties to the cheaper."""
        worth = self.utility(usd_weight) - 1e-9 * self.usd / np.maximum(self.counts, 1)
        return {name: self.programs[int(worth[:, at].argmax())] for at, name in enumerate(self.categories)}

    def usd_of(self, choices: Mapping[str, Program]) -> float:
        """Dollars a question of one program a category, on what was observed."""
        index = self.index
        spent = sum(self.usd[index[choices[name]], at] for at, name in enumerate(self.categories))
        return float(spent / self.counts.sum())

    @property
    def index(self) -> dict[Program, int]:
        """Where each program stands."""
        return {program: at for at, program in enumerate(self.programs)}

    def within(self, usd_max: float, start: Mapping[str, Program]) -> dict[str, Program]:
        """`start` improved as far as `usd_max` dollars a question allow: again and again the change of one category's
        program that brings most for its dollars, of those that fit. What a price of a dollar alone cannot do where the
        next better program is far dearer."""
        worth, index, chosen = self.utility(0.0), self.index, dict(start)
        while True:
            left = usd_max - self.usd_of(chosen)
            steps: list[tuple[float, str, int]] = []
            for at, name in enumerate(self.categories):
                now = index[chosen[name]]
                gain = (worth[:, at] - worth[now, at]) * self.counts[at] / self.counts.sum()
                more = (self.usd[:, at] - self.usd[now, at]) / self.counts.sum()
                rate = np.where((gain > GAIN_MIN) & (more <= left), gain / np.maximum(more, USD_MIN), 0.0)
                steps.append((float(rate.max()), name, int(rate.argmax())))
            highest, name, best = max(steps)
            if highest <= 0.0:
                return chosen
            chosen[name] = self.programs[best]

    def prices(self, usd_max: float) -> tuple[float, ...]:
        """What a dollar costs at each place of the dial, in even steps from where the cheapest worker is thought dear
        to where a budget of `usd_max` a question is thought cheap; nothing at the last. So the dial spans what these
        workers do cost, whatever that is."""
        spent = self.usd.sum(1) / self.counts.sum()
        if not (spent > 0).any():
            return DIAL
        dear = max(min(usd_max, self.usd_of(self.best(0.0))), float(spent[spent > 0].min()))
        cheap = max(float(spent[spent > 0].min()), CHEAPEST_SHARE * dear)
        places = np.geomspace(CHEAPEST_WORTH / cheap, BUDGET_WORTH / dear, QUALITY_MAX)
        return (*places.tolist(), 0.0)

    def dial(self, usd_weights: Sequence[float], usd_max: float) -> list[dict[str, Program]]:
        """One program a category for each price of a dollar, dearest dollar first. The first table over `usd_max`
        dollars a question gives way to the best one within it, so that a budget has a place of its own; the last table
        stays, and the one before it is improved where all others are within."""
        tables = [self.best(weight) for weight in usd_weights]
        over = [at for at, table in enumerate(tables) if at and self.usd_of(table) > usd_max]
        if over and len(tables) > 2:
            at = min(over[0], len(tables) - 2)
            fits = self.usd_of(tables[at]) <= BUDGET_SHARE * usd_max
            tables[at] = self.within(BUDGET_SHARE * usd_max, tables[at if fits else at - 1])
        return tables

    def affordable(self, dial: Sequence[Mapping[str, Program]], usd_max: float) -> int:
        """The highest place at which a question costs no more than that; 0 where none does."""
        return max((at for at, table in enumerate(dial) if self.usd_of(table) <= usd_max), default=0)


class Choices:
    """The best programs by place of the dial, for pools that may lack some of the workers that were searched. `tables`
    hold for the whole pool (`ProgramWorth.dial`); of a smaller one the program of the best utility at the place's
    price."""

    def __init__(
        self, worth: ProgramWorth, tables: Sequence[Mapping[str, Program]], usd_weights: Sequence[float]
    ) -> None:
        """`usd_weights`: what a dollar costs at each place of `tables`."""
        self.places = len(tables)
        self._worth = worth
        self._tables = tables
        self._utility = [
            worth.utility(weight) - 1e-9 * worth.usd / np.maximum(worth.counts, 1) for weight in usd_weights
        ]
        self._bits = {
            name: 1 << at for at, name in enumerate(dict.fromkeys(n for p in worth.programs for n in p.first))
        }
        self._needs = np.array([self._mask((*each.first, *each.then)) for each in worth.programs], dtype=np.int64)

    def affordable(self, usd_max: float) -> int:
        """The highest place at which a question costs no more than that; 0 where none does."""
        return self._worth.affordable(self._tables, usd_max)

    def best(self, place: int, category: str, names: Collection[str]) -> Program:
        """The program for a question of the category, over no worker but `names`. Raises KeyError where none of them
        was searched."""
        offered = self._mask(names)
        if offered == self._mask(self._bits):
            return self._tables[place][category]
        return self._worth.programs[int(self._ranked(place, category, offered)[0])]

    def other(self, place: int, category: str, names: Collection[str], n: int, rng: Random) -> Program:
        """The best program that begins as one of the `n` best beginnings does, each group of workers once."""
        order, groups = self._ranked(place, category, self._mask(names)), dict[frozenset[str], Program]()
        for index in order.tolist():
            program = self._worth.programs[index]
            groups.setdefault(frozenset(program.first), program)  # the first is the best of its group
            if len(groups) == n:
                break
        return rng.choice(list(groups.values()))

    def _mask(self, names: Iterable[str]) -> int:
        return sum(self._bits.get(name, 0) for name in names)

    def _ranked(self, place: int, category: str, offered: int) -> Ints:
        """Indices of the programs that `offered` can carry out, best first."""
        possible = np.nonzero((self._needs & ~np.int64(offered)) == 0)[0]
        if not len(possible):
            raise KeyError("no program needs these workers alone")
        worth = self._utility[place][possible, self._worth.categories.index(category)]
        ranked: Ints = possible[np.argsort(-worth, kind="stable")]
        return ranked


def search(observed: Sequence[Observation]) -> ProgramWorth:
    """Every program over the workers that all questions have. Raises ValueError where there is none."""
    facts = _Facts(observed)
    programs: list[Program] = []
    outcome: list[Floats] = []
    usd: list[Floats] = []
    for program, right, spent in facts.results():
        programs.append(program)
        outcome.append(facts.by_category(right))
        usd.append(facts.by_category(spent))
    counts = facts.by_category(np.ones(len(observed)))
    return ProgramWorth(tuple(programs), facts.categories, counts, np.array(outcome), np.array(usd))


def gives(program: Program, observed: Observation) -> WorkerResult:
    """What the program gives on one question. Raises KeyError on a worker that was not asked it."""
    if program.check:
        return _checked(program, observed)
    first = vote_result(observed, program.first)
    if _votes(observed, program.first) >= program.enough:
        return first
    workers = vote_result(observed, (*program.first, *program.then))
    last = workers if program.poll else observed.results[program.then[-1]]
    return WorkerResult(last.outcome, workers.cost_nano, last.answer)


def _checked(program: Program, observed: Observation) -> WorkerResult:
    first, then = (observed.results[names[0]] for names in (program.first, program.then))
    if not observed.checks:  # then the tool is not offered, and the other is asked at once
        return then
    check = observed.checks.get(program.first[0])
    spent_nano = first.cost_nano + (0 if check is None else check.cost_nano)
    if check is not None and check.valid:
        return WorkerResult(first.outcome, spent_nano, first.answer)
    return WorkerResult(then.outcome, spent_nano + then.cost_nano, then.answer)


def _votes(observed: Observation, workers: Sequence[str]) -> int:
    answers = Counter(answer for name in workers if (answer := observed.results[name].answer))
    return max(answers.values(), default=0)


class _Facts:
    """What was observed as arrays [questions, workers], workers by success, best first."""

    def __init__(self, observed: Sequence[Observation]) -> None:
        names = workers_in(observed)
        success = {name: sum(each.results[name].outcome for each in observed) for name in names}
        self.names = sorted(names, key=lambda name: (-success[name], name))
        self.right = np.array([[each.results[name].outcome for name in self.names] for each in observed])
        nano = np.array([[each.results[name].cost_nano for name in self.names] for each in observed])
        self.usd: Floats = nano / NANO_PER_USD
        self.answers = np.array([_codes([each.results[name].answer for name in self.names]) for each in observed])
        checks = [[each.checks.get(name) for name in self.names] for each in observed]
        self.valid = np.array([[check is not None and check.valid for check in row] for row in checks])
        spent = np.array([[0 if check is None else check.cost_nano for check in row] for row in checks])
        self.check_usd: Floats = spent / NANO_PER_USD
        self.checked = np.array([[check is not None for check in row] for row in checks]).any(0)
        self.offered = np.array([bool(each.checks) for each in observed])
        self.categories = tuple(sorted({each.category for each in observed}))
        where = {name: at for at, name in enumerate(self.categories)}
        self._of = np.array([where[each.category] for each in observed])
        self._rows = np.arange(len(observed))

    def by_category(self, values: Floats) -> Floats:
        """[questions] → sums [categories]."""
        sums: Floats = np.bincount(self._of, values, len(self.categories)).astype(np.float64)
        return sums

    def results(self) -> Iterator[tuple[Program, Floats, Floats]]:
        """Each program with its outcome and dollars on every question."""
        everybody = range(len(self.names))
        most = FIRST_MAX if len(self.names) <= CROWD else CROWD_FIRST_MAX
        for size in range(1, min(most, len(self.names)) + 1):
            for first in combinations(everybody, size):
                for speaker in first:
                    yield from self._beginning_with((speaker, *(other for other in first if other != speaker)))
        yield from self._checking()

    def _checking(self) -> Iterator[tuple[Program, Floats, Floats]]:
        """One worker checked and shipped, or another one asked instead; of workers that any check was recorded of."""
        for one in np.flatnonzero(self.checked).tolist():
            valid = self.valid[:, one]
            for other in range(len(self.names)):
                if other != one:
                    right = np.where(valid, self.right[:, one], self.right[:, other])
                    spent = self.usd[:, one] + self.check_usd[:, one] + np.where(valid, 0.0, self.usd[:, other])
                    total = np.where(self.offered, spent, self.usd[:, other])
                    yield Program(self._named((one,)), 0, self._named((other,)), check=True), right, total

    def _beginning_with(self, first: tuple[int, ...]) -> Iterator[tuple[Program, Floats, Floats]]:
        chosen, votes = self._majority(first)
        right, spent = self.right[self._rows, chosen], self.usd[:, first].sum(1)
        yield Program(self._named(first)), right, spent
        rest = [worker for worker in range(len(self.names)) if worker not in first]
        pairs = combinations(rest, 2) if len(self.names) <= CROWD else ()
        then = [*((worker,) for worker in rest), *pairs]
        for enough in range(min(2, len(first)), len(first) + 1):
            asked_on = votes < enough
            if not asked_on.any():
                continue
            for more in then if enough > 1 else [(worker,) for worker in rest]:
                total = spent + np.where(asked_on, self.usd[:, more].sum(1), 0.0)
                if enough > 1:
                    polled = self.right[self._rows, self._majority(first + more)[0]]
                    poll = Program(self._named(first), enough, self._named(more), poll=True)
                    yield poll, np.where(asked_on, polled, right), total
                if len(more) == 1:
                    own = Program(self._named(first), enough, self._named(more))
                    yield own, np.where(asked_on, self.right[:, more[0]], right), total

    def _majority(self, workers: tuple[int, ...]) -> tuple[Ints, Ints]:
        """Per question the first worker with the most common answer, and how many gave it: 0 where all are empty."""
        answers = self.answers[:, workers]
        same = np.where(answers < 0, 0, (answers[:, :, None] == answers[:, None, :]).sum(2))
        first = same.argmax(1)
        chosen: Ints = np.array(workers)[first]
        votes: Ints = same[self._rows, first]
        return chosen, votes

    def _named(self, workers: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(self.names[worker] for worker in workers)


def _codes(answers: Sequence[str]) -> list[int]:
    """Equal answers get equal numbers; no answer equals nothing."""
    codes: dict[str, int] = {}
    return [codes.setdefault(answer, len(codes)) if answer else -1 - at for at, answer in enumerate(answers)]
