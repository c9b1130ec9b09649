"""Anthropic's Message and its events, made of a chat completion and of its chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import TypeAdapter

from gateway.core.anthropic.events import MessageEvents
from gateway.core.anthropic.reply import ERRORS, MessageHead, error_body, error_status, finished_message
from gateway.core.anthropic.thinking import Display
from gateway.core.openai.reply import chunks_of
from gateway.errors import (
    BadRequest,
    BatonError,
    BudgetExceeded,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    NotFound,
    RateLimited,
    TooLarge,
    Unauthorized,
    Unavailable,
    UpstreamError,
    UpstreamOverloaded,
)

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
HEAD = MessageHead("msg_1", "baton", "shown", ("END",))
CALL = {"id": "call_1", "type": "function", "function": {"name": "sum", "arguments": '{"a":1}'}}
OTHER = {"id": "call_2", "type": "function", "function": {"name": "say", "arguments": '{"b":"é"}'}}
SIGNED = {"type": "thinking", "thinking": "hm", "signature": "sig"}
REDACTED = {"type": "redacted_thinking", "data": "x"}


def head(display: Display) -> MessageHead:
    return MessageHead("msg_1", "baton", display, ("END",))


def completion(finish: str = "stop", usage: Mapping[str, Any] | None = None, **message: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": finish}
    return {"choices": [choice], "usage": usage or {"prompt_tokens": 7, "completion_tokens": 3}}


def whole(body: Mapping[str, Any], display: Display = "shown") -> dict[str, Any]:
    message = finished_message(head(display), body)
    Message.model_validate(message, strict=True)
    return message


def streamed(chunks: Iterable[Sequence[Mapping[str, Any]]], display: Display = "shown") -> dict[str, Any]:
    """The message that Anthropic's own SDK puts together from the events of these chunks."""
    made = MessageEvents(head(display))
    events = [*made.open(), *(event for chunk in chunks for event in made.chunk(chunk)), *made.completed(completion())]
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    open_block: int | None = None
    for event in events:
        typed = EVENT.validate_python(event, strict=True)
        if typed.type == "content_block_start":
            assert open_block is None
            open_block = typed.index
        elif typed.type == "content_block_delta":
            assert open_block == typed.index
        elif typed.type == "content_block_stop":
            assert open_block == typed.index
            open_block = None
        snapshot = accumulate_event(event=typed, current_snapshot=snapshot, json_bufs=buffers)
    assert open_block is None
    assert events[-1] == {"type": "message_stop"}
    made_message: dict[str, Any] = snapshot.model_dump(exclude_none=True)
    return made_message


def delta(**fields: Any) -> list[dict[str, Any]]:
    return [{"index": 0, "delta": fields, "finish_reason": None}]


def end(finish: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"index": 0, "delta": {}, "finish_reason": finish, **fields}]


BODIES: list[tuple[dict[str, Any], list[dict[str, Any]], str]] = [
    (completion(content="42"), [{"type": "text", "text": "42"}], "end_turn"),
    (completion("length", content="4"), [{"type": "text", "text": "4"}], "max_tokens"),
    (completion("content_filter", content="4"), [{"type": "text", "text": "4"}], "refusal"),
    (completion(refusal="I can't."), [{"type": "text", "text": "I can't."}], "refusal"),
    (completion(), [], "end_turn"),
    (
        completion("tool_calls", content="I add.", tool_calls=[CALL, OTHER]),
        [
            {"type": "text", "text": "I add."},
            {"type": "tool_use", "id": "call_1", "name": "sum", "input": {"a": 1}},
            {"type": "tool_use", "id": "call_2", "name": "say", "input": {"b": "é"}},
        ],
        "tool_use",
    ),
    (
        completion("stop", tool_calls=[{**CALL, "id": "", "function": {"name": "sum", "arguments": ""}}]),
        [{"type": "tool_use", "id": "toolu_10", "name": "sum", "input": {}}],
        "tool_use",
    ),
    (
        completion(content="yes", reasoning_content="hm"),
        [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "yes"}],
        "end_turn",
    ),
    (
        completion(content="yes", reasoning="hm", thinking_blocks=[SIGNED, REDACTED]),
        [SIGNED, REDACTED, {"type": "text", "text": "yes"}],
        "end_turn",
    ),
]


