"""How long a runner rests between two looks at its store: the less there was to do, the longer."""

from __future__ import annotations

import asyncio

IDLE_TIMES = 5  # an idle runner rests at most this multiple of its shortest rest


class Rests:
    """`least_s` after a look that found work, and twice as long after each one that found none. What was made in this
    process wakes its runner at once; an idle one finds only what other processes left or put off."""

    def __init__(self, least_s: float) -> None:
        self._least_s = self._now_s = least_s
        self._woken = asyncio.Event()

    @property
    def is_woken(self) -> bool:
        """Whether there is something to do at once."""
        return self._woken.is_set()

    def wake(self) -> None:
        """End this rest, or the next one."""
        self._woken.set()

    def begin(self) -> None:
        """What is woken from here on is not seen by the look that begins."""
        self._woken.clear()

    async def rest(self, *, worked: bool) -> None:
        """Rest. `worked`: whether the last look found work."""
        self._now_s = self._least_s if worked else min(IDLE_TIMES * self._least_s, 2 * self._now_s)
        try:
            async with asyncio.timeout(self._now_s):
                await self._woken.wait()
        except TimeoutError:
            return
        self._now_s = self._least_s
