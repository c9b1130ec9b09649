"""One worker call: the order of its money, which errors are tried again, how long between them, how many in all."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.log.events import Event
from gateway.core.log.rollout import AttemptRecord, StepRecord
from gateway.core.loop.caps import Caps, Meter
from gateway.core.loop.plan import Step
from gateway.core.money.amounts import Usage
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import (
    DeadlineExceeded,
    SpoolFull,
    UpstreamError,
    UpstreamProtocol,
    UpstreamRateLimited,
    UpstreamRefused,
    UpstreamTimeout,
)
from gateway.service.loop.calls import Calls, StepCall
from gateway.service.loop.health.retries import RetryBudget
from gateway.service.loop.state import HoldRecord, Loop, StepRun, Tree
from gateway.service.ports.request import Clock, WorkerCall
from tests.fakes.journal import FakeJournal
from tests.fakes.workers import FakeWorkers, Says, Scripted
from tests.records import a_rollout
from tests.waiting import until

PRICE = {"input_usd_per_mtok": "1", "output_usd_per_mtok": "2"}
NAMES = {"name": "w", "handle": "atlas", "kind": "openai", "model": "m", "url": "http://w/v1"}
SPEC = WorkerSpec.model_validate({**NAMES, "price": PRICE, "timeout_s": 30.0})
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
    """One step's calls of a scripted worker, with the meter they draw from and the journal they are announced in."""

    def __init__(self, *script: Scripted, budget: RetryBudget | None = None) -> None:
        self.clock = FakeClock()
        self.workers = FakeWorkers({"w": list(script)})
        self.meter = Meter(10**15, Caps(calls=10**6, tokens=10**12))
        self.journal = FakeJournal()
        self.calls = Calls(self.workers, budget or RetryBudget(), self.clock, sleep=self.clock.sleep)
        self.runs: list[StepRun] = []

    @property
    def records(self) -> list[AttemptRecord]:
        return [record for run in self.runs for record in run.record.attempts]

    @property
    def announced(self) -> list[int]:
        """The attempts that are on disk, as their dispatches number them."""
        return [event.payload["attempt"] for event in self.journal.of_kind("dispatch")]

    @property
    def money(self) -> tuple[int, int]:
        """Nano-dollars (drawn, spent)."""
        return self.meter.drawn_nano, self.meter.spent_nano

    def call(self, left_s: float = 60.0) -> StepCall:
        hold = HoldRecord(self.journal, Event("h", "hold", 0, {"hold_id": "h"}))
        tree = Tree(self.meter, "h", self.clock.s + left_s, asyncio.Semaphore(4), hold)
        nobody: Any = None
        loop = Loop(a_rollout(steps=[]), tree, (), {}, (SPEC,), {}, nobody, None, self.meter.caps, 1)
        run = StepRun(0, Step("atlas", None), SPEC, StepRecord(1, 0, "w", "atlas", "openai", "1", None, []))
        self.runs.append(run)
        body = {"messages": [{"role": "user", "content": "Hello?"}], "max_tokens": 100}
        return StepCall(self.calls, loop, run, body, ())

    async def complete(self, left_s: float = 60.0) -> Mapping[str, Any]:
        return await self.call(left_s).complete()

    async def stream(self, left_s: float = 60.0) -> list[Mapping[str, Any]]:
        chunks: list[Mapping[str, Any]] = []

        async def take(chunk: Mapping[str, Any]) -> None:
            chunks.append(chunk)

        await self.call(left_s).stream(take)
        return chunks


async def test_the_order_is_draw_announce_call_settle() -> None:
    seen: list[tuple[bool, int]] = []

    def look(call: WorkerCall) -> Says:
        seen.append((bench.meter.drawn_nano > 0, len(bench.journal.of_kind("dispatch"))))
        return Says("fine", usage=Usage(10, 5))

    bench = Bench(look)
    (append, drawn) = bench.journal.append, []

    async def appended(*events: Event) -> None:
        drawn.append((bench.meter.drawn_nano, len(bench.workers.calls)))
        await append(*events)

    bench.journal.append = appended  # type: ignore[method-assign]
    await bench.complete()
    worst_nano, left = drawn[0]
    assert (worst_nano > 0, left) == (True, 0)  # on disk after the draw and before the call
    assert seen == [(True, 1)]
    assert bench.journal.of_kind("dispatch")[0].payload["bound_nano"] == worst_nano
    assert bench.money == (0, 10 * 1_000 + 5 * 2_000)


async def test_between_step_and_worker_stands_one_file() -> None:
    files: list[str] = []

    def look(call: WorkerCall) -> Says:
        frames = traceback.extract_stack()
        files.extend(dict.fromkeys(frame.filename for frame in frames if "/gateway/" in frame.filename))
        return Says("fine")

    await Bench(look).complete()
    assert [Path(name).name for name in files] == ["calls.py"]


