"""The system's clock (port `Clock`)."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from gateway.service.ports.request import Clock


class SystemClock(Clock):
    """UTC for records, the monotonic clock for durations."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic_s(self) -> float:
        return time.monotonic()
