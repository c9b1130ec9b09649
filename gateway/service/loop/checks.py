"""Contracts and verify steps while they run: what is asked of a checker, who is asked again, which way a plan goes.

A reply that misses its contract is repaired once by its worker, which is told the fault; then another worker answers.
A checker that fails says nothing of the reply: a contract then lets it pass, marked `unchecked`, for no other worker
could do better; a verify step takes the edge `escalate`. What checks and repairs cost is the step's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from gateway.core.log.rollout import AttemptRecord, RolloutRecord, StepRecord
from gateway.core.loop.compose import SeenStep
from gateway.core.loop.contract import VERIFY_TASK, Expect, Ruling, verdict_of
from gateway.core.loop.plan import Step
from gateway.core.loop.replies.errors import CONTRACT, VERIFY
from gateway.core.loop.replies.testing import program_of
from gateway.core.loop.replies.verdicts import StepVerdict, checked_flags, step_verdict
from gateway.core.loop.shown import ShownReply
from gateway.core.loop.turns.marks import asks_client
from gateway.core.money.amounts import cost_nano
from gateway.core.money.details import sum_details
from gateway.core.openai.reply import merge, reply_text
from gateway.core.pool.models import is_checker
from gateway.core.pool.workers import MODEL_KINDS, PYTHON_URL, TOOL_KINDS, VOTE_URL, WorkerSpec
from gateway.errors import CapReached, ContractMissed, UpstreamError
from gateway.service.loop.bodies import step_body, wanted_tokens
from gateway.service.loop.calls import Saw
from gateway.service.loop.routers import USAGE_GUESS
from gateway.service.loop.spending.charges import price_of
from gateway.service.loop.state import Loop, StepRun
from gateway.service.ports.request import Clock

Call = Callable[..., Awaitable[Mapping[str, Any]]]  # loop, run, answers, streams, more messages
Fitted = Callable[[Loop, StepRun, Sequence[SeenStep]], Awaitable[list[dict[str, Any]]]]
Ask = Callable[[Loop, StepRun, Sequence[dict[str, Any]], Saw], Awaitable[list[Mapping[str, Any]]]]


def check_limits(offered: Sequence[WorkerSpec]) -> dict[str, Any]:
    """The parts of a plan's limits that say which workers merge replies, check them, and have tools for others."""
    return {
        "merges": frozenset(spec.handle for spec in offered if spec.url == VOTE_URL),
        "checkers": tuple(spec.handle for spec in offered if is_checker(spec)),
        "runs_tests": any(spec.url == PYTHON_URL for spec in offered),
        "toolboxes": tuple(spec.handle for spec in offered if spec.kind == "mcp"),
    }


def is_skipped(loop: Loop, run: StepRun) -> bool:
    """Whether the verdicts before a step took another way: one of them ended the plan, none chose the step though one
    of them might have, or all that it sees was skipped. Call it when its gates have ended."""
    gates = [loop.runs[index] for index in run.gates]
    if any(gate.verdict is not None and gate.taken is None for gate in gates):
        return True
    named = any(gate.step.verify is not None and run.index in gate.step.verify.edges for gate in gates)
    if named and not any(gate.taken == run.index for gate in gates):
        return True
    seen = [loop.runs[index].record.status for index in run.step.see]
    return bool(seen) and all(status == "skipped" for status in seen)


def take_edge(run: StepRun, verdict: Ruling) -> None:
    """Let a verify step go the way of its verdict. One that cannot be read escalates."""
    assert run.step.verify is not None  # noqa: S101 - only verify steps get here
    accept, escalate = run.step.verify.edges
    run.verdict, run.taken = verdict, accept if verdict.accept else escalate


def note(loop: Loop, run: StepRun, now_us: int, by: str, verdict: Ruling) -> None:
    """Log a verdict with the attempt that it is of, and tell a client that asked for events."""
    if not run.record.attempts:
        run.record.attempts.append(AttemptRecord(now_us, now_us, dispatched=False))
    pairwise = {"pairwise": True} if verdict.pairwise else {}
    run.record.attempts[-1].verdict = {"by": by, "accept": verdict.accept, "why": verdict.why, **pairwise}
    loop.tell("step_checked", step=run.index, worker=run.spec.name, by=by, accept=verdict.accept, why=verdict.why)


