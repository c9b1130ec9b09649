"""One step: what it may see, what it may cost, the attempts at its worker, and what is logged of it.

The worst case of every attempt is drawn from the request's meter, and its `dispatch` event is on disk, before the
call leaves. Whatever happens then (reply, error, cut stream, cancellation), the draw is settled exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gateway.core.compose import SeenStep, step_messages
from gateway.core.events import Event
from gateway.core.ids import uuid7
from gateway.core.meter import Draw
from gateway.core.money import Usage, cost_nano, input_tokens_bound, output_tokens_that_fit, worst_case_nano
from gateway.core.pool import Price, WorkerSpec
from gateway.core.reply import Collected, chunks_of, reply_text
from gateway.core.rollout import AttemptRecord
from gateway.core.usage import billed_usage, read_usage, text_bytes
from gateway.errors import BatonError, CapReached, DeadlineExceeded, Unpriced, UpstreamProtocol
from gateway.service.attempts import Attempts
from gateway.service.job import Job, StepRun
from gateway.service.ports import Clock, Journal, WorkerCall

OUTPUT_TOKENS_MIN = 16  # a call that could say less than this is not worth making
Child = Callable[[Job, StepRun, list[dict[str, Any]], bool], Awaitable[Mapping[str, Any]]]


class StepRunner:
    """Runs single steps. `child` runs a step on worker `self` as a loop one level deeper."""

    def __init__(self, attempts: Attempts, journal: Journal, clock: Clock, child: Child) -> None:
        self._attempts = attempts
        self._journal = journal
        self._clock = clock
        self._child = child

    async def run(self, job: Job, run: StepRun, *, answers: bool, streams: bool) -> None:
        """Wait for what the step sees, call its worker, keep reply or error. `answers`: it gets the client's own
        parameters; `streams`: its stream is the reply. Raises nothing but CancelledError."""
        try:
            await asyncio.gather(*(job.runs[index].ended.wait() for index in run.step.see))
            run.body = await self._call(job, run, answers, streams)
            run.record.status = "done"
        except BatonError as error:
            run.error = error
            run.record.status, run.record.error = "failed", error.code
        except asyncio.CancelledError:
            run.record.status, run.record.error = "cancelled", "cancelled"
            raise
        finally:
            run.record.finished_us = self._now_us()
            self._keep_reply(run)
            run.ended.set()

    async def _call(self, job: Job, run: StepRun, answers: bool, streams: bool) -> Mapping[str, Any]:
        seen = [_seen(job.runs[index]) for index in run.step.see if job.runs[index].body is not None]
        messages = step_messages(job.conversation, run.step.task, seen)
        run.record.messages = messages
        if run.spec.kind == "self":
            run.record.started_us = self._now_us()
            return await self._child(job, run, messages, streams)
        async with job.tree.slots:
            run.record.started_us = self._now_us()
            attempt = _Attempt(self, job, run, _body(job, run.spec, messages, answers))
            saw = [(step.handle, step.task or "", step.reply) for step in seen]
            return await (attempt.stream(saw) if streams else attempt.whole(saw))

    async def announce(self, job: Job, step_id: str, worker: str, bound_nano: int, attempt: int = 1) -> None:
        """Return once it is on disk that a call is about to leave which may cost so much. Raises SpoolFull."""
        now_us = self._now_us()
        payload = {
            "hold_id": job.tree.hold_id,
            "rollout_id": job.record.id,
            "step_id": step_id,
            "attempt": attempt,
            "worker": worker,
            "bound_nano": bound_nano,
        }
        await self._journal.append(Event(uuid7(now_us // 1000), "dispatch", now_us, payload))
        if job.tree.held is not None:
            await asyncio.shield(job.tree.held)  # appended first, so on disk by now; its error is ours

    def _keep_reply(self, run: StepRun) -> None:
        if run.body is None:
            return
        choice = (run.body.get("choices") or [{}])[0]
        run.record.reply = reply_text(run.body)
        run.record.tool_calls = (choice.get("message") or {}).get("tool_calls")
        run.record.finish_reason = choice.get("finish_reason")

    def _now_us(self) -> int:
        return int(self._clock.now().timestamp() * 1_000_000)

    def _left_s(self, job: Job) -> float:
        left = job.tree.deadline_s - self._clock.monotonic_s()
        if left <= 0:
            raise DeadlineExceeded(f"the request's {job.caps.wall_s:g} s are over")
        return left


class _Attempt:
    """The attempts of one step, with their money."""

    def __init__(self, runner: StepRunner, job: Job, run: StepRun, body: dict[str, Any]) -> None:
        self._runner, self._job, self._run, self._body = runner, job, run, body
        self._price = price_of(run.spec)
        self._draw = _fit(job, self._price, run.spec, body)
        self._open = False
        self._attempts = 0
        self._collected = Collected()

    async def whole(self, saw: list[tuple[str, str, str]]) -> Mapping[str, Any]:
        """The step's reply in one piece."""
        usage: Usage | None = None
        try:
            reply = await self._runner._attempts.complete(
                self._worker_call(saw), self._job.tree.deadline_s, self._after, self._before
            )
            usage = reply.usage
            return reply.body
        finally:
            self._settle(usage)

    async def stream(self, saw: list[tuple[str, str, str]]) -> Mapping[str, Any]:
        """The step's reply as it is produced: each chunk goes to the client before the next is read."""
        usage: Usage | None = None
        sink = self._job.sink
        try:
            chunks = self._runner._attempts.stream(
                self._worker_call(saw), self._job.tree.deadline_s, self._after, self._before
            )
            async for chunk in chunks:
                usage = read_usage(chunk) or usage
                if not chunk.get("choices"):
                    continue
                if self._run.record.first_byte_us is None:
                    self._run.record.first_byte_us = self._runner._now_us()
                self._collected.add(chunk["choices"])
                if sink is not None:
                    await sink.chunk(chunk["choices"])
            if not self._collected.finished:
                raise UpstreamProtocol(f"worker {self._run.spec.name} ended its stream without a finish_reason")
            usage = usage or self._estimated()
            return self._collected.body()
        finally:
            self._run.body = self._collected.body() if self._collected.started else None
            self._settle(usage or (self._estimated() if self._collected.started else None))

    async def _before(self, attempt: int) -> None:
        """Called before each attempt leaves: caps first, then the money, then the durable word of it."""
        self._settle(None)  # the attempt before this one, if it was left open
        job, run = self._job, self._run
        self._attempts = attempt
        job.tree.meter.count_call()
        job.tree.meter.draw(self._draw)
        self._open = True
        step_id = f"{run.record.round}.{run.index}"
        await self._runner.announce(job, step_id, run.spec.name, self._draw.nano, attempt)

    def _after(self, record: AttemptRecord) -> None:
        """Called after each attempt. One that failed with a status, or never left, costs nothing."""
        self._run.record.attempts.append(record)
        if record.error is not None and (record.upstream_status is not None or not record.dispatched):
            self._settle(Usage())

    def _settle(self, usage: Usage | None) -> None:
        """Close the open draw: at the usage given, or in full where nobody can say what the worker will bill."""
        if not self._open:
            return
        self._open = False
        record, meter = self._run.record, self._job.tree.meter
        if usage is None:
            nano, usage = self._draw.nano, Usage(self._draw.tokens, 0, estimated=True)
        else:
            nano = 0 if usage == Usage() else cost_nano(self._price, usage)
        meter.settle(self._draw, nano, usage.prompt_tokens + usage.completion_tokens)
        record.prompt_tokens += usage.prompt_tokens
        record.completion_tokens += usage.completion_tokens
        record.usage_estimated |= usage.estimated
        record.cost_nano += nano

    def _estimated(self) -> Usage:
        request_bytes = len(str(self._body).encode("utf-8", "replace"))
        said = text_bytes(choice.get("message") or {} for choice in self._collected.body()["choices"])
        return billed_usage(None, self._body, request_bytes, said)

    def _worker_call(self, saw: list[tuple[str, str, str]]) -> WorkerCall:
        job, run = self._job, self._run
        timeout_s = min(run.spec.timeout_s, self._runner._left_s(job))
        step_id = f"{run.record.round}.{run.index}"
        return WorkerCall(run.spec, self._body, timeout_s, job.record.id, step_id, job.depth, saw)


