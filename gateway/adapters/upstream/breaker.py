"""A circuit breaker: what keeps failing is left alone for a while, then tried with one call."""

from __future__ import annotations

import time
from collections.abc import Callable


class Breaker:
    """Opens after `failures_max` failures in a row; then one probe each `cool_down_s` until one succeeds."""

    def __init__(
        self, failures_max: int = 5, cool_down_s: float = 10.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._failures_max, self._cool_down_s, self._now = failures_max, cool_down_s, now
        self._failures = 0
        self._closed_until_s = 0.0
        self._probing = False

    def admit(self) -> bool:
        """Whether a call may go out now. One that may must end in `succeeded`, `failed` or `abandoned`."""
        if self._failures < self._failures_max:
            return True
        if self._probing or self._now() < self._closed_until_s:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        self._failures, self._probing = 0, False

    def failed(self) -> None:
        self._failures, self._probing = self._failures + 1, False
        self._closed_until_s = self._now() + self._cool_down_s

    def abandoned(self) -> None:
        """The caller went away: nothing was learned."""
        self._probing = False
