"""Chat bodies as requests of Anthropic's API: nothing in them that it refuses, nothing lost that it has."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.anthropic.outbound import JSON_TOOL, to_request
from gateway.errors import UpstreamRefused

NEW, OLD = "claude-sonnet-4-5", "claude-3-5-haiku-latest"
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": "é"}'}}
TOOL = {"type": "function", "function": {"name": "find", "description": "finds", "parameters": {"properties": {}}}}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 3}, "maximum": {"type": "string", "enum": ["a"]}},
    "required": ["n"],
}


def sent(*messages: Any, model: str = NEW, **fields: Any) -> dict[str, Any]:
    return to_request({"model": model, "max_tokens": 50, "messages": list(messages), **fields})


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_a_conversation_becomes_turns_that_alternate() -> None:
    body = sent(
        {"role": "developer", "content": "be brief"},
        {"role": "system", "content": [{"type": "text", "text": "and kind"}]},
        user("hi"),
        user("there"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "found", "is_error": True},
        user("so?"),
        {"role": "assistant", "content": "I say  \n"},
    )
    assert [part["text"] for part in body["system"]] == ["be brief", "and kind"]
    assert [turn["role"] for turn in body["messages"]] == ["user", "assistant", "user", "assistant"]
    assert body["messages"][1]["content"] == [{"type": "tool_use", "id": "c1", "name": "find", "input": {"q": "é"}}]
    result, words = body["messages"][2]["content"]
    assert result == {"type": "tool_result", "tool_use_id": "c1", "content": "found", "is_error": True}
    assert words == {"type": "text", "text": "so?"}
    assert body["messages"][3]["content"] == "I say"


def test_nothing_empty_is_sent() -> None:
    body = sent(
        {"role": "system", "content": ""},
        user([{"type": "text", "text": " "}, {"type": "text", "text": "hi"}]),
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
        stop=["\n", "END"],
    )
    assert "system" not in body
    assert body["messages"][0]["content"] == "hi"
    assert body["messages"][2]["content"] == [{"type": "tool_result", "tool_use_id": "c1", "content": ""}]
    assert body["stop_sequences"] == ["END"]
    only_system = sent({"role": "system", "content": "be brief"})
    assert [turn["role"] for turn in only_system["messages"]] == ["user"]


@pytest.mark.parametrize(
    ("model", "after", "role"),
    [
        ("claude-opus-5", [], "system"),
        ("claude-opus-5", [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "go"}], "system"),
        ("claude-opus-5", [{"role": "user", "content": "go"}], "user"),
        (NEW, [], "user"),
    ],
)
def test_what_a_system_says_between_turns_goes_where_the_model_takes_it(model: str, after: Any, role: str) -> None:
    body = sent(user("hi"), {"role": "system", "content": "now in French"}, *after, model=model)
    holder = next(turn for turn in body["messages"] if "now in French" in str(turn))
    assert holder["role"] == role


def test_media_become_blocks() -> None:
    text = base64.b64encode(b"words").decode()
    body = sent(
        user(
            [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                {"type": "image_url", "image_url": {"url": "https://host/a.png"}, "cache_control": {"type": "x"}},
                {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBE", "filename": "a.pdf"}},
                {"type": "file", "file": {"file_data": f"data:text/csv;base64,{text}"}},
            ]
        )
    )
    one, two, pdf, csv = body["messages"][0]["content"]
    assert one == {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    assert two["source"] == {"type": "url", "url": "https://host/a.png"}
    assert two["cache_control"] == {"type": "x"}
    assert (pdf["source"]["media_type"], pdf["title"]) == ("application/pdf", "a.pdf")
    assert csv["source"] == {"type": "text", "media_type": "text/plain", "data": "words"}
    with pytest.raises(UpstreamRefused):
        sent(user([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]))


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, None),
        ({"tool_choice": "auto"}, {"type": "auto"}),
        ({"tool_choice": "required"}, {"type": "any"}),
        ({"tool_choice": "none", "parallel_tool_calls": False}, {"type": "none"}),
        ({"tool_choice": {"type": "function", "function": {"name": "find"}}}, {"type": "tool", "name": "find"}),
        ({"parallel_tool_calls": False}, {"type": "auto", "disable_parallel_tool_use": True}),
    ],
)
def test_the_choice_of_tools(fields: dict[str, Any], choice: Any) -> None:
    body = sent(user("hi"), tools=[TOOL], **fields)
    assert body["tools"] == [
        {"name": "find", "description": "finds", "input_schema": {"type": "object", "properties": {}}}
    ]
    assert body.get("tool_choice") == choice


def test_allowed_tools_are_those_that_are_sent() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    tools = [{"type": "function", "function": {"name": "find"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}
    body = sent(user("hi"), tools=[TOOL, other], tool_choice=choice)
    assert [tool["name"] for tool in body["tools"]] == ["find"]
    assert body["tool_choice"] == {"type": "any"}


def test_calls_of_a_conversation_have_their_tools_beside_them() -> None:
    turns = (
        user("hi"),
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
    )
    body = sent(*turns)
    assert ([tool["name"] for tool in body["tools"]], body["tool_choice"]) == (["find"], {"type": "none"})


def test_the_older_functions_are_tools() -> None:
    call = {"role": "assistant", "function_call": {"name": "find", "arguments": "{}"}}
    functions = [{"name": "find", "parameters": {"type": "object", "properties": {"q": {}}}}]
    body = sent(user("hi"), call, {"role": "function", "name": "find", "content": "1"}, functions=functions)
    asked, answered = body["messages"][1]["content"][0], body["messages"][2]["content"][0]
    assert asked["id"] == answered["tool_use_id"]
    assert body["tools"][0]["input_schema"] == {"type": "object", "properties": {"q": {}}}


def test_a_schema_is_sent_without_what_anthropic_refuses() -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    body = sent(user("hi"), response_format=format_, output_config={"effort": "low"})
    assert body["output_config"]["effort"] == "low"
    schema = body["output_config"]["format"]["schema"]
    assert schema["properties"] == {"n": {"type": "integer"}, "maximum": {"type": "string", "enum": ["a"]}}
    assert schema["additionalProperties"] is False
    assert "tools" not in body


@pytest.mark.parametrize(
    ("model", "format_", "fields", "choice"),
    [
        (OLD, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, {}, {"type": "tool", "name": JSON_TOOL}),
        (NEW, {"type": "json_object"}, {}, {"type": "tool", "name": JSON_TOOL}),
        (OLD, {"type": "json_object"}, {"tools": [TOOL]}, {"type": "any"}),
        (OLD, {"type": "json_object"}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"type": "auto"}),
    ],
)
def test_a_model_without_schemas_replies_by_a_tool(model: str, format_: Any, fields: Any, choice: Any) -> None:
    body = sent(user("hi"), model=model, response_format=format_, **fields)
    assert body["tools"][-1]["name"] == JSON_TOOL
    assert body["tool_choice"] == choice


@pytest.mark.parametrize(
    ("name", "value", "idle"), [("n", 2, 1), ("seed", 7, None), ("logprobs", True, False), ("logit_bias", {"1": 1}, {})]
)
def test_what_the_api_cannot_have_is_refused_by_name(name: str, value: Any, idle: Any) -> None:
    with pytest.raises(UpstreamRefused) as caught:
        sent(user("hi"), **{name: value})
    assert (caught.value.param, caught.value.dispatched) == (name, False)
    assert name not in sent(user("hi"), **{name: idle})


WORDS = st.text(max_size=30)
PARTS = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, WORDS),
    st.builds(lambda text: {"type": "image_url", "image_url": {"url": f"https://host/{text}"}}, WORDS),
    st.just({"type": "file", "file": {"file_data": "data:text/plain;base64,AAAA", "filename": "a"}}),
)
TURNS = st.one_of(
    st.builds(lambda role, content: {"role": role, "content": content},
              st.sampled_from(("system", "developer", "user")), st.one_of(WORDS, st.lists(PARTS, max_size=3))),
    st.builds(lambda text: {"role": "assistant", "content": text}, WORDS),
    st.builds(lambda text: {"role": "assistant", "content": None, "tool_calls": [
        {**CALL, "function": {"name": "find", "arguments": text}}]}, WORDS),
    st.builds(lambda text: {"role": "tool", "tool_call_id": "c1", "content": text}, WORDS),
)  # fmt: skip


@given(st.lists(TURNS, max_size=6), st.booleans(), st.sampled_from((None, "json_object", "json_schema")), WORDS)
def test_a_request_is_hardly_larger_than_what_was_measured(turns: Any, tools: bool, form: Any, text: str) -> None:
    """Braces and names of properties apart, which no model reads."""
    schema = {"name": "x", "schema": {**SCHEMA, "description": text}}
    body = {"model": NEW, "max_tokens": 50, "messages": turns} | ({"tools": [TOOL]} if tools else {})
    body |= {"response_format": {"type": form, "json_schema": schema}} if form else {}
    items = sum(1 + len(turn["content"] or ()) * isinstance(turn["content"], list) for turn in turns)
    made = to_request(body)
    assert len(json.dumps(made)) <= len(json.dumps(body)) + 100 * items + 768
    for turn in made["messages"]:
        assert turn["content"]
        assert turn["role"] in ("user", "assistant")


def test_a_text_completion_is_a_message_of_its_prompt() -> None:
    body = to_request({"model": NEW, "prompt": ["Once"], "max_tokens": 5})
    assert body == {"model": NEW, "max_tokens": 5, "messages": [{"role": "user", "content": "Once"}]}
    with pytest.raises(UpstreamRefused):
        to_request({"model": NEW, "prompt": ["a", "b"], "max_tokens": 5})
