"""A request body's bytes as JSON data: bounded before it is built, because building is what costs. Pure.

A byte of JSON can become a hundred in memory, and each value is walked several times on its way. So what a body holds
is counted in its bytes first, at gigabytes a second, and the bounds are far above what clients send: tens of thousands
of messages, parts and tools, or an embedding's half a million tokens. What stands in texts does not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from gateway.errors import BadRequest

NESTING_MAX = 64
OBJECTS_MAX = 50_000
PROPERTIES_MAX = 100_000
VALUES_MAX = 500_000
TEXTS_MAX = 200_000  # names included
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # of a surrogate pair; whole pairs match as well
_HOLDS = frozenset((dict, list))
_BOUNDS = (
    ((b"{", b"["), OBJECTS_MAX, "objects and arrays"),
    ((b":",), PROPERTIES_MAX, "properties"),
    ((b",",), VALUES_MAX, "values"),
)


def decoded(data: bytearray) -> Any:
    """The data, which can be encoded again; `data` is empty afterwards, for a large body is a large part of what
    serving it takes. Raises BadRequest where it is no JSON, or holds too much."""
    _check_bounds(data)
    halves = _HALF.search(data) is not None
    try:
        text = data.decode()
        data.clear()
        body = json.loads(text, parse_constant=_no_constant)
        if halves:  # half a surrogate pair decodes, and can then never be encoded again
            json.dumps(body, ensure_ascii=False).encode()
        _check_nesting(body)
    except (ValueError, RecursionError):
        raise BadRequest("We could not parse the JSON body of your request.", code="invalid_json") from None
    return body


def _check_bounds(data: bytearray) -> None:
    if len(data) <= OBJECTS_MAX or not _too_much(data):
        return
    bare = outside_texts(data)
    found = f"too many texts; at most {TEXTS_MAX} are accepted" if bare is None else _too_much(bare)
    if found:
        raise BadRequest(f"The body of your request holds {found}.", code="body_above_max_values")


def outside_texts(data: bytearray) -> bytes | None:
    """JSON without its texts; None where there are more than `TEXTS_MAX`."""
    if b"\\" in data:  # the signs that look like ends of texts; pairs of strokes first, from left to right
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return None if data.count(b'"') > 2 * TEXTS_MAX else b"".join(data.split(b'"')[::2])


def _too_much(data: bytes | bytearray) -> str | None:
    """What there is more of than is taken; a value more than the commas say is nobody's loss."""
    for marks, most, what in _BOUNDS:
        found = sum(data.count(mark) for mark in marks)
        if found > most:
            return f"{found} {what}; at most {most} are accepted"
    return None


def _check_nesting(body: Any) -> None:
    """Raises ValueError for JSON nested deeper than anything that walks it later can bear."""
    level, depth = [body], 0
    while level := [item for value in level for item in _items(value) if type(item) in _HOLDS]:
        depth += 1
        if depth == NESTING_MAX:
            raise ValueError(f"nested deeper than {NESTING_MAX} levels")


def _items(value: Any) -> Iterable[Any]:
    return value.values() if type(value) is dict else value if type(value) is list else ()


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
