"""The calls of one step: what is sent, what it may cost, its retries, and the settling of each.

The worst case of every attempt is drawn from the request's meter, and its `dispatch` event is on disk, before the call
leaves. Whatever happens then (reply, error, cut stream, cancellation), the draw is settled exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar, cast

from gateway.core.log.rollout import AttemptRecord
from gateway.core.loop.meter import Draw
from gateway.core.money.amounts import (
    Usage,
    cost_nano,
    input_tokens_bound,
    output_tokens_that_fit,
    worst_case_nano,
)
from gateway.core.openai.chat import HINTS, choices_in
from gateway.core.openai.counting import answered, asked
from gateway.core.openai.reply import Collected
from gateway.core.openai.texts import TOKENS_DEFAULT
from gateway.core.openai.usage import BYTES_PER_TOKEN, billed_usage, read_usage, text_bytes
from gateway.core.pool.workers import Price, WorkerSpec
from gateway.errors import CapReached, DeadlineExceeded, Unpriced, UpstreamProtocol
from gateway.service.loop.attempts import Attempts
from gateway.service.loop.state import Job, StepRun
from gateway.service.ports.request import Clock, TokenCounter, WorkerCall, WorkerReply

OUTPUT_TOKENS_MIN = 16  # a call that could say less than this is not worth making
T = TypeVar("T")
Saw = list[tuple[str, str, str]]
PassOn = Callable[[Mapping[str, Any]], Awaitable[None]]  # takes each chunk of a stream that has choices


class Caller(Protocol):
    """What a call needs of who makes it."""

    attempts: Attempts
    clock: Clock
    tokens: TokenCounter

    async def announce(self, job: Job, step_id: str, worker: str, bound_nano: int, attempt: int = 1) -> None:
        """Return once it is on disk that a call is about to leave which may cost so much. Raises SpoolFull."""
        ...


class NoTokenizer:
    """`TokenCounter` where bytes are good enough."""

    async def count(self, worker: WorkerSpec, texts: Sequence[str], at_most: int) -> int | None:
        """Nothing is counted."""
        return None


NO_TOKENIZER = NoTokenizer()


class StepCall:
    """One call of a step, with its retries and its money. `share`: of what is left, it may draw one part in so many;
    `counted` off: its first try belongs to a call that has been counted."""

    def __init__(
        self, caller: Caller, job: Job, run: StepRun, body: dict[str, Any], *, share: int = 1, counted: bool = True
    ) -> None:
        self._caller, self._job, self._run, self._body = caller, job, run, body
        self._counted = counted
        self._price = price_of(run.spec)
        self._draw, self._input_bound = _fit(job, self._price, run.spec, body, share)
        self._open = False
        self._attempt: AttemptRecord | None = None  # the latest that ended
        self.collected = Collected()

    async def whole(self, saw: Saw) -> Mapping[str, Any]:
        """The reply in one piece."""
        reply: WorkerReply | None = None
        try:
            reply = await self._caller.attempts.complete(
                self._worker_call(saw), self._job.tree.deadline_s, self._after, self._before
            )
            return reply.body
        finally:
            await self._settle_counted(reply.usage if reply else None, lambda: reply.body if reply else {})

    async def stream(self, saw: Saw, pass_on: PassOn) -> Mapping[str, Any]:
        """The reply as it is produced: each chunk is passed on before the next is read."""
        usage: Usage | None = None
        try:
            chunks = self._caller.attempts.stream(
                self._worker_call(saw), self._job.tree.deadline_s, self._after, self._before
            )
            async with aclosing(cast(AsyncGenerator[Mapping[str, Any], None], chunks)):
                async for chunk in chunks:
                    usage = read_usage(chunk) or usage
                    if chunk.get("choices"):
                        self.collected.add(chunk["choices"])
                        self.collected.about(chunk)
                        await pass_on(chunk)
            if not self.collected.finished:
                raise UpstreamProtocol(f"worker {self._run.spec.name} ended its stream without a finish_reason")
            return self.collected.body()
        finally:
            usage = usage or (self._rough() if self.collected.started else None)
            await self._settle_counted(usage, self.collected.body)

    async def _before(self, attempt: int) -> None:
        """Called before each attempt leaves: caps first, then the money, then the durable word of it."""
        self._settle(None)  # the attempt before this one, if it was left open
        job, run = self._job, self._run
        if self._counted or attempt > 1:
            job.tree.meter.count_call()
        job.tree.meter.draw(self._draw)
        self._open = True
        run.dispatches += 1
        try:
            await self._caller.announce(job, step_id(run), run.spec.name, self._draw.nano, run.dispatches)
        except BaseException:  # boundary: whatever kept the word of it from the disk, the call has not left
            self._settle(Usage())
            raise

    def _after(self, record: AttemptRecord) -> None:
        """Called after each attempt. One that failed with a status, or never left, costs nothing."""
        self._run.record.attempts.append(record)
        self._attempt = record
        if record.error is not None and (record.upstream_status is not None or not record.dispatched):
            self._settle(Usage())

    def _settle(self, usage: Usage | None, counted_by: str | None = None) -> None:
        """Close the open draw: at the usage given, or in full where nobody can say what the worker will bill."""
        if not self._open:
            return
        self._open = False
        record, meter = self._run.record, self._job.tree.meter
        if usage is None:
            nano, usage, counted_by = self._draw.nano, Usage(self._draw.tokens, 0, estimated=True), "bound"
        else:
            nano = 0 if usage == Usage() else cost_nano(self._price, usage)
        meter.settle(self._draw, nano, usage.prompt_tokens + usage.completion_tokens)
        record.prompt_tokens += usage.prompt_tokens
        record.completion_tokens += usage.completion_tokens
        record.usage_estimated |= usage.estimated
        record.cost_nano += nano
        if counted_by and self._attempt is not None:
            self._attempt.counted_by = counted_by

    async def _settle_counted(self, usage: Usage | None, reply: Callable[[], Mapping[str, Any]]) -> None:
        """`_settle`, by the worker's tokenizer where the worker itself told nothing of what came; by bytes where it has
        none, or where the request ends before it has counted."""
        by = "bytes" if usage is not None and usage.unreported else None
        try:
            if by and self._open and (told := await self._by_tokenizer(reply())):
                usage, by = told, "tokenizer"
        finally:
            self._settle(usage, by)

    async def _by_tokenizer(self, reply: Mapping[str, Any]) -> Usage | None:
        """What the call counts as; neither count is above what the draw holds for it. None: no tokenizer."""
        spec, tokens = self._run.spec, self._caller.tokens
        prompt = asked({**spec.params, **self._body})
        said = answered(choice.get("message") or {} for choice in reply.get("choices") or ())
        said_max = _output_bound(self._body)
        prompt_tokens = await tokens.count(spec, prompt.texts, self._input_bound)
        said_tokens = None if prompt_tokens is None else await tokens.count(spec, said.texts, said_max)
        if prompt_tokens is None or said_tokens is None:
            return None
        return Usage(
            min(prompt_tokens + prompt.tokens, self._input_bound), min(said_tokens + said.tokens, said_max), True
        )

    def _rough(self) -> Usage:
        request_bytes = len(str(self._body).encode("utf-8", "replace"))
        said = text_bytes(choice.get("message") or {} for choice in self.collected.body()["choices"])
        return billed_usage(None, self._body, request_bytes, said)

    def _worker_call(self, saw: Saw) -> WorkerCall:
        job, run = self._job, self._run
        left_s = job.tree.deadline_s - self._caller.clock.monotonic_s()
        if left_s <= 0:
            raise DeadlineExceeded(f"the request's {job.caps.wall_s:g} s are over")
        timeout_s = min(run.spec.timeout_s, left_s)
        record, revision = job.record, job.record.pool_revision or ""
        return WorkerCall(
            run.spec, self._body, timeout_s, record.id, step_id(run), job.depth, saw, job.endpoint, revision
        )


def step_id(run: StepRun) -> str:
    """Names a step inside its rollout."""
    return f"{run.record.round}.{run.index}"


def price_of(spec: WorkerSpec) -> Price:
    """A worker's price. Raises Unpriced: what cannot be priced is refused, never free."""
    if spec.price is None:
        raise Unpriced(f"worker {spec.name} has no price; give it `price` in the pool file")
    return spec.price


