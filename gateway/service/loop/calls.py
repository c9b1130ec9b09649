"""One worker call, top to bottom: draw, announce, call, settle; and again where the failure may pass.

The order is the promise of money. The worst case of an attempt leaves the request's meter first. Its `dispatch` event
is on disk before the call leaves. Whatever happens then (reply, error, cut stream, cancellation), the draw is settled
exactly once.

Only failures that may pass are tried again, only inside the deadline, only within the retry budget: a retry multiplies
load exactly when a worker has least to spare. The budget keeps retries at a fifth of all calls, so that a worker which
fails everything sees 1.2 times its load and not 3 (Google SRE book, ch. 21, "Handling overload").
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from itertools import count
from typing import Any, TypeVar, cast

from tenacity import AsyncRetrying, RetryCallState, wait_exponential, wait_random

from gateway.core.log.rollout import AttemptRecord
from gateway.core.log.spans import call_traceparent
from gateway.core.money.amounts import Usage, cost_nano
from gateway.core.money.details import sum_details
from gateway.core.openai.chat import choices_in
from gateway.core.openai.options import custom_names
from gateway.core.openai.reply import ReplyBuilder, TextChunk, reply_facts, text_piece
from gateway.core.openai.vendors.empty import EmptyReply, check_stream, check_whole, speaks
from gateway.core.openai.vendors.mend import Mender, missing_ends
from gateway.core.openai.vendors.usage import billed_usage, read_usage, reply_text, request_text, text_bytes
from gateway.core.pool.identity import identity_in
from gateway.core.pool.tools import Tool
from gateway.core.pool.workers import MODEL_KINDS, WorkerSpec
from gateway.errors import BatonError, CapReached, DeadlineExceeded, UpstreamError, UpstreamProtocol
from gateway.service.loop.bodies import PromptSize, output_bound, price_of, size_in_bytes, worst_case
from gateway.service.loop.state import Loop, StepRun
from gateway.service.ports.request import (
    Clock,
    TokenCount,
    TokenCounter,
    Toolboxes,
    WorkerCall,
    WorkerReply,
    Workers,
)

ATTEMPTS_MAX = 3
ATTEMPT_S_MIN = 0.05
T = TypeVar("T")
Saw = Sequence[tuple[str, str, str]]  # (handle, task, reply text) of each step that the call may see
PassOn = Callable[[Mapping[str, Any]], Awaitable[None]]  # takes each chunk of a stream that has choices
Chunks = AsyncGenerator[Mapping[str, Any], None]


class NoTokenizer:
    """`TokenCounter` where bytes are good enough."""

    async def count(self, worker: WorkerSpec, texts: Sequence[str], at_most: int) -> int | None:
        """Return None: no worker has a tokenizer here."""
        return None

    async def measure(self, worker: WorkerSpec, texts: Sequence[str]) -> TokenCount | None:
        """Return None, as `count`."""
        return None


class NoToolboxes:
    """`Toolboxes` of workers among which none is of kind mcp."""

    def tools(self, worker: WorkerSpec, revision: str) -> tuple[Tool, ...]:
        """No tools."""
        return ()


NO_TOKENIZER, NO_TOOLBOXES = NoTokenizer(), NoToolboxes()
NO_CHARGE = Usage()  # of a call that cost nothing; a tool's reply without tokens still costs its price a call


class RetryBudget:
    """A token bucket counted in calls: each first attempt adds one, each retry takes `calls_per_retry`.

    Over any run of `n` calls at most `start_retries + n / calls_per_retry` retries are allowed.
    """

    def __init__(self, *, calls_per_retry: int = 5, start_retries: int = 2, saved_retries_max: int = 10) -> None:
        self._calls_per_retry = calls_per_retry
        self._calls_max = saved_retries_max * calls_per_retry
        self._calls = start_retries * calls_per_retry

    def deposit(self) -> None:
        """Count a first attempt."""
        self._calls = min(self._calls + 1, self._calls_max)

    def withdraw(self) -> bool:
        """Pay for one retry. Returns False where the budget does not allow one."""
        if self._calls < self._calls_per_retry:
            return False
        self._calls -= self._calls_per_retry
        return True


class Calls:
    """What all worker calls of a gateway share: the workers, the retry policy, the clock and the tokenizers."""

    def __init__(
        self,
        workers: Workers,
        budget: RetryBudget,
        clock: Clock,
        tokens: TokenCounter = NO_TOKENIZER,
        toolboxes: Toolboxes = NO_TOOLBOXES,
        *,
        attempts_max: int = ATTEMPTS_MAX,
        wait_initial_s: float = 0.1,
        wait_s_max: float = 5.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.workers = workers
        self.clock = clock
        self.tokens = tokens
        self.toolboxes = toolboxes
        self._budget = budget
        self.attempts_max = attempts_max
        self._backoff = wait_exponential(multiplier=wait_initial_s, max=wait_s_max) + wait_random(0, wait_initial_s)
        self._sleep = sleep

    def begin(self) -> None:
        """Count a call, which earns a share of a retry."""
        self._budget.deposit()

    async def try_again(self, number: int, error: Exception, deadline_s: float) -> bool:
        """Wait before the next attempt after the `number`th, which failed so, and pay for it; False where there is
        none. `deadline_s` is on the clock's monotonic scale."""
        if not (isinstance(error, UpstreamError) and error.retryable) or number >= self.attempts_max:
            return False
        wait_s = max(self._backoff(_after(number)), error.retry_after_s or 0.0)
        if deadline_s - self.clock.monotonic_s() < wait_s + ATTEMPT_S_MIN or not self._budget.withdraw():
            return False
        await self._sleep(wait_s)
        return True