@pytest.mark.parametrize(("body", "content", "reason"), BODIES)
def test_a_completion_and_its_chunks_make_the_same_message(
    body: dict[str, Any], content: list[dict[str, Any]], reason: str
) -> None:
    message = whole(body)
    assert message["content"] == content
    assert (message["stop_reason"], message["id"], message["model"]) == (reason, "msg_1", "baton")
    live = streamed(chunks_of(body))
    assert (live["content"], live["stop_reason"]) == (content, reason)
    assert (live["usage"]["input_tokens"], live["usage"]["output_tokens"]) == (7, 3)


def test_a_refusal_says_why() -> None:
    details = {"type": "refusal", "category": None, "explanation": "I can't."}
    assert whole(completion(refusal="I can't."))["stop_details"] == details


def test_a_stop_sequence_is_named_where_the_worker_names_it() -> None:
    chunks = [delta(content="4"), end("stop", stop_reason="END")]
    assert streamed(chunks)["stop_sequence"] == "END"
    assert streamed(chunks)["stop_reason"] == "stop_sequence"
    assert streamed([delta(content="4"), end("stop", stop_reason=128009)])["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("display", "blocks"),
    [("shown", [SIGNED, REDACTED]), ("omitted", [{**SIGNED, "thinking": ""}, REDACTED]), ("hidden", [])],
)
def test_thinking_is_as_the_request_wants_it(display: Display, blocks: list[dict[str, Any]]) -> None:
    signed = completion(content="yes", thinking_blocks=[SIGNED, REDACTED], reasoning_content="hm")
    text = {"type": "text", "text": "yes"}
    assert whole(signed, display)["content"] == [*blocks, text]
    assert streamed(chunks_of(signed), display)["content"] == [*blocks, text]
    unsigned = completion(content="yes", reasoning_content="hm")
    expected = [{"type": "thinking", "thinking": "hm", "signature": ""}] if display == "shown" else []
    assert whole(unsigned, display)["content"] == [*expected, text]
    assert streamed(chunks_of(unsigned), display)["content"] == [*expected, text]


def test_thinking_in_pieces_is_one_block() -> None:
    chunks = [
        delta(thinking_blocks=[{"type": "thinking", "thinking": "h", "signature": ""}], reasoning_content="h"),
        delta(thinking_blocks=[{"type": "thinking", "thinking": "m", "signature": None}], reasoning_content="m"),
        delta(thinking_blocks=[{"type": "thinking", "thinking": "", "signature": "sig"}]),
        delta(content="yes"),
        end("stop"),
    ]
    assert streamed(chunks)["content"] == [SIGNED, {"type": "text", "text": "yes"}]


def test_what_a_worker_mixes_into_a_call_follows_it() -> None:
    def piece(index: int, text: str, **fields: Any) -> list[dict[str, Any]]:
        return delta(tool_calls=[{"index": index, "function": {**fields, "arguments": text}}])

    chunks = [
        delta(content="I call"),
        delta(tool_calls=[{"index": 0, **CALL, "function": {"name": "sum", "arguments": ""}}]),
        delta(tool_calls=[{"index": 1, **OTHER, "function": {"name": "say", "arguments": '{"b"'}}]),
        piece(0, '{"a":'),
        delta(content="late"),
        delta(reasoning_content="later"),
        piece(1, ':"é"}'),
        piece(0, "1}"),
        end("tool_calls"),
    ]
    assert [(block["type"], block.get("text", block.get("input"))) for block in streamed(chunks)["content"]] == [
        ("text", "I call"),
        ("tool_use", {"a": 1}),
        ("tool_use", {"b": "é"}),
        ("text", "late"),
    ]