def price_of(spec: WorkerSpec) -> Price:
    """A worker's price. Raises Unpriced: what cannot be priced is refused, never free."""
    if spec.price is None:
        raise Unpriced(f"worker {spec.name} has no price; give it `price` in the pool file")
    return spec.price


def _seen(run: StepRun) -> SeenStep:
    return SeenStep(run.index, run.step.worker, run.step.task, reply_text(run.body or {}))


def _body(job: Job, spec: WorkerSpec, messages: list[dict[str, Any]], answers: bool) -> dict[str, Any]:
    """The chat body for a worker: only the answering step gets the client's own parameters."""
    params = dict(job.params) if answers else {}
    bounds = [params.pop(name, None) for name in ("max_completion_tokens", "max_tokens")]
    wanted = next((bound for bound in bounds if bound is not None), spec.output_tokens_max)
    name = "max_completion_tokens" if bounds[0] or "max_completion_tokens" in spec.params else "max_tokens"
    return {**params, "messages": messages, name: min(wanted, spec.output_tokens_max)}


def _fit(job: Job, price: Price, spec: WorkerSpec, body: dict[str, Any]) -> Draw:
    """The worst case of one attempt, after lowering what is asked of the worker to what is left. Raises CapReached."""
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    choices = int(body.get("n", 1))
    rest = {key: value for key, value in body.items() if key != "messages"}
    input_bound = input_tokens_bound(body["messages"], str(rest) + str(spec.params))
    meter = job.tree.meter
    fits = min(
        output_tokens_that_fit(price, input_bound, meter.left_nano) // choices,
        (meter.left_tokens - input_bound) // choices,
    )
    if fits < min(OUTPUT_TOKENS_MIN, body[name]):
        cap = "tokens" if meter.left_tokens - input_bound < OUTPUT_TOKENS_MIN * choices else "cost"
        raise CapReached(cap, f"what is left of the request's {cap} cap is too little for worker {spec.name}")
    body[name] = min(body[name], fits)
    output_bound = body[name] * choices
    return Draw(worst_case_nano(price, input_bound, output_bound), input_bound + output_bound)


async def replay(body: Mapping[str, Any], job: Job) -> None:
    """Stream a reply that is already whole (an earlier round's, a child's) to the client."""
    if job.sink is None:
        return
    for choices in chunks_of(body):
        await job.sink.chunk(choices)
