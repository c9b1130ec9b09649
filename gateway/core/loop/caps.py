"""Caps: the limits of one request besides its budget. They come from settings, key and headers, never from text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from gateway.core.money.amounts import usd_to_nano
from gateway.errors import BadRequest


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
    wall_s: float = 120.0  # seconds for the whole request

    def narrow(self, limits: Mapping[str, Any]) -> Caps:
        """Return these caps, each lowered to the value in `limits` if that is lower. Raises BadRequest for an unknown
        name and for a value out of range."""
        names = {field.name for field in fields(self)}
        changes: dict[str, Any] = {}
        for name, value in limits.items():
            if name not in names:
                raise BadRequest(
                    f"caps.{name} is not a cap; send one of {', '.join(sorted(names))}", param=f"caps.{name}"
                )
            changes[name] = min(getattr(self, name), _positive(name, value))
        return replace(self, **changes)

    def as_json(self) -> dict[str, Any]:
        """The caps as a JSON object, for records."""
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
