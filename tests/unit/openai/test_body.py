"""A body's bytes as JSON data: read, or refused before it costs anything."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.openai.body import (
    NESTING_MAX,
    OBJECTS_MAX,
    PROPERTIES_MAX,
    TEXTS_MAX,
    VALUES_MAX,
    decode_json,
    without_texts,
)
from gateway.core.openai.chat import parse_request
from gateway.core.openai.shapes import PARTS_MAX
from gateway.core.openai.shapes import PROPERTIES_MAX as KNOWN_MAX
from gateway.errors import BadRequest

DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
PARTED: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": ""}]}]
BOUND = "at most {} are accepted"


@given(DATA, st.booleans())
def test_what_is_written_is_read(data: Any, ascii_only: bool) -> None:
    assert decode_json(bytearray(json.dumps(data, ensure_ascii=ascii_only).encode("utf-8", "replace"))) is not None or (
        data is None
    )


@given(DATA, st.booleans())
def test_texts_are_told_from_what_stands_around_them(data: Any, ascii_only: bool) -> None:
    written = json.dumps(data, ensure_ascii=ascii_only).encode("utf-8", "replace")
    assert without_texts(bytearray(written)) == re.sub(rb'"(?:[^"\\]|\\.)*"', b"", written)


def test_the_bytes_are_let_go() -> None:
    data = bytearray(b'{"a": 1}')
    assert decode_json(data) == {"a": 1}
    assert not data


@pytest.mark.parametrize(
    ("body", "most"),
    [
        (b"[" + b"{}," * OBJECTS_MAX + b"{}]", OBJECTS_MAX),
        (b"[" + b"[]," * OBJECTS_MAX + b"{}]", OBJECTS_MAX),
        (b"{" + b",".join(b'"%d":1' % n for n in range(PROPERTIES_MAX + 1)) + b"}", PROPERTIES_MAX),
        (b"[" + b"1," * (VALUES_MAX + 1) + b"1]", VALUES_MAX),
        (b"[" + b'"",' * (VALUES_MAX + 1) + b'""]', TEXTS_MAX),
        (b"[" + b'"\\\\",' * (VALUES_MAX + 1) + b'""]', TEXTS_MAX),
    ],
    ids=["objects", "arrays", "properties", "values", "texts", "texts that end in a stroke"],
)
def test_a_body_with_too_many_values_is_refused_with_the_bound(body: bytes, most: int) -> None:
    with pytest.raises(BadRequest, match=BOUND.format(most)) as refused:
        decode_json(bytearray(body))
    assert refused.value.code == "body_above_max_values"


@pytest.mark.parametrize("text", ["{" * 200_000, ":,[" * 200_000, '"{' * 200_000, "\\" * 200_001, 'a\\"b{' * 100_000])
def test_punctuation_in_texts_does_not_count_as_values(text: str) -> None:
    assert decode_json(bytearray(json.dumps({"messages": [{"content": text}]}).encode())) == {
        "messages": [{"content": text}]
    }


def test_the_bounds_themselves_are_taken() -> None:
    assert len(decode_json(bytearray(b"[" + b"{}," * (OBJECTS_MAX - 2) + b"{}]"))) == OBJECTS_MAX - 1
    assert len(decode_json(bytearray(b"[" + b"1," * VALUES_MAX + b"1]"))) == VALUES_MAX + 1


def test_nesting_is_bounded() -> None:
    assert decode_json(bytearray(b"[" * NESTING_MAX + b"]" * NESTING_MAX))
    with pytest.raises(BadRequest, match="could not parse"):
        decode_json(bytearray(b"[" * (NESTING_MAX + 1) + b"]" * (NESTING_MAX + 1)))


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b"[NaN]", b'"\\ud800"', b'{"\\udfff": 1}', b'"\\udc00\\ud800"', b"1" * 5000, b"[1] [2]"],
)
def test_a_body_that_is_no_json_or_cannot_be_encoded_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="could not parse") as refused:
        decode_json(bytearray(body))
    assert refused.value.code == "invalid_json"


def test_a_whole_pair_is_a_character() -> None:
    assert decode_json(bytearray(b'"\\ud83d\\ude00"')) == "\U0001f600"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({f"u{n}": 1 for n in range(KNOWN_MAX)}, None),
        ({"messages": [HELLO[0] | {f"u{n}": 1 for n in range(KNOWN_MAX)}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": PARTED[0]["content"] * PARTS_MAX}, *PARTED]}, "messages[1].content"),
        ({"messages": [HELLO[0] | {f"u{n}": 1 for n in range(200)}] * 30}, "messages[20].u96"),
    ],
    ids=["properties", "properties of a message", "parts", "unknown properties"],
)
def test_a_list_that_is_too_long_is_refused_with_its_path_and_bound(body: dict[str, Any], param: str | None) -> None:
    with pytest.raises(
        BadRequest, match=r"at most (256|4096) are accepted|more than 4096 unknown properties"
    ) as refused:
        parse_request({"model": "m", "messages": HELLO, **body}, messages_max=100)
    assert refused.value.param == param