def step_body(job: Job, spec: WorkerSpec, messages: Sequence[Mapping[str, Any]], answers: bool) -> dict[str, Any]:
    """The body for a worker: only the answering step gets the client's own parameters."""
    if job.endpoint == "embeddings":
        return dict(job.params)
    if job.endpoint == "completions":
        return {**job.params, "max_tokens": min(job.params.get("max_tokens", TOKENS_DEFAULT), spec.output_tokens_max)}
    params = {name: value for name, value in job.params.items() if name not in HINTS or name not in spec.cannot}
    params = params if answers else {}
    bounds = [params.pop(name, None) for name in ("max_completion_tokens", "max_tokens")]
    wanted = next((bound for bound in bounds if bound is not None), spec.output_tokens_max)
    newer = (bounds[0] or "max_completion_tokens" in spec.params) and "max_completion_tokens" not in spec.cannot
    name = "max_completion_tokens" if newer or "max_tokens" in spec.cannot else "max_tokens"
    return {**params, "messages": list(messages), name: min(wanted, spec.output_tokens_max)}


def fan_out(body: dict[str, Any], spec: WorkerSpec) -> list[dict[str, Any]]:
    """The bodies that make up `n` choices: one, or as many of one choice each where the worker takes no `n`. A seed
    would make them all the same, so each counts it on."""
    choices = body.get("n", 1)
    if choices == 1 or "n" not in spec.cannot or "messages" not in body:
        return [body]
    single = {name: value for name, value in body.items() if name != "n"}
    seed = single.get("seed")
    return [{**single, **({} if seed is None else {"seed": seed + number})} for number in range(choices)]


