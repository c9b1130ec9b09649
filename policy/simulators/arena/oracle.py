"""The oracle: the best plan for a question, knowing its kind, and choosing workers by what the pool *shows* of them.

It reads tags, levels, prices and experience only, never the true accuracies, so its plans can teach a model to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import combinations
from typing import Any

from policy.simulators.arena.families.family import Family
from policy.simulators.arena.families.tasks import INSTRUCTIONS, JOIN_SKILL, Problem, focus
from policy.simulators.arena.workers import ArenaWorker, Pool

Plan = dict[str, Any]
Experience = Mapping[str, tuple[int, float]]  # handle → (how many like this, share right)

PRICE_WEIGHT_PER_USD = 30.0  # a call that costs one more thousandth of a dollar must be right 3 % more often
PRIOR_WEIGHT = 4.0  # how many observations the words of the pool count for
VOTERS_MAX = 4
STEPS_MAX = 5


def step(worker: ArenaWorker, see: list[int], task: str | None = None) -> Plan:
    """One step as JSON."""
    return {"worker": worker.handle, "task": task, "see": see}


def oracle_plan(
    question: str, task: str | None, pool: Pool, *,
    price_weight: float = PRICE_WEIGHT_PER_USD, experience: Experience | None = None,
) -> Plan:  # fmt: skip
    """The best plan for `question` (or for the part of it that `task` names): highest estimated success minus
    `price_weight` times dollars. A question that no worker can solve, or that is not one, goes to the cheapest."""
    chooser = _Chooser(pool, price_weight, experience or {})
    problem = focus(question, task)
    if problem is None:
        return {"steps": [step(chooser.cheapest(), [])]}
    return {"steps": _steps(problem, chooser)}


class _Chooser:
    """Choices over one pool by shown success and price."""

    def __init__(self, pool: Pool, price_weight: float, experience: Experience) -> None:
        self.models = [worker for worker in pool if worker.kind == "openai"]
        self.tool = next((worker for worker in pool if worker.kind == "tool"), None)
        self.child = next((worker for worker in pool if worker.kind == "self"), None)
        self.price_weight = price_weight
        self.experience = experience

    def success(self, worker: ArenaWorker, skill: str) -> float:
        """Shown level, moved by experience as a mean with PRIOR_WEIGHT pseudo-observations."""
        success = worker.shown_success(skill)
        if not success or worker.handle not in self.experience:
            return success
        n, mean = self.experience[worker.handle]
        return (PRIOR_WEIGHT * success + n * mean) / (PRIOR_WEIGHT + n)

    def price(self, worker: ArenaWorker) -> float:
        return self.price_weight * worker.typical_usd()

    def ranked(self, skill: str) -> list[ArenaWorker]:
        """Workers with that tag, best utility first; ties to the earlier in the pool."""
        candidates = [worker for worker in self.models if skill in worker.tags]
        return sorted(candidates, key=lambda worker: self.price(worker) - self.success(worker, skill))

    def best(self, skill: str) -> ArenaWorker:
        return next(iter(self.ranked(skill)), None) or self.cheapest()

    def cheapest(self) -> ArenaWorker:
        """The cheapest model. Raises ValueError on a pool without one."""
        return min(self.models, key=ArenaWorker.typical_usd)


def _steps(problem: Problem, chooser: _Chooser) -> list[Plan]:
    family = problem.family
    if family is None:
        return _both(problem, chooser)
    if family.shape == "vote":
        return _vote(family, chooser)
    if family.shape == "check":
        return _check(family, chooser)
    return _chain(family, chooser)


def _chain(family: Family, chooser: _Chooser) -> list[Plan]:
    workers = [chooser.best(part.skill) for part in family.parts]
    if not all(part.skill in worker.tags for part, worker in zip(family.parts, workers, strict=True)):
        return [step(chooser.cheapest(), [])]
    return [step(worker, [index - 1] if index else []) for index, worker in enumerate(workers)]


def majority_success(rates: list[float]) -> float:
    """Chance that a vote over solvers with those success rates is right, when wrong answers never agree: two or more
    right, or exactly one and it is the first (ties go to the earliest)."""
    none = 1.0
    for rate in rates:
        none *= 1 - rate
    one = sum(none / (1 - rate) * rate if rate < 1 else 0.0 for rate in rates)
    first = none / (1 - rates[0]) * rates[0] if rates[0] < 1 else 0.0
    return 1 - none - one + first


def _vote(family: Family, chooser: _Chooser) -> list[Plan]:
    skill = family.parts[0].skill
    solvers = chooser.ranked(skill)
    if not solvers:
        return [step(chooser.cheapest(), [])]
    success = partial(chooser.success, skill=skill)
    options: list[list[ArenaWorker]] = [[solvers[0]]]
    if chooser.tool is not None:
        options += [
            sorted(voters, key=success, reverse=True)
            for size in range(3, VOTERS_MAX + 1)
            for voters in combinations(solvers[:8], size)
        ]

    def utility(voters: list[ArenaWorker]) -> float:
        rates = [success(worker) for worker in voters]
        right = rates[0] if len(rates) == 1 else majority_success(rates)
        return right - sum(chooser.price(worker) for worker in voters)

    voters = max(options, key=utility)
    steps = [step(worker, []) for worker in voters]
    if len(voters) > 1 and chooser.tool is not None:
        steps.append(step(chooser.tool, list(range(len(voters)))))
    return steps


def _check(family: Family, chooser: _Chooser) -> list[Plan]:
    """Any drafter's slips can be repaired, so the draft is bought by price and the review by quality."""
    drafters = chooser.ranked(family.parts[0].skill)
    reviewers = chooser.ranked("review")
    if not drafters:
        return [step(chooser.cheapest(), [])]
    if not reviewers:
        return [step(drafters[0], [])]
    draft = min(drafters, key=chooser.price)
    return [step(draft, []), step(reviewers[0], [0])]


def _both(problem: Problem, chooser: _Chooser) -> list[Plan]:
    """Each question as a child loop, then a join; without a `self` worker the steps of both, if they fit."""
    if chooser.child is not None:
        steps = [step(chooser.child, [], INSTRUCTIONS[index]) for index in range(len(problem.parts))]
        return [*steps, step(chooser.best(JOIN_SKILL), list(range(len(steps))))]
    steps, ends = [], []
    for index, part in enumerate(problem.parts):
        offset = len(steps)
        for inner in _steps(part, chooser):
            steps.append({**inner, "see": [offset + i for i in inner["see"]], "task": INSTRUCTIONS[index]})
        ends.append(len(steps) - 1)
    if len(steps) >= STEPS_MAX:
        return [step(chooser.cheapest(), [])]
    return [*steps, step(chooser.best(JOIN_SKILL), ends)]
