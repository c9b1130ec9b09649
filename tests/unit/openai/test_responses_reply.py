"""Completions as Response objects, chunks as typed events: held to the types of OpenAI's own SDK."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.core.openai.reply import ReplyBuilder, chunks_of
from gateway.core.openai.responses.events import Events
from gateway.core.openai.responses.items import to_input_items
from gateway.core.openai.responses.reply import (
    Head,
    conversation_of_log,
    failed_response,
    finished_response,
    head_of_log,
    is_response_id,
    output_items,
    response_in_progress,
    to_log,
)
from gateway.core.openai.responses.request import parse_responses_request

RESPONSE: TypeAdapter[Response] = TypeAdapter(Response)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
HEX = "0123456789abcdef" * 2
ERROR = {"message": "it broke", "type": "upstream_error", "param": None, "code": "upstream_protocol"}
CALLS = [
    {"id": f"call_{n}", "type": "function", "function": {"name": "sum", "arguments": f'{{"a":{n}}}'}} for n in (1, 2)
]
LOGPROBS = {
    "content": [
        {"token": "é", "logprob": -0.1, "bytes": None, "top_logprobs": [{"token": "e", "logprob": -2, "bytes": [101]}]}
    ]
}
FULL = {
    "temperature": 0.5,
    "max_output_tokens": 9,
    "tools": [{"type": "function", "name": "sum"}],
    "tool_choice": {"type": "function", "name": "sum"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
    "reasoning": {"effort": "high"},
    "metadata": {"a": "b"},
    "prompt_cache_retention": "in_memory",
    "include": ["message.output_text.logprobs"],
    "user": "ann",
}


def head(**fields: Any) -> Head:
    asked = parse_responses_request({"model": "baton", "input": "hi", **fields}, items_max=10)
    return Head(f"resp_{HEX}", 1_700_000_000, asked.model, asked.instructions, asked.body, stored=True)


def made(message: dict[str, Any], finish: str = "stop", **more: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "completion_tokens_details": {"reasoning_tokens": 2}}
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish, **more}
    return {"choices": [choice], "usage": usage, "service_tier": "default"}


def held_to_type(response: dict[str, Any]) -> Response:
    return RESPONSE.validate_python(response, strict=True)


def events_of(about: Head, completion: dict[str, Any]) -> list[dict[str, Any]]:
    events = Events(about)
    told = events.open()
    for choices in chunks_of(completion):
        told += events.chunk(choices)
    return told + events.completed(completion, 1_700_000_005)


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_the_object_is_of_openais_type_and_says_what_was_asked() -> None:
    whole = held_to_type(finished_response(head(**FULL), made({"content": "é"}, logprobs=LOGPROBS), 1_700_000_005))
    assert whole.status == "completed"
    assert whole.completed_at == 1_700_000_005
    assert (whole.temperature, whole.max_output_tokens, whole.user) == (0.5, 9, "ann")
    assert whole.reasoning is not None
    assert whole.reasoning.effort == "high"
    assert whole.prompt_cache_retention == "in_memory"
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens, whole.usage.total_tokens) == (3, 4, 7)
    assert whole.usage.output_tokens_details.reasoning_tokens == 2
    (token,) = whole.output[0].content[0].logprobs  # type: ignore[union-attr, index, misc]
    assert (token.token, token.bytes) == ("é", [195, 169])
    held_to_type(response_in_progress(head()))
    assert (
        finished_response(head(), made({"content": "x"}, logprobs=LOGPROBS), 1)["output"][0]["content"][0]["logprobs"]
        == []
    )


def test_reasoning_text_and_calls_are_items_in_this_order() -> None:
    message = {"content": "let me see", "reasoning_content": "hm", "tool_calls": CALLS}
    whole = held_to_type(finished_response(head(), made(message, "tool_calls"), 1))
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [item.call_id for item in whole.output[2:]] == ["call_1", "call_2"]  # type: ignore[union-attr]
    assert whole.output_text == "let me see"


def test_an_answer_cut_short_says_why() -> None:
    cut = held_to_type(finished_response(head(), made({"content": "one"}, "length"), 1))
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[0].status == "incomplete"  # type: ignore[union-attr]
    filtered = finished_response(head(), made({"content": None}, "content_filter"), 1)
    assert filtered["incomplete_details"] == {"reason": "content_filter"}


def test_a_refusal_is_a_part_of_its_own() -> None:
    whole = held_to_type(finished_response(head(), made({"content": None, "refusal": "no"}), 1))
    assert whole.output[0].content[0].refusal == "no"  # type: ignore[union-attr, index]
    assert kinds(events_of(head(), made({"content": None, "refusal": "no"})))[3:8] == [
        "content_part.added", "refusal.delta", "refusal.done", "content_part.done", "output_item.done",
    ]  # fmt: skip


def test_a_failure_has_one_of_openais_codes() -> None:
    for kind, code in (
        ("upstream_error", "server_error"),
        ("rate_limit_error", "rate_limit_exceeded"),
        ("insufficient_quota", "rate_limit_exceeded"),
        ("invalid_request_error", "invalid_prompt"),
    ):
        broken = held_to_type(failed_response(head(), ERROR | {"type": kind}))
        assert broken.error is not None
        assert broken.error.code == code
        assert broken.status == "failed"


def test_a_streams_events_are_of_openais_types_and_in_its_order() -> None:
    message = {"content": "hello", "reasoning": "hm", "tool_calls": CALLS}
    told = events_of(head(), made(message, "tool_calls"))
    for event in told:
        EVENT.validate_python(event, strict=True)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert kinds(told) == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert told[-1]["response"]["output"] == output_items(head(), made(message, "tool_calls"))


def test_text_after_a_call_is_another_item() -> None:
    events = Events(head())
    told = []
    for delta in ({"content": "a"}, {"tool_calls": [{**CALLS[0], "index": 0}]}, {"content": "b"}):
        told += events.chunk([{"index": 0, "delta": delta}])
    told += events.chunk([{"index": 0, "delta": {}, "finish_reason": "stop"}])
    told += events.completed(made({"content": "ab", "tool_calls": CALLS[:1]}), 1)
    output = told[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    assert [item["content"][0]["text"] for item in output if item["type"] == "message"] == ["a", "b"]
    assert len({item["id"] for item in output}) == 3


def test_logprobs_come_with_the_pieces_of_text_they_are_about() -> None:
    told = events_of(head(**FULL), made({"content": "é"}, logprobs=LOGPROBS))
    (delta,) = (event for event in told if event["type"] == "response.output_text.delta")
    assert delta["logprobs"] == [{"token": "é", "logprob": -0.1, "top_logprobs": [{"token": "e", "logprob": -2}]}]


def test_reasoning_in_pieces_is_one_item_and_calls_have_a_bound() -> None:
    events = Events(head())
    told = []
    for word in ("h", "m"):
        told += events.chunk([{"index": 0, "delta": {"reasoning_content": word}}])
    for number in range(130):
        call = {"index": number, "id": f"call_{number}", "function": {"name": "sum", "arguments": "{}"}}
        told += events.chunk([{"index": 0, "delta": {"tool_calls": [call]}}])
    output = events.completed(made({"content": None}), 1)[-1]["response"]["output"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert [item["type"] for item in output[1:]] == ["function_call"] * 128
    EVENT.validate_python(told[-1], strict=True)


def test_pieces_of_calls_may_come_interleaved() -> None:
    events = Events(head())
    pieces = [(0, "call_1", "{"), (1, "call_2", "["), (0, None, "}"), (1, None, "]")]
    told = []
    for index, call_id, text in pieces:
        call = {"index": index, "id": call_id, "function": {"name": "sum" if call_id else None, "arguments": text}}
        told += events.chunk([{"index": 0, "delta": {"tool_calls": [call]}}])
    told += events.completed(made({"content": None, "tool_calls": CALLS}, "tool_calls"), 1)
    output = told[-1]["response"]["output"]
    assert [(item["call_id"], item["name"], item["arguments"]) for item in output] == [
        ("call_1", "sum", "{}"),
        ("call_2", "sum", "[]"),
    ]


def test_nothing_at_all_is_an_empty_message() -> None:
    told = events_of(head(), made({"content": ""}))
    assert told[-1]["response"]["output"] == output_items(head(), made({"content": ""}))
    assert told[-1]["response"]["output"][0]["content"][0]["text"] == ""
    assert "output_text.delta" not in kinds(told)
    EVENT.validate_python(told[-1], strict=True)


def test_a_stream_that_breaks_off_says_so_twice() -> None:
    events = Events(head())
    events.open()
    events.chunk([{"index": 0, "delta": {"content": "par"}}])
    broken, error = events.failed(ERROR)
    EVENT.validate_python(broken, strict=True)
    EVENT.validate_python(error, strict=True)
    assert broken["response"]["output"][0]["content"][0]["text"] == "par"
    assert error["error"] == ERROR
    assert (error["code"], error["message"]) == ("upstream_protocol", "it broke")


def test_the_log_gives_back_head_and_conversation() -> None:
    asked = parse_responses_request({"model": "baton", "input": "hi", "instructions": "be", **FULL}, items_max=10)
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    request = {"model": "baton", "messages": messages, "response": to_log(asked)}
    again = head_of_log(request, f"resp_{HEX}", 1_700_000_000)
    assert response_in_progress(again) == response_in_progress(head(instructions="be", **FULL))
    reply = made({"content": "ok", "refusal": None, "tool_calls": CALLS, "reasoning_content": "hm"})
    assert conversation_of_log(request, reply) == [
        messages[1],
        {"role": "assistant", "content": "ok", "tool_calls": CALLS},
    ]
    assert conversation_of_log(request, None) == messages[1:]


def test_names_of_responses() -> None:
    assert is_response_id(f"resp_{HEX}")
    assert not any(map(is_response_id, ("", "resp_1", f"resp_{HEX}0", f"chatcmpl-{HEX}", f"resp_{HEX}\n")))


json = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
call_pieces = st.fixed_dictionaries(
    {},
    optional={
        "index": st.integers(0, 3) | json,
        "id": st.sampled_from(["call_1", "call_2", None]) | json,
        "function": st.fixed_dictionaries(
            {}, optional={"name": st.just("f") | json, "arguments": st.text(max_size=3) | json}
        )
        | json,
    },
)
deltas = st.fixed_dictionaries(
    {},
    optional={
        "content": st.text(max_size=4) | json,
        "refusal": st.text(max_size=4) | json,
        "reasoning_content": st.text(max_size=4) | json,
        "tool_calls": st.lists(call_pieces | json, max_size=3) | json,
        "made_up": json,
    },
)
chunk_choices = st.fixed_dictionaries(
    {},
    optional={
        "index": st.just(0) | json,
        "delta": deltas | json,
        "finish_reason": st.sampled_from([None, "stop", "length", "tool_calls"]) | json,
        "logprobs": st.just(LOGPROBS) | json,
    },
)


@given(st.lists(st.lists(chunk_choices, max_size=2), max_size=8))
def test_whatever_a_worker_sends_the_events_are_well_formed(chunks: list[list[dict[str, Any]]]) -> None:
    events = Events(head(include=["message.output_text.logprobs"]))
    told = events.open()
    for choices in chunks:
        told += events.chunk(choices)
    told += events.completed(made({"content": "x"}), 1)
    for event in told:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    added = [event["item"]["id"] for event in told if event["type"] == "response.output_item.added"]
    done = [event["item"]["id"] for event in told if event["type"] == "response.output_item.done"]
    assert sorted(added) == sorted(done)
    assert len(set(added)) == len(added)
    assert [item["id"] for item in told[-1]["response"]["output"]] == added
    assert _text_of(told) == "".join(_content_parts(told))


def _text_of(told: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in told if event["type"] == "response.output_text.delta")


def _content_parts(told: list[dict[str, Any]]) -> list[str]:
    messages = [item for item in told[-1]["response"]["output"] if item["type"] == "message"]
    return [part["text"] for item in messages for part in item["content"] if part["type"] == "output_text"]


@given(st.lists(st.text(min_size=1, max_size=5), max_size=5), st.lists(st.integers(0, 2), max_size=6))
def test_a_streams_last_word_is_what_the_whole_reply_would_say(words: list[str], calls: list[int]) -> None:
    """Text, then pieces of calls in any order: the stream's items are those of the reply put together from it."""
    about, collected = head(), ReplyBuilder()
    events = Events(about)
    seen: dict[int, int] = {}
    pieces: list[dict[str, Any]] = [{"content": word} for word in words]
    for number in calls:
        index = seen.setdefault(number, len(seen))
        pieces.append(
            {"tool_calls": [{"index": index, "id": f"call_{index}", "function": {"name": "", "arguments": "x"}}]}
        )
    for delta in pieces:
        chunk = [{"index": 0, "delta": delta}]
        events.chunk(chunk)
        collected.add(chunk)
    last = {"index": 0, "delta": {}, "finish_reason": "stop"}
    events.chunk([last])
    collected.add([last])
    completion = collected.body()
    assert events.completed(completion, 1)[-1]["response"]["output"] == output_items(about, completion)


