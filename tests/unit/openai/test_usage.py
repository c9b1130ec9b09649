"""Usage: read, bounded, estimated."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.money.amounts import Usage
from gateway.core.openai.vendors.usage import billed_usage, read_usage, text_bytes, usage_body

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
def test_usage_without_counts_is_none(usage: Any) -> None:
    assert read_usage({"usage": usage}) is None


@given(COUNTS, COUNTS, st.integers(0, 10_000), st.integers(0, 10_000), st.booleans(), st.integers(0, 5000))
def test_never_above_what_is_possible(p: int, c: int, request: int, reply: int, says: bool, context: int) -> None:
    usage = billed_usage(Usage(p, c) if says else None, REQUEST, request, reply, context)
    assert usage.completion_tokens <= max(10, context)
    assert usage.prompt_tokens <= max(request, 200, context)
    if says and p <= max(request, context) and c <= max(10, context):
        assert usage == Usage(p, c), "what is possible is believed"
    if not says or c > max(10, context):
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
