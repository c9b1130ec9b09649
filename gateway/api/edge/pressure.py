"""How many requests run at the same time: as many as this process can serve now. The others wait in order.

Requests that wait for a worker cost no processor time, so hundreds of them are no load; a few dozen that all need the
processor are one. The turn of the event loop tells the two apart: in one turn everything that is ready runs once, so a
turn is the least that anything here waits, a call to Redis and its deadline included. While turns are longer than
`TURN_S`, fewer requests run at the same time; once turns are shorter, more do.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

EVERY_S = 0.02  # interval of measurements, while any request runs
TURN_S = 0.03
SMOOTHING = 0.3  # weight of the newest turn, so that one long turn changes nothing
LEAST = 32  # requests that always may run: another process of this machine may make turns long
CUT, GROWTH = 0.8, 1.15  # of one measurement: from LEAST to 512 in less than half a second
WAIT_S_MAX = 3.0  # then a request runs anyway: the others may be streams, which take minutes and no processor


class WorkSlots:
    """At most `most` requests run at the same time, and as few as LEAST while turns are long. After a rest the limit is
    LEAST, so that a burst is measured before all of it runs."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.limit = min(LEAST, most)
        self.turn_s = 0.0  # smoothed
        self.running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._watching = False

    async def take(self) -> None:
        """Wait for a free slot, first come first served, at most WAIT_S_MAX."""
        if self.running < self.limit and not self._waiting:
            self.running += 1
        else:
            await self._wait()
        self._watch()

    def give(self) -> None:
        """Release the slot that take() returned."""
        self.running -= 1
        self._admit()

    def measure(self, turn_s: float) -> None:
        """Adapt the limit to one measured turn."""
        self.turn_s += SMOOTHING * (turn_s - self.turn_s)
        if self.turn_s <= TURN_S:
            self.limit = min(self._most, max(self.limit + 1, int(self.limit * GROWTH)))
            self._admit()
        elif self.running <= self.limit:  # else the last cut has had no effect yet
            self.limit = min(self._most, max(LEAST, int(self.running * CUT)))

    async def _wait(self) -> None:
        """Wait for a slot. Whoever frees one for us counts it as running."""
        slot = asyncio.get_running_loop().create_future()
        self._waiting.append(slot)
        try:
            await asyncio.wait((slot,), timeout=WAIT_S_MAX)
        except asyncio.CancelledError:
            if not slot.cancel():  # it was freed for us at this moment
                self.give()
            raise
        if slot.cancel():
            self.running += 1

    def _admit(self) -> None:
        while self._waiting and self.running < self.limit:
            slot = self._waiting.popleft()
            if not slot.done():
                self.running += 1
                slot.set_result(None)

    def _watch(self) -> None:
        """Measure turns from now on, as long as any request runs."""
        if self._watching:
            return
        self._watching = True
        self.limit, self.turn_s = max(self.running, min(LEAST, self._most)), 0.0
        loop = asyncio.get_running_loop()

        def again() -> None:
            loop.call_later(EVERY_S, loop.call_soon, begin)

        def begin() -> None:
            loop.call_soon(end, time.monotonic())

        def end(began_s: float) -> None:
            self.measure(time.monotonic() - began_s)
            self._watching = self.running > 0
            if self._watching:
                again()

        again()