async def all_or_first_error(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them return. Raises what the first that fails raises; the others are cancelled and awaited."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _fit(job: Job, price: Price, spec: WorkerSpec, body: dict[str, Any], share: int) -> tuple[Draw, int]:
    """The worst case of one attempt, after lowering what is asked of the worker to its share of what is left, and the
    tokens that its prompt may have. Raises CapReached."""
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    choices = choices_in(body)
    rest = {key: value for key, value in body.items() if key != "messages"}
    input_bound = input_tokens_bound(body.get("messages", ()), str(rest) + str(spec.params))
    if job.endpoint == "embeddings":  # nothing but input, and much of it: the cap on tokens takes the usual guess
        return Draw(worst_case_nano(price, input_bound, 0), input_bound // BYTES_PER_TOKEN), input_bound
    left_nano, left_tokens = job.tree.meter.left_nano // share, job.tree.meter.left_tokens // share
    fits = min(output_tokens_that_fit(price, input_bound, left_nano) // choices, (left_tokens - input_bound) // choices)
    if fits < min(OUTPUT_TOKENS_MIN, body[name]):
        cap = "tokens" if left_tokens - input_bound < OUTPUT_TOKENS_MIN * choices else "cost"
        raise CapReached(cap, f"what is left of the request's {cap} cap is too little for worker {spec.name}")
    body[name] = min(body[name], fits)
    output_bound = _output_bound(body)
    return Draw(worst_case_nano(price, input_bound, output_bound), input_bound + output_bound), input_bound


def _output_bound(body: Mapping[str, Any]) -> int:
    """Tokens that all choices may have; 0 for embeddings."""
    return int(body.get("max_completion_tokens") or body.get("max_tokens") or 0) * choices_in(body)