CITED = {
    "content": "see a",
    "annotations": [
        {"type": "url_citation", "url_citation": {"url": "https://a", "title": "A", "start_index": 4, "end_index": 5}},
        {"type": "url_citation", "url_citation": {"url": "https://b"}},
        {"type": "other"},
        "no annotation",
    ],
}
CITATIONS = [
    {"type": "url_citation", "url": "https://a", "title": "A", "start_index": 4, "end_index": 5},
    {"type": "url_citation", "url": "https://b", "title": "", "start_index": 0, "end_index": 0},
]


def test_url_citations_are_annotations_of_the_text() -> None:
    response = finished_response(head(), made(CITED), 1_700_000_005)
    held_to_type(response)
    assert response["output"][0]["content"][0]["annotations"] == CITATIONS


def test_streamed_citations_are_events_and_in_the_last_object() -> None:
    events = Events(head())
    told = events.open() + events.chunk([{"delta": {"content": "see a"}}])
    told += events.chunk([{"delta": {"annotations": CITED["annotations"]}}])
    told += events.completed(made(CITED), 1_700_000_005)
    added = [event for event in told if event["type"] == "response.output_text.annotation.added"]
    assert [(event["annotation_index"], event["annotation"]) for event in added] == list(enumerate(CITATIONS))
    for event in told:
        EVENT.validate_python(event, strict=True)
    [item] = told[-1]["response"]["output"]
    assert item["content"][0]["annotations"] == CITATIONS


