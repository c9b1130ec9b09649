"""The meter of one request: how much money, how many calls and how many tokens are left. Pure counters, no clock.

Every worker call and planning call draws its worst case before it leaves, and settles its actual cost afterwards. All
loops of a request share one meter, so neither fan-out nor depth can exceed the hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.loop.caps import Caps
from gateway.errors import CapReached


@dataclass(frozen=True, slots=True)
class Draw:
    """The worst case of one attempt: nano-dollars and tokens."""

    nano: int
    tokens: int


@dataclass(slots=True)
class Meter:
    """Nano-dollars, calls and tokens of one request. `granted_nano` is what the hold reserved."""

    granted_nano: int
    caps: Caps
    spent_nano: int = 0
    drawn_nano: int = 0  # the worst cases of calls in flight
    calls: int = 0
    tokens: int = 0
    drawn_tokens: int = 0

    @property
    def left_nano(self) -> int:
        """The nano-dollars that the next call may cost at most."""
        return self.granted_nano - self.spent_nano - self.drawn_nano

    @property
    def left_tokens(self) -> int:
        """The tokens that the next call may use at most."""
        return self.caps.tokens - self.tokens - self.drawn_tokens

    def draw(self, draw: Draw) -> None:
        """Reserve one attempt's worst case. Raises CapReached(tokens | cost), and then reserves nothing."""
        if draw.tokens > self.left_tokens:
            raise CapReached("tokens", f"the next call could exceed the request's cap of {self.caps.tokens} tokens")
        if draw.nano > self.left_nano:
            raise CapReached("cost", "the next call could cost more than the request has left; raise the cost cap")
        self.drawn_nano += draw.nano
        self.drawn_tokens += draw.tokens

    def count_call(self) -> None:
        """Count one attempt at a worker. Raises CapReached(calls)."""
        if self.calls >= self.caps.calls:
            raise CapReached("calls", f"the request's cap of {self.caps.calls} worker calls is used up")
        self.calls += 1

    def settle(self, draw: Draw, actual_nano: int, tokens: int) -> None:
        """Replace a draw by the attempt's actual cost and tokens, in full even if the worker bills above its bound."""
        self.drawn_nano -= draw.nano
        self.drawn_tokens -= draw.tokens
        self.spent_nano += actual_nano
        self.tokens += tokens
