"""References in schemas: what LiteLLM's vendors get in their place, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.openai.vendors.schemas import GROWTH_BYTES_MAX, refers, without_references
from gateway.core.pool.models import follows_references
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import BadRequest

CITY = {"type": "object", "properties": {"name": {"type": "string"}}}


def a_worker(model: str = "gemini/gemini-2.5-pro", kind: str = "litellm", **fields: Any) -> WorkerSpec:
    entry = {"name": "w", "handle": "atlas", "kind": kind, "model": model, **fields}
    return WorkerSpec.model_validate(entry)


EVERYWHERE = follows_references(a_worker())
CLAUDE = follows_references(a_worker("azure_ai/claude-haiku-4-5"))


def tools(schema: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [], "tools": [{"type": "function", "function": {"name": "go", "parameters": schema}}]}


def a_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}}


def sent(schema: dict[str, Any], model: str = "gemini/gemini-2.5-pro") -> Any:
    body = tools(schema)
    before = json.dumps(body)
    changed = without_references(follows_references(a_worker(model)), body, "w")
    assert json.dumps(body) == before
    return changed["tools"][0]["function"]["parameters"]


@pytest.mark.parametrize(
    ("reference", "place"),
    [("#/$defs/City", "$defs"), ("#/definitions/City", "definitions"), ("City", "$defs"), ("/$defs/City", "$defs")],
)
def test_a_definition_stands_in_place_of_each_reference_to_it(reference: str, place: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": reference}, "b": {"$ref": reference}},
        place: {"City": CITY},
    }
    assert sent(schema) == {"type": "object", "properties": {"a": CITY, "b": CITY}}


def test_what_is_beside_a_reference_counts_more_than_its_target() -> None:
    schema = {
        "items": [{"$ref": "#/$defs/City", "description": "here"}],
        "$defs": {"City": {**CITY, "description": "x"}},
    }
    assert sent(schema) == {"items": [{**CITY, "description": "here"}]}


def test_a_pointer_leads_through_lists_and_escaped_names() -> None:
    schema = {"anyOf": [{"$ref": "#/$defs/a~1b/oneOf/1"}], "$defs": {"a/b": {"oneOf": [{"type": "null"}, CITY]}}}
    assert sent(schema) == {"anyOf": [CITY]}


def test_a_definition_that_holds_itself_is_copied_once() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}, "of": {"$ref": "#"}}}
    plain = sent({"type": "object", "properties": {"first": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": node}})
    copied = plain["properties"]["first"]["properties"]
    assert copied["next"] == {"type": "object"}
    assert "$ref" not in json.dumps(plain)


def test_properties_may_have_the_names_of_keywords() -> None:
    named = {"$ref": CITY, "definitions": {"type": "array"}, "$defs": {"type": "string"}, "x": {"$ref": "#/$defs/C"}}
    assert sent({"properties": named, "$defs": {"C": CITY}}) == {"properties": {**named, "x": CITY}}


def test_no_reference_is_left_for_litellm_to_follow() -> None:
    hidden = {
        "definitions": {"B": {"a": [{"$ref": "B2"}] * 2}, "B2": CITY},
        "list": [{"$ref": "B"}, {"$ref": "nowhere"}],
    }
    plain = json.dumps(sent({"type": "object", "default": hidden, "properties": {"$ref": "B", "p": {"$ref": 5}}}))
    assert '"$ref": "' not in plain


def doubling(levels: int, **more: Any) -> dict[str, Any]:
    """A schema of some bytes a level, whose copies double with each level."""
    names = {f"D{n}": {"anyOf": [{"$ref": f"#/$defs/D{n + 1}"}] * 2} for n in range(levels)}
    return {"properties": {"a": {"$ref": "#/$defs/D0"}}, "$defs": {**names, f"D{levels}": {"type": "string", **more}}}


CHAIN = {"$ref": "#/$defs/D0", "$defs": {f"D{n}": {"items": {"$ref": f"#/$defs/D{n + 1}"}} for n in range(99)}}


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (doubling(20), "references to copy"),
        (doubling(3, description="x" * 60_000), f"grows by more than {GROWTH_BYTES_MAX} bytes"),
        (
            {"$ref": "#/$defs/D0", "$defs": {f"D{n}": {"items": {"$ref": f"#/$defs/D{n + 1}"}} for n in range(99)}},
            "deeper",
        ),
    ],
)
def test_a_schema_that_grows_too_far_is_refused_with_its_path(schema: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadRequest, match=problem) as caught:
        without_references(EVERYWHERE, tools(schema), "w")
    assert caught.value.param == "tools[0].function.parameters"
    with pytest.raises(BadRequest) as caught:
        without_references(CLAUDE, a_format(schema), "w")
    assert caught.value.param == "response_format.json_schema.schema"


def test_all_schemas_of_a_request_grow_within_one_bound() -> None:
    tool = tools(doubling(3, description="x" * 15_000))["tools"][0]
    without_references(EVERYWHERE, {"tools": [tool]}, "w")
    with pytest.raises(BadRequest) as caught:
        without_references(EVERYWHERE, {"tools": [tool] * 3}, "w")
    assert caught.value.param == "tools[2].function.parameters"


@pytest.mark.parametrize(
    ("model", "in_tools", "in_old_tools", "in_formats"),
    [
        ("gemini/gemini-2.5-pro", True, True, False),
        ("gemini/gemini-1.5-pro", True, True, True),
        ("bedrock/amazon.nova-pro-v1:0", True, True, True),
        ("azure_ai/claude-haiku-4-5", False, True, True),
        ("anthropic/claude-haiku-4-5", False, False, False),
        ("fireworks_ai/llama", False, True, True),
        ("mistral/mistral-large-latest", False, False, False),
        ("openai/gpt-5", False, False, False),
    ],
)
def test_only_providers_that_follow_references_get_none(
    model: str, in_tools: bool, in_old_tools: bool, in_formats: bool
) -> None:
    follows, new = follows_references(a_worker(model)), {"items": {"$ref": "#/$defs/C"}, "$defs": {"C": CITY}}
    old = {"items": {"$ref": "#/definitions/C"}, "definitions": {"C": CITY}}
    assert refers(follows, tools(new)) is in_tools
    assert refers(follows, tools(old)) is in_old_tools
    assert refers(follows, a_format(new)) is in_formats
    assert not refers(follows, tools(CITY))


def test_workers_of_openais_wire_get_schemas_as_they_are() -> None:
    for api in ("chat", "responses"):
        spec = a_worker("gpt-5", "openai", url="http://127.0.0.1:1/v1", api=api)
        assert not follows_references(spec)
