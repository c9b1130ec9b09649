"""Usage: read, bounded, estimated."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.money import Usage
from gateway.core.usage import billed_usage, read_usage, text_bytes, usage_body

REQUEST: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}
COUNTS = st.integers(0, 10**12)


@given(COUNTS, COUNTS, st.booleans())
def test_what_is_written_is_read(prompt: int, completion: int, estimated: bool) -> None:
    usage = Usage(prompt, completion, estimated)
    assert read_usage({"usage": usage_body(usage)}) == usage


@pytest.mark.parametrize(
    "usage",
    [None, [], {}, {"prompt_tokens": -1}, {"prompt_tokens": 1.0}, {"prompt_tokens": True},
     {"prompt_tokens": "5"}, {"prompt_tokens": 5, "completion_tokens": None}],
)  # fmt: skip
def test_what_is_no_count_is_not(usage: Any) -> None:
    assert read_usage({"usage": usage}) is None


@given(COUNTS, COUNTS, st.integers(0, 10_000), st.integers(0, 10_000), st.booleans())
def test_never_above_what_the_request_allows(p: int, c: int, request: int, reply: int, says: bool) -> None:
    usage = billed_usage(Usage(p, c) if says else None, REQUEST, request, reply)
    assert usage.completion_tokens <= 10
    assert usage.prompt_tokens <= max(request, 200)
    if says and p <= request and c <= 10:
        assert usage == Usage(p, c)
    if not says or c > 10:
        assert usage.estimated


def test_every_choice_may_use_the_bound() -> None:
    usage = billed_usage(Usage(1, 25), {**REQUEST, "n": 3}, 100, 0)
    assert usage == Usage(1, 25)


def test_text_is_counted_in_bytes_wherever_it_stands() -> None:
    call = {"function": {"name": "add", "arguments": "{}"}}
    pieces: list[dict[str, Any]] = [
        {"content": "é"},
        {"reasoning_content": "abc", "tool_calls": [call, "x"]},
        {"content": None},
    ]
    assert text_bytes(pieces) == 2 + 3 + 3 + 2