def _after(number: int) -> RetryCallState:
    """The state that tenacity's waits read. Its loop would cost more than most calls need, which are not retried."""
    state = RetryCallState(retry_object=_NO_RETRIES, fn=None, args=(), kwargs={})
    state.attempt_number = number
    return state


_NO_RETRIES = AsyncRetrying()


class StepCall:
    """One call of a step. Await `complete` or `stream` once.

    It may draw one part in `share` of what is left. `counted=False`: the first attempt is already counted against
    caps.calls. `size`: of the prompt, if it was counted. Raises CapReached where too little is left for the call,
    UpstreamRefused where the prompt fills the worker's context.
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
    ) -> None:
        self._calls, self._loop, self._run, self._body, self._saw = calls, loop, run, body, saw
        self._counted, self._counts = counted, False  # the latter: of the latest attempt, against caps.calls
        worst = (size and size.worst) or worst_case(loop, run.spec, body, share, size or size_in_bytes(run.spec, body))
        self._worst, self._input_bound, self.lowered_by = worst.draw, worst.prompt_tokens_max, worst.lowered_by
        self._open, self._started_us = False, 0  # open: the worst case is drawn and not settled
        self._named: dict[str, str] = {}  # who the reply says that it is of
        self._latest: AttemptRecord | None = None
        self.collected = ReplyBuilder()
        customs = custom_names(loop.params) - custom_names(body)  # sent as functions
        self._mender: Mender | None = None
        if loop.endpoint == "chat":
            self._mender = Mender(run.spec.origin, choices_in(body), customs, run.names, loop.params)
        self._must_speak = loop.endpoint == "chat" and run.spec.kind in MODEL_KINDS

    async def complete(self) -> Mapping[str, Any]:
        """The reply in one piece. Raises what the last attempt raised, CapReached, SpoolFull or DeadlineExceeded."""
        reply = await self._attempted(self._whole)
        self._named = identity_in(reply.body, self._run.spec.model)
        self._record()
        await self._settle_counted(reply.usage, reply.body, reply.cost_nano)
        return reply.body if self._mender is None else self._mender.body(reply.body)

    async def stream(self, pass_on: PassOn) -> Mapping[str, Any]:
        """The reply as it is produced: each chunk is passed on before the next is read, and nothing is tried again
        after the first. Raises as `complete`."""
        first, chunks = await self._attempted(self._first_chunks)
        self._named = identity_in(first[0], self._run.spec.model)
        usage: Usage | None = None
        is_done = False
        try:
            async with aclosing(chunks):
                try:
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
            usage = usage or (self._rough_usage() if self.collected.started else None)
            await self._settle_counted(usage, self.collected.body() if self.collected.started else {})

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

    # ------------------------------------------------------------ draw, announce, call, settle

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
                if not await self._calls.try_again(number, error, self._loop.tree.deadline_s):
                    raise
        raise AssertionError("the attempts end")

    async def _attempt(self, number: int, leave: Callable[[WorkerCall], Awaitable[T]]) -> T:
        call = self._worker_call()
        self._draw(number)
        await self._announce()
        try:
            return await leave(call)
        except BaseException as error:  # boundary: a call that left is logged and settled, whatever failed it
            self._record_failure(error)
            await self._settle_begun(call.so_far, error)
            raise

    def _draw(self, number: int) -> None:
        """Take the worst case out of the request's meter. Raises CapReached."""
        self._counts = self._counted or number > 1
        if self._counts:
            self._loop.tree.meter.count_call()
        self._loop.tree.meter.draw(self._worst)
        self._open = True
        self._run.dispatches += 1

    async def _announce(self) -> None:
        """Put the dispatch on disk. Raises SpoolFull."""
        try:
            now_us, step, worker = self._calls.clock.now_us(), step_id(self._run), self._run.spec.name
            nano, attempt = self._worst.nano, self._run.dispatches
            await self._loop.announce(now_us, step, worker, nano, attempt, calls=int(self._counts))
        except BaseException:  # boundary: whatever kept the dispatch from the disk, the call has not left
            self._settle(NO_CHARGE)
            raise
        self._started_us = self._calls.clock.now_us()

    async def _whole(self, call: WorkerCall) -> WorkerReply:
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
        record = AttemptRecord(
            self._started_us, self._calls.clock.now_us(), left_out=list(self._run.left_out), cut=self._run.cut
        )
        record.named = self._named or None
        if error is not None:
            record.error = error.code if isinstance(error, BatonError) else "cancelled"
        if isinstance(error, UpstreamError):
            record.upstream_status, record.dispatched = error.upstream_status, error.dispatched
        self._run.record.attempts.append(record)
        self._latest = record
        return record

    async def _settle_begun(self, so_far: ReplyBuilder, error: BaseException) -> None:
        """Settle a reply that broke off: at what came of it; at its tokens where the worker ended it, and no reply was
        in it; in full where neither is known."""
        if self._open and so_far.started:
            self.collected = so_far
            await self._settle_counted(self._rough_usage(), so_far.body())
        elif isinstance(error, EmptyReply):
            await self._settle_counted(error.usage, {})
        elif isinstance(error, UpstreamError) and error.tokens is not None:
            prompt = min(error.tokens[0], self._input_bound)
            reply = min(error.tokens[1], max(0, self._worst.tokens - prompt))
            self._settle(Usage(prompt, reply, estimated=True), "bytes")
        else:
            self._settle(None)

    async def _settle_counted(
        self, usage: Usage | None, reply: Mapping[str, Any], bill_nano: int | None = None
    ) -> None:
        """`_settle`. Where the worker did not report usage, its tokenizer counts; where it has none, or the request
        ends before it has counted, bytes do."""
        by = "bytes" if usage is not None and usage.unreported else None
        try:
            if by and self._open and (counted := await self._tokenizer_usage(reply)):
                usage, by = counted, "tokenizer"
        finally:
            self._settle(usage, by, bill_nano)

    def _settle(self, usage: Usage | None, counted_by: str | None = None, bill_nano: int | None = None) -> None:
        """Close the open draw: at the worker's bill (up to the draw, where it came from outside), else at this usage,
        or in full where neither is known."""
        if not self._open:
            return
        self._open = False
        record, meter = self._run.record, self._loop.tree.meter
        if usage is None:
            nano, usage, counted_by = self._worst.nano, Usage(self._worst.tokens, 0, estimated=True), "bound"
        elif bill_nano is not None:
            nano = bill_nano
        elif self._run.spec.bills and usage.bill_nano is not None:
            nano = min(usage.bill_nano, self._worst.nano)
        else:
            nano = 0 if usage is NO_CHARGE else cost_nano(price_of(self._run.spec), usage)
        meter.settle(self._worst, nano, usage.prompt_tokens + usage.completion_tokens)
        record.prompt_tokens += usage.prompt_tokens
        record.completion_tokens += usage.completion_tokens
        record.usage_estimated |= usage.estimated
        record.usage_details = sum_details((record.usage_details, usage.details)) or None
        record.cost_nano += nano
        if counted_by and self._latest is not None:
            self._latest.counted_by = counted_by

    # ------------------------------------------------------------ what it was

    async def _tokenizer_usage(self, reply: Mapping[str, Any]) -> Usage | None:
        """Usage by the worker's tokenizer, neither count above what the draw holds. None: it has no tokenizer."""
        spec, tokens = self._run.spec, self._calls.tokens
        prompt = request_text({**spec.params, **self._body})
        answer = reply_text(choice.get("message") or {} for choice in reply.get("choices") or ())
        answer_max = output_bound(self._body)
        prompt_tokens = await tokens.count(spec, prompt.texts, self._input_bound)
        answer_tokens = None if prompt_tokens is None else await tokens.count(spec, answer.texts, answer_max)
        if prompt_tokens is None or answer_tokens is None:
            return None
        return Usage(
            min(prompt_tokens + prompt.tokens, self._input_bound), min(answer_tokens + answer.tokens, answer_max), True
        )

    def _rough_usage(self) -> Usage:
        """Usage by bytes, of a stream that ended without reporting any."""
        request_bytes = len(str(self._body).encode("utf-8", "replace"))
        reply_bytes = text_bytes(choice.get("message") or {} for choice in self.collected.body()["choices"])
        return billed_usage(None, self._body, request_bytes, reply_bytes)

    def _worker_call(self) -> WorkerCall:
        """The call, with the time that is left. Raises DeadlineExceeded where none is."""
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
