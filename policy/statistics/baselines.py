"""Policies to compare with, each a planner of the served loop: fixed, random, cheapest, table, vote, cascade, MoA,
fallback, nearest neighbours.

All of them read what a conductor is shown, the question's text included, and nothing else; where they have parameters,
`policy/statistics/tuning.py` chooses these on training prompts. The oracle, which knows more, is the environments' own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul

from gateway.core.log.rollout import RoundRecord
from gateway.core.loop.caps import Meter
from gateway.core.loop.experience.likeness import content_text, embed, question_text
from gateway.core.loop.plan import Plan, Step
from gateway.core.money.amounts import cost_nano
from gateway.core.pool.workers import WorkerSpec
from gateway.service.loop.routers import (
    SHIP,
    USAGE_GUESS,
    FixedPlanner,
    cascade_plan,
    disputed,
    models_of,
    side_by_side,
    single,
    vote_plan,
)
from gateway.service.loop.state import EarlyStart, Planner, Situation
from policy.environments.base import rng_for


def by_name(situation: Situation, names: Sequence[str]) -> list[WorkerSpec]:
    """The workers of those names that are offered, in that order, each once; the cheapest model where none is."""
    models = models_of(situation)
    offered = {spec.name: spec for spec in models}
    return [offered[name] for name in dict.fromkeys(names) if name in offered] or [cheapest(models)]


def cheapest(models: Sequence[WorkerSpec]) -> WorkerSpec:
    """The lowest price of a typical call; ties to the name. A worker without a price counts as the dearest."""
    return min(models, key=lambda spec: (spec.price is None, typical_nano(spec), spec.name))


def typical_nano(spec: WorkerSpec) -> int:
    """Nano-dollars of a typical call; 0 without a price."""
    return cost_nano(spec.price, USAGE_GUESS) if spec.price is not None else 0


class OneRoundPlanner:
    """A planner that decides by itself in round 1 and then ships the result. `choose` gives the plan of round 1; it
    raises PlanRefused where the workers that it needs are not offered."""

    def __init__(self, name: str, choose: Callable[[Situation], Plan]) -> None:
        self.name = name
        self._choose = choose

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Raises PlanRefused as `choose`."""
        return SHIP if situation.round > 1 else self._choose(situation)


