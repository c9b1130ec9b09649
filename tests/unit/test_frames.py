"""Frames of a chat stream: those that are made from the one before say what any other frame would say."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.openai.reply import text_piece
from gateway.service.request.frames import ChatFrames
from gateway.service.request.running import Running


def frames(**chat: Any) -> tuple[ChatFrames, Any]:
    """Frames of a request, and what they read of it."""
    asked = {"model": "m", "include_usage": False, "obfuscate": False} | chat
    record = SimpleNamespace(completion_id="chatcmpl-1", created_us=1_700_000_000_000_000)
    running = SimpleNamespace(record=record, chat=SimpleNamespace(**asked), reply_facts={}, progress="off")
    return ChatFrames(cast(Running, running)), running


def piece(text: str, **more: Any) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": text}} | more


def bodies(made: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(frame.removeprefix(b"data: ")) for frame in made]


@given(st.lists(st.text(min_size=1), min_size=2, max_size=4), st.booleans())
def test_a_piece_of_text_is_framed_as_any_other_chunk(texts: list[str], include_usage: bool) -> None:
    short, _ = frames(include_usage=include_usage)
    for text in texts:
        long, _ = frames(include_usage=include_usage)
        long.chunk([piece("begins")])
        whole = bodies(long.chunk([piece(text, logprobs={"content": []})]))
        whole[0]["choices"][0]["logprobs"] = None
        assert bodies(short.chunk([piece(text)]))[-1:] == whole


def test_half_a_surrogate_pair_stays_an_escape() -> None:
    short, _ = frames()
    short.chunk([piece("a")])
    (frame,) = short.chunk([piece("\ud83d")])
    assert b'"content":"\\ud83d"' in frame


def test_facts_that_come_late_are_in_the_frames_after_them() -> None:
    short, running = frames()
    short.chunk([piece("a")])
    short.chunk([piece("b")])
    running.reply_facts = {"system_fingerprint": "fp"}
    assert bodies(short.chunk([piece("c")]))[0]["system_fingerprint"] == "fp"


def test_each_choice_has_frames_of_its_own() -> None:
    short, _ = frames()
    for index in (0, 1, 0, 1):
        made = bodies(short.chunk([piece(f"text {index}") | {"index": index}]))
        assert made[-1]["choices"][0]["index"] == index
        assert made[-1]["choices"][0]["delta"] == {"content": f"text {index}"}


def test_padding_is_new_in_each_frame() -> None:
    short, _ = frames(obfuscate=True)
    made = [bodies(short.chunk([piece("a")]))[-1]["obfuscation"] for _ in range(8)]
    assert len(set(made)) > 1


CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}


@pytest.mark.parametrize(
    ("chunk", "piece_of_it"),
    [
        (CHUNK | {"choices": [piece("a")]}, (0, "a")),
        (CHUNK | {"choices": [piece("a", finish_reason=None, logprobs=None)]}, (0, "a")),
        (CHUNK | {"choices": [piece("a", finish_reason="stop")]}, None),
        (CHUNK | {"choices": [piece("a", logprobs={"content": []})]}, None),
        (CHUNK | {"choices": [piece("a", content_filter_results={})]}, None),
        (CHUNK | {"choices": [piece("a"), piece("b") | {"index": 1}]}, None),
        (CHUNK | {"choices": [piece("a") | {"index": "0"}]}, None),
        (CHUNK | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "a"}}]}, None),
        (CHUNK | {"choices": [{"index": 0, "delta": {"content": None}}]}, None),
        (CHUNK | {"choices": [{"index": 0, "delta": {"refusal": "a"}}]}, None),
        (CHUNK | {"choices": [piece("a")], "service_tier": "flex"}, None),
        (CHUNK | {"choices": []}, None),
        (CHUNK, None),
    ],
)
def test_only_a_chunk_of_nothing_but_text_takes_the_short_way(chunk: dict[str, Any], piece_of_it: object) -> None:
    assert text_piece(chunk) == piece_of_it


def test_what_a_vendor_says_of_its_reply_is_told_once() -> None:
    short, running = frames(include_usage=True)
    running.reply_facts = {"provider": "one", "citations": ["a"]}
    made = bodies([*short.chunk([piece("a")]), *short.chunk([piece("b")])])
    running.reply_facts = {"provider": "one", "citations": ["a", "b"]}
    made += bodies([*short.chunk([piece("c")]), *short.chunk([piece("d")])])
    assert all(body["provider"] == "one" for body in made)
    assert [body["citations"] for body in made if "citations" in body] == [["a"], ["a", "b"]]
    assert "".join(body["choices"][0]["delta"].get("content") or "" for body in made) == "abcd"


def test_what_a_vendor_says_of_a_choice_is_on_its_frame() -> None:
    short, _ = frames()
    made = bodies(short.chunk([piece("a", content_filter_results={"hate": 1})]))
    made += bodies(short.chunk([{"index": 0, "delta": {}, "finish_reason": "stop", "native_finish_reason": "END"}]))
    made += bodies(short.chunk([{"index": 0, "delta": {}, "content_filter_offsets": {"end": 1}}]))
    choices = [body["choices"][0] for body in made]
    assert [choice.get("content_filter_results") for choice in choices] == [None, {"hate": 1}, None, None]
    assert choices[2]["native_finish_reason"] == "END"
    assert (choices[3]["content_filter_offsets"], choices[3]["delta"]) == ({"end": 1}, {})


@pytest.mark.parametrize(
    ("delta", "content"),
    [
        ({"role": "assistant", "content": ""}, ""),
        ({"role": "assistant"}, ""),
        ({"content": "a"}, ""),
        ({"role": "assistant", "content": None}, None),
        ({"role": "assistant", "content": None, "tool_calls": [{"index": 0}]}, None),
        ({"tool_calls": [{"index": 0}]}, None),
        ({"role": "assistant", "content": None, "refusal": "no"}, None),
    ],
)
def test_the_first_frame_has_no_content_where_the_reply_begins_with_none(delta: Any, content: Any) -> None:
    short, _ = frames()
    first = bodies(short.chunk([{"index": 0, "delta": delta}]))[0]["choices"][0]["delta"]
    assert first == {"role": "assistant", "content": content, "refusal": None}
