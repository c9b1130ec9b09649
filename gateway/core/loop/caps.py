"""Caps: the limits of one request beside its budget. They come from settings, key and headers, never from text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from gateway.core.money.amounts import usd_to_nano
from gateway.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Caps:
    """Each is a largest value; hitting one ends the request with the best answer so far, or a clear error."""

    depth: int = 2  # child loops below the request's own loop
    rounds: int = 4  # plans a loop
    steps: int = 5  # steps a plan
    parallel: int = 4  # worker calls in flight
    calls: int = 16  # worker attempts in the whole tree
    tokens: int = 200_000  # prompt + completion tokens in the whole tree
    cost_nano: int = 500_000_000  # nano-dollars in the whole tree, planning included
    wall_s: float = 120.0  # seconds for the whole request

    def narrowed(self, wanted: Mapping[str, Any]) -> Caps:
        """These caps, each lowered to `wanted` where that is lower. Unknown names and nonsense raise BadRequest."""
        known = {field.name for field in fields(self)}
        changes: dict[str, Any] = {}
        for name, value in wanted.items():
            if name not in known:
                raise BadRequest(
                    f"caps.{name} is not a cap; known are {', '.join(sorted(known))}", param=f"caps.{name}"
                )
            changes[name] = min(getattr(self, name), _positive(name, value))
        return replace(self, **changes)

    def as_json(self) -> dict[str, Any]:
        """Plain mapping, for records."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


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
    """The caps a client asks for. Raises BadRequest naming the header."""
    wanted: dict[str, Any] = {}
    for header, name in CAP_HEADERS.items():
        text = headers.get(header)
        if text is None:
            continue
        try:
            wanted[name] = _parse(name, text)
            _positive(name, wanted[name])
        except (ValueError, BadRequest):
            raise BadRequest(
                f"{header}: `{text[:40]}` is not a usable value; send a number above 0", param=header
            ) from None
    return wanted


def _parse(name: str, text: str) -> int | float:
    if name == "cost_nano":
        return usd_to_nano(text)
    return float(text) if name == "wall_s" else int(text)


def _positive(name: str, value: Any) -> Any:
    """`value` when it is in range: seconds may be a fraction, the rest are whole; depth may be 0, the rest not."""
    kind = int | float if name == "wall_s" else int
    good = isinstance(value, kind) and not isinstance(value, bool) and 0 <= value < math.inf
    if not good or (value == 0 and name != "depth"):
        what = "a number" if name == "wall_s" else "a whole number"
        raise BadRequest(f"caps.{name} must be {what} above 0", param=f"caps.{name}")
    return value