class RoutedOnce:
    """A router of the gateway in round 1; then its result is shipped. Routers plan every round anew."""

    def __init__(self, router: Planner) -> None:
        self.name = router.name
        self._router = router

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Raises PlanRefused as the router."""
        return SHIP if situation.round > 1 else await self._router.plan(situation, record, meter, early)


def fixed(worker: str) -> Planner:
    """`fixed:<worker>`: one step, always the same worker."""
    return RoutedOnce(FixedPlanner(worker))


def random_worker(seed: int = 0) -> Planner:
    """`random`: one step on any model worker, by a hash of (seed, question, names offered)."""

    def choose(situation: Situation) -> Plan:
        models = sorted(models_of(situation), key=lambda spec: spec.name)
        return single(rng_for("random", seed, question_text(situation.conversation)).choice(models))

    return OneRoundPlanner("random", choose)


def random_plan(seed: int = 0) -> Planner:
    """`random-plan`: a random valid plan: 1 to `steps_max` steps, any worker, any earlier steps seen. A child loop gets
    one step. The choice is by a hash of (seed, conversation, handles offered)."""

    def choose(situation: Situation) -> Plan:
        texts = [content_text(message.get("content")) for message in situation.conversation]
        rng = rng_for("random plan", seed, *texts)
        handles = sorted(situation.allowed.handles)
        steps: list[Step] = []
        for index in range(rng.randint(1, situation.allowed.steps_max) if situation.rollout_id else 1):
            see = tuple(sorted(rng.sample(range(index), rng.randint(0, index))))
            steps.append(Step(rng.choice(handles), None, see))
        return Plan(tuple(steps))

    return OneRoundPlanner("random-plan", choose)


def cheapest_worker() -> Planner:
    """`cheapest`: one step on the model worker with the lowest price."""
    return OneRoundPlanner("cheapest", lambda situation: single(cheapest(models_of(situation))))


@dataclass(frozen=True)
class Categories:
    """Classifies questions: the nearest mean embedding of training questions (Rocchio's classifier).

    A client that names its task type is believed where that is a known category.
    """

    centroids: Mapping[str, Sequence[float]]
    _known: dict[str, str] = field(default_factory=dict, repr=False)

    KNOWN_MAX = 10_000

    @classmethod
    def fitted(cls, questions: Sequence[tuple[str, str]]) -> Categories:
        """From (question, category). Raises ValueError on none."""
        if not questions:
            raise ValueError("no questions to learn categories from")
        sums: dict[str, list[float]] = {}
        for text, category in questions:
            total = sums.setdefault(category, [])
            vector = embed(text)
            total[:] = [a + b for a, b in zip(total, vector, strict=True)] if total else vector
        return cls({category: _unit(total) for category, total in sums.items()})

    def of(self, situation: Situation) -> str:
        """The category of the last user message; ties to the name."""
        kind = situation.task_type
        return (
            kind if kind is not None and kind in self.centroids else self.of_text(question_text(situation.conversation))
        )

    def of_text(self, text: str) -> str:
        """The category of a question; remembered for a while, since every round asks again."""
        if text not in self._known:
            if len(self._known) >= self.KNOWN_MAX:
                self._known.clear()
            vector = embed(text)
            means = self.centroids
            self._known[text] = max(sorted(means), key=lambda name: sum(map(mul, means[name], vector)))
        return self._known[text]


def _unit(vector: Sequence[float]) -> list[float]:
    norm = sum(x * x for x in vector) ** 0.5
    return [x / norm for x in vector] if norm else list(vector)


def table(categories: Categories, best: Mapping[str, Sequence[str]]) -> Planner:
    """`table`: per category of question the worker that was best in training. `best`: workers by category, best first,
    for not all of them need to be offered."""
    return OneRoundPlanner("table", lambda situation: single(by_name(situation, best[categories.of(situation)])[0]))


def vote(workers: Sequence[str]) -> Planner:
    """`vote`: the question to `workers` at once, and the majority of their answers; ties to the earliest named."""
    return OneRoundPlanner("vote", lambda situation: vote_plan(situation, by_name(situation, workers)))


def moa(drafters: Sequence[str], aggregator: str) -> Planner:
    """`moa`: drafts side by side, and an aggregator that sees all of them and answers (Wang et al., arXiv:2406.04692,
    one layer)."""

    def choose(situation: Situation) -> Plan:
        drafts = by_name(situation, drafters)[: situation.allowed.steps_max - 1]
        return side_by_side(situation, drafts, by_name(situation, [aggregator])[0])

    return OneRoundPlanner("moa", choose)


class FallbackPlanner:
    """`fallback`: one worker, and a second one where the reply of the first is empty or there is none."""

    name = "fallback"

    def __init__(self, first: str, then: str) -> None:
        self._first, self._then = first, then

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Raises PlanRefused where no model worker is left."""
        if situation.round == 1:
            return single(by_name(situation, [self._first])[0])
        if situation.round == 2 and not any(reply.answer for reply in situation.replies):
            return single(by_name(situation, [self._then])[0])
        return SHIP


@dataclass(frozen=True, slots=True)
class Ladder:
    """One cascade: `first` are asked side by side; where fewer than two of them agree, `then` answers."""

    first: tuple[str, ...]
    then: str | None = None  # None: the first of `first` is shipped whatever the others say


class CascadePlanner:
    """`cascade`: cheap ones first, ship where two of them agree, else escalate; a ladder for every category.

    The digest says who agrees, as it tells a conductor. Two rounds at most are planned, the third ships.
    """

    name = "cascade"

    def __init__(self, categories: Categories, ladders: Mapping[str, Ladder]) -> None:
        self._categories = categories
        self._ladders = ladders

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Raises PlanRefused where no model worker is left."""
        ladder = self._ladders[self._categories.of(situation)]
        then = None if ladder.then is None else by_name(situation, [ladder.then])[0]
        return cascade_plan(situation, by_name(situation, ladder.first), then)


class PriceCascade:
    """`price-cascade`: the two cheapest model workers side by side; while the last reply is known to differ from the
    others, the next dearer one. The last reply is shipped."""

    name = "price-cascade"

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Raises PlanRefused where no model worker is left."""
        models = sorted(models_of(situation), key=lambda spec: (spec.price is None, typical_nano(spec), spec.name))
        if situation.round == 1:
            return side_by_side(situation, models[: min(2, situation.allowed.steps_max)])
        asked = {reply.handle for reply in situation.replies}
        rest = [spec for spec in models if spec.handle not in asked]
        if situation.final or not rest or (situation.replies and not disputed(situation)):
            return SHIP
        return single(rest[0])
