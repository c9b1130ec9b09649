"""The event-stream parser: any cut of the bytes gives the same events; nothing grows without bound."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.adapters.upstream.sse import SseError, SseEvent, SseParser

STREAM = (
    b': hello\r\n\r\ndata: one\n\nevent: error\ndata: two\ndata:three\n\nid: 4\nretry: 5\n\ndata: {"\xc3\xa9": 1}\r\r'
)
EVENTS = [SseEvent("one"), SseEvent("two\nthree", "error"), SseEvent('{"é": 1}')]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    parser = SseParser(1000)
    edges = [0, *sorted(cuts), len(STREAM)]
    events = [event for a, b in pairwise(edges) for event in parser.feed(STREAM[a:b])]
    assert events + parser.end() == EVENTS


def test_the_end_completes_an_event_without_its_blank_line() -> None:
    parser = SseParser(1000)
    assert parser.feed(b"data: x") == []
    assert parser.end() == [SseEvent("x")]
    assert SseParser(1000).end() == []


@pytest.mark.parametrize("stream", [b"x" * 200, b"data: x\n" * 20, b"data: \xff\n"])
def test_bytes_that_are_no_event_stream_are_an_error(stream: bytes) -> None:
    with pytest.raises(SseError):
        SseParser(100).feed(stream)


@given(st.binary(max_size=500))
def test_no_bytes_make_it_fail_otherwise(stream: bytes) -> None:
    parser = SseParser(50)
    try:
        parser.feed(stream)
    except SseError:
        return
    assert len(parser._line) <= 50


def test_a_line_end_that_is_cut_in_two_is_one() -> None:
    stream = b"data: a\r\ndata: b\r\n\r\n"
    for cut in range(len(stream) + 1):
        parser = SseParser(100)
        events = [*parser.feed(stream[:cut]), *parser.feed(b""), *parser.feed(stream[cut:]), *parser.end()]
        assert events == [SseEvent("a\nb")], cut


PARTS = (
    b"data: one\n\n",
    b"data: ",
    b"two\n",
    b"\n",
    b"\r\n",
    b"\r",
    b"event: error\n",
    b"data:x\n\n",
    b": c\n\n",
    b"\xc3\xa9",
)


@given(st.lists(st.sampled_from(PARTS), max_size=12), st.data())
def test_whole_events_are_read_as_single_bytes_are(parts: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(parts)
    cut = data.draw(st.integers(0, len(stream)))
    at_once, bytewise = SseParser(60), SseParser(60)
    events = at_once.feed(stream[:cut]) + at_once.feed(stream[cut:]) + at_once.end()
    assert events == [e for at in range(len(stream)) for e in bytewise.feed(stream[at : at + 1])] + bytewise.end()


def test_an_event_of_one_line_has_the_same_bound() -> None:
    assert SseParser(100).feed(b"data: " + b"x" * 94 + b"\n\n") == [SseEvent("x" * 94)]
    with pytest.raises(SseError):
        SseParser(99).feed(b"data: " + b"x" * 94 + b"\n\n")


def test_a_byte_order_mark_before_the_first_event_is_skipped_wherever_it_is_cut() -> None:
    stream = b'\xef\xbb\xbfdata: {"a": 1}\n\ndata: {"b": 2}\n\n'
    for cut in range(len(stream) + 1):
        parser = SseParser(100)
        events = [*parser.feed(stream[:cut]), *parser.feed(stream[cut:]), *parser.end()]
        assert events == [SseEvent('{"a": 1}'), SseEvent('{"b": 2}')], cut
    assert SseParser(100).feed_to(len, stream) == [8, 8]


def test_a_mark_behind_the_first_bytes_is_text() -> None:
    assert SseParser(100).feed("data: \ufeffx\n\n".encode()) == [SseEvent("\ufeffx")]


@pytest.mark.parametrize("empty", [b"data:\n\n", b"data: \n\n", b"data:  \r\n\r\n", b"event: ping\ndata:\n\n", b"\n\n"])
def test_an_event_without_text_is_skipped(empty: bytes) -> None:
    stream = b"data: one\n\n" + empty + b"data: two\n\n"
    assert SseParser(100).feed(stream) == [SseEvent("one"), SseEvent("two")]
    parser = SseParser(100)
    assert [event for byte in stream for event in parser.feed(bytes([byte]))] == [SseEvent("one"), SseEvent("two")]
