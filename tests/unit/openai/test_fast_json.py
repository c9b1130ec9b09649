"""msgspec where `json` was: the same values from the same bytes, and the same refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.log.events import Event, canonical, parse
from gateway.core.openai.body import decode_json, parse_json
from gateway.core.openai.reply import json_bytes
from gateway.errors import BadRequest

TEXTS = st.text() | st.text(alphabet=["\ud800", "\udc00", "\x00", "\u2028", "é", "😀", "a", '"', "\\"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
)
_MARKS = [*'{}[],:"\\ 10-.e', "\\u", "d800", "dc00", "E5", "NaN", "Infinity", "null", "true", "\t", "\x00", "é"]
_PARTS = [*_MARKS, '"a"', '"a":', "9" * 30, "1e400", "\ufeff", "\\n", "\\x", "01"]
PIECES = st.lists(st.sampled_from(_PARTS), max_size=12)
ODD = [
    *(
        b'{"a":1,"a":2}',
        b"[1,]",
        b"NaN",
        b"-Infinity",
        b"1e400",
        b"-0",
        b"-0.0",
        b"1.0",
        b"1",
        b"0.1",
        b"01",
        b"1.",
        b"",
    ),
    *(b'"\\ud800"', b'"\\ud83d\\ude00"', b'"\xed\xa0\x80"', b'"\xff"', b'"\x01"', b"\xef\xbb\xbf{}", b"\x0c1"),
    *(b"18446744073709551616", b"123456789012345678901234567890", b"9" * 5_000, b"12345678901234567890.5"),
    *(b"[" * 3_000 + b"]" * 3_000, '"é"'.encode("utf-16"), b"1 2", b"nul", b'"\\x"', b'"\\u12g4"'),
]


def same(ours: Any, theirs: Any) -> bool:
    """Equal in type and value, NaN and the sign of zero included."""
    return repr(ours) == repr(theirs)


def outcome(parsed: Any, data: Any) -> Any:
    try:
        return parsed(data)
    except (ValueError, RecursionError):
        return ValueError


@pytest.mark.parametrize("data", ODD, ids=lambda data: repr(data[:24]))
def test_odd_bytes_are_parsed_as_json_parses_them(data: bytes) -> None:
    assert same(outcome(parse_json, data), outcome(json.loads, data))


@given(PIECES)
def test_any_bytes_are_parsed_as_json_parses_them(pieces: list[str]) -> None:
    data = "".join(pieces).encode("utf-8", "surrogatepass")
    assert same(outcome(parse_json, data), outcome(json.loads, data))


@given(VALUES)
def test_any_value_comes_back(value: Any) -> None:
    data = json.dumps(value).encode()
    assert same(parse_json(data), json.loads(data))


@pytest.mark.parametrize("data", [b"NaN", b'{"a":Infinity}', b'"\\ud800"', b"\xff", b"", b"[" * 3_000, b"9" * 5_000])
def test_a_body_that_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest) as refused:
        decode_json(bytearray(data))
    assert refused.value.code == "invalid_json"


def test_a_body_keeps_its_numbers_and_its_last_duplicate() -> None:
    data = bytearray(b'{"a":1,"seed":123456789012345678901234567890,"a":2.0,"emoji":"\\ud83d\\ude00"}')
    assert same(decode_json(data), {"a": 2.0, "seed": 123456789012345678901234567890, "emoji": "😀"})
    assert not data


@given(VALUES)
def test_an_event_comes_back_from_its_bytes(value: Any) -> None:
    payload = {"value": value}
    parsed = parse(canonical(Event("i", "rollout", 1, payload)))
    plain = json.dumps(payload, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    assert same(parsed, Event("i", "rollout", 1, json.loads(plain)))
    turned = Event("i", "rollout", 1, dict(reversed([("value", value), ("also", [value])])))
    assert canonical(turned) == canonical(Event("i", "rollout", 1, {"value": value, "also": [value]}))


@given(VALUES)
def test_what_clients_get_is_json_without_nonfinite_numbers(value: Any) -> None:
    def refuse(text: str) -> None:
        raise AssertionError(text)

    data = json_bytes(value)
    plain = json.loads(data, parse_constant=refuse)
    assert same(plain, json.loads(json.dumps(value), parse_constant=lambda _: None))


@pytest.mark.parametrize("number", [b"1e400", b"-1e400", b"NaN", b"-Infinity"])
def test_a_body_has_no_number_beyond_a_double(number: bytes) -> None:
    with pytest.raises(BadRequest, match="could not parse"):
        decode_json(bytearray(b'{"a":' + number + b"}"))
