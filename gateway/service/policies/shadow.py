"""Shadow plans: the shadow version plans beside the serving version. No worker is called, and no request waits.

The shadow gets the first round of a share of requests, after the serving version has planned it. At most `parallel`
shadow plans run at once; further ones are dropped, never queued. The log gets one event for each. The operator pays:
nothing if planning is free, else from a budget for shadow plans, and without that budget there are none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gateway.core.log.events import Event, Kind, uuid7
from gateway.core.log.rollout import RoundRecord
from gateway.core.loop.caps import Caps, Meter
from gateway.core.loop.plan import Plan, Step
from gateway.core.loop.prompt import render
from gateway.core.money.amounts import input_tokens_bound, worst_case_nano
from gateway.core.money.ledger import Scope
from gateway.core.policies.versions import Pick, in_share, same_route
from gateway.errors import BatonError, ConductorError, PlanRefused
from gateway.service.loop.conducting import ConductorPlanner, ConductorSettings, profile_for, prompt_input
from gateway.service.loop.state import EarlyStart, Situation, nothing_to_write
from gateway.service.policies.versions import PolicyVersions
from gateway.service.ports.money import LEASE_SLACK_S, Budgets
from gateway.service.ports.policies import PolicyMetrics
from gateway.service.ports.request import Clock, Journal

log = logging.getLogger("baton.versions")
SCOPE = "operator:shadow"
PLENTY_NANO = 2**53 - 1


@dataclass(frozen=True, slots=True)
class ShadowLimits:
    """`share`: the share of requests, in [0, 1]. `parallel`: the largest number of shadow plans at once. `budget_nano`:
    the nano-dollars that all shadow plans together may ever cost, if planning has a price."""

    share: float = 0.1
    parallel: int = 1
    budget_nano: int = 0


class ShadowedPlanner:
    """The planner `conductor`, which offers each plan to the shadow as well."""

    name = "conductor"

    def __init__(self, learned: ConductorPlanner, shadows: Shadows) -> None:
        self._learned = learned
        self._shadows = shadows

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Plan as the learned planner does. The shadow's turn comes when that has ended, with a plan or an error."""
        plan: Plan | None = None
        try:
            plan = await self._learned.plan(situation, record, meter, early)
            return plan
        finally:
            self._shadows.offer(situation, plan, record)


