"""What of a call is counted in tokens: nothing that a provider bills may be missing."""

from __future__ import annotations

import json
from typing import Any

from gateway.core.money.amounts import TOKENS_PER_MEDIA_PART, TOKENS_PER_REQUEST, input_tokens_bound
from gateway.core.openai.vendors.usage import (
    TOKENS_PER_CHOICE,
    TOKENS_PER_TOOL_CALL,
    TOKENS_PER_TURN,
    reply_text,
    request_text,
)

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}


def test_a_prompt_is_its_messages_and_what_a_template_puts_around_them() -> None:
    body = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "name": "ann", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        ]
    }
    text = request_text(body)
    assert text.texts == ["Be brief.", "hi", "ann", json.dumps(CALL, separators=(",", ":")), "2", "call_1"]
    assert text.tokens == TOKENS_PER_REQUEST + 4 * TOKENS_PER_TURN + TOKENS_PER_TOOL_CALL


def test_parts_are_texts_or_the_bound_that_the_hold_has_for_them() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9000}}
    sound = {"type": "input_audio", "input_audio": {"data": "A" * 400_000, "format": "mp3"}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, image, sound]}]}
    text = request_text(body)
    assert text.texts == ["see"]
    assert text.tokens == TOKENS_PER_REQUEST + TOKENS_PER_TURN + TOKENS_PER_MEDIA_PART + 400_000 * 3 // 4 // 16
    assert text.tokens + 3 <= input_tokens_bound(body["messages"])


def test_tools_and_schemas_are_counted_by_their_json() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    shape = {"type": "json_schema", "json_schema": {"name": "é"}}
    body = {"messages": [], "tools": [tool, tool], "tool_choice": "auto", "response_format": shape, "seed": 3}
    tools = json.dumps(tool, separators=(",", ":"))
    assert request_text(body).texts == [tools, tools, "auto", '{"type":"json_schema","json_schema":{"name":"é"}}']


def test_texts_and_tokens_of_the_other_endpoints() -> None:
    cases: list[tuple[dict[str, Any], list[str], int]] = [
        ({"prompt": "one"}, ["one"], 0),
        ({"prompt": ["one", "two"], "suffix": "end"}, ["one", "two", "end"], 0),
        ({"input": [1, 2, 3]}, [], 3),
        ({"input": [[1, 2], [3]]}, [], 3),
    ]
    for body, texts, tokens in cases:
        text = request_text(body)
        assert (text.texts, text.tokens) == (texts, tokens)


def test_a_reply_is_all_that_was_said_and_a_token_a_choice() -> None:
    message = {"content": "yes", "reasoning_content": "hm", "refusal": None, "tool_calls": [CALL, "nonsense"]}
    text = reply_text([message, {}])
    assert text.texts == ["yes", "hm", "add", '{"a":1}']
    assert text.tokens == 2 * TOKENS_PER_CHOICE + TOKENS_PER_TOOL_CALL