async def test_a_failure_with_a_status_costs_nothing_and_one_without_an_estimate_within_its_draw() -> None:
    bench = Bench(BUSY, UpstreamTimeout("slow"), Says("fine", usage=Usage(10, 5)))
    await bench.complete()
    bound_nano = bench.journal.of_kind("dispatch")[0].payload["bound_nano"]
    drawn_nano, spent_nano = bench.money
    assert (drawn_nano, 20_000 < spent_nano < bound_nano + 20_000) == (0, True)
    assert [record.counted_by for record in bench.records] == [None, "pace", None]


async def test_a_stream_that_was_cut_costs_its_text_so_far() -> None:
    bench = Bench(Says("one two three", dies_after=3))
    with pytest.raises(UpstreamProtocol):
        await bench.stream()
    drawn_nano, spent_nano = bench.money
    bound_nano = bench.journal.of_kind("dispatch")[0].payload["bound_nano"]
    assert (drawn_nano, 0 < spent_nano < bound_nano) == (0, True)
    assert [record.counted_by for record in bench.records] == ["bytes"]


async def test_a_good_call_is_one_try() -> None:
    bench = Bench(Says("fine"))
    assert (await bench.complete())["choices"][0]["message"]["content"] == "fine"
    assert bench.announced == [1]
    assert [(record.error, record.upstream_status) for record in bench.records] == [(None, None)]
    assert bench.clock.slept == []


@pytest.mark.parametrize("how", ["complete", "stream"])
async def test_errors_that_may_pass_are_tried_again(how: str) -> None:
    bench = Bench(BUSY, UpstreamTimeout("slow"), Says("fine"))
    await (bench.complete() if how == "complete" else bench.stream())
    assert bench.announced == [1, 2, 3]
    assert [record.error for record in bench.records] == ["upstream_error", "upstream_timeout", None]
    assert [record.upstream_status for record in bench.records] == [503, None, None]


@pytest.mark.parametrize("how", ["complete", "stream"])
@pytest.mark.parametrize(
    "error", [UpstreamRefused("no"), UpstreamError("key"), DeadlineExceeded("late"), ValueError("a bug")]
)
async def test_errors_that_will_not_pass_are_not_tried_again(how: str, error: Exception) -> None:
    bench = Bench(error, Says("fine"))
    with pytest.raises(type(error)):
        await (bench.complete() if how == "complete" else bench.stream())
    assert bench.announced == [1]


async def test_three_tries_at_most_and_the_last_error_is_raised() -> None:
    bench = Bench(BUSY, BUSY, UpstreamProtocol("nonsense"), Says("too late"))
    with pytest.raises(UpstreamProtocol):
        await bench.complete()
    assert bench.announced == [1, 2, 3]


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
    assert bench.announced == []
    assert bench.workers.calls == []


async def test_a_try_gets_no_more_time_than_is_left() -> None:
    bench = Bench(UpstreamRateLimited("slow down", retry_after_s=2.0), Says("fine"))
    await bench.complete(left_s=5.0)
    assert [call.timeout_s for call in bench.workers.calls] == [pytest.approx(5.0), pytest.approx(3.0)]
    await bench.complete(left_s=500.0)
    assert bench.workers.calls[-1].timeout_s == SPEC.timeout_s


async def test_a_stream_is_not_tried_again_once_it_spoke() -> None:
    bench = Bench(Says("one two three", dies_after=2), Says("fine"))
    with pytest.raises(UpstreamProtocol):
        await bench.stream()
    assert bench.announced == [1]
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
    assert bench.announced == [1, 2, 3]


async def test_leaving_a_stream_closes_the_worker_and_is_recorded() -> None:
    bench = Bench(Says("one two three"))

    async def leave(chunk: Mapping[str, Any]) -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await bench.call().stream(leave)
    assert bench.workers.cancelled == ["w"]
    assert [record.error for record in bench.records] == ["cancelled"]
    assert bench.meter.drawn_nano == 0


async def test_cancelling_is_not_retried() -> None:
    bench = Bench(Says("late", delay_s=60))
    task = asyncio.create_task(bench.complete())
    await until(lambda: bench.workers.in_flight)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.announced == [1]
    assert [record.error for record in bench.records] == ["cancelled"]


async def test_a_call_that_is_not_on_disk_does_not_leave() -> None:
    bench = Bench(Says("fine"))
    bench.journal.full = True
    with pytest.raises(SpoolFull):
        await bench.complete()
    assert bench.workers.calls == []
    assert bench.records == []
    assert bench.money == (0, 0)


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
