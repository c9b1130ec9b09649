"""Retries of worker calls: only errors that may pass, only inside the deadline, only within the retry budget.

A retry multiplies load exactly when a worker has least to spare; the budget keeps retries at a fifth of all calls, so
that a worker which fails everything sees 1.2 times its load and not 3 (Google SRE book, ch. 21, "Handling overload").
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any, cast

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_exponential, wait_random

from gateway.core.log.rollout import AttemptRecord
from gateway.errors import BatonError, DeadlineExceeded, UpstreamError, UpstreamProtocol
from gateway.service.ports.request import Clock, WorkerCall, WorkerReply, Workers

ATTEMPTS_MAX = 3
ATTEMPT_S_MIN = 0.05
OnAttempt = Callable[[AttemptRecord], None]
BeforeAttempt = Callable[[int], Awaitable[None]]


class RetryBudget:
    """A token bucket counted in calls: every first try pays one in, every retry takes `calls_per_retry` out.

    Over any run of `n` calls at most `start_retries + n / calls_per_retry` retries are allowed.
    """

    def __init__(self, *, calls_per_retry: int = 5, start_retries: int = 2, saved_retries_max: int = 10) -> None:
        self._calls_per_retry = calls_per_retry
        self._calls_max = saved_retries_max * calls_per_retry
        self._calls = start_retries * calls_per_retry

    def deposit(self) -> None:
        """A first try was made."""
        self._calls = min(self._calls + 1, self._calls_max)

    def withdraw(self) -> bool:
        """Whether one retry may be made; if so it is paid for."""
        if self._calls < self._calls_per_retry:
            return False
        self._calls -= self._calls_per_retry
        return True


async def _no_hook(attempt: int) -> None:
    """The default `before_attempt`: nothing to do."""


class Attempts:
    """One worker call with its retries. `deadline_s` is on the clock's monotonic scale; so many seconds are left as
    lie between it and `clock.monotonic_s()`. `before_attempt(n)` is awaited before try n (from 1) leaves; `on_attempt`
    is told of each finished try."""

    def __init__(
        self,
        workers: Workers,
        retry_budget: RetryBudget,
        clock: Clock,
        *,
        attempts_max: int = ATTEMPTS_MAX,
        wait_initial_s: float = 0.1,
        wait_s_max: float = 5.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._workers = workers
        self._budget = retry_budget
        self._clock = clock
        self._attempts_max = attempts_max
        self._backoff = wait_exponential(multiplier=wait_initial_s, max=wait_s_max) + wait_random(0, wait_initial_s)
        self._sleep = sleep

    async def complete(
        self, call: WorkerCall, deadline_s: float, on_attempt: OnAttempt, before_attempt: BeforeAttempt = _no_hook
    ) -> WorkerReply:
        """The reply of the first try that works. Raises what the last try raised, or DeadlineExceeded."""
        async for attempt in self._retrying(deadline_s):
            with attempt:
                trimmed = self._trimmed(call, deadline_s)
                await before_attempt(attempt.retry_state.attempt_number)
                with self._reported(on_attempt, self._clock.now_us()):
                    return await self._workers.complete(trimmed)
        raise AssertionError("tenacity returns or raises")

    async def stream(
        self, call: WorkerCall, deadline_s: float, on_attempt: OnAttempt, before_attempt: BeforeAttempt = _no_hook
    ) -> AsyncIterator[Mapping[str, Any]]:
        """The chunks of the first try that yields one; nothing is retried after a first chunk. Raises as `complete`."""
        async for attempt in self._retrying(deadline_s):
            with attempt:
                trimmed = self._trimmed(call, deadline_s)
                await before_attempt(attempt.retry_state.attempt_number)
                started_us = self._clock.now_us()
                chunks = cast(AsyncGenerator[Mapping[str, Any], None], self._workers.stream(trimmed))
                with self._reported(on_attempt, started_us, failures_only=True):
                    first = await _first(chunks)
        async with aclosing(chunks):
            with self._reported(on_attempt, started_us):
                yield first
                async for chunk in chunks:
                    yield chunk

    def _retrying(self, deadline_s: float) -> AsyncRetrying:
        self._budget.deposit()
        return AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, UpstreamError) and error.retryable),
            wait=self._wait_s,
            stop=lambda state: self._gives_up(state, deadline_s),
            sleep=self._sleep,
            reraise=True,
        )

    def _wait_s(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked_s = error.retry_after_s if isinstance(error, UpstreamError) else None
        return max(self._backoff(state), asked_s or 0.0)

    def _gives_up(self, state: RetryCallState, deadline_s: float) -> bool:
        """Asked once after each failure that may be retried; saying no takes the retry out of the budget."""
        left_s = deadline_s - self._clock.monotonic_s()
        if state.attempt_number >= self._attempts_max or left_s < state.upcoming_sleep + ATTEMPT_S_MIN:
            return True
        return not self._budget.withdraw()

    def _trimmed(self, call: WorkerCall, deadline_s: float) -> WorkerCall:
        left_s = deadline_s - self._clock.monotonic_s()
        if left_s <= 0:
            raise DeadlineExceeded("the request's time was over before the worker could be called")
        return replace(call, timeout_s=min(call.timeout_s, left_s))

    @contextmanager
    def _reported(self, on_attempt: OnAttempt, started_us: int, *, failures_only: bool = False) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # boundary: only observed, for the log; cancellation included
            code = error.code if isinstance(error, BatonError) else "cancelled"
            status = error.upstream_status if isinstance(error, UpstreamError) else None
            dispatched = error.dispatched if isinstance(error, UpstreamError) else True
            on_attempt(AttemptRecord(started_us, self._clock.now_us(), code, status, dispatched))
            raise
        if not failures_only:
            on_attempt(AttemptRecord(started_us, self._clock.now_us()))


async def _first(chunks: AsyncIterator[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The first chunk. A stream without any is no reply."""
    try:
        return await anext(chunks)
    except StopAsyncIteration:
        raise UpstreamProtocol("the worker's stream was empty") from None
