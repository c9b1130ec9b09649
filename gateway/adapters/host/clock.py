"""The system's clock (port `Clock`), and how late the event loop is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime

from gateway.service.ports.request import Clock


class SystemClock(Clock):
    """UTC for records, the monotonic clock for durations."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def now_us(self) -> int:
        return time.time_ns() // 1000

    def monotonic_s(self) -> float:
        return time.monotonic()


async def watch_loop(late: Callable[[float], None], every_s: float = 0.25) -> None:
    """Pass on how many seconds late the event loop runs a timer, every `every_s` seconds, for ever."""
    while True:
        due_s = time.monotonic() + every_s
        await asyncio.sleep(every_s)
        late(max(0.0, time.monotonic() - due_s))
