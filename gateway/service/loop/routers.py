"""Routers, the policies that plan without a model: fixed worker, rule, vote and cascade."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.log.rollout import RoundRecord
from gateway.core.loop.caps import Meter
from gateway.core.loop.experience import RuleWeights, rule_utility, smoothed_success
from gateway.core.loop.plan import Plan, Step
from gateway.core.money.amounts import Usage, cost_nano
from gateway.core.pool.workers import MODEL_KINDS, NANO_PER_USD, VOTE_URL, WorkerSpec
from gateway.errors import PlanRefused
from gateway.service.loop.bodies import price_of
from gateway.service.loop.state import EarlyStart, Situation

LATENCY_GUESS_S = 2.0
USAGE_GUESS = Usage(400, 300)  # a typical call, where there is no experience
VOTERS = 3
SHIP = Plan(())


def models_of(situation: Situation) -> list[WorkerSpec]:
    """The model workers offered, without those that failed in this loop. Raises PlanRefused where none is left."""
    models = [spec for spec in situation.workers if spec.kind in MODEL_KINDS and spec.handle not in situation.avoid]
    if not models:
        raise PlanRefused("no_worker", "every model worker of this pool has failed")
    return models


def single(spec: WorkerSpec) -> Plan:
    """A plan of one step: the conversation to one worker."""
    return Plan((Step(spec.handle, None),))


def side_by_side(situation: Situation, specs: Sequence[WorkerSpec], last: WorkerSpec | None = None) -> Plan:
    """A plan that sends the conversation to all `specs` in parallel, and then to `last`, which sees all replies."""
    steps = [Step(spec.handle, None) for spec in specs]
    if last is not None:
        first = situation.allowed.first_index
        steps.append(Step(last.handle, None, tuple(range(first, first + len(specs)))))
    return Plan(tuple(steps))


def vote_plan(situation: Situation, voters: Sequence[WorkerSpec]) -> Plan:
    """A plan that asks the voters in parallel and takes the majority of their answers (ties go to the first). The caps
    may leave room for fewer voters; one voter needs no vote. Raises PlanRefused where the pool has no `vote`."""
    voters = voters[: max(1, situation.allowed.steps_max - 1)]
    if len(voters) == 1:
        return single(voters[0])
    tool = next((spec for spec in situation.workers if spec.url == VOTE_URL), None)
    if tool is None:
        raise PlanRefused("no_worker", "this pool has no vote")
    return side_by_side(situation, voters, tool)


def cascade_plan(situation: Situation, first: Sequence[WorkerSpec], then: WorkerSpec | None) -> Plan:
    """Round 1: `first` in parallel, or `then` alone where caps or pool allow no second opinion. Round 2: `then`, unless
    another reply agrees with the last of `first`. The last reply is shipped."""
    if situation.round == 1:
        asked = first[-1:] if situation.final else first[-situation.allowed.steps_max :]
        return single(then) if then is not None and len(asked) < 2 else side_by_side(situation, asked)
    if situation.round > 2 or then is None or len(situation.replies) < 2 or agreed(situation):
        return SHIP
    return single(then)


def agreed(situation: Situation) -> bool:
    """Whether the last reply, which an empty plan ships, has the same answer as an earlier reply."""
    return any(flag.startswith("agrees:") for flag in situation.replies[-1].flags)


class FixedPlanner:
    """`fixed:<worker>`: one step, the conversation as it is, always to the same worker."""

    def __init__(self, worker: str) -> None:
        self.name = f"fixed:{worker}"
        self._worker = worker

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Raises PlanRefused where the worker is not among those offered."""
        spec = next((spec for spec in situation.workers if spec.name == self._worker), None)
        if spec is None:
            raise PlanRefused("unknown_worker", f"worker {self._worker} is not in this pool")
        return Plan((Step(spec.handle, None),))


class RulePlanner:
    """`rule`: one step on the model worker of the highest utility, w1·success + w2/latency − w3·cost.

    Success, latency and cost come from the nearest past tasks with an outcome. A Beta prior gives workers with few
    outcomes the benefit of the doubt, so each worker is tried until it disappoints. A request that explores credits
    every worker with many more right answers, so that the least known worker is tried, unless it has failed.
    """

    name = "rule"

    def __init__(self, weights: RuleWeights) -> None:
        self._weights = weights

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Raises PlanRefused where no model worker is left to try."""
        hope = self._weights.hope if situation.explore else 0.0
        return single(self.ranked(situation, hope)[0])

    def ranked(self, situation: Situation, hope: float = 0.0) -> list[WorkerSpec]:
        """The model workers by utility, best first; ties to the later name. Raises PlanRefused where none is left."""
        models = models_of(situation)
        return sorted(models, key=lambda spec: (self.utility(spec, situation, hope), spec.name), reverse=True)

    def utility(self, spec: WorkerSpec, situation: Situation, hope: float = 0.0) -> float:
        """The utility that the rule expects of this worker on this task, after `hope` credited right answers."""
        past = situation.experience.get(spec.name)
        latency_s = past.latency_ms_mean / 1000 if past else spec.latency_hint_s or LATENCY_GUESS_S
        usd = _expected_nano(spec, situation) / NANO_PER_USD
        return rule_utility(self._weights, self.success(spec, situation, hope), latency_s, usd)

    def success(self, spec: WorkerSpec, situation: Situation, hope: float = 0.0) -> float:
        """The expected probability, in [0, 1], that this worker is right on this task."""
        past = situation.experience.get(spec.name)
        return smoothed_success(self._weights, past.success_mean if past else 0.0, past.n if past else 0, hope)


def _expected_nano(spec: WorkerSpec, situation: Situation) -> int:
    """The expected nano-dollars of a call of this worker. Raises Unpriced."""
    past = situation.experience.get(spec.name)
    return past.cost_nano_mean if past else cost_nano(price_of(spec), USAGE_GUESS)


class VoteRouter:
    """`vote`: the workers that the rule ranks highest answer in parallel; the majority answer is the reply."""

    name = "vote"

    def __init__(self, rule: RulePlanner, voters: int = VOTERS) -> None:
        self._rule = rule
        self._voters = voters

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Raises PlanRefused where no model worker is left, or the pool has no `vote`."""
        if situation.round > 1:
            return SHIP
        return vote_plan(situation, self._rule.ranked(situation)[: self._voters])


class CascadeRouter:
    """`cascade`: two workers that are good for their price answer in parallel. Where they agree, that is the reply;
    else the most successful of the others answers. Without experience the dearest worker counts as the most
    successful."""

    name = "cascade"

    def __init__(self, rule: RulePlanner) -> None:
        self._rule = rule

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Raises PlanRefused where no model worker is left."""
        first = self._rule.ranked(situation)[1::-1]  # the best is last, because agreement ships the last reply
        asked = {reply.handle for reply in situation.replies} or {spec.handle for spec in first}
        rest = [spec for spec in models_of(situation) if spec.handle not in asked]
        return cascade_plan(situation, first, max(rest, key=lambda spec: self._worth(spec, situation), default=None))

    def _worth(self, spec: WorkerSpec, situation: Situation) -> tuple[float, int, str]:
        return self._rule.success(spec, situation), _expected_nano(spec, situation), spec.name
