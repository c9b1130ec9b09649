"""Replies have OpenAI's shape, whole or in chunks, and a stream is logged as the whole reply it was."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.money.amounts import Usage
from gateway.core.openai.body import replace_nonfinite
from gateway.core.openai.reply import (
    ReplyBuilder,
    chunk,
    chunks_of,
    completion,
    read_text,
    reply_text,
    usage_json,
)

USAGE = Usage(7, 5)


def call(at: int, arguments: str = "{}") -> dict[str, Any]:
    return {"id": f"call_{at}", "type": "function", "function": {"name": f"f{at}", "arguments": arguments}}


def said(content: str | None, finish_reason: str | None = "stop", **more: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": content, **more}, "finish_reason": finish_reason}]}


def whole(body: dict[str, Any]) -> dict[str, Any]:
    return completion(body, completion_id="chatcmpl-1", created_s=1_700_000_000, model="baton", usage=USAGE)


def collected(chunks: list[list[dict[str, Any]]]) -> ReplyBuilder:
    kept = ReplyBuilder()
    for choices in chunks:
        kept.add(chunk(choices, completion_id="c", created_s=0, model="m")["choices"])
    return kept


def test_a_completion_has_every_key_a_strict_client_reads() -> None:
    assert whole({**said("4"), "id": "theirs", "model": "grand-9b", "usage": {"prompt_tokens": 1}}) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "baton",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "4", "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": usage_json(USAGE),
        "service_tier": "default",
    }


def test_usage_adds_up_and_has_both_details() -> None:
    usage = usage_json(USAGE)
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (7, 5, 12)
    assert set(usage) > {"prompt_tokens_details", "completion_tokens_details"}


def test_fields_of_a_worker_about_itself_are_passed_on_or_filled_in() -> None:
    body = whole({**said("4", None), "service_tier": "flex", "system_fingerprint": "fp_1"})
    assert body["service_tier"] == "flex"
    assert body["system_fingerprint"] == "fp_1"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert "system_fingerprint" not in whole({**said("4"), "system_fingerprint": None})


@pytest.mark.parametrize("calls", [None, []])
def test_tool_calls_are_there_or_absent_but_never_null(calls: object) -> None:
    assert "tool_calls" not in whole(said("4", tool_calls=calls))["choices"][0]["message"]
    message = whole(said(None, "tool_calls", tool_calls=[call(0)]))["choices"][0]["message"]
    assert message["tool_calls"] == [call(0)]
    assert message["content"] is None


@pytest.mark.parametrize("body", [{}, {"choices": None}, {"choices": []}])
def test_a_body_without_choices_has_none(body: dict[str, Any]) -> None:
    assert whole(body)["choices"] == []
    assert chunks_of(body) == []
    assert reply_text(body) == ""


@pytest.mark.parametrize("choice", [{}, {"message": None}, {"message": {"content": [{"type": "text"}]}}])
def test_the_text_of_an_odd_choice_is_empty(choice: dict[str, Any]) -> None:
    assert reply_text({"choices": [choice]}) == ""
    assert whole({"choices": [choice]})["choices"][0]["message"]["role"] == "assistant"


def test_the_text_is_the_first_choices() -> None:
    assert reply_text({"choices": [*said("a")["choices"], *said("b")["choices"]]}) == "a"


def test_a_chunk_has_openais_keys_on_every_choice() -> None:
    made = chunk(
        [{"index": 1, "delta": {"content": None, "tool_calls": None, "refusal": None}}, {"delta": None}],
        completion_id="chatcmpl-1",
        created_s=5,
        model="baton",
    )
    assert made == {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 5,
        "model": "baton",
        "service_tier": "default",
        "choices": [
            {"index": 1, "delta": {"content": None, "refusal": None}, "finish_reason": None, "logprobs": None},
            {"index": 0, "delta": {}, "finish_reason": None, "logprobs": None},
        ],
    }


def test_the_chunks_of_a_whole_reply_are_role_content_finish() -> None:
    body = said("4")
    body["choices"][0]["logprobs"] = {"content": [{"token": "4"}]}
    assert chunks_of(body) == [
        [{"index": 0, "delta": {"role": "assistant", "content": "", "refusal": None}}],
        [{"index": 0, "delta": {"content": "4"}, "logprobs": {"content": [{"token": "4"}]}}],
        [{"index": 0, "delta": {}, "finish_reason": "stop"}],
    ]


choices = st.fixed_dictionaries(
    {
        "message": st.fixed_dictionaries(
            {"role": st.just("assistant"), "content": st.none() | st.text(max_size=20)},
            optional={
                "refusal": st.none() | st.text(max_size=10),
                "reasoning_content": st.text(max_size=10),
                "tool_calls": st.lists(st.builds(call, st.integers(0, 9), st.text(max_size=9)), max_size=3),
                "function_call": st.just({"name": "f", "arguments": "{}"}),
            },
        ),
        "finish_reason": st.sampled_from(["stop", "length", "tool_calls"]),
        "logprobs": st.none() | st.just({"content": [{"token": "4"}], "refusal": None}),
    }
)


@given(st.lists(choices, min_size=1, max_size=3))
def test_a_whole_reply_in_chunks_is_collected_into_itself(made: list[dict[str, Any]]) -> None:
    body = {"choices": made}
    before = copy.deepcopy(body)
    kept = collected(chunks_of(body))
    assert kept.finished
    assert whole(kept.body()) == whole(body)
    assert body == before


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_interleaved_tool_calls_are_put_together(seed: int) -> None:
    """Deltas of two choices, each with text and three calls, cut anywhere and shuffled between calls."""
    rng = Random(seed)
    arguments = ['{"city": "Łódź", "n": 1}', "{}", '{"a": "' + "x" * 30 + '"}']
    streams: list[list[dict[str, Any]]] = []
    for at in (0, 1):
        streams.append([{"index": at, "delta": {"content": letter}} for letter in f"Text {at}"])
        for number, text in enumerate(arguments):
            opening = {**call(number, ""), "index": number}
            pieces = [{"index": number, "function": {"arguments": letter}} for letter in text]
            streams.append([{"index": at, "delta": {"tool_calls": [piece]}} for piece in (opening, *pieces)])
    kept = ReplyBuilder()
    while streams:
        stream = rng.choice(streams)
        kept.add([stream.pop(0)])
        streams = [left for left in streams if left]
    assert kept.started
    assert not kept.finished
    kept.add([{"index": 0, "delta": {}, "finish_reason": "tool_calls"}])
    assert not kept.finished  # the other choice has not ended
    kept.add([{"index": 1, "delta": {}, "finish_reason": "tool_calls"}])
    assert kept.finished
    calls = [call(number, text) for number, text in enumerate(arguments)]
    assert kept.body()["choices"] == [
        {
            "index": at,
            "message": {"role": "assistant", "content": f"Text {at}", "tool_calls": calls},
            "finish_reason": "tool_calls",
        }
        for at in (0, 1)
    ]


def test_calls_without_an_index_are_calls_of_their_own() -> None:
    kept = ReplyBuilder()
    kept.add([{"delta": {"tool_calls": [call(0), call(1)]}}])
    kept.add([{"delta": {"tool_calls": [{**call(2), "index": None}]}}])
    assert kept.body()["choices"][0]["message"]["tool_calls"] == [call(0), call(1), call(2)]


def test_a_worker_that_numbers_all_its_calls_zero_does_not_merge_them() -> None:
    body = said(None, "tool_calls", tool_calls=[{**call(0), "index": 0}, {**call(1), "index": 0}])
    assert collected(chunks_of(body)).body()["choices"][0]["message"]["tool_calls"] == [call(0), call(1)]


def test_log_probs_grow_with_the_text() -> None:
    kept = ReplyBuilder()
    for token in ("a", "b"):
        kept.add([{"delta": {"content": token}, "logprobs": {"content": [{"token": token}], "refusal": None}}])
    assert kept.body()["choices"][0]["logprobs"] == {"content": [{"token": "a"}, {"token": "b"}], "refusal": None}


def test_nothing_has_started_before_the_first_choice() -> None:
    kept = ReplyBuilder()
    kept.add([])
    assert (kept.started, kept.finished) == (False, False)
    assert kept.body() == {"choices": []}


@pytest.mark.parametrize(
    "choice",
    [
        {"index": None, "delta": None},
        {"index": "0", "delta": "text"},
        {"delta": {"content": 7, "tool_calls": "search"}},
        {"delta": {"tool_calls": ["search", None]}},
        {"delta": {"tool_calls": [{"index": -1}, {"index": 128}, {"index": 10**9, "function": {"name": "f"}}]}},
        {"delta": {}, "logprobs": [1]},
        {"delta": {"function_call": "f"}},
    ],
)
def test_nonsense_is_left_out(choice: dict[str, Any]) -> None:
    kept = ReplyBuilder()
    kept.add([choice])
    (made,) = kept.body()["choices"]
    assert made["index"] == 0
    assert made["message"]["content"] is None
    assert not made["message"].get("tool_calls")
    assert not made["message"].get("function_call")


def test_a_far_index_makes_room_only_up_to_a_bound() -> None:
    kept = ReplyBuilder()
    kept.add([{"delta": {"tool_calls": [{"index": 127, "id": "x", "function": {"name": "f", "arguments": None}}]}}])
    calls = kept.body()["choices"][0]["message"]["tool_calls"]
    assert len(calls) == 128
    assert calls[127] == {"id": "x", "type": "function", "function": {"name": "f", "arguments": ""}}


def test_numbers_that_json_cannot_say_become_null() -> None:
    assert replace_nonfinite({"a": [float("-inf"), 1.5, {"b": float("nan")}], "c": "inf"}) == {
        "a": [None, 1.5, {"b": None}],
        "c": "inf",
    }


TEXT_CHUNK: dict[str, Any] = {
    "id": "c",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "delta": {"content": "é"}, "finish_reason": None, "logprobs": None}],
}
MORE_IN_CHOICE: list[dict[str, Any]] = [
    {"finish_reason": "stop"},
    {"logprobs": {"content": []}},
    {"delta": {"content": "x", "role": "user"}},
    {"delta": {"content": None}},
    {"delta": {"reasoning_content": "x"}},
    {"delta": {"tool_calls": [call(0)]}},
    {"token_ids": [1]},
]
MORE_THAN_TEXT: list[dict[str, Any]] = [
    {"system_fingerprint": "fp"},
    {"service_tier": "flex"},
    {"usage": {"prompt_tokens": 1, "completion_tokens": 1}},
    {"choices": []},
    {"choices": TEXT_CHUNK["choices"] * 2},
    {"created": 1.5},
    {"error": {"message": "broken"}},
    *({"choices": [{**TEXT_CHUNK["choices"][0], **more}]} for more in MORE_IN_CHOICE),
]


@given(st.lists(st.tuples(st.integers(0, 2), st.text(st.characters(exclude_categories=["Cs"]), max_size=5))))
def test_chunks_of_text_make_the_same_reply_in_the_short_way(pieces: list[tuple[int, str]]) -> None:
    short, long = ReplyBuilder(), ReplyBuilder()
    for index, text in pieces:
        choice = {"index": index, "delta": {"content": text}, "finish_reason": None, "logprobs": None}
        body = TEXT_CHUNK | {"choices": [choice]}
        named = {**choice, "delta": {"role": "assistant", "content": text}}
        for sent in (body, TEXT_CHUNK | {"choices": [named]}):
            read = read_text(json.dumps(sent).encode())
            assert read.as_json() == body == read
            assert {**read} == body
        short.add_text(index, text)
        long.add(body["choices"])
    assert short.body() == long.body()


def test_the_short_way_goes_on_after_other_chunks() -> None:
    built = ReplyBuilder()
    built.add([{"index": 0, "delta": {"role": "assistant", "content": None}}])
    built.add_text(0, "é")
    built.add([{"index": 0, "delta": {"content": "!"}, "finish_reason": "stop"}])
    (choice,) = built.body()["choices"]
    assert choice == {"index": 0, "message": {"role": "assistant", "content": "é!"}, "finish_reason": "stop"}


@pytest.mark.parametrize("more", MORE_THAN_TEXT)
def test_a_chunk_of_more_than_text_takes_the_long_way(more: dict[str, Any]) -> None:
    for text in (json.dumps(TEXT_CHUNK | more), "[" * 5_000):
        with pytest.raises((ValueError, RecursionError)):
            read_text(text.encode())
