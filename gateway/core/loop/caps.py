"""The caps of one request besides its budget, and the meter that counts against them. Pure.

Caps come from settings, key and headers, never from text. Every worker call and planning call draws its worst case from
the meter before it leaves, and settles its actual cost afterwards. All loops of a request share one meter, so neither
fan-out nor depth can exceed the hold. The hold covers one answer at first; `secure` lets it grow for more.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

from gateway.core.money.amounts import usd_to_nano
from gateway.errors import BadRequest, CapReached


@dataclass(frozen=True, slots=True)
class Caps:
    """The largest allowed values. A request that reaches one ends with its best answer so far or a clear error."""

    depth: int = 2  # child loops below the request's own loop
    rounds: int = 4  # plans a loop
    steps: int = 5  # steps a plan
    parallel: int = 4  # worker calls in flight
    calls: int = 16  # worker attempts in the whole tree
    tokens: int = 200_000  # prompt + completion tokens in the whole tree
    cost_nano: int = 500_000_000  # nano-dollars in the whole tree, planning included
    wall_s: float = 300.0  # seconds for the whole request

    def narrow(self, limits: Mapping[str, Any]) -> Caps:
        """Return these caps, each lowered to the value in `limits` if that is lower. Raises BadRequest for an unknown
        name and for a value out of range."""
        if not limits:
            return self
        changes: dict[str, Any] = {}
        for name, value in limits.items():
            if name not in _NAMES:
                raise BadRequest(
                    f"caps.{name} is not a cap; send one of {', '.join(sorted(_NAMES))}", param=f"caps.{name}"
                )
            changes[name] = min(getattr(self, name), _positive(name, value))
        return replace(self, **changes)

    def as_json(self) -> dict[str, Any]:
        """The caps as a JSON object, for records."""
        return dict(zip(_NAMES, _VALUES(self), strict=True))


_NAMES = tuple(field.name for field in fields(Caps))
_VALUES = attrgetter(*_NAMES)
CAP_HEADERS = {
    "x-baton-max-cost-usd": "cost_nano",
    "x-baton-max-depth": "depth",
    "x-baton-max-rounds": "rounds",
    "x-baton-max-steps": "steps",
    "x-baton-max-parallel": "parallel",
    "x-baton-max-calls": "calls",
    "x-baton-max-tokens": "tokens",
    "x-baton-timeout-s": "wall_s",
}


def caps_from_headers(headers: Mapping[str, str]) -> dict[str, Any]:
    """The caps that a client asks for. Raises BadRequest, which names the header."""
    limits: dict[str, Any] = {}
    for header, name in CAP_HEADERS.items():
        text = headers.get(header)
        if text is None:
            continue
        try:
            limits[name] = _parse(name, text)
            _positive(name, limits[name])
        except (ValueError, BadRequest):
            raise BadRequest(
                f"{header}: `{text[:40]}` is not a usable value; send a number above 0", param=header
            ) from None
    return limits


def _parse(name: str, text: str) -> int | float:
    if name == "cost_nano":
        return usd_to_nano(text)
    return float(text) if name == "wall_s" else int(text)


def _positive(name: str, value: Any) -> Any:
    """Return `value` if it is in range. Only seconds may be fractional, and only depth may be 0. Raises BadRequest."""
    kind = int | float if name == "wall_s" else int
    valid = isinstance(value, kind) and not isinstance(value, bool) and 0 <= value < math.inf
    if not valid or (value == 0 and name != "depth"):
        what = "a number" if name == "wall_s" else "a whole number"
        raise BadRequest(f"caps.{name} must be {what} above 0", param=f"caps.{name}")
    return value


KEPT_SHARE = 4


@dataclass(frozen=True, slots=True)
class Draw:
    """The worst case of one attempt: nano-dollars and tokens."""

    nano: int
    tokens: int


Grow = Callable[[int], Awaitable[None]]


@dataclass(slots=True)
class Meter:
    """Nano-dollars, calls and tokens of one request. `granted_nano` is what the hold reserves."""

    granted_nano: int
    caps: Caps
    spent_nano: int = 0
    drawn_nano: int = 0  # the worst cases of calls in flight
    calls: int = 0
    tokens: int = 0
    drawn_tokens: int = 0
    grow: Grow | None = None  # enlarges the hold until so much is left, if the cap and the budgets allow it
    room_nano: int = 0  # what the budgets had beside the hold when they were last asked
    answer_nano: int = 0  # what the shortest answer may cost, which planning leaves
    plan_tokens: int = 0  # of the latest planning prompt
    short: bool = False  # whether they had less than was asked for
    keepers: int = 0  # child loops under way, while which an answer's part is kept back
    kept_nano: int = 0  # of what is held
    kept_reach_nano: int = 0  # of what the cap on cost allows
    kept_tokens: int = 0

    @property
    def left_nano(self) -> int:
        """The nano-dollars that are reserved for the next call."""
        return self.granted_nano - self.spent_nano - self.drawn_nano - self.kept_nano

    @property
    def reach_nano(self) -> int:
        """The nano-dollars that the next call may cost if the hold grows as far as the cap on cost."""
        used = self.spent_nano + self.drawn_nano + self.kept_reach_nano
        return self.left_nano if self.grow is None else self.caps.cost_nano - used

    @property
    def known_nano(self) -> int:
        """The nano-dollars that are left, as far as is known of the budgets."""
        return min(self.reach_nano, self.left_nano + self.room_nano)

    async def secure(self, nano: int) -> bool:
        """Let the hold grow if less than `nano` is left of it. Returns whether so much is left then."""
        if nano > self.left_nano and self.grow is not None:
            await self.grow(nano)
        return nano <= self.left_nano

    @property
    def left_tokens(self) -> int:
        """The tokens that the next call may use at most."""
        return self.caps.tokens - self.tokens - self.drawn_tokens - self.kept_tokens

    @contextmanager
    def kept_back(self) -> Iterator[None]:
        """Keep one call and one part in KEPT_SHARE of what is left, so that a plan which spends all that it may leaves
        enough for an answer."""
        if not self.keepers:
            self.kept_reach_nano, self.kept_tokens = self.reach_nano // KEPT_SHARE, self.left_tokens // KEPT_SHARE
            self.kept_nano = self.left_nano // KEPT_SHARE if self.grow is None else self.answer_nano
        self.keepers += 1
        try:
            yield
        finally:
            self.keepers -= 1
            if not self.keepers:
                self.kept_nano = self.kept_reach_nano = self.kept_tokens = 0

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
        if self.calls + bool(self.keepers) >= self.caps.calls:
            raise CapReached("calls", f"the request's cap of {self.caps.calls} worker calls is used up")
        self.calls += 1

    def settle(self, draw: Draw, actual_nano: int, tokens: int) -> None:
        """Replace a draw by the attempt's actual cost and tokens, in full even if the worker bills above its bound."""
        self.drawn_nano -= draw.nano
        self.drawn_tokens -= draw.tokens
        self.spent_nano += actual_nano
        self.tokens += tokens