class Shadows:
    """Runs shadow plans. One object serves the whole process."""

    def __init__(
        self,
        versions: PolicyVersions,
        learned: ConductorPlanner,
        settings: ConductorSettings,
        budgets: Budgets,
        journal: Journal,
        clock: Clock,
        metrics: PolicyMetrics,
        limits: ShadowLimits,
    ) -> None:
        self._versions = versions
        self._learned = learned
        self._settings = settings
        self._budgets = budgets
        self._journal = journal
        self._clock = clock
        self._metrics = metrics
        self._limits = limits
        self._running: set[asyncio.Task[None]] = set()

    def offer(self, situation: Situation, plan: Plan | None, record: RoundRecord) -> None:
        """Let the shadow plan this round too, if it falls into its share. Returns at once. Skips exploring plans."""
        shadow = self._versions.shadow
        if shadow is None or situation.rollout_id is None or situation.round > 1 or situation.explore:
            return
        if not in_share(situation.rollout_id, f"shadow {shadow.version}", 100 * self._limits.share):
            return
        if len(self._running) >= self._limits.parallel:
            self._metrics.policy_shadowed(shadow.version, "dropped")
            return
        live_ms = max(0.0, (self._clock.now_us() - record.started_us) / 1000)
        task = asyncio.create_task(self._run(shadow, situation, plan, record.policy_version, live_ms))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def drain(self) -> None:
        """Cancel all shadow plans. They leave no event in the log."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _run(
        self, shadow: Pick, situation: Situation, plan: Plan | None, live: str | None, live_ms: float
    ) -> None:
        """Make one shadow plan, from its hold to its event in the log. Nothing depends on it, so it raises nothing."""
        result, began_s = "unpaid", self._clock.monotonic_s()
        round_ = RoundRecord(1, "conductor")
        shadow_situation = replace(
            situation, version=shadow, timeout_s=self._settings.timeout_s, before_spending=nothing_to_write
        )
        try:
            refusal, shadow_plan = await self._plan(shadow_situation, round_)
            result = _result(refusal, plan, shadow_plan)
            payload = {
                "rollout_id": situation.rollout_id,
                "version": shadow.version,
                "live_version": live,
                "refusal": refusal,
                "agrees": {"agrees": True, "differs": False}.get(result),
                "latency_ms": (self._clock.monotonic_s() - began_s) * 1000,
                "live_latency_ms": live_ms,
                "prompt_tokens": round_.prompt_tokens,
                "completion_tokens": round_.completion_tokens,
                "cost_nano": round_.cost_nano,
            }
            await self._write("shadow", payload)
        except BatonError as error:  # no money, or no room in the journal
            log.info("no shadow plan of %s: %s", shadow.version, error.message)
        except Exception as bug:  # boundary: no request waits for this, so only the log can show a bug
            log.error("a shadow plan of %s met a bug", shadow.version, exc_info=bug)
        self._metrics.policy_shadowed(shadow.version, result)

    async def _plan(self, situation: Situation, record: RoundRecord) -> tuple[str | None, Plan | None]:
        """(the reason why the plan could not be used, None) or (None, the plan). Raises BudgetExceeded,
        MoneyUnavailable, SpoolFull."""
        hold_id = await self._hold(situation)
        meter = Meter(PLENTY_NANO, Caps())
        try:
            return None, await self._learned.plan(situation, record, meter, _run_nothing)
        except (ConductorError, PlanRefused) as error:
            return error.reason, None
        finally:
            if hold_id is not None:
                await asyncio.shield(self._settle(hold_id, meter.spent_nano))

    # ------------------------------------------------------------ money

    async def _hold(self, situation: Situation) -> str | None:
        """Reserve the worst case of one plan in the operator's scope. Returns the hold's id, or None if planning is
        free."""
        profile = profile_for(situation, self._settings)
        bound = input_tokens_bound(render(profile, prompt_input(situation)), "")
        amount_nano = worst_case_nano(self._settings.price, bound, self._settings.tokens_max)
        if amount_nano == 0:
            return None
        hold_id = uuid7(self._clock.now_us() // 1000)
        scopes = [Scope(SCOPE, self._limits.budget_nano)]
        await self._budgets.hold(hold_id, amount_nano, amount_nano, scopes, self._settings.timeout_s + LEASE_SLACK_S)
        money = {
            "hold_id": hold_id,
            "rollout_id": hold_id,
        }  # not the client's rollout, which shows only the client's money
        step = {"step_id": "shadow", "attempt": 1, "worker": "conductor", "bound_nano": amount_nano}
        await asyncio.gather(
            self._write("hold", {**money, "amount_nano": amount_nano, "scopes": [[SCOPE, self._limits.budget_nano]]}),
            self._write("dispatch", {**money, **step}),
        )
        return hold_id

    async def _settle(self, hold_id: str, nano: int) -> None:
        state = {"state": "posted" if nano else "voided", "charged_nano": nano, "scopes": [[SCOPE, None]]}
        await self._write("settle", {"hold_id": hold_id, "rollout_id": hold_id, **state})
        await (self._budgets.post(hold_id, nano) if nano else self._budgets.void(hold_id))

    async def _write(self, kind: Kind, payload: Mapping[str, object]) -> None:
        await self._journal.append(Event.new(kind, self._clock.now_us(), payload))


def _result(refusal: str | None, live: Plan | None, shadow: Plan | None) -> str:
    """Compare a shadow plan with the live plan: agrees | differs | refused (the shadow made no valid plan) | alone
    (only the shadow made a plan)."""
    if refusal is not None or shadow is None:
        return "refused"
    if live is None:
        return "alone"
    return "agrees" if same_route(live, shadow) else "differs"


def _run_nothing(step: Step) -> None:
    """Ignore a step: the steps of shadow plans never run."""