def test_a_call_without_an_index_is_the_next_one() -> None:
    chunks = [delta(tool_calls=[CALL]), delta(tool_calls=[OTHER]), end("tool_calls")]
    assert [block["id"] for block in streamed(chunks)["content"]] == ["call_1", "call_2"]


def test_arguments_that_are_no_object_reach_the_client() -> None:
    for text, value in (("[1]", [1]), ("{broken", "{broken")):
        call = {**CALL, "function": {"name": "sum", "arguments": text}}
        assert whole(completion(tool_calls=[call]))["content"][0]["input"] == {"arguments": value}


@pytest.mark.parametrize(
    "message",
    [
        {"content": 7, "tool_calls": "x", "thinking_blocks": "x"},
        {"tool_calls": [7], "thinking_blocks": [7, {"type": "thinking", "thinking": 7}, {"type": "odd"}]},
    ],
)
def test_what_has_no_form_is_passed_over(message: dict[str, Any]) -> None:
    assert whole(completion(**message))["content"] == []
    assert streamed([delta(**message), [{"index": 1, "delta": {"content": "x"}}], [{"delta": 7}]])["content"] == []


def test_a_body_without_choices_is_an_empty_message() -> None:
    for body in ({}, {"choices": [7]}, {"choices": [{"message": 7}]}):
        assert whole(body)["content"] == []
    call = {"id": 7, "function": 7}
    assert whole(completion(tool_calls=[call]))["content"] == [
        {"type": "tool_use", "id": "toolu_10", "name": "", "input": {}}
    ]


def test_a_ping_is_an_event_of_its_own() -> None:
    assert MessageEvents(HEAD).ping() == {"type": "ping"}


def test_calls_without_end_are_bounded() -> None:
    chunks = [delta(tool_calls=[{"index": index, **CALL}]) for index in range(200)]
    assert len(streamed(chunks)["content"]) == 128


def test_cached_tokens_are_counted_apart() -> None:
    usage: dict[str, Any] = {
        "prompt_tokens": 100,
        "completion_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 30},
        "completion_tokens_details": {"reasoning_tokens": 4},
    }
    assert whole({**completion(usage=usage, content="x"), "service_tier": "priority"})["usage"] == {
        "input_tokens": 10,
        "cache_creation_input_tokens": 30,
        "cache_read_input_tokens": 60,
        "output_tokens": 9,
        "output_tokens_details": {"thinking_tokens": 4},
        "service_tier": "priority",
    }
    usage["prompt_tokens_details"] |= {"cache_write_1h_tokens": 20}
    hours = whole(completion(usage=usage, content="x"))["usage"]
    assert hours["cache_creation"] == {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 20}
    assert whole(completion(content="x"))["usage"] == {
        "input_tokens": 7,
        "output_tokens": 3,
        "service_tier": "standard",
    }


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequest("x"), 400, "invalid_request_error"),
        (Unauthorized("x"), 401, "authentication_error"),
        (BudgetExceeded("x", scope="key"), 402, "billing_error"),
        (Forbidden("x"), 403, "permission_error"),
        (NotFound("x"), 404, "not_found_error"),
        (Conflict("x"), 409, "conflict_error"),
        (TooLarge("x"), 413, "request_too_large"),
        (RateLimited("x", retry_after_s=1.0), 429, "rate_limit_error"),
        (BatonError("x"), 500, "api_error"),
        (UpstreamError("x"), 502, "api_error"),
        (Unavailable("x"), 529, "overloaded_error"),
        (UpstreamOverloaded("x"), 529, "overloaded_error"),
        (DeadlineExceeded("x"), 504, "timeout_error"),
    ],
)
def test_every_error_has_anthropics_shape(error: BatonError, status: int, kind: str) -> None:
    body = error_body(error, "req_1")
    assert body == {"type": "error", "error": {"type": kind, "message": "x"}, "request_id": "req_1"}
    assert error_status(error) == status
    if kind not in ("conflict_error", "request_too_large"):  # which the SDK's union does not list
        ErrorResponse.model_validate(body, strict=True)
    assert ERRORS.get(status, "api_error") == kind
    assert "request_id" not in error_body(error)
