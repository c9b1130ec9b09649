"""An event loop in a thread of its own, for a library whose coroutines compute for long between two waits.

LiteLLM translates a request inside its coroutine: five megabytes of tools take it two seconds. On a loop of its own it
shares the processor with the gateway's loop, which waits some milliseconds for its turn and not until the end.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

AHEAD_MAX = 64  # items that a reader has not taken
AHEAD_WAIT_S = 0.005
T = TypeVar("T")


class SideLoop:
    """The loop. It runs until the process ends."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that runs there, as a task. Cancelling cancels the task."""
        return await asyncio.wrap_future(self.start(work))

    def pump(self, items: AsyncGenerator[T, None]) -> Pump[T]:
        """The items of a generator that runs there. Close it."""
        return Pump(self, items)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)


class Pump(Generic[T]):
    """Takes items of a generator on a side loop, ahead of the reader by at most AHEAD_MAX, and wakes the reader only if
    it waits: an item costs less than a visit to the other loop."""

    def __init__(self, side: SideLoop, items: AsyncGenerator[T, None]) -> None:
        self._side, self._items = side, items
        self._loop = asyncio.get_running_loop()
        self._ready: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._over = False
        side.start(self._begin())

    async def next(self) -> T | None:
        """The next item; None at the end. Raises what the generator raised, after the items before it."""
        while not self._ready:
            if self._over:
                if self._error is not None:
                    raise self._error
                return None
            self._waiter = waiter = self._loop.create_future()
            if not (self._ready or self._over):  # else it came between the two looks
                await waiter
        return self._ready.popleft()

    async def aclose(self) -> None:
        """End the generator, and wait for its end."""
        await self._side.run(self._end())

    async def _begin(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _end(self) -> None:
        """Runs on the side loop, after `_begin`."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._items.aclose()

    async def _run(self) -> None:
        try:
            async for item in self._items:
                self._ready.append(item)
                self._wake()
                while len(self._ready) >= AHEAD_MAX:  # noqa: ASYNC110 - a slow reader is seldom, and wakes nobody
                    await asyncio.sleep(AHEAD_WAIT_S)
        except Exception as error:  # boundary: the reader gets it
            self._error = error
        finally:
            self._over = True
            self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self._loop.call_soon_threadsafe(_resume, waiter)


def _resume(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
