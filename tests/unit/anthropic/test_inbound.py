"""Replies of Anthropic's API, whole and in events, as chat; and back as the Messages of the client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.anthropic.events import MessageEvents
from gateway.core.anthropic.inbound import MessageChunks, to_completion
from gateway.core.anthropic.outbound import JSON_TOOL
from gateway.core.anthropic.reply import MessageHead, finished_message

HEAD = MessageHead("msg_1", "m", "shown", ("END",))
CITED = {
    "type": "web_search_result_location",
    "url": "https://a",
    "title": "A",
    "cited_text": "x",
    "encrypted_index": "e",
}
SEARCH = {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "x"}}
FOUND = {
    "type": "web_search_tool_result",
    "tool_use_id": "srv_1",
    "content": [{"type": "web_search_result", "url": "https://a", "title": "A", "encrypted_content": "e"}],
}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "sig"}
USE = {"type": "tool_use", "id": "t1", "name": "find", "input": {"q": 1}}
CONTENTS: dict[str, list[dict[str, Any]]] = {
    "text": [{"type": "text", "text": "hello"}],
    "empty": [{"type": "text", "text": ""}],
    "thought": [THOUGHT, {"type": "text", "text": "yes"}, USE],
    "redacted": [{"type": "redacted_thinking", "data": "d"}, {"type": "text", "text": "yes"}],
    "calls": [USE, {**USE, "id": "t2"}],
    "mixed": [{"type": "text", "text": "a"}, USE, {"type": "text", "text": "b"}, {**USE, "id": "t2"}],
    "interleaved": [THOUGHT, USE, {**THOUGHT, "signature": "two"}, {**USE, "id": "t2"}],
    "searched": [
        {"type": "text", "text": "I look."},
        SEARCH,
        FOUND,
        {"type": "text", "text": "It is "},
        {"type": "text", "text": "42", "citations": [CITED, {**CITED, "url": "https://b"}]},
        {"type": "text", "text": "."},
    ],
    "cited at once": [{"type": "text", "text": "42", "citations": [{"type": "char_location", "document_index": 0}]}],
}
USAGE = {
    "input_tokens": 5,
    "output_tokens": 7,
    "cache_read_input_tokens": 3,
    "cache_creation_input_tokens": 2,
    "inference_geo": "eu",
    "server_tool_use": {"web_search_requests": 1},
}


def message(content: list[dict[str, Any]], stop: str = "end_turn", sequence: str | None = None) -> dict[str, Any]:
    head = {"id": "msg_0", "type": "message", "role": "assistant", "model": "claude"}
    return {**head, "content": content, "stop_reason": stop, "stop_sequence": sequence, "usage": USAGE}


def events(content: list[dict[str, Any]], stop: str = "end_turn", sequence: str | None = None) -> Iterator[Any]:
    """The events of a message as Anthropic sends them."""
    start = {**message([]), "usage": {**USAGE, "output_tokens": 1}, "stop_reason": None}
    yield {"type": "message_start", "message": start}
    for index, block in enumerate(content):
        texts = {name: str(block[name]) for name in ("text", "thinking") if name in block}
        empty: dict[str, Any] = {**block, **dict.fromkeys(texts, "")}
        pieces: list[dict[str, Any]] = [{"type": f"{name}_delta", name: text} for name, text in texts.items() if text]
        if block.get("signature"):
            empty["signature"] = ""
            pieces.append({"type": "signature_delta", "signature": block["signature"]})
        if "citations" in block:
            empty["citations"] = []
            pieces += [{"type": "citations_delta", "citation": one} for one in block["citations"]]
        if "input" in block:
            empty["input"] = {}
            half = json.dumps(block["input"])
            pieces += [{"type": "input_json_delta", "partial_json": piece} for piece in ("", half[:3], half[3:])]
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield from ({"type": "content_block_delta", "index": index, "delta": piece} for piece in pieces)
        yield {"type": "content_block_stop", "index": index}
    usage = {"output_tokens": 7}
    yield {"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": sequence}, "usage": usage}
    yield {"type": "message_stop"}


def joined(stream: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content of a streamed Message. Raises AssertionError for blocks that do not follow one another."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in stream:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
            is_open = True
        elif event["type"] == "content_block_delta":
            assert is_open
            _add(blocks[event["index"]], event["delta"])
        elif event["type"] == "content_block_stop":
            is_open = False
    for block in blocks:
        if text := block.pop("json"):
            block["input"] = json.loads(text)
    return blocks


def _add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "citation":
            block["citations"].append(value)
        elif name == "partial_json":
            block["json"] += value
        elif name != "type":
            block[name] += value


@pytest.mark.parametrize("name", CONTENTS)
def test_a_message_comes_back_as_it_was_whole_and_streamed(name: str) -> None:
    content = CONTENTS[name]
    assert finished_message(HEAD, to_completion(message(content)))["content"] == content
    chunks, made = MessageChunks(), MessageEvents(HEAD)
    stream = [event for one in events(content) for event in made.chunk(chunks.chunk(one)["choices"])]
    assert joined(iter([*made.open(), *stream, *made.completed({})])) == content


@pytest.mark.parametrize(
    ("stop", "sequence", "finish", "shown"),
    [
        ("end_turn", None, "stop", "end_turn"),
        ("stop_sequence", "END", "stop", "stop_sequence"),
        ("max_tokens", None, "length", "max_tokens"),
        ("model_context_window_exceeded", None, "length", "model_context_window_exceeded"),
        ("pause_turn", None, "stop", "pause_turn"),
        ("refusal", None, "content_filter", "refusal"),
    ],
)
def test_why_it_ended_is_said_in_both_words(stop: str, sequence: str | None, finish: str, shown: str) -> None:
    content = CONTENTS["text"]
    completion = to_completion(message(content, stop, sequence))
    assert completion["choices"][0]["finish_reason"] == finish
    whole = finished_message(HEAD, completion)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (shown, sequence)
    chunks, made = MessageChunks(), MessageEvents(HEAD)
    for one in events(content, stop, sequence):
        made.chunk(chunks.chunk(one)["choices"])
    delta = made.completed({})[-2]["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == (shown, sequence)


def test_usage_counts_the_prompt_with_its_cache_and_keeps_what_else_is_said() -> None:
    completion = to_completion(message(CONTENTS["text"]))
    assert (completion["usage"]["prompt_tokens"], completion["usage"]["completion_tokens"]) == (10, 7)
    shown = finished_message(HEAD, completion)["usage"]
    assert {name: shown[name] for name in USAGE} == USAGE
    chunks = MessageChunks()
    last = [chunks.chunk(one) for one in events(CONTENTS["text"])][-2]
    assert last["usage"] == completion["usage"]


def test_a_chat_client_sees_the_pages_that_a_text_cites() -> None:
    whole = to_completion(message(CONTENTS["searched"]))["choices"][0]["message"]
    assert whole["content"] == "I look.It is 42."
    chunks = MessageChunks()
    deltas = [choice["delta"] for one in events(CONTENTS["searched"]) for choice in chunks.chunk(one)["choices"]]
    cited = [one["url_citation"] for delta in deltas for one in delta.get("annotations", ())]
    assert cited == [one["url_citation"] for one in whole["annotations"]]
    assert [(one["url"], whole["content"][one["start_index"] : one["end_index"]]) for one in cited] == [
        ("https://a", "42"),
        ("https://b", "42"),
    ]


def test_a_reply_in_chats_own_form_is_taken_as_it_is() -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    assert to_completion({"id": "c", "choices": [choice]}) == {"id": "c", "choices": [choice]}
    piece = {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": None}]}
    assert MessageChunks().chunk(piece) == piece
    whole = MessageChunks().chunk(message(CONTENTS["text"]))
    assert whole["choices"][0]["message"]["content"] == "hello"


def test_a_reply_by_the_json_tool_is_text() -> None:
    content = [{"type": "tool_use", "id": "t", "name": JSON_TOOL, "input": {"n": 1}}]
    choice = to_completion(message(content, "tool_use"))["choices"][0]
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": '{"n": 1}'}, "stop")
    chunks = MessageChunks()
    choices = [choice for one in events(content, "tool_use") for choice in chunks.chunk(one)["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == '{"n": 1}'
    assert choices[-1]["finish_reason"] == "stop"
    assert not any("tool_calls" in choice["delta"] for choice in choices)


@pytest.mark.parametrize(("kind", "status"), [("overloaded_error", 529), ("rate_limit_error", 429), ("odd", None)])
def test_an_error_has_its_status(kind: str, status: int | None) -> None:
    error = {"type": "error", "error": {"type": kind, "message": "no"}}
    for body in (to_completion(error), MessageChunks().chunk(error)):
        assert body["error"]["message"] == "no"
        assert body["error"].get("status") == status


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(
        ("type", "index", "content_block", "delta", "text", "citation", "partial_json", "usage", "message", "content")
    ), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
KINDS = ("message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta")


@given(st.lists(st.tuples(st.sampled_from(KINDS), JSON, JSON), max_size=6))
def test_no_event_breaks_it(found: list[tuple[str, Any, Any]]) -> None:
    chunks, made = MessageChunks(), MessageEvents(HEAD)
    for kind, block, delta in found:
        chunk = chunks.chunk({"type": kind, "content_block": block, "delta": delta, "message": block})
        made.chunk(chunk.get("choices", ()))
    made.completed({})
