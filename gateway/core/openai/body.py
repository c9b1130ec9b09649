"""Decodes the JSON of a request body, and bounds it before it is built, because building is what costs. Pure.

One byte of JSON can become a hundred bytes in memory, and the gateway walks each value several times. So this file
counts objects, properties and values in the raw bytes first, at gigabytes a second. The bounds lie far above what
clients send: tens of thousands of messages, parts and tools, or an embedding's half a million tokens. Characters
inside strings do not count.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping
from typing import Any

import msgspec

from gateway.errors import BadRequest

_msgspec_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode  # NaN and infinities become null
NESTING_MAX = 64
OBJECTS_MAX = 50_000
PROPERTIES_MAX = 100_000
VALUES_MAX = 500_000
TEXTS_MAX = 200_000  # strings, property names included
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half of a surrogate pair; a complete pair matches too
_CONTAINERS = frozenset((dict, list, tuple))
_BOUNDS = (
    ((b"{", b"["), OBJECTS_MAX, "objects and arrays"),
    ((b":",), PROPERTIES_MAX, "properties"),
    ((b",",), VALUES_MAX, "values"),
)


def decode_json(data: bytearray) -> Any:
    """Decode a body. The result can be encoded as UTF-8 JSON again.

    Empties `data`: a large body is a large part of the memory that serving it takes. Raises BadRequest (`invalid_json`,
    `body_above_max_values`) if the body is not JSON or exceeds a bound.
    """
    _check_bounds(data)
    try:
        body = _decoded(data)
        data.clear()
        check_nesting(body)
    except (ValueError, RecursionError):
        raise BadRequest("We could not parse the JSON body of your request.", code="invalid_json") from None
    return body


def parse_json(data: bytes | str) -> Any:
    """Parse as `json.loads` does, to the same values, in a third of its time. Raises ValueError or RecursionError.

    What msgspec refuses although `json` does not (half a surrogate pair, NaN and infinities, a byte order mark) is
    parsed by `json`.
    """
    try:
        return _msgspec_decode(data)
    except (ValueError, RecursionError):
        return json.loads(data)


def _decoded(data: bytearray) -> Any:
    try:
        return _msgspec_decode(data)
    except (ValueError, RecursionError):  # `json` says what is no JSON, and knows numbers that are no doubles
        has_surrogates = _SURROGATE.search(data) is not None
        body = json.loads(data.decode(), parse_constant=_no_constant, parse_float=_finite)
        if has_surrogates:  # half a surrogate pair decodes, but nothing can encode it again
            json.dumps(body, ensure_ascii=False).encode()
        return body


def _check_bounds(data: bytearray) -> None:
    """Raises BadRequest(body_above_max_values) if the body exceeds a bound."""
    if len(data) <= OBJECTS_MAX or not _excess(data):
        return
    structure = without_texts(data)
    excess = f"too many texts; at most {TEXTS_MAX} are accepted" if structure is None else _excess(structure)
    if excess:
        raise BadRequest(f"The body of your request holds {excess}.", code="body_above_max_values")


def without_texts(data: bytearray) -> bytes | None:
    """Return the JSON without its strings, or None if it holds more than `TEXTS_MAX` of them."""
    if b"\\" in data:  # remove escaped backslashes first, from left to right, then escaped quotes
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return None if data.count(b'"') > 2 * TEXTS_MAX else b"".join(data.split(b'"')[::2])


def _excess(data: bytes | bytearray) -> str | None:
    """Describe the first bound that the data exceeds, or return None. Values are counted by their commas, so the count
    may be one short; that is harmless."""
    for marks, count_max, what in _BOUNDS:
        count = sum(data.count(mark) for mark in marks)
        if count > count_max:
            return f"{count} {what}; at most {count_max} are accepted"
    return None


def check_nesting(value: Any) -> None:
    """Raises ValueError for JSON that is nested too deeply for the recursive code that walks it later."""
    level, depth = [value], 0
    while level := [item for outer in level for item in _items(outer) if type(item) in _CONTAINERS]:
        depth += 1
        if depth == NESTING_MAX:
            raise ValueError(f"nested deeper than {NESTING_MAX} levels")


def _items(value: Any) -> Iterable[Any]:
    return value.values() if type(value) is dict else value if type(value) in _CONTAINERS else ()


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):  # no double is so large
        raise ValueError(f"{text[:20]} is out of range")
    return number


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


class AsMapping:
    """Lets a struct be read as the JSON object that it was decoded from."""

    __slots__ = ()

    def as_json(self) -> dict[str, Any]:
        """The object, as each kind of struct makes it."""
        return {}

    def __getitem__(self, name: str) -> Any:
        return self.as_json()[name]

    def get(self, name: str, default: Any = None) -> Any:
        """`Mapping.get`."""
        return self.as_json().get(name, default)

    def keys(self) -> KeysView[str]:
        """`Mapping.keys`."""
        return self.as_json().keys()

    def items(self) -> ItemsView[str, Any]:
        """`Mapping.items`."""
        return self.as_json().items()

    def __iter__(self) -> Iterator[str]:
        return iter(self.as_json())

    def __len__(self) -> int:
        return len(self.as_json())

    def __eq__(self, other: object) -> bool:
        return self.as_json() == (other.as_json() if isinstance(other, AsMapping) else other)

    __hash__ = None  # type: ignore[assignment]


Mapping.register(AsMapping)


def json_bytes(value: Any) -> bytes:
    """Compact JSON as UTF-8.

    NaN and ±inf, which JSON cannot represent, become null. Half a surrogate pair, which UTF-8 cannot represent, stays
    the escape it was received as: the other half may follow in the next chunk.
    """
    try:
        return _encode(value)
    except (TypeError, ValueError, RecursionError):  # half a surrogate pair, or a value that only `json` encodes
        pass
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(replace_nonfinite(value), ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(json.loads(text), separators=(",", ":")).encode()


def replace_nonfinite(value: Any) -> Any:
    """Replace NaN and ±inf in JSON data by None, as JSON cannot represent them. A masked token's log-prob is -inf."""
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
