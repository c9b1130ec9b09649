"""Open load: a fixed number of requests a second, without waiting for replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

UNDER_WAY_MAX = 400  # below what the gateways serve at a time, so that a stall of this machine is no overload of theirs


class Paced:
    """Calls `ask` at this rate while the block lasts, and waits for the last reply. `skipped`: turns without a call
    because too many requests were in flight."""

    def __init__(self, ask: Callable[[], Awaitable[object]], per_s: float) -> None:
        self._ask, self._every_s = ask, 1 / per_s
        self._under_way: set[asyncio.Future[object]] = set()
        self._on = True
        self.skipped = 0

    async def __aenter__(self) -> Paced:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._on = False
        await self._task
        await asyncio.gather(*self._under_way)

    async def _run(self) -> None:
        next_s = time.monotonic()
        while self._on:
            if len(self._under_way) < UNDER_WAY_MAX:
                asking = asyncio.ensure_future(self._ask())
                self._under_way.add(asking)
                asking.add_done_callback(self._under_way.discard)
            else:
                self.skipped += 1
            next_s += self._every_s
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
