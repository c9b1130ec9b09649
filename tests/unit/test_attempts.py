"""Retries: which errors, how long between them, how many in all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.log.rollout import AttemptRecord
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import (
    DeadlineExceeded,
    UpstreamError,
    UpstreamProtocol,
    UpstreamRateLimited,
    UpstreamRefused,
    UpstreamTimeout,
)
from gateway.service.loop.attempts import Attempts, RetryBudget
from gateway.service.ports.request import Clock, WorkerCall
from tests.fakes.workers import FakeWorkers, Says, Scripted

SPEC = WorkerSpec.model_validate({"name": "w", "handle": "atlas", "kind": "openai", "model": "m", "url": "http://w/v1"})
CALL = WorkerCall(SPEC, {"messages": []}, 30.0, "rollout", "step")
BUSY = UpstreamError("busy", retryable=True, upstream_status=503)


class FakeClock(Clock):
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.s = 1000.0
        self.slept: list[float] = []

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.s)

    def monotonic_s(self) -> float:
        return self.s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.s += seconds


class Bench:
    """Attempts over a scripted worker, with everything that was reported."""

    def __init__(self, *script: Scripted, budget: RetryBudget | None = None) -> None:
        self.clock = FakeClock()
        self.workers = FakeWorkers({"w": list(script)})
        self.records: list[AttemptRecord] = []
        self.before: list[int] = []
        self.attempts = Attempts(self.workers, budget or RetryBudget(), self.clock, sleep=self.clock.sleep)

    async def note(self, attempt: int) -> None:
        self.before.append(attempt)

    async def complete(self, left_s: float = 60.0) -> Mapping[str, Any]:
        deadline_s = self.clock.monotonic_s() + left_s
        return (await self.attempts.complete(CALL, deadline_s, self.records.append, self.note)).body

    async def stream(self, left_s: float = 60.0) -> list[Mapping[str, Any]]:
        deadline_s = self.clock.monotonic_s() + left_s
        chunks = self.attempts.stream(CALL, deadline_s, self.records.append, self.note)
        return [chunk async for chunk in chunks]


async def test_a_good_call_is_one_try() -> None:
    bench = Bench(Says("fine"))
    assert (await bench.complete())["choices"][0]["message"]["content"] == "fine"
    assert bench.before == [1]
    assert [(record.error, record.upstream_status) for record in bench.records] == [(None, None)]
    assert bench.clock.slept == []


@pytest.mark.parametrize("how", ["complete", "stream"])
async def test_what_may_pass_is_tried_again(how: str) -> None:
    bench = Bench(BUSY, UpstreamTimeout("slow"), Says("fine"))
    await (bench.complete() if how == "complete" else bench.stream())
    assert bench.before == [1, 2, 3]
    assert [record.error for record in bench.records] == ["upstream_error", "upstream_timeout", None]
    assert [record.upstream_status for record in bench.records] == [503, None, None]


@pytest.mark.parametrize("how", ["complete", "stream"])
@pytest.mark.parametrize(
    "error", [UpstreamRefused("no"), UpstreamError("key"), DeadlineExceeded("late"), ValueError("a bug")]
)
async def test_what_will_not_pass_is_not(how: str, error: Exception) -> None:
    bench = Bench(error, Says("fine"))
    with pytest.raises(type(error)):
        await (bench.complete() if how == "complete" else bench.stream())
    assert bench.before == [1]


async def test_three_tries_at_most_and_the_last_error_is_raised() -> None:
    bench = Bench(BUSY, BUSY, UpstreamProtocol("nonsense"), Says("too late"))
    with pytest.raises(UpstreamProtocol):
        await bench.complete()
    assert bench.before == [1, 2, 3]


async def test_waits_grow_and_are_bounded() -> None:
    bench = Bench(BUSY, BUSY, Says("fine"))
    await bench.complete()
    assert 0.1 <= bench.clock.slept[0] <= 0.2
    assert 0.2 <= bench.clock.slept[1] <= 0.3


async def test_the_workers_own_wish_is_honoured() -> None:
    bench = Bench(UpstreamRateLimited("slow down", retry_after_s=7.0), Says("fine"))
    await bench.complete()
    assert bench.clock.slept == [7.0]


async def test_a_wish_beyond_the_deadline_ends_it_at_once() -> None:
    bench = Bench(UpstreamRateLimited("slow down", retry_after_s=7.0), Says("fine"))
    with pytest.raises(UpstreamRateLimited):
        await bench.complete(left_s=6.0)
    assert bench.clock.slept == []


async def test_no_time_left_means_no_try() -> None:
    bench = Bench(Says("fine"))
    with pytest.raises(DeadlineExceeded):
        await bench.complete(left_s=0.0)
    assert bench.before == []
    assert bench.workers.calls == []


async def test_a_try_gets_no_more_time_than_is_left() -> None:
    bench = Bench(UpstreamRateLimited("slow down", retry_after_s=2.0), Says("fine"))
    await bench.complete(left_s=5.0)
    assert [call.timeout_s for call in bench.workers.calls] == [pytest.approx(5.0), pytest.approx(3.0)]
    await bench.complete(left_s=500.0)
    assert bench.workers.calls[-1].timeout_s == CALL.timeout_s


async def test_a_stream_is_not_tried_again_once_it_spoke() -> None:
    bench = Bench(Says("one two three", dies_after=2), Says("fine"))
    with pytest.raises(UpstreamProtocol):
        await bench.stream()
    assert bench.before == [1]
    assert [record.error for record in bench.records] == ["upstream_protocol"]


async def test_a_stream_that_dies_before_it_spoke_is() -> None:
    bench = Bench(Says("one two three", dies_after=0), Says("fine"))
    chunks = await bench.stream()
    assert "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"]) == "fine"
    assert [record.error for record in bench.records] == ["upstream_protocol", None]


async def test_an_empty_stream_is_a_failure_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(Says("fine"))
    monkeypatch.setattr("tests.fakes.workers.chunks", lambda call, says: [])
    with pytest.raises(UpstreamProtocol, match="empty"):
        await bench.stream()
    assert bench.before == [1, 2, 3]


async def test_leaving_a_stream_closes_the_worker_and_is_recorded() -> None:
    bench = Bench(Says("one two three"))
    chunks: Any = bench.attempts.stream(CALL, bench.clock.s + 9, bench.records.append)
    await anext(chunks)
    await chunks.aclose()
    assert bench.workers.cancelled == ["w"]
    assert [record.error for record in bench.records] == ["cancelled"]


async def test_cancelling_is_not_retried() -> None:
    bench = Bench(Says("late", delay_s=5))
    task = asyncio.create_task(bench.complete())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.before == [1]
    assert [record.error for record in bench.records] == ["cancelled"]


async def test_what_a_hook_raises_ends_the_call_before_it_leaves() -> None:
    bench = Bench(Says("fine"))

    async def refuse(attempt: int) -> None:
        raise MemoryError("the journal is full")

    with pytest.raises(MemoryError):
        await bench.attempts.complete(CALL, bench.clock.s + 9, bench.records.append, refuse)
    assert bench.workers.calls == []
    assert bench.records == []


async def test_a_call_that_never_left_says_so_in_its_record() -> None:
    bench = Bench(UpstreamError("unreachable", retryable=True, dispatched=False), Says("fine"))
    await bench.complete()
    assert [record.dispatched for record in bench.records] == [False, True]


async def test_a_worker_that_always_fails_sees_a_fifth_more_load_and_not_three_times() -> None:
    bench = Bench(BUSY)
    for _ in range(200):
        with pytest.raises(UpstreamError):
            await bench.complete()
    assert len(bench.workers.calls) <= 200 + 2 + 200 // 5
    assert len(bench.workers.calls) >= 200 + 200 // 5


@given(st.lists(st.booleans(), max_size=400), st.integers(1, 10), st.integers(0, 5), st.integers(5, 12))
def test_retries_stay_within_a_share_of_calls(steps: list[bool], share: int, start: int, cap: int) -> None:
    budget = RetryBudget(calls_per_retry=share, start_retries=start, saved_retries_max=cap)
    calls = retries = 0
    for is_call in steps:
        if is_call:
            budget.deposit()
            calls += 1
        else:
            retries += budget.withdraw()
        assert retries * share <= start * share + calls


def test_a_quiet_hour_saves_no_more_than_the_cap() -> None:
    budget = RetryBudget(saved_retries_max=10)
    for _ in range(10_000):
        budget.deposit()
    assert sum(budget.withdraw() for _ in range(100)) == 10
