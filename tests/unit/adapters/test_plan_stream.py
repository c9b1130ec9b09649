"""A chunk of a plan that is decoded into a struct says what it says when it is read field by field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.adapters.upstream.conductor import stream
from gateway.adapters.upstream.conductor.stream import PlanChunk, PlanStream, read_chunk
from gateway.adapters.upstream.sse import SseEvent, SseParser
from gateway.errors import ConductorError
from gateway.service.ports.request import ConductorChunk

BYTES_MAX = 40
ENTRY = st.fixed_dictionaries(
    {"token": st.text(max_size=3), "logprob": st.one_of(st.floats(-9, 0), st.just(0)), "bytes": st.just([97])}
)
CHUNK = st.fixed_dictionaries(
    {"index": st.just(0), "delta": st.fixed_dictionaries({}, optional={"content": st.text(max_size=4)})},
    optional={
        "token_ids": st.one_of(st.none(), st.lists(st.sampled_from([7, 8, 1.0, True]), max_size=2)),
        "logprobs": st.one_of(st.none(), st.fixed_dictionaries({"content": st.lists(ENTRY, max_size=2)})),
        "finish_reason": st.sampled_from([None, None, "stop"]),
    },
)


def event(choice: Any, **more: Any) -> str:
    return json.dumps({"id": "p", "model": "smol-1", "choices": [choice], **more})


def read(events: Sequence[str]) -> list[PlanChunk | str]:
    """The events as the client gives them to the stream of a plan."""
    came = SseParser(1 << 20).feed_to(read_chunk, b"".join(b"data: %b\n\n" % one.encode() for one in events))
    return [one.data if isinstance(one, SseEvent) else one for one in came]


def outcome(events: Sequence[str], together: bool) -> tuple[ConductorChunk | None, str | None]:
    """The plan as one piece, and why it could not be read."""
    plan = PlanStream("asked-for", BYTES_MAX)
    pieces: list[ConductorChunk | None] = []
    try:
        for each in [events] if together else [[one] for one in events]:
            pieces.append(plan.take(read(each), False))
            plan.check()
    except ConductorError as error:
        return _joined(pieces), error.message
    return _joined(pieces), None


def _joined(pieces: Sequence[ConductorChunk | None]) -> ConductorChunk | None:
    found = [piece for piece in pieces if piece is not None]
    return ConductorChunk(
        "".join(piece.text for piece in found),
        tuple(token for piece in found for token in piece.token_ids),
        tuple(logprob for piece in found for logprob in piece.logprobs),
        tuple(text for piece in found for text in piece.tokens),
    )


@given(st.lists(CHUNK, max_size=6))
def test_both_ways_read_the_same_in_one_piece_or_in_many(choices: list[dict[str, Any]]) -> None:
    struct = [event(choice) for choice in choices]
    by_field = [event(choice, usage={}) for choice in choices]  # what no struct takes, and says nothing
    wanted = outcome(by_field, False)
    assert outcome(struct, False) == outcome(struct, True) == outcome(by_field, True) == wanted


def test_a_chunk_of_text_with_its_tokens_is_not_parsed_field_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "json_object", None)
    entries = [{"token": "{", "logprob": -0.5, "bytes": [123], "top_logprobs": []}]
    choice = {"index": 0, "delta": {"content": "{"}, "finish_reason": None, "token_ids": [90]}
    vllm = event(choice | {"logprobs": {"content": entries}}, object="chat.completion.chunk", created=1)
    hosted = event({"index": 0, "delta": {"role": "assistant", "content": "}"}, "logprobs": None}, usage=None)
    piece = PlanStream("asked-for", BYTES_MAX).take(read([vllm, hosted]), False)
    assert piece == ConductorChunk("{}", (90,), (-0.5,), ("{",))


def test_the_model_that_answered_is_the_one_in_the_chunks() -> None:
    plan = PlanStream("asked-for", BYTES_MAX)
    plan.take(read([event({"delta": {"content": "{}"}}), event({"delta": {}, "finish_reason": "stop"})]), True)
    assert plan.end({"messages": [], "max_tokens": 9}).model == "smol-1"


def test_the_bound_on_the_text_counts_bytes() -> None:
    piece, error = outcome([event({"delta": {"content": "é" * 20}}), event({"delta": {"content": "x"}})], True)
    assert piece == ConductorChunk("é" * 20)
    assert error == f"the plan is longer than {BYTES_MAX} bytes"
