"""The meter of one request tree: what its hold, calls and tokens still allow. Pure counters, no clock.

Every worker call and planning call draws its worst case before it leaves and settles the actual after. Since all
loops of a tree share one meter, neither fan-out nor depth can pass the hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.caps import Caps
from gateway.errors import CapReached


@dataclass(slots=True)
class Meter:
    """Nano-dollars, calls and tokens of one request. `granted_nano` is what the hold reserved."""

    granted_nano: int
    caps: Caps
    spent_nano: int = 0
    drawn_nano: int = 0  # worst cases of calls in flight
    calls: int = 0
    tokens: int = 0

    @property
    def left_nano(self) -> int:
        """What the next call may cost at most."""
        return self.granted_nano - self.spent_nano - self.drawn_nano

    def draw(self, bound_nano: int) -> int:
        """Reserve one call's worst case; returns it. Raises CapReached(tokens | cost) and then reserves nothing."""
        if self.tokens >= self.caps.tokens:
            raise CapReached("tokens", f"the request's cap of {self.caps.tokens} tokens is used up")
        if bound_nano > self.left_nano:
            raise CapReached("cost", "the next call could cost more than is left of the request's money; raise the cap")
        self.drawn_nano += bound_nano
        return bound_nano

    def count_call(self) -> None:
        """One attempt at a worker. Raises CapReached(calls)."""
        if self.calls >= self.caps.calls:
            raise CapReached("calls", f"the request's cap of {self.caps.calls} worker calls is used up")
        self.calls += 1

    def settle(self, bound_nano: int, actual_nano: int, tokens: int) -> None:
        """A drawn call ended at its actual cost. A worker billing above its bound is still counted in full."""
        self.drawn_nano -= bound_nano
        self.spent_nano += actual_nano
        self.tokens += tokens