def test_citations_without_text_are_an_empty_text() -> None:
    events = Events(head())
    told = events.chunk([{"delta": {"annotations": CITED["annotations"][:1]}}])
    assert [event["type"] for event in told][-1] == "response.output_text.annotation.added"


def test_sampling_is_always_numbers() -> None:
    names = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
    response = response_in_progress(head())
    assert [response[name] for name in names] == [1.0, 1.0, 0.0, 0.0]
    response = response_in_progress(head(temperature=0, top_p=0.5, presence_penalty=1, frequency_penalty=-2))
    assert [response[name] for name in names] == [0.0, 0.5, 1.0, -2.0]
    assert all(type(response[name]) is float for name in names)


def test_reasoning_repeats_the_summary_that_was_asked_for() -> None:
    assert response_in_progress(head())["reasoning"] == {"effort": None, "summary": None}
    asked = {"effort": "low", "summary": "concise"}
    assert response_in_progress(head(reasoning=asked))["reasoning"] == asked
    assert response_in_progress(head(reasoning={"generate_summary": "auto"}))["reasoning"]["summary"] == "auto"


def test_text_beside_calls_is_commentary_and_other_text_the_final_answer() -> None:
    def phases(items: list[dict[str, Any]]) -> list[str]:
        return [item["phase"] for item in items if item["type"] == "message"]

    both, text = made({"content": "let me add", "tool_calls": CALLS}, "tool_calls"), made({"content": "3"})
    assert phases(output_items(head(), both)) == ["commentary"]
    assert phases(output_items(head(), text)) == ["final_answer"]
    assert phases(events_of(head(), both)[-1]["response"]["output"]) == ["commentary"]
    assert phases(events_of(head(), text)[-1]["response"]["output"]) == ["final_answer"]
    assert phases(events_of(head(), made({}))[-1]["response"]["output"]) == ["final_answer"]


