"""Policies that plan without a model: a fixed worker, and the rule that weighs what was observed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gateway.core.experience import RuleWeights, rule_utility, smoothed_success
from gateway.core.meter import Meter
from gateway.core.money import Usage, cost_nano
from gateway.core.plan import Plan, Step
from gateway.core.pool import NANO_PER_USD, WorkerSpec
from gateway.core.rollout import RoundRecord
from gateway.errors import BatonError, PlanRefused
from gateway.service.job import EarlyStart, Planner, Situation
from gateway.service.steps import price_of

LATENCY_GUESS_S = 2.0
USAGE_GUESS = Usage(400, 300)  # a typical call, where nothing was observed yet


class FixedPlanner:
    """`fixed:<worker>`: one step, the conversation as it is, always the same worker."""

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

    Success, latency and cost are what was observed on the nearest past tasks with an outcome; a worker with few is
    given the benefit of the doubt (a Beta prior), so every worker gets tried until it disappoints.
    """

    name = "rule"

    def __init__(self, weights: RuleWeights) -> None:
        self._weights = weights

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Raises PlanRefused where no model worker is left to try."""
        models = [spec for spec in situation.workers if spec.kind in ("openai", "litellm")]
        usable = [spec for spec in models if spec.handle not in situation.avoid]
        if not usable:
            raise PlanRefused("no_worker", "every model worker of this pool has failed")
        best = max(usable, key=lambda spec: (self.utility(spec, situation), spec.name))
        return Plan((Step(best.handle, None),))

    def utility(self, spec: WorkerSpec, situation: Situation) -> float:
        """What the rule expects of this worker on this task."""
        past = situation.experience.get(spec.name)
        success = smoothed_success(self._weights, past.success_mean if past else 0.0, past.n if past else 0)
        latency_s = past.latency_ms_mean / 1000 if past else spec.latency_hint_s or LATENCY_GUESS_S
        nano = past.cost_nano_mean if past else cost_nano(price_of(spec), USAGE_GUESS)
        return rule_utility(self._weights, success, latency_s, nano / NANO_PER_USD)


class AutoPlanner:
    """`baton` while a pool is new: the rule, until so many judged rollouts exist that the conductor can be trusted."""

    name = "auto"

    def __init__(
        self, rule: RulePlanner, learned: Planner, count: Callable[[str], Awaitable[int]], outcomes_min: int
    ) -> None:
        self._rule = rule
        self._learned = learned
        self._count = count
        self._outcomes_min = outcomes_min
        self._trusted: set[str] = set()

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """As the planner it stands for; the record names that one."""
        planner = self._learned if await self._trusts(situation.pool) else self._rule
        record.planner = planner.name
        return await planner.plan(situation, record, meter, early)

    async def _trusts(self, pool: str) -> bool:
        if pool not in self._trusted:
            try:
                judged = await self._count(pool)
            except BatonError:  # the store is away: the rule needs nothing
                return False
            if judged >= self._outcomes_min:
                self._trusted.add(pool)
        return pool in self._trusted
