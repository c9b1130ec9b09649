"""Marks of items in chat messages: what is cut at them is the whole, whatever they say."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.openai import marks
from gateway.core.openai.reply import ReplyBuilder
from gateway.core.openai.responses.outbound import Chunks
from gateway.core.openai.responses.output import Output, output_of
from gateway.core.openai.vendor import for_worker

HEX = "0123456789abcdef" * 2
WORDS = st.text("ab\n", max_size=6)
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers(-2, 9) | WORDS | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "id", "text"]), inner),
    max_leaves=4,
)
CALL = {"id": "call_1", "type": "function", "function": {"name": "sum", "arguments": "{}"}}
MARKS = st.sampled_from(marks.KINDS)
DELTAS = st.lists(
    st.one_of(
        st.builds(lambda kind: {marks.FIELD: [{"type": kind}]}, MARKS),
        st.builds(lambda text: {"content": text}, WORDS),
        st.builds(lambda text: {"refusal": text}, WORDS),
        st.builds(lambda text: {"reasoning_content": text}, WORDS),
        st.builds(lambda at: {"tool_calls": [{**CALL, "index": at}]}, st.integers(0, 3)),
    ),
    max_size=9,
)


def built(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    builder = ReplyBuilder()
    for delta in deltas:
        builder.add([{"index": 0, "delta": delta}])
    builder.add([{"index": 0, "delta": {}, "finish_reason": "stop"}])
    choice: dict[str, Any] = builder.body()["choices"][0]
    return choice


@given(DELTAS)
def test_pieces_of_a_message_are_the_message(deltas: list[dict[str, Any]]) -> None:
    choice = built(deltas)
    again = built([piece["delta"] for piece in marks.pieces(choice)])
    for name in (*marks.TEXTS, marks.FIELD):
        assert (again["message"].get(name) or None) == (choice["message"].get(name) or None)
    assert len(again["message"].get("tool_calls", ())) == len(choice["message"].get("tool_calls", ()))


def begun(kind: str, *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    return [{marks.FIELD: [{"type": kind}]}, *deltas]


ITEMS = st.lists(
    st.one_of(
        st.lists(WORDS, max_size=3).map(lambda texts: begun(marks.MESSAGE, *({"content": text} for text in texts))),
        st.builds(lambda text: [*begun(marks.MESSAGE), {"content": "a"}, *begun(marks.PART), {"refusal": text}], WORDS),
        st.just(begun(marks.REASONING)),
        st.builds(
            lambda text: [
                *begun(marks.REASONING),
                *begun(marks.SUMMARY, {"reasoning_content": text}),
                *begun(marks.GAP, {"reasoning_content": "-"}),
                *begun(marks.SUMMARY, {"reasoning_content": "b"}),
            ],
            WORDS,
        ),
        st.builds(lambda text: [*begun(marks.REASONING), *begun(marks.TEXT, {"reasoning_content": text})], WORDS),
        st.just(begun(marks.CALL)),
    ),
    max_size=6,
)


@given(ITEMS)
def test_the_items_are_the_same_whole_and_in_pieces(items: list[list[dict[str, Any]]]) -> None:
    deltas, calls = [], 0
    for delta in (one for item in items for one in item):
        deltas.append(delta)
        if delta.get(marks.FIELD) == [{"type": marks.CALL}]:
            deltas.append({"tool_calls": [{**CALL, "index": calls}]})
            calls += 1
    streamed = Output("0" * 32, {})
    for delta in deltas:
        deque(streamed.choice({"index": 0, "delta": delta}), 0)
    deque(streamed.close("completed"), 0)
    assert output_of(built(deltas)["message"]).items == streamed.items
    assert len(streamed.items) == len(items)


@given(st.dictionaries(st.sampled_from([*marks.TEXTS, *marks.LISTS, marks.FIELD]), ANYTHING))
def test_marks_that_a_worker_made_up_break_nothing(message: dict[str, Any]) -> None:
    output_of(message)
    marks.answer(message)
    marks.facts(message)
    assert all(mark["type"] in marks.KINDS for mark in marks.read(message.get(marks.FIELD)))
    deque(Output(HEX, {}).choice({"delta": {marks.EVENTS: message.get(marks.FIELD), **message}}), 0)


@given(st.lists(st.tuples(st.sampled_from([
    *("response.output_item.added", "response.output_item.done", "response.content_part.added", "response.created"),
    *("response.output_text.delta", "response.reasoning_summary_part.added", "response.reasoning_text.delta"),
    *("response.output_text.annotation.added", "response.web_search_call.searching", "response.completed"),
]), st.dictionaries(st.sampled_from(["item", "delta", "part", "annotation", "output_index", "response"]), ANYTHING)),
    max_size=6))  # fmt: skip
def test_events_without_their_form_are_ignored(events: list[tuple[str, dict[str, Any]]]) -> None:
    chunks, builder, output = Chunks(), ReplyBuilder(), Output(HEX, {})
    for kind, fields in events:
        choices = chunks.chunk({"type": kind, **fields}).get("choices") or ()
        builder.add(choices)
        for choice in choices:
            deque(output.choice(choice), 0)
    deque(output.end("completed", None), 0)


def test_only_workers_that_take_marks_get_them() -> None:
    item = {"type": "web_search_call", "id": "ws_1"}
    begun = [{"type": marks.MESSAGE, "phase": "commentary", "at": {}}, {"type": marks.ITEM, "item": item, "at": {}}]
    message = {"role": "assistant", "content": "Yes.", marks.FIELD: begun}
    assert for_worker([message], "a" * 12) == [{"role": "assistant", "content": "Yes."}]
    assert for_worker([message], "a" * 12, marks.NATIVE)[0][marks.FIELD] == begun[:1]
    assert for_worker([message], "a" * 12, (*marks.NATIVE, *marks.HOSTED))[0][marks.FIELD] == begun


def test_the_answer_is_the_text_of_the_last_message() -> None:
    marked = [{"type": marks.MESSAGE, "at": {}}, {"type": marks.MESSAGE, "at": {"content": 3}}]
    assert marks.answer({"content": "onetwo", marks.FIELD: marked}) == "two"
    assert marks.answer({"content": "onetwo"}) == "onetwo"
    assert marks.answer({"content": None, marks.FIELD: marked}) is None