TOOLS: list[dict[str, Any]] = [
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
    {"type": "namespace", "name": "docs", "description": "reads", "tools": [{"type": "function", "name": "read"}]},
]
MIXED = [
    {"id": "c1", "type": "custom", "custom": {"name": "apply_patch", "input": "*** Begin"}},
    {"id": "c2", "type": "function", "function": {"name": "docs__read", "arguments": "{}"}},
]


def test_calls_of_custom_tools_and_of_namespaces_are_items_of_their_own() -> None:
    about, completion = head(tools=TOOLS), made({"tool_calls": MIXED}, "tool_calls")
    whole, told = finished_response(about, completion, 1_700_000_005), events_of(about, completion)
    held_to_type(whole)
    for event in told:
        EVENT.validate_python(event, strict=True)
    for items in (whole["output"], told[-1]["response"]["output"]):
        custom, function = items
        assert custom == {
            "id": f"ctc_{HEX}000000", "type": "custom_tool_call", "call_id": "c1", "name": "apply_patch",
            "input": "*** Begin",
        }  # fmt: skip
        assert (function["name"], function["namespace"]) == ("read", "docs")
    assert "custom_tool_call_input.delta" in kinds(told)
    assert "custom_tool_call_input.done" in kinds(told)


def test_a_stored_conversation_has_its_custom_calls() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": MIXED},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    items = to_input_items(messages, HEX, head(tools=TOOLS).tool_names)
    assert [item["type"] for item in items] == ["custom_tool_call", "function_call", "custom_tool_call_output"]
    assert items[1]["namespace"] == "docs"