def code_fault(expect: Expect, body: Mapping[str, Any]) -> str | None:
    """What code can tell is wrong with any choice of a reply; None where nothing is. A call of the client's own tools
    is no text, and nothing is wrong with it."""
    if asks_client(body):
        return None
    texts = [reply_text({"choices": [choice]}) for choice in body.get("choices") or ()]
    return next((fault for text in texts if (fault := expect.fault(text)) is not None), None)


def python_worker(loop: Loop) -> WorkerSpec | None:
    """The worker that runs tests, where the pool has one."""
    return next((spec for spec in loop.workers if spec.url == PYTHON_URL), None)


def other_worker(loop: Loop, run: StepRun) -> WorkerSpec | None:
    """The model worker that answers where this step's own missed its contract twice: of those that have not failed here
    the most successful, else the dearest."""
    failed = {one.step.worker for one in loop.runs if one.error is not None} | {run.spec.handle}
    models = [spec for spec in loop.workers if spec.kind in MODEL_KINDS and spec.handle not in failed]

    def worth(spec: WorkerSpec) -> tuple[float, int, str]:
        past = loop.experience.get(spec.name)
        return past.success_mean if past else 0.5, cost_nano(price_of(spec), USAGE_GUESS), spec.name

    return max(models, key=worth, default=None)


def hand_over(run: StepRun, spec: WorkerSpec) -> None:
    """Let another worker answer a step. Its earlier attempts keep the name of the worker that made them."""
    for attempt in run.record.attempts:
        attempt.worker = attempt.worker or run.spec.name
    run.spec = spec
    run.record.worker, run.record.handle = spec.name, spec.handle
    run.record.kind, run.record.worker_version = spec.kind, spec.version


def correction(run: StepRun, fault: str) -> list[dict[str, Any]]:
    """The messages that ask a worker again: its reply, and what is wrong with it."""
    request = f"That is not what was asked for: {fault}. Answer again, in full. Your new answer replaces the other."
    return [
        {"role": "assistant", "content": reply_text(run.body or {})},
        {"role": "user", "content": request},
    ]


def side_call(run: StepRun, spec: WorkerSpec, task: str) -> tuple[StepRun, SeenStep]:
    """A call beside a step, of a worker that checks its reply: the run of the call, and the reply as it sees it."""
    record = run.record
    own = StepRecord(
        record.round, run.index, spec.name, spec.handle, spec.kind, spec.version, task, [run.index]
    )  # it is not logged: its cost and attempts are the step's
    beside = StepRun(run.index, Step(spec.handle, task, (run.index,)), spec, own, dispatches=run.dispatches)
    return beside, SeenStep(run.index, run.step.worker, run.step.task, reply_text(run.body or {}))


def add_cost(run: StepRun, beside: StepRun) -> None:
    """Add what a call beside a step did and cost to the step."""
    record, other = run.record, beside.record
    for attempt in other.attempts:
        attempt.worker = beside.spec.name
    record.attempts += other.attempts
    record.cost_nano += other.cost_nano
    record.prompt_tokens += other.prompt_tokens
    record.completion_tokens += other.completion_tokens
    record.usage_estimated |= other.usage_estimated
    record.usage_details = sum_details((record.usage_details, other.usage_details)) or None
    run.dispatches = beside.dispatches


def standing_verdict(rollout_id: str, step: StepRecord) -> StepVerdict | None:
    """`step_verdict` of a record."""
    attempts = [{"verdict": one.verdict, "worker": one.worker, "dispatched": one.dispatched} for one in step.attempts]
    return step_verdict(rollout_id, step.round, step.step, step.worker, attempts)


def verdicts_of(records: Iterable[RolloutRecord]) -> tuple[StepVerdict, ...]:
    """The verdicts that stand on the steps of some rollouts, in order."""
    verdicts = (standing_verdict(record.id, step) for record in records for step in record.steps)
    return tuple(one for one in verdicts if one is not None)


def flags_with_verdicts(loop: Loop, reply: ShownReply) -> tuple[str, ...]:
    """The flags of a digest, with what was checked of its reply."""
    here, *after = [run.record for run in loop.runs[reply.index : reply.index + 2]]
    verdict, *following = (standing_verdict(loop.record.id, record) for record in (here, *after))
    return checked_flags(reply.flags, here.status, verdict, following[0] if following else None)


