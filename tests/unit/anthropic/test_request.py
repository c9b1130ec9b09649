"""A Messages request and the chat request it stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from anthropic.types import MessageCountTokensParams, StopReason
from anthropic.types.message_create_params import MessageCreateParamsBase

from gateway.core.anthropic.native import without_native
from gateway.core.anthropic.request import COUNTED, FIELDS, MessageRequest, parse_message_request
from gateway.errors import BadRequest, UpstreamRefused

PAGE = Path(__file__).resolve().parents[3] / "docs" / "anthropic.md"
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
SUM = {"name": "sum", "description": "adds", "input_schema": {"type": "object"}, "strict": True}
CHAT_SUM = {
    "type": "function",
    "function": {"name": "sum", "description": "adds", "strict": True, "parameters": {"type": "object"}},
}
USE = {"type": "tool_use", "id": "toolu_1", "name": "sum", "input": {"a": "é"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"}


def read(messages: Any = "hi", **fields: Any) -> MessageRequest:
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    body = {"model": "baton", "max_tokens": 9, "messages": turns, **fields}
    return parse_message_request(body, messages_max=10)


def sent(*turns: Any, **fields: Any) -> list[dict[str, Any]]:
    """The chat messages of turns, each as (role, content)."""
    asked = read([{"role": role, "content": content} for role, content in turns], **fields)
    return [dict(message) for message in asked.chat.messages]


def refusal(messages: Any = "hi", **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as refused:
        read(messages, **fields)
    return refused.value


def test_every_property_of_anthropics_types_is_known() -> None:
    properties = get_type_hints(MessageCreateParamsBase) | get_type_hints(MessageCountTokensParams)
    assert properties.keys() <= FIELDS.keys()


def test_every_property_has_its_row() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in FIELDS if f"`{name}`" not in page] == []
    assert [reason for reason in get_args(StopReason) if f"`{reason}`" not in page] == []


def test_every_parameter_goes_where_chat_has_it() -> None:
    asked = read(
        system="be brief",
        temperature=0.5,
        top_p=0.9,
        stop_sequences=["END"],
        tools=[SUM],
        tool_choice={"type": "tool", "name": "sum", "disable_parallel_tool_use": True},
        metadata={"user_id": "ann"},
        service_tier="standard_only",
        stream=True,
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
    )
    assert list(asked.chat.messages) == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert asked.chat.params == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["END"],
        "tools": [CHAT_SUM],
        "tool_choice": {"type": "function", "function": {"name": "sum"}},
        "parallel_tool_calls": False,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
        },
    }
    assert (asked.chat.model, asked.chat.stream, asked.chat.end_user) == ("baton", True, "ann")
    assert asked.stops == ("END",)
    assert asked.chat.dropped == ()


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
    ],
)
def test_the_choice_of_tools(choice: Any, expected: dict[str, Any]) -> None:
    params = read(tools=[SUM], tool_choice=choice).chat.params
    assert {name: params[name] for name in params if name.startswith(("tool_choice", "parallel"))} == expected
    assert "tool_choice" not in read(tool_choice={"type": "auto"}).chat.params


@pytest.mark.parametrize(
    ("fields", "effort", "display"),
    [
        ({}, None, "hidden"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, None, "hidden"),
        ({"thinking": {"type": "adaptive"}}, None, "shown"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "xhigh"}}, "xhigh", "shown"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, None, "omitted"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "low", "shown"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5000}}, "medium", "shown"),
        ({"thinking": {"type": "enabled", "budget_tokens": 32000}}, "high", "shown"),
    ],
)
def test_thinking_becomes_an_effort(fields: dict[str, Any], effort: str | None, display: str) -> None:
    asked = read(**fields)
    assert (asked.chat.params.get("reasoning_effort"), asked.thinking) == (effort, display)


def test_tool_results_become_messages_in_front_of_the_users_words() -> None:
    turns = sent(
        ("user", "add"),
        ("assistant", [{"type": "text", "text": "I add."}, USE, {**USE, "id": "toolu_2"}]),
        (
            "user",
            [
                RESULT,
                {**RESULT, "tool_use_id": "toolu_2", "is_error": True, "content": [{"type": "text", "text": "no"}]},
                {"type": "text", "text": "so?"},
            ],
        ),
    )
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "tool", "user"]
    assert turns[1]["content"] == "I add."
    assert turns[1]["tool_calls"][0] == {
        "id": "toolu_1",
        "type": "function",
        "function": {"name": "sum", "arguments": '{"a": "é"}'},
    }
    assert turns[2] == {"role": "tool", "tool_call_id": "toolu_1", "content": "2"}
    assert [part["text"] for part in turns[3]["content"]] == ["Error: ", "no"]
    assert turns[4] == {"role": "user", "content": "so?"}


def test_an_image_in_a_tool_result_stays_in_it() -> None:
    result = {**RESULT, "content": [{"type": "text", "text": "a photo"}, IMAGE]}
    turns = sent(("user", "look"), ("assistant", [USE]), ("user", [result]))
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    assert turns[2]["content"] == [{"type": "text", "text": "a photo"}, image]
    empty = {key: value for key, value in RESULT.items() if key != "content"}
    assert sent(("user", "look"), ("assistant", [USE]), ("user", [empty]))[2]["content"] == ""


def test_images_documents_and_search_results_become_parts() -> None:
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0xLjQ="}
    blocks = [
        IMAGE,
        {"type": "image", "source": {"type": "url", "url": "https://host/a.png"}},
        {"type": "document", "source": pdf, "title": "a.pdf"},
        {"type": "document", "source": {"type": "url", "url": "https://host/b.pdf"}},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "words"}, "title": "T"},
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "inner"}]},
         "context": "C"},
        {"type": "search_result", "source": "https://s", "title": "S", "content": [{"type": "text", "text": "hit"}]},
    ]  # fmt: skip
    (message,), lost = without_native(sent(("user", blocks)), caches=True)
    assert lost == []
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        {"type": "image_url", "image_url": {"url": "https://host/a.png"}},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERi0xLjQ=", "filename": "a.pdf"}},
        {"type": "file", "file": {"file_data": "https://host/b.pdf", "filename": "document.pdf"}},
        {"type": "text", "text": "T\nwords"},
        {"type": "text", "text": "C"},
        {"type": "text", "text": "inner"},
        {"type": "text", "text": "S (https://s)\nhit"},
    ]


def test_thinking_goes_back_as_reasoning() -> None:
    unsigned = {"type": "thinking", "thinking": "hm", "signature": ""}
    _, message, _ = sent(("user", "hi"), ("assistant", [unsigned, {"type": "text", "text": "yes"}]), ("user", "why?"))
    assert message == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


def test_system_text_may_stand_in_blocks_and_between_turns() -> None:
    turns = sent(("user", "hi"), ("system", "later"), system=[{"type": "text", "text": "a"}])
    assert turns == [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "later"},
    ]
    parts = sent(("user", "hi"), system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])[0]["content"]
    assert parts == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert sent(("user", "hi"), system=[]) == [{"role": "user", "content": "hi"}]


def test_an_empty_assistant_turn_stays_a_turn() -> None:
    assert sent(("user", "hi"), ("assistant", []), ("user", "well?"))[1] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("turns", "param"),
    [
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [USE]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [RESULT]}], "messages[0].content[0].tool_use_id"),
        ([{"role": "assistant", "content": [USE]}], "messages[0]"),
        ([{"role": "assistant", "content": [USE]}, {"role": "user", "content": "x"}], "messages[0]"),
        ([{"role": "assistant", "content": [USE]}, {"role": "user", "content": [{**RESULT, "content": [USE]}]}],
         "messages[1].content[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}],
         "messages[0].content[0].source.type"),
        ([{"role": "user", "content": [{"type": "image", "source": {"type": "text", "data": "x"}}]}],
         "messages[0].content[0].source.type"),
        ([{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}],
         "messages[0].content[0].source"),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "api_base": "y"}]}],
         "messages[0].content[0].api_base"),
    ],
)  # fmt: skip
def test_bad_messages_are_named_to_the_block(turns: Any, param: str) -> None:
    error = refusal(turns)
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": ["a"] * 1025}, "stop_sequences"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"tools": ["sum"]}, "tools"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "sum"}]}, "tools[0].input_schema"),
        ({"tools": [SUM], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [SUM], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"container": {"id": "c"}}, "container"),
        ({"mcp_servers": [{"url": "https://x"}]}, "mcp_servers"),
        ({"api_base": "https://x"}, "api_base"),
        ({"metadata": {"user_id": "x" * 513}}, "metadata.user_id"),
    ],
)
def test_bad_values_name_their_property(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert param in error.message


def test_a_schema_that_cannot_be_checked_is_refused_under_its_own_name() -> None:
    format_ = {"type": "json_schema", "schema": {"type": 1}}
    assert refusal(output_config={"format": format_}).param == "output_config.format.schema"


@pytest.mark.parametrize("body", [[], {"messages": []}, {"model": "m", "messages": [{"role": "user", "content": "x"}]}])
def test_a_body_needs_its_required_properties(body: Any) -> None:
    with pytest.raises(BadRequest):
        parse_message_request(body, messages_max=10)


def test_a_request_to_count_needs_no_bound_and_too_many_messages_are_refused() -> None:
    hi = {"role": "user", "content": "hi"}
    body = {"model": "m", "messages": [hi] * 3}
    assert parse_message_request(body, messages_max=3, required=COUNTED).chat.output_tokens is None
    with pytest.raises(BadRequest, match="at most 2"):
        parse_message_request(body, messages_max=2, required=COUNTED)


def test_what_is_left_out_is_named_by_the_clients_path() -> None:
    cached = {"type": "text", "text": "hi", "citations": [{"type": "x"}], "odd": 1}
    turns = [
        {"role": "user", "content": [cached, {"type": "container_upload", "file_id": "f"}]},
        {"role": "assistant", "content": [{"type": "web_search_tool_result", "content": []}, {**USE, "caller": None}]},
        {"role": "user", "content": [RESULT]},
    ]
    tools = [
        {"type": "web_search_20250305", "name": "web_search"},
        {**SUM, "input_examples": [{}]},
        {**SUM, "name": "far", "allowed_callers": ["code_execution_20260120"]},
    ]
    asked = read(turns, tools=tools, top_k=5, speed="fast", odd=True)
    assert sorted(asked.chat.dropped) == sorted(["odd", "top_k", "speed", "tools[2]", "messages[0].content[0].odd"])
    assert asked.chat.left_out == ("web_search_20250305",)
    strict = {"model": "m", "max_tokens": 1, "messages": turns}
    with pytest.raises(BadRequest, match="Unknown parameter"):
        parse_message_request(strict, messages_max=10, strict=True)


def test_errors_about_the_chat_request_name_the_clients_property() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE]},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, USE]},
        {"role": "user", "content": [RESULT]},
    ]
    asked = read(turns, system="s", tools=[{"type": "bash_20250124", "name": "bash"}, SUM])

    def renamed(param: str) -> str | None:
        return asked.names.reword(UpstreamRefused(f"`{param}` is bad", param=param)).param

    assert renamed("messages[0].content") == "system.content"
    assert renamed("messages[1].content[1].image_url.url") == "messages[0].content[1].source"
    assert renamed("messages[2].tool_calls[0].function") == "messages[1].content"
    assert renamed("messages[3].tool_call_id") == "messages[2].content[0].tool_call_id"
    assert renamed("messages[9].content") == "messages[9].content"
    assert renamed("tools[0].function.parameters") == "tools[1].input_schema"
    assert renamed("tools[7]") == "tools[7]"
    assert renamed("stop") == "stop_sequences"
    assert renamed("reasoning_effort") == "output_config.effort"
    assert renamed("model") == "model"
    same = BadRequest("no")
    assert asked.names.reword(same).message == "no"


def test_the_end_of_a_cached_prefix_stays_where_it_is() -> None:
    cache = {"cache_control": {"type": "ephemeral"}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "look", **cache}, {**IMAGE, **cache}]},
        {"role": "assistant", "content": [{**USE, **cache}]},
        {"role": "user", "content": [{**RESULT, "content": None, **cache}]},
    ]
    asked = read(turns, tools=[{**SUM, **cache}])
    assert [part["cache_control"] for part in asked.chat.messages[0]["content"]] == [{"type": "ephemeral"}] * 2
    assert asked.chat.messages[1]["blocks"] == [{"type": "tool_use", **cache}]
    assert asked.chat.messages[2] == {"role": "tool", "tool_call_id": "toolu_1", "content": "", **cache}
    assert asked.chat.params["tools"] == [{**CHAT_SUM, **cache}]
    assert asked.chat.dropped == ()
