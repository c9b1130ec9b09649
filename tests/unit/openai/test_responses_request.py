"""A Responses request and the chat request it stands for."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.openai.chat import ChatRequest
from gateway.core.openai.responses.request import FIELDS, MOVED, chat_request, parse_responses_request
from gateway.errors import BadRequest

TOOL = {"type": "function", "name": "sum", "description": "adds", "parameters": {"type": "object"}, "strict": True}
CHAT_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {name: value for name, value in TOOL.items() if name != "type"},
}


def chat(history: Any = (), **fields: Any) -> ChatRequest:
    asked = parse_responses_request({"model": "baton", "input": "hi", **fields}, items_max=10)
    return chat_request(asked, asked.items, history, messages_max=10)[0]


def refusal(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as refused:
        chat(**fields)
    return refused.value


def test_every_parameter_goes_where_chat_has_it() -> None:
    given = chat(
        instructions="be brief",
        max_output_tokens=50,
        temperature=0.5,
        top_p=0.9,
        tools=[TOOL],
        tool_choice={"type": "function", "name": "sum"},
        parallel_tool_calls=False,
        include=["message.output_text.logprobs"],
        top_logprobs=3,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True},
              "verbosity": "high"},
        metadata={"task_type": "sums"},
        safety_identifier="ann",
        stream=True,
    )  # fmt: skip
    assert given.model == "baton"
    assert list(given.messages) == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert given.params == {
        "max_completion_tokens": 50,
        "temperature": 0.5,
        "top_p": 0.9,
        "tools": [CHAT_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "sum"}},
        "parallel_tool_calls": False,
        "logprobs": True,
        "top_logprobs": 3,
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
        "verbosity": "high",
    }
    assert given.stream
    assert given.metadata == {"task_type": "sums"}
    assert given.end_user == "ann"


def test_properties_without_effect_add_no_parameters() -> None:
    quiet: dict[str, Any] = {**dict.fromkeys(FIELDS), "model": "baton", "input": "hi"}
    asked = parse_responses_request(quiet, items_max=10)
    assert chat_request(asked, asked.items, (), messages_max=10)[0].params == {}
    harmless: dict[str, Any] = {
        "background": False,
        "truncation": "disabled",
        "context_management": [],
        "tools": [],
        "include": [],
    }
    assert chat(**harmless, text={"format": {"type": "text"}}, reasoning={}, parallel_tool_calls=True).params == {}


def test_allowed_tools_are_the_only_ones_sent() -> None:
    other = {**TOOL, "name": "other"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]}
    params = chat(tools=[TOOL, other], tool_choice=choice).params
    assert [tool["function"]["name"] for tool in params["tools"]] == ["other"]
    assert params["tool_choice"] == "required"


def test_instructions_stand_before_the_conversation_that_goes_on() -> None:
    history = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    messages = chat(history, instructions="new").messages
    assert [message["content"] for message in messages] == ["new", "one", "two", "hi"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"model": None}, "model", "missing_required_parameter"),
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": []}, "input", "empty_array"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"max_output_tokens": 0}, "max_output_tokens", "integer_below_min_value"),
        ({"background": 1}, "background", "invalid_type"),
        ({"conversation": {"name": "conv_1"}}, "conversation", "invalid_value"),
        ({"conversation": "c", "previous_response_id": "r"}, "conversation", "mutually_exclusive_parameters"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_parameter"),
        ({"truncation": "never"}, "truncation", "invalid_value"),
        ({"context_management": {"type": "compaction"}}, "context_management", "invalid_type"),
        ({"moderation": {"model": "m"}}, "moderation", "unsupported_parameter"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm", "unsupported_parameter"),
        ({"include": ["everything"]}, "include", "invalid_value"),
        ({"include": [{}]}, "include", "invalid_type"),
        ({"reasoning": {"effort": "heroic"}}, "reasoning.effort", "invalid_value"),
        ({"reasoning": {"effort": []}}, "reasoning.effort", "invalid_type"),
        ({"text": {"verbosity": "epic"}}, "text.verbosity", "invalid_value"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema",
         "missing_required_parameter"),
        ({"tools": [{"type": 5}]}, "tools[0].type", "invalid_value"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name", "missing_required_parameter"),
        ({"tools": [{"type": "custom", "name": "x", "format": {"type": "xml"}}]}, "tools[0].format.type",
         "invalid_value"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name",
         "missing_required_parameter"),
        ({"tools": ["sum"]}, "tools[0]", "invalid_type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
        ({"tools": [{**TOOL, "parameters": []}]}, "tools[0].parameters", "invalid_type"),
        ({"tools": [{**TOOL, "async": True}]}, "tools[0].async", "unsupported_parameter"),
        ({"tools": [{**TOOL, "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers",
         "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function", "name": "sum"}}, "tool_choice.name", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice.type", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.tools",
         "invalid_value"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [{"name": "x"}]}},
         "tool_choice.tools[0].name", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [TOOL], "mode": "none"}},
         "tool_choice.mode", "invalid_value"),
        ({"metadata": {"a": 1}}, "metadata", "invalid_type"),
        ({"service_tier": "gold"}, "service_tier", "invalid_value"),
        ({"tools": [{**TOOL, "base_url": "http://evil"}]}, "tools[0].base_url", "refused_field"),
        ({"api_base": "http://evil"}, "api_base", "refused_field"),
        ({"aws_region": "x"}, "aws_region", "refused_field"),
    ],
)  # fmt: skip
def test_what_is_refused_is_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    refused = refusal(**fields)
    assert (refused.param, refused.code) == (param, code)


@pytest.mark.parametrize("name", MOVED)
def test_a_chat_parameter_is_told_where_it_went(name: str) -> None:
    refused = refusal(**{name: 1})
    assert refused.param == name
    assert f"moved to '{MOVED[name]}'" in refused.message


def test_unknown_properties_are_dropped_and_said_or_refused_where_that_is_set() -> None:
    assert chat(stop=["x"], seed=1).dropped == ("seed", "stop")
    with pytest.raises(BadRequest) as refused:
        parse_responses_request({"model": "baton", "input": "hi", "seed": 1}, items_max=10, strict=True)
    assert (refused.value.param, refused.value.code) == ("seed", "unknown_parameter")
    with pytest.raises(BadRequest):
        parse_responses_request([], items_max=10)


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"history": [{"role": "user", "content": "x"}] * 10}, "input"),
        ({"history": [{"role": "user", "content": [{"type": "text"}]}]}, "previous_response_id"),
        ({"input": [{"role": "user", "content": "x"}, {"role": "user", "content": [IMAGE]}], "instructions": "be"},
         "input[1].content[0].image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "https"}]}]},
         "input[0].content[0].file_data"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "strict": True, "schema": {"type": "strin"}}}},
         "text.format.schema"),
        ({"prompt_cache_options": {"mode": "sometimes"}}, "prompt_cache_options.mode"),
    ],
)  # fmt: skip
def test_refusals_of_chat_are_in_the_words_of_responses(fields: dict[str, Any], param: str) -> None:
    refused = refusal(**fields)
    assert str(refused.param).startswith(param)
    for word in ("messages[", "`messages`"):
        assert word not in refused.message + str(refused.param)


def test_reasoning_alone_is_nothing_to_answer() -> None:
    assert refusal(input=[{"type": "reasoning", "id": "rs_1", "summary": []}]).code == "empty_array"


def test_properties_of_responses_alone_are_read_from_the_request() -> None:
    asked = parse_responses_request(
        {"model": "baton", "input": "hi", "store": False, "previous_response_id": "resp_1"}, items_max=10
    )
    assert (asked.store, asked.previous, asked.instructions) == (False, "resp_1", None)
    assert chat(text={"verbosity": "low"}).params == {"verbosity": "low"}


def test_stream_options_and_store_go_on() -> None:
    given = chat(stream=True, stream_options={"include_obfuscation": True}, store=False)
    assert given.obfuscate
    assert given.store is False
    assert chat(stream_options={"include_obfuscation": True, "include_usage": True}).dropped == (
        "stream_options.include_usage",
    )


def test_every_property_of_openais_request_is_known() -> None:
    from openai.types.responses import response_create_params

    theirs = set(response_create_params.ResponseCreateParamsBase.__annotations__) | {"stream"}
    assert theirs <= set(FIELDS)


PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "edits files",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
}
SPACE = {"type": "namespace", "name": "docs", "description": "reads", "tools": [{**TOOL, "defer_loading": True}, PATCH]}


def test_the_tools_of_codex_are_taken_and_hosted_ones_named() -> None:
    given = chat(tools=[TOOL, PATCH, SPACE, {"type": "web_search", "external_web_access": True}, {"type": "x_new"}])
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: X"}}
    custom = {"name": "apply_patch", "description": "edits files", "format": grammar}
    assert given.params["tools"] == [
        CHAT_TOOL,
        {"type": "custom", "custom": custom},
        {"type": "function", "function": {**CHAT_TOOL["function"], "name": "docs__sum"}},
        {"type": "custom", "custom": {**custom, "name": "docs__apply_patch"}},
    ]
    assert given.left_out == ("web_search", "x_new")
    assert given.dropped == ()
    assert chat(tools=[{"type": "web_search"}]).params == {}


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ({"type": "custom", "name": "apply_patch"}, {"type": "custom", "custom": {"name": "apply_patch"}}),
        (
            {"type": "function", "name": "sum", "namespace": "docs"},
            {"type": "function", "function": {"name": "docs__sum"}},
        ),
    ],
)
def test_a_tool_choice_names_a_tool_of_any_kind(choice: dict[str, Any], sent: dict[str, Any]) -> None:
    assert chat(tools=[PATCH, SPACE], tool_choice=choice).params["tool_choice"] == sent


def test_hosted_tools_among_the_allowed_ones_are_passed_over() -> None:
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "web_search"}, {"type": "function", "name": "sum"}],
    }
    assert chat(tools=[TOOL, PATCH], tool_choice=allowed).params["tools"] == [CHAT_TOOL]


def test_a_long_name_in_a_namespace_is_shortened_and_stays_one_of_a_kind() -> None:
    tools = [{**TOOL, "name": f"{'x' * 60}{n}"} for n in (1, 2)]
    names = [tool["function"]["name"] for tool in chat(tools=[{**SPACE, "tools": tools}]).params["tools"]]
    assert len(set(names)) == 2
    assert all(len(name) == 64 for name in names)


def test_calls_of_every_kind_go_on_and_items_of_hosted_tools_beside_them() -> None:
    items = [
        {"role": "user", "content": "go"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "function_call", "call_id": "c2", "name": "sum", "namespace": "docs", "arguments": "{}"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
    ]
    given = chat(input=items)
    assert (given.dropped, given.left_out) == ((), ("web_search_call",))
    assert given.messages[1:] == (
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "custom", "custom": {"name": "apply_patch", "input": "*** Begin"}},
                {"id": "c2", "type": "function", "function": {"name": "docs__sum", "arguments": "{}"}},
            ],
            "output_items": [{"type": "item", "item": items[1], "at": {}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "tool", "tool_call_id": "c2", "content": "3"},
    )
