"""Promised shapes: which schemas can be promised, and whether a reply keeps to one, however hostile either is."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.openai.structured import NODES_MAX, ReplyShape, check_schema, shape_of
from gateway.errors import BadRequest

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": {"type": "string", "pattern": "^[a-z]+$"}},
    "required": ["x", "name"],
    "additionalProperties": False,
}


def choice(content: object, finish_reason: str = "stop", **message: Any) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish_reason}


def test_which_requests_are_promised_a_shape() -> None:
    def asked(**schema: Any) -> dict[str, Any]:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT, **schema}}}

    assert shape_of(asked(strict=True)) == ReplyShape(POINT)
    assert shape_of({"response_format": {"type": "json_object"}}) == ReplyShape(None)
    for none in ({}, asked(), asked(strict=False), {"response_format": {"type": "text"}}):
        assert shape_of(none) is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"x": 1, "name": "a"}', None),
        ('{"x": "1", "name": "a"}', "$.x"),
        ('{"x": 1}', "'name' is a required property"),
        ('{"x": 1, "name": "a", "y": 2}', "Additional properties"),
        ('{"x": 1, "name": "A"}', "does not match"),
        ('```json\n{"x": 1, "name": "a"}\n```', "not JSON"),
        ('{"x": NaN, "name": "a"}', "not JSON"),
        ("", "not JSON"),
        (None, "not JSON"),
        ([{"type": "text"}], "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_reply_keeps_to_its_schema_or_the_first_thing_wrong_is_named(content: object, problem: str | None) -> None:
    found = ReplyShape(POINT).problem(choice(content))
    assert found is None if problem is None else found is not None and problem in found
    assert found is None or len(found) <= 300


@pytest.mark.parametrize(
    "unjudged",
    [
        choice('{"x": ', "length"),
        choice("", "content_filter"),
        choice(None, "tool_calls", tool_calls=[{"id": "1"}]),
        choice(None, refusal="I will not"),
        choice(None, "function_call", function_call={"name": "f"}),
    ],
)
def test_a_reply_without_an_answer_has_no_shape_problem(unjudged: dict[str, Any]) -> None:
    assert ReplyShape(POINT).problem(unjudged) is None
    assert ReplyShape(None).problem(unjudged) is None


def test_json_mode_wants_an_object_and_no_more() -> None:
    assert ReplyShape(None).problem(choice('{"anything": [1]}')) is None
    assert ReplyShape(None).problem(choice("[1]")) == "it is not a JSON object"
    assert ReplyShape(None).fits({"choices": [choice("{}"), choice("{}")]})
    assert not ReplyShape(None).fits({"choices": [choice("{}"), choice("no")]})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://127.0.0.1:1/schema"},
        {"$ref": "file:///etc/passwd"},
        {"$ref": "other.json"},
        {"$ref": "#/$defs/none"},
        {"$ref": 7},
        {"$id": "http://127.0.0.1:1/", "type": "object"},
        {"$dynamicRef": "#x"},
        {"patternProperties": {"(a+)+$": {}}},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "pattern": "("},
        {"type": "string", "pattern": 7},
        {"type": "nonsense"},
        {"type": ["string", 7]},
        {"properties": {"a": 7}},
        {"properties": []},
        {"required": "a"},
        {"anyOf": []},
        {"anyOf": {}},
        {"minLength": -1},
        {"multipleOf": 0},
        {"maximum": "7"},
        {"items": [{}]},
        {"enum": "a"},
        {"anyOf": [{"items": {"$ref": "https://a.example"}}]},
        {"properties": {str(i): {} for i in range(NODES_MAX)}},
    ],
)
def test_a_schema_that_cannot_be_checked_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        check_schema(schema, "response_format.json_schema.schema")
    assert (refused.value.code, refused.value.param) == ("invalid_json_schema", "response_format.json_schema.schema")


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"},
        {"properties": {"$id": {"type": "string"}, "pattern": {"type": "string"}, "$ref": {"type": "string"}}},
        {"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
        {"$defs": {"a/b": True}, "$ref": "#/$defs/a~1b"},
        {"enum": [{"$ref": "http://a.example"}]},
        {"prefixItems": [{"type": "string"}], "items": False},
        {"type": ["string", "null"], "format": "email"},
        {"not": {"type": "null"}, "if": {"type": "string"}, "then": {"minLength": 1}},
    ],
)
def test_other_schemas_are_taken(schema: dict[str, Any]) -> None:
    check_schema(schema, "x")
    ReplyShape(schema).problem(choice('{"next": {"next": {}}}'))


def test_formats_that_can_be_checked_are() -> None:
    for name, good, wrong in (("date", "2026-01-31", "31.1."), ("uuid", "12345678-1234-5678-1234-567812345678", "x")):
        shape = ReplyShape({"type": "string", "format": name})
        assert shape.problem(choice(json.dumps(good))) is None
        assert shape.problem(choice(json.dumps(wrong))) is not None


def _bomb() -> dict[str, Any]:
    """Trying every way through it takes 2**40 steps."""
    steps = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    return {"$defs": {**steps, "d40": {"type": "integer"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    ("schema", "content"),
    [
        (_bomb(), '"x"'),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "1"),
        ({"type": "string", "pattern": "^(a+)+$"}, json.dumps("a" * 100_000 + "!")),
    ],
)
def test_neither_schema_nor_reply_can_keep_the_gateway_busy(schema: dict[str, Any], content: str) -> None:
    check_schema(schema, "x")
    began = time.process_time()
    assert ReplyShape(schema).problem(choice(content)) is not None
    assert time.process_time() - began < 5  # unbounded, each of them takes longer than anybody waits


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
KEYWORDS = ("type", "properties", "$ref", "anyOf", "items", "enum", "required", "pattern", "$defs", "minimum", "not")


@given(st.dictionaries(st.sampled_from(KEYWORDS), json_values, max_size=4), json_values)
def test_any_schema_is_refused_by_name_or_checks_any_reply(schema: dict[str, Any], value: object) -> None:
    try:
        check_schema(schema, "x")
    except BadRequest:
        return
    found = ReplyShape(schema).problem(choice(json.dumps(value)))
    assert found is None or found
