"""How many requests are worked on at once, by what this process can bear now; the others wait their turn.

Requests that wait for a worker cost no processor time, so hundreds of them are no load; a few dozen that all want the
processor are. What tells the two apart is the turn of the event loop: the time in which everything that is ready runs
once, and so the least that anything here waits, a call to Redis and its deadline included. While turns are longer than
`TURN_S`, fewer requests are worked on at once; once they are shorter, more again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

EVERY_S = 0.02  # a turn is measured so often, while anything runs
TURN_S = 0.03
SMOOTHING = 0.3  # weight of the newest turn: one long turn alone is a hiccup
LEAST = 32  # at once, however long turns are: they may be long because of what else this machine does
CUT, GROWTH = 0.8, 1.15  # a measurement: from LEAST to 512 in less than half a second
WAIT_S_MAX = 3.0  # then it is worked on all the same: what runs may be streams that take minutes and no processor


class Places:
    """At most `most` requests run at once, and as few as LEAST of them while turns are long. After a rest it begins at
    LEAST: what a burst would cost is seen before all of it runs."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.limit = min(LEAST, most)
        self.turn_s = 0.0  # smoothed
        self.running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._watching = False

    async def take(self) -> None:
        """Return once there is a place, first come first served, or after WAIT_S_MAX without one."""
        if self.running < self.limit and not self._waiting:
            self.running += 1
        else:
            await self._given()
        self._watch()

    def give(self) -> None:
        """Back, what was taken."""
        self.running -= 1
        self._admit()

    def turned(self, turn_s: float) -> None:
        """A turn of the loop took so long."""
        self.turn_s += SMOOTHING * (turn_s - self.turn_s)
        if self.turn_s <= TURN_S:
            self.limit = min(self._most, max(self.limit + 1, int(self.limit * GROWTH)))
            self._admit()
        elif self.running <= self.limit:  # else the last cut has not come to bear yet
            self.limit = min(self._most, max(LEAST, int(self.running * CUT)))

    async def _given(self) -> None:
        """Wait for a place; who gives it has counted it."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await asyncio.wait((place,), timeout=WAIT_S_MAX)
        except asyncio.CancelledError:
            if not place.cancel():  # given at that very moment
                self.give()
            raise
        if place.cancel():
            self.running += 1

    def _admit(self) -> None:
        while self._waiting and self.running < self.limit:
            given = self._waiting.popleft()
            if not given.done():
                self.running += 1
                given.set_result(None)

    def _watch(self) -> None:
        """Measure turns from now on, for as long as anything runs."""
        if self._watching:
            return
        self._watching = True
        self.limit, self.turn_s = max(self.running, min(LEAST, self._most)), 0.0
        loop = asyncio.get_running_loop()

        def later() -> None:
            loop.call_later(EVERY_S, loop.call_soon, begun)

        def begun() -> None:
            loop.call_soon(ended, time.monotonic())

        def ended(began_s: float) -> None:
            self.turned(time.monotonic() - began_s)
            self._watching = self.running > 0
            if self._watching:
                later()

        later()
