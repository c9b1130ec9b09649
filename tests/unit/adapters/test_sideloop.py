"""A loop in a thread of its own: results, errors, cancelling, and streams across the two loops."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from gateway.adapters.upstream.outbound.sideloop import AHEAD_MAX, SideLoop


@pytest.fixture(scope="module")
def side() -> SideLoop:
    return SideLoop("side")


async def test_work_runs_in_the_thread_and_its_result_and_error_come_back(side: SideLoop) -> None:
    async def where() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    async def fail() -> None:
        raise KeyError("there")

    assert await side.run(where()) == "side"
    with pytest.raises(KeyError, match="there"):
        await side.run(fail())


async def test_the_callers_loop_goes_on_while_the_other_computes(side: SideLoop) -> None:
    begun, end = threading.Event(), threading.Event()

    async def compute() -> bool:
        begun.set()
        return end.wait(10)  # without a wait of the loop's

    computing = asyncio.create_task(side.run(compute()))
    while not begun.is_set():
        await asyncio.sleep(0)
    assert not computing.done()
    end.set()
    assert await computing


async def test_cancelling_cancels_there(side: SideLoop) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.sleep(10)
        finally:
            cancelled.set()

    waiting = asyncio.create_task(side.run(wait()))
    while not begun.is_set():
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await asyncio.to_thread(cancelled.wait, 10)


class Source:
    def __init__(self, most: int, error: Exception | None = None, pause_s: float = 0) -> None:
        self.made, self.ended = 0, threading.Event()
        self._most, self._error, self._pause_s = most, error, pause_s

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            while self.made < self._most:
                await asyncio.sleep(self._pause_s)
                self.made += 1
                yield self.made
            if self._error is not None:
                raise self._error
        finally:
            self.ended.set()


@pytest.mark.parametrize("pause_s", [0, 0.001])
async def test_all_items_come_in_order_and_then_the_end(side: SideLoop, pause_s: float) -> None:
    async with aclosing(side.pump(Source(300, pause_s=pause_s).items())) as items:
        assert [await items.next() for _ in range(300)] == list(range(1, 301))
        assert await items.next() is None
        assert await items.next() is None


async def test_an_error_comes_behind_the_items_before_it(side: SideLoop) -> None:
    async with aclosing(side.pump(Source(3, ValueError("broken")).items())) as items:
        assert [await items.next() for _ in range(3)] == [1, 2, 3]
        with pytest.raises(ValueError, match="broken"):
            await items.next()


async def test_it_is_ahead_of_a_slow_reader_by_a_bound(side: SideLoop) -> None:
    source = Source(10 * AHEAD_MAX)
    async with aclosing(side.pump(source.items())) as items:
        assert await items.next() == 1
        until = time.monotonic() + 10
        while source.made < AHEAD_MAX and time.monotonic() < until:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert source.made <= AHEAD_MAX + 1
    assert source.ended.is_set()


@pytest.mark.parametrize("taken", [0, 1])
async def test_closing_ends_the_generator(side: SideLoop, taken: int) -> None:
    source = Source(10_000, pause_s=0.001)
    items = side.pump(source.items())
    for _ in range(taken):
        await items.next()
    await asyncio.wait_for(items.aclose(), 10)
    assert source.ended.is_set() or not source.made