class Contracts:
    """What a step must keep, and what a verify step finds. `call` gets another reply of a step's worker, `ask` calls a
    worker with bodies, `fit` gives the messages of a call as far as its worker's context has room for them."""

    def __init__(self, clock: Clock, call: Call, ask: Ask, fit: Fitted) -> None:
        self._clock = clock
        self._call = call
        self._ask = ask
        self._fit = fit

    async def verify(self, loop: Loop, run: StepRun) -> None:
        """Ask the checker about the step before, and go the way of its verdict. A candidate without a reply needs no
        checker, and a call of the client's own tools cannot be checked."""
        candidate, verdict = loop.runs[run.index - 1], Ruling(None, "the checker failed")
        try:
            if candidate.body is None or candidate.error is not None:
                verdict = Ruling(False, "there is no reply")
            elif asks_client(candidate.body):
                verdict = Ruling(True, "it calls the client's own tools")
            else:
                if run.spec.kind not in TOOL_KINDS:
                    run.record.task = run.step.task or VERIFY_TASK
                run.body = await self._call(loop, run, False, False)
                verdict = verdict_of(reply_text(run.body))
        finally:
            take_edge(run, verdict)
            note(loop, run, self._clock.now_us(), VERIFY, verdict)

    async def enforce(self, loop: Loop, run: StepRun, expect: Expect, answers: bool) -> Mapping[str, Any]:
        """The reply that keeps the contract: the first one, a repair by the same worker, or another worker's. Raises
        ContractMissed."""
        fault = await self._fault(loop, run, expect)
        if fault is not None and run.spec.kind not in TOOL_KINDS:
            fault = await self._again(loop, run, expect, answers, correction(run, fault), fault)
        if fault is not None and run.spec.kind not in TOOL_KINDS and (other := other_worker(loop, run)):
            hand_over(run, other)
            fault = await self._again(loop, run, expect, answers, (), fault)
        if fault is not None:
            raise ContractMissed(f"no reply to this step keeps its contract: {fault}")
        return run.body or {}

    async def _again(
        self, loop: Loop, run: StepRun, expect: Expect, answers: bool, more: Sequence[dict[str, Any]], fault: str
    ) -> str | None:
        """What is wrong with another reply; the old `fault` where none comes."""
        try:
            run.body = await self._call(loop, run, answers, False, more)
        except CapReached as reached:
            loop.record.capped = loop.record.capped or reached.cap
            return fault
        except UpstreamError:
            return fault
        return await self._fault(loop, run, expect)

    async def _fault(self, loop: Loop, run: StepRun, expect: Expect) -> str | None:
        """What is wrong with a step's reply; None where it keeps its contract, and where no checker can tell."""
        fault = code_fault(expect, run.body or {})
        note(loop, run, self._clock.now_us(), CONTRACT, Ruling(fault is None, fault or ""))
        if fault is not None or asks_client(run.body or {}):
            return fault
        python = python_worker(loop) if expect.tests else None
        judge = next((spec for spec in loop.workers if spec.handle == expect.judge), None)
        for spec, task in ((python, program_of(expect.tests)), (judge, VERIFY_TASK)):
            if spec is not None:
                verdict = await self._beside(loop, run, spec, task)
                note(loop, run, self._clock.now_us(), CONTRACT, verdict)
                if verdict.accept is False:
                    return verdict.why or "a checker rejects it"
        return None

    async def _beside(self, loop: Loop, run: StepRun, spec: WorkerSpec, task: str) -> Ruling:
        """What a checker says of a step's reply; nothing where it fails, or where a cap leaves no call for it."""
        beside, seen = side_call(run, spec, task)
        try:
            messages = await self._fit(loop, beside, [seen])
            body = step_body(loop, beside, messages, False)
            beside.wanted_tokens = wanted_tokens(loop, beside, False)
            replies = await self._ask(loop, beside, [body], [(seen.handle, seen.task or "", seen.reply)])
        except (UpstreamError, CapReached) as error:
            return Ruling(None, error.message)
        finally:
            add_cost(run, beside)
        return verdict_of(reply_text(merge(replies)))
