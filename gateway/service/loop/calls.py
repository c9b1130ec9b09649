"""One worker call, top to bottom: draw, announce, call, settle; and again where the failure may pass.

The order is the promise of money. The worst case of an attempt leaves the request's meter first. Its `dispatch` event
is on disk before the call leaves. Whatever happens then (reply, error, cut stream, cancellation), the draw is settled
exactly once.

Only failures that may pass are tried again, only inside the deadline, only within the retry budget: a retry multiplies
load exactly when a worker has least to spare. The budget keeps retries at a fifth of all calls, so that a worker which
fails everything sees 1.2 times its load and not 3 (Google SRE book, ch. 21, "Handling overload").
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar, cast

from gateway.core.log.rollout import AttemptRecord
from gateway.core.log.spans import call_traceparent
from gateway.core.money.amounts import Usage
from gateway.core.money.details import sum_details
from gateway.core.money.templates import shape_of_prompt
from gateway.core.openai.chat import choices_in
from gateway.core.openai.options import custom_names
from gateway.core.openai.reply import ReplyBuilder, TextChunk, reply_facts, text_piece
from gateway.core.openai.tasks.fields import FIELDS as TASK_FIELDS
from gateway.core.openai.vendors.empty import EmptyReply, check_stream, check_whole, speaks
from gateway.core.openai.vendors.mend import Mender, missing_ends
from gateway.core.openai.vendors.usage import read_usage
from gateway.core.pool.identity import identity_in, is_other_model
from gateway.core.pool.workers import MODEL_KINDS
from gateway.errors import BatonError, CapReached, DeadlineExceeded, UpstreamError, UpstreamProtocol, UpstreamTimeout
from gateway.service.loop.bodies import PromptSize, size_in_bytes, worst_case
from gateway.service.loop.health.breakers import Flight
from gateway.service.loop.health.retries import RetryBudget as RetryBudget
from gateway.service.loop.health.shared import NO_TOKENIZER as NO_TOKENIZER
from gateway.service.loop.health.shared import Calls as Calls
from gateway.service.loop.spending.charges import PACE, charge, counted_usage, ended_usage, rough_usage, silent_usage
from gateway.service.loop.state import Loop, StepRun
from gateway.service.ports.request import (
    WorkerCall,
    WorkerReply,
)

T = TypeVar("T")
Saw = Sequence[tuple[str, str, str]]  # (handle, task, reply text) of each step that the call may see
PassOn = Callable[[Mapping[str, Any]], Awaitable[None]]  # takes each chunk of a stream that has choices
Chunks = AsyncGenerator[Mapping[str, Any], None]


NO_CHARGE = Usage()  # of a call that cost nothing; a tool's reply without tokens still costs its price a call


class StepCall:
    """One call of a step. Await `complete` or `stream` once.

    It may draw one part in `share` of what is left; `held`: of what is held. `counted=False`: the first attempt is
    already counted against caps.calls. `size`: of the prompt, if it was counted. Raises CapReached where too little is
    left for the call, UpstreamRefused where the prompt fills the worker's context.
    """

    def __init__(
        self,
        calls: Calls,
        loop: Loop,
        run: StepRun,
        body: dict[str, Any],
        saw: Saw,
        *,
        share: int = 1,
        counted: bool = True,
        size: PromptSize | None = None,
        held: bool = False,
    ) -> None:
        self._calls, self._loop, self._run, self._body, self._saw = calls, loop, run, body, saw
        self._counted, self._counts = counted, False  # the latter: of the latest attempt, against caps.calls
        size = size or size_in_bytes(run.spec, body)
        worst = size.worst or worst_case(loop, run.spec, body, share, size, held=held)
        self._bound, self._worst, self.lowered_by = worst, worst.draw, worst.lowered_by
        self._open, self._started_us = False, 0  # open: the worst case is drawn and not settled
        self._flight: Flight
        self._named: dict[str, str] = {}  # who the reply says that it is of
        self._latest: AttemptRecord | None = None
        self.collected = ReplyBuilder()
        customs = custom_names(loop.params) - custom_names(body)  # sent as functions
        self._mender: Mender | None = None
        if loop.endpoint == "chat":
            self._mender = Mender(run.spec.origin, choices_in(body), customs, run.names, loop.params)
        self._must_speak = loop.endpoint == "chat" and run.spec.kind in MODEL_KINDS

    @property
    def worst_nano(self) -> int:
        """What an attempt may cost."""
        return self._worst.nano

    async def complete(self) -> Mapping[str, Any]:
        """The reply in one piece. Raises what the last attempt raised, CapReached, SpoolFull or DeadlineExceeded."""
        reply = await self._attempted(self._complete_once)
        self._named = identity_in(reply.body, self._run.spec.model)
        self._record(other := self._other_model())
        await self._settle_counted(reply.usage, reply.body, reply.cost_nano)
        if other is not None:
            raise other
        return reply.body if self._mender is None else self._mender.body(reply.body)

    async def stream(self, pass_on: PassOn) -> Mapping[str, Any]:
        """The reply as it comes: each chunk is passed on before the next is read, and nothing is tried again after the
        first. Raises as `complete`."""
        first, chunks = await self._attempted(self._first_chunks)
        self._calls.rests.heard(self._flight)
        self._named = identity_in(first[0], self._run.spec.model)
        usage: Usage | None = None
        is_done = False
        try:
            async with aclosing(chunks):
                try:
                    if (other := self._other_model()) is not None:
                        raise other
                    while (chunk := first.pop(0) if first else await anext(chunks, None)) is not None:
                        if not isinstance(chunk, TextChunk):
                            usage, is_done = read_usage(chunk) or usage, "done" in chunk
                        clean = self._collect(chunk)
                        if isinstance(clean, TextChunk) or clean.get("choices") or reply_facts(clean):
                            await pass_on(clean)
                    if is_done and (ends := missing_ends(self.collected.body()["choices"])):
                        await pass_on(self._collect({"choices": ends}))
                except BaseException as error:  # boundary: only observed, for log and money; cancellation included
                    self._record_failure(error)
                    raise
            self._record()
            if not self.collected.finished:
                raise UpstreamProtocol(f"worker {self._run.spec.name} ended its stream without a finish_reason")
            return self.collected.body()
        finally:
            body = self.collected.body() if self.collected.started else {}
            if usage is None and not body:
                await self._settle_silent()
            await self._settle_counted(usage or rough_usage(self._body, body), body)

    def _collect(self, chunk: Mapping[str, Any]) -> Mapping[str, Any]:
        """The chunk as the client gets it; it is added to the reply."""
        piece = text_piece(chunk)
        if piece is not None and (self._mender is None or self._mender.wants(piece[0])):
            self.collected.add_text(*piece)
            return chunk
        chunk = chunk if self._mender is None else self._mender.chunk(chunk)
        self.collected.about(chunk)
        if chunk.get("choices"):
            self.collected.add(chunk["choices"])
        return chunk

    async def _attempted(self, leave: Callable[[WorkerCall], Awaitable[T]]) -> T:
        """What `leave` returns on the first attempt that works. Its draw is still open then: the caller settles it.

        Where too little is left for another attempt, the failure of the last one is raised: it is the worker's fault.
        """
        self._calls.begin()
        failure: Exception | None = None
        for number in count(1):
            try:
                return await self._attempt(number, leave)
            except CapReached:
                if isinstance(failure, UpstreamError):
                    raise failure from None
                raise
            except Exception as error:  # boundary: only looked at; what is not tried again goes on
                failure = error
                moves_on = self._calls.rests.holds(self._run.spec) and self._has_others()
                if moves_on or not await self._calls.try_again(number, error, self._loop.tree.deadline_s):
                    raise
        raise AssertionError("the attempts end")

    async def _attempt(self, number: int, leave: Callable[[WorkerCall], Awaitable[T]]) -> T:
        call = self._worker_call()
        await self._loop.tree.meter.secure(self._worst.nano)
        self._flight = self._calls.rests.leave(self._run.spec, self._has_others)
        try:
            self._draw(number)
            await self._announce()
        except BaseException as error:  # boundary: whatever it was, the call has not left
            self._calls.rests.ended(self._flight, error)
            raise
        try:
            return await leave(call)
        except BaseException as error:  # boundary: a call that left is logged and settled, whatever failed it
            if call.so_far.started:
                self._calls.rests.heard(self._flight)
            self._record_failure(error)
            await self._settle_begun(call.so_far, error)
            raise

    def _has_others(self) -> bool:
        """Whether something else can be done than to ask this worker: a planned request has other models that have not
        failed in it and do not rest; a tool, its plan can do without."""
        loop, run = self._loop, self._run
        if loop.fallback is None or run.spec.kind not in MODEL_KINDS:
            return loop.fallback is not None
        failed = loop.failed | {run.spec.handle}
        others = (spec for spec in loop.workers if spec.kind in MODEL_KINDS and spec.handle not in failed)
        return any(not self._calls.rests.holds(spec) for spec in others)

    def _other_model(self) -> UpstreamProtocol | None:
        """The failure of a worker that must answer as the model that it is asked for, and did not."""
        spec, named = self._run.spec, self._named.get("model", "")
        if not spec.exact_model or not is_other_model(named, spec.model or ""):
            return None
        return UpstreamProtocol(
            f"worker {spec.name} was asked for {spec.model} and answers as {named}", retryable=False
        )

    def _draw(self, number: int) -> None:
        """Take the worst case out of the request's meter. Raises CapReached."""
        self._counts, meter = self._counted or number > 1, self._loop.tree.meter
        if self._counts:
            meter.count_call()
        meter.draw(self._worst)
        self._open = True
        self._run.dispatches += 1

    async def _announce(self) -> None:
        """Put the dispatch on disk. Raises SpoolFull."""
        now_us, step, worker = self._calls.clock.now_us(), step_id(self._run), self._run.spec.name
        try:
            await self._loop.announce(
                now_us, step, worker, self._worst.nano, self._run.dispatches, calls=int(self._counts)
            )
        except BaseException:  # boundary: whatever kept the dispatch from the disk, the call has not left
            self._settle(NO_CHARGE)
            raise
        self._started_us = self._calls.clock.now_us()

    async def _complete_once(self, call: WorkerCall) -> WorkerReply:
        """The reply in one piece. Raises EmptyReply."""
        reply = await self._calls.workers.complete(call)
        if self._must_speak:
            check_whole(self._run.spec.name, reply.body, reply.usage, self._body)
        return reply

    async def _first_chunks(self, call: WorkerCall) -> tuple[list[Mapping[str, Any]], Chunks]:
        """The chunks of a stream up to the first that says something, and the rest. Raises EmptyReply where none does,
        UpstreamProtocol where there is none."""
        chunks, first = cast(Chunks, self._calls.workers.stream(call)), list[Mapping[str, Any]]()
        async for chunk in chunks:
            first.append(chunk)
            if speaks(chunk) or not self._must_speak:
                return first, chunks
        check_stream(self._run.spec.name, first, self._body)
        return first, chunks

    def _record_failure(self, error: BaseException) -> None:
        """Record an attempt that failed. It costs nothing if it failed with a status, or never left."""
        record = self._record(error)
        if record.upstream_status is not None or not record.dispatched:
            self._settle(NO_CHARGE)

    def _record(self, error: BaseException | None = None) -> AttemptRecord:
        """Log how the attempt ended."""
        now_us, run = self._calls.clock.now_us(), self._run
        record = AttemptRecord(self._started_us, now_us, left_out=list(run.left_out), cut=run.cut)
        record.named = self._named or None
        if error is not None:
            record.error = error.code if isinstance(error, BatonError) else "cancelled"
        if isinstance(error, UpstreamTimeout) and error.hasty:
            record.error = DeadlineExceeded.code  # of the request, which says nothing about the worker
        if isinstance(error, UpstreamError):
            record.upstream_status, record.dispatched = error.upstream_status, error.dispatched
        self._run.record.attempts.append(record)
        self._latest = record
        self._calls.rests.ended(self._flight, error)
        return record

    async def _settle_begun(self, so_far: ReplyBuilder, error: BaseException) -> None:
        """Settle a reply that broke off: at what came of it, at what its worker ended it with, else at an estimate."""
        if self._open and so_far.started:
            self.collected = so_far
            await self._settle_counted(rough_usage(self._body, so_far.body()), so_far.body())
        elif isinstance(error, EmptyReply):
            await self._settle_counted(error.usage, {})
        elif isinstance(error, UpstreamError) and error.tokens is not None:
            self._settle(ended_usage(error.tokens, self._bound), "bytes")
        else:
            await self._settle_silent()

    async def _settle_counted(
        self, usage: Usage | None, reply: Mapping[str, Any], bill_nano: int | None = None, by: str | None = None
    ) -> None:
        """`_settle`. Unreported usage is counted by the worker's tokenizer, else by bytes; a reply's also `by` this."""
        how = by or ("bytes" if usage is not None and usage.unreported else None)
        try:
            asked = self._calls.tokens, self._run.spec, self._body, reply, self._bound
            if usage is not None and usage.unreported and self._open and (counted := await counted_usage(*asked)):
                usage = replace(counted, completion_tokens=usage.completion_tokens) if by else counted
                how = by or "tokenizer"
        finally:
            self._settle(usage, how, bill_nano)

    async def _settle_silent(self) -> None:
        """Settle a call of which nothing came back: at an estimate, in full where its price is not by tokens."""
        if not self._open or self._loop.endpoint in TASK_FIELDS:
            return self._settle(None)
        took_s = (self._calls.clock.now_us() - self._started_us) / 1e6
        usage = silent_usage(self._run.spec, self._body, self._bound, self._calls.paces, took_s)
        await self._settle_counted(usage, {}, by=PACE)

    def _settle(self, usage: Usage | None, counted_by: str | None = None, bill_nano: int | None = None) -> None:
        """Close the open draw at what `charge` says."""
        if not self._open:
            return
        self._open = False
        record, meter = self._run.record, self._loop.tree.meter
        nano = 0
        if usage is not NO_CHARGE:
            nano, usage, replaced = charge(self._run.spec, self._body, self._bound, usage, bill_nano)
            counted_by = replaced or counted_by
        meter.settle(self._worst, nano, usage.prompt_tokens + usage.completion_tokens)
        record.prompt_tokens += usage.prompt_tokens
        record.completion_tokens += usage.completion_tokens
        record.usage_estimated |= usage.estimated
        record.usage_details = sum_details((record.usage_details, usage.details)) or None
        record.cost_nano += nano
        latest = self._latest
        if counted_by and latest is not None:
            latest.counted_by = counted_by
        elif usage.completion_tokens and latest is not None and latest.error is None:
            self._learn(usage, (latest.finished_us - latest.started_us) / 1e6)

    def _learn(self, usage: Usage, took_s: float) -> None:
        """Note what a whole reply says of its worker."""
        name, body = self._run.spec.name, self._body
        self._calls.paces.learn(name, usage.completion_tokens / choices_in(body), took_s)
        if self._loop.endpoint == "chat" and not usage.estimated:
            told = usage.prompt_tokens, self._bound.prompt_tokens_max
            self._loop.tree.templates.learn(name, shape_of_prompt(body["messages"], body), *told)

    def _worker_call(self) -> WorkerCall:
        """The call. Raises DeadlineExceeded where no time is left."""
        loop, run = self._loop, self._run
        left_s = loop.tree.deadline_s - self._calls.clock.monotonic_s()
        if left_s <= 0:
            raise DeadlineExceeded(f"the request's {loop.caps.wall_s:g} s are over")
        return WorkerCall(
            worker=run.spec,
            body=self._body,
            timeout_s=min(run.spec.timeout_s, left_s),
            rollout_id=loop.record.id,
            step_id=step_id(run),
            depth=loop.depth,
            saw=self._saw,
            endpoint=loop.endpoint,
            revision=loop.record.pool_revision or "",
            traceparent=call_traceparent(loop.record, step_id(run), len(run.record.attempts)),
        )


def step_id(run: StepRun) -> str:
    """Names a step inside its rollout."""
    return f"{run.record.round}.{run.index}"
