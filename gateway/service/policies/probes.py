"""Probes: a worker in quarantine is asked again what it, at its usual, answered right, and released once it does.

One question at a time, of the kind of task on which it was flagged, at a pace. The operator pays, out of a budget a day
that is zero unless it is set: each probe holds its worst case first, like any request, and is charged what it cost. The
text of a question goes only to the worker that was sent it before; neither question nor reply is logged.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.core.access.audit import Act
from gateway.core.log.events import Event, Kind, uuid7
from gateway.core.log.rollout import StepRecord
from gateway.core.loop.replies.agreement import compare
from gateway.core.loop.replies.kinds import read_message, read_text, wanted_kind
from gateway.core.money.amounts import cost_nano, worst_case_nano
from gateway.core.money.ledger import Scope, windows
from gateway.core.openai.finish import finish_reason
from gateway.core.openai.reply import reply_text
from gateway.core.pool.drift import Signal
from gateway.core.pool.models import adapt, model_of
from gateway.core.pool.release import ReleaseTest
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import BatonError, BudgetExceeded, Conflict, UpstreamError
from gateway.service.loop.bodies import size_in_bytes
from gateway.service.loop.spending.charges import output_bound, price_of
from gateway.service.policies.drift import served_signals
from gateway.service.policies.quarantine import Quarantines
from gateway.service.ports.drift import DriftStore, KnownQuestion, Quarantine
from gateway.service.ports.money import LEASE_SLACK_S, Budgets
from gateway.service.ports.request import REFUSED_STATUSES, Clock, Journal, WorkerCall, Workers

log = logging.getLogger("baton.drift")
BY_PROBES = "rule:probes"
SCOPE = "operator:probes"
EVERY_S = 1.0
PACE_S = 15.0  # between two probes of one worker
REST_S = 300.0  # where the budget is spent, or no question is known
QUESTIONS_MAX = 200  # the latest ones, of which one is drawn
ASKED = (
    *("temperature", "top_p", "seed", "stop", "frequency_penalty", "presence_penalty", "response_format"),
    *("reasoning_effort", "verbosity", "max_tokens", "max_completion_tokens"),
)  # the parameters of the client that a probe repeats
Signals = Mapping[Signal, float]


class ProbeMetrics(Protocol):
    """Counts probes."""

    def probed(self, worker: str, result: str, nano: int) -> None:
        """Count a probe and its nano-dollars. `result`: good, bad, unknown, failed or unpaid."""
        ...


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """`day_nano`: the nano-dollars that all probes of a day (UTC) may cost; 0: there are none."""

    day_nano: int = 0
    pace_s: float = PACE_S
    rest_s: float = REST_S


class Probes:
    """Asks the workers in quarantine. Call `run` in a task, in one process of a gateway."""

    def __init__(
        self,
        quarantines: Quarantines,
        workers: Workers,
        budgets: Budgets,
        journal: Journal,
        clock: Clock,
        metrics: ProbeMetrics,
        limits: ProbeLimits,
    ) -> None:
        self._quarantines = quarantines
        self._store: DriftStore = quarantines.store
        self._workers = workers
        self._budgets = budgets
        self._journal = journal
        self._clock = clock
        self._metrics = metrics
        self._limits = limits
        self._draw = random.Random()  # noqa: S311 - which question comes is no secret

    async def run(self, every_s: float = EVERY_S) -> None:
        """Probe for ever, where there is a budget. No error ends it."""
        while self._limits.day_nano:
            for standing in self._quarantines.standing():
                try:
                    await self.probe(standing)
                except BatonError as error:
                    log.info("worker %s cannot be probed now: %s", standing.worker, error.message)
                except Exception:  # boundary: probes are not worth a gateway
                    log.exception("a probe of worker %s failed", standing.worker)
            await asyncio.sleep(every_s)

    async def probe(self, standing: Quarantine) -> bool:
        """Ask one question, if it is time for one, and release the worker if it has passed. Return whether it was
        asked. Raises Unavailable, MoneyUnavailable, SpoolFull."""
        spec = self._quarantines.spec_of(standing)
        if spec is None or not standing.tests:  # an operator put it there, and lets it out
            return False
        lease_s = spec.timeout_s + LEASE_SLACK_S
        lent = await self._store.lend(standing.id, lease_s)
        if lent is None:
            return False
        tests = list(lent.tests)
        test = min((one for one in tests if not one.passed), key=lambda one: one.probes, default=None)
        if test is None:
            return await self._release(lent)
        questions = await self._store.questions(lent.worker, lent.version, test.task_type, lent.at, QUESTIONS_MAX)
        if not questions:
            log.info("worker %s: no question with a known answer to probe it with", lent.worker)
            await self._store.rest(lent.id, self._limits.rest_s)
            return False
        return await self._ask(lent, spec, test, self._draw.choice(questions))

    async def _ask(self, lent: Quarantine, spec: WorkerSpec, test: ReleaseTest, question: KnownQuestion) -> bool:
        try:
            signals, nano = await self._answer(spec, question)
        except BudgetExceeded as error:
            log.info("worker %s is not probed: %s", lent.worker, error.message)
            self._metrics.probed(lent.worker, "unpaid", 0)
            await self._store.rest(lent.id, self._limits.rest_s)
            return False
        tests = list(lent.tests)
        for one in tests:
            result = one.result(signals) if one.task_type == test.task_type else None
            if result is not None:
                one.add(result)
        self._metrics.probed(lent.worker, _result(test, signals), nano)
        await self._store.probed(lent.id, tests, nano, self._limits.pace_s)
        if all(one.passed for one in tests):
            await self._release(lent)
        return True

    async def _release(self, lent: Quarantine) -> bool:
        """Release a worker whose tests are all passed; a flag that came meanwhile keeps it."""
        now = next((one for one in await self._store.standing(self._clock.now()) if one.id == lent.id), None)
        if now is None or not all(test.passed for test in now.tests):
            return False
        counts = ", ".join(f"{test.signal} was bad in {test.bad:g} of {test.probes}" for test in now.tests)
        try:
            await self._quarantines.release(lent.worker, Act(BY_PROBES, f"its probes passed: {counts}"))
        except Conflict:
            return False  # an operator was faster
        log.warning("worker %s (version %s) is out of quarantine: %s", lent.worker, lent.version, counts)
        return True

    # ------------------------------------------------------------ one question

    async def _answer(self, spec: WorkerSpec, question: KnownQuestion) -> tuple[Signals, int]:
        """What the worker's reply says, and what it cost. Raises BudgetExceeded, MoneyUnavailable, SpoolFull."""
        params = {name: value for name, value in question.params.items() if name in ASKED}
        body = {**_taken(spec, params), "messages": question.messages}
        bound_nano = worst_case_nano(price_of(spec), size_in_bytes(spec, body).tokens_max, output_bound(body))
        hold_id = uuid7(self._clock.now_us() // 1000)
        scopes = windows(SCOPE, self._clock.now())
        if bound_nano:
            await self._hold(hold_id, spec, bound_nano, scopes)
        charged = bound_nano  # until it is known what it cost
        try:
            signals, charged = await self._called(spec, body, question, hold_id, bound_nano)
        finally:
            if bound_nano:
                await asyncio.shield(self._settle(hold_id, charged, scopes))
        return signals, charged

    async def _called(
        self, spec: WorkerSpec, body: Mapping[str, Any], question: KnownQuestion, hold_id: str, bound_nano: int
    ) -> tuple[Signals, int]:
        step = StepRecord(1, 0, spec.name, spec.handle, spec.kind, spec.version, None, [])
        step.started_us = self._clock.now_us()
        call = WorkerCall(spec, body, spec.timeout_s, hold_id, "probe")
        try:
            reply = await self._workers.complete(call)
        except UpstreamError as error:
            free = error.upstream_status is not None or not error.dispatched
            refused = error.upstream_status in REFUSED_STATUSES
            return ({} if refused else {"failed": 1.0}), (0 if free else bound_nano)
        step.finished_us, step.status = self._clock.now_us(), "done"
        choice: Mapping[str, Any] = next(iter(reply.body.get("choices") or ()), {})
        step.finish_reason, step.reply = finish_reason(choice.get("finish_reason")), reply_text(reply.body)
        step.completion_tokens = reply.usage.completion_tokens
        nano = cost_nano(price_of(spec), reply.usage) if reply.cost_nano is None else reply.cost_nano
        if spec.bills and reply.usage.bill_nano is not None:
            nano = min(reply.usage.bill_nano, bound_nano)
        return {**served_signals(step), **_outcome(question, choice.get("message") or {})}, nano

    # ------------------------------------------------------------ money

    async def _hold(self, hold_id: str, spec: WorkerSpec, nano: int, names: tuple[str, str, str]) -> None:
        life, month, day = names
        scopes = [Scope(life, None), Scope(month, None), Scope(day, self._limits.day_nano)]
        await self._budgets.hold(hold_id, nano, nano, scopes, spec.timeout_s + LEASE_SLACK_S)
        money = {"hold_id": hold_id, "rollout_id": hold_id}
        amounts = [[scope.name, scope.limit_nano] for scope in scopes]
        step = {"step_id": "probe", "attempt": 1, "worker": spec.name, "bound_nano": nano}
        await self._journal.append(
            self._event("hold", {**money, "amount_nano": nano, "scopes": amounts}),
            self._event("dispatch", {**money, **step}),
        )

    async def _settle(self, hold_id: str, nano: int, scopes: tuple[str, str, str]) -> None:
        amounts = [[name, None] for name in scopes]
        state = {"state": "posted" if nano else "voided", "charged_nano": nano, "scopes": amounts}
        await self._journal.append(self._event("settle", {"hold_id": hold_id, "rollout_id": hold_id, **state}))
        await (self._budgets.post(hold_id, nano) if nano else self._budgets.void(hold_id))

    def _event(self, kind: Kind, payload: Mapping[str, Any]) -> Event:
        return Event.new(kind, self._clock.now_us(), payload)


def _taken(spec: WorkerSpec, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters as far as the worker's model takes them, with the bound of its reply."""
    params_taken, _ = adapt(spec, dict(params))
    bounds = [params_taken.pop(name, None) for name in ("max_completion_tokens", "max_tokens")]
    bound = next((bound for bound in bounds if bound is not None), spec.output_tokens_max)
    newer = model_of(spec).completion_tokens and "max_completion_tokens" not in spec.cannot
    name = "max_completion_tokens" if newer or "max_tokens" in spec.cannot else "max_tokens"
    return {**params_taken, name: min(bound, spec.output_tokens_max)}


def _outcome(question: KnownQuestion, message: Mapping[str, Any]) -> dict[Signal, float]:
    """Whether the reply says what is known to be right; nothing where that cannot be known from the two texts."""
    kind = wanted_kind(question.params, question.tags)
    agreement = compare(read_text(question.answer, kind), read_message(message, kind))
    return {} if agreement == "unknown" else {"outcome": float(agreement == "different")}


def _result(test: ReleaseTest, signals: Signals) -> str:
    value = test.result(signals)
    if value is None:
        return "failed" if signals.get("failed") else "unknown"
    return "bad" if value > 0.5 else "good"
