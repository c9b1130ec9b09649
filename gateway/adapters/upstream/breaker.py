"""A circuit breaker: it stops calls to a service that keeps failing, and then tries it with one call at a time."""

from __future__ import annotations

import time
from collections.abc import Callable


class Breaker:
    """Opens after `failures_max` failures in a row. Then it admits one call every `cool_down_s` until one succeeds."""

    def __init__(
        self, failures_max: int = 5, cool_down_s: float = 10.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._failures_max, self._cool_down_s, self._now = failures_max, cool_down_s, now
        self._failures = 0
        self._blocked_until_s = 0.0
        self._probing = False

    def admit(self) -> bool:
        """Whether a call may leave now. After True, call `succeed`, `fail` or `abandon` once."""
        if self._failures < self._failures_max:
            return True
        if self._probing or self._now() < self._blocked_until_s:
            return False
        self._probing = True
        return True

    def succeed(self) -> None:
        """Report that the call succeeded."""
        self._failures, self._probing = 0, False

    def fail(self) -> None:
        """Report that the call failed."""
        self._failures, self._probing = self._failures + 1, False
        self._blocked_until_s = self._now() + self._cool_down_s

    def abandon(self) -> None:
        """Report that the caller left before the call ended, so that its result is unknown."""
        self._probing = False
