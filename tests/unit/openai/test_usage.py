"""Usage: believed as far as it makes sense, counted otherwise."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.money.amounts import Usage
from gateway.core.openai.vendors.usage import BYTES_PER_TOKEN_MAX, billed_usage, read_usage, text_bytes, usage_body

REQUEST: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}
LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "word " * 800}], "max_tokens": 512}
COUNTS = st.integers(0, 10**12)
CONTEXT = 8192


@given(COUNTS, COUNTS, st.booleans(), st.booleans())
def test_what_is_written_is_read(prompt: int, completion: int, estimated: bool, clipped: bool) -> None:
    usage = Usage(prompt, completion, estimated, clipped=clipped)
    again = read_usage({"usage": usage_body(usage)})
    assert again == usage
    assert again is not None
    assert again.clipped == clipped


@pytest.mark.parametrize(
    "usage",
    [None, [], {}, "5", {"prompt_tokens": -1}, {"prompt_tokens": True}, {"prompt_tokens": "many"},
     {"prompt_tokens": math.nan}, {"prompt_tokens": math.inf}, {"prompt_tokens": 10**400},
     {"prompt_tokens": "9" * 5000}, {"prompt_tokens": "1,2"}, {"prompt_tokens": None, "completion_tokens": None}],
)  # fmt: skip
def test_usage_without_counts_is_none(usage: Any) -> None:
    assert read_usage({"usage": usage}) is None


@given(COUNTS, COUNTS, st.integers(0, 10_000), st.integers(0, 10_000), st.booleans(), st.integers(0, 5000))
def test_never_above_what_is_possible(p: int, c: int, request: int, reply: int, says: bool, context: int) -> None:
    usage = billed_usage(Usage(p, c) if says else None, REQUEST, request, reply, context)
    assert usage.completion_tokens <= max(10, context)
    assert usage.prompt_tokens <= max(request, 200, context)
    fewest = max(reply // BYTES_PER_TOKEN_MAX, min(reply, 1))
    sensible = min(max(4 * 10, reply), max(10, context))
    if says and 0 < p <= max(request, context) and fewest <= c <= sensible:
        assert usage == Usage(p, c), "what is possible is believed"
    if not says or c > max(10, context):
        assert usage.estimated


def test_every_choice_may_use_the_bound() -> None:
    usage = billed_usage(Usage(1, 25), {**REQUEST, "n": 3}, 100, 0)
    assert usage == Usage(1, 25)


@pytest.mark.parametrize(
    ("reported", "reply_bytes", "tokens", "unreported"),
    [
        (Usage(0, 0), 4000, (1100, 1000), True),  # nothing, for a long reply
        (Usage(0, 0), 0, (1100, 0), True),
        (Usage(1, 1), 4000, (1100, 1000), True),  # less than any tokenizer makes of it
        (Usage(0, 950), 4000, (1100, 950), False),  # of the reply alone
        (Usage(900, 0), 4000, (900, 1000), False),  # of the prompt alone
        (Usage(900, 950), 4000, (900, 950), False),
        (Usage(130, 130), 4000, (130, 130), False),  # the fewest that are believed
        (None, 4000, (1100, 1000), True),
    ],
)
def test_a_count_that_is_too_small_for_its_text_is_unreported(
    reported: Usage | None, reply_bytes: int, tokens: tuple[int, int], unreported: bool
) -> None:
    usage = billed_usage(reported, LONG, 4400, reply_bytes, CONTEXT)
    assert (usage.prompt_tokens, usage.completion_tokens) == tokens
    assert usage.unreported == unreported
    is_believed = reported is not None and tokens == (reported.prompt_tokens, reported.completion_tokens)
    assert usage.estimated != is_believed
    assert not usage.clipped


@pytest.mark.parametrize(
    "request_body",
    [
        {"prompt": ""},
        {"messages": []},
        {"input": []},
    ],
)
def test_no_tokens_are_believed_of_an_empty_prompt(request_body: dict[str, Any]) -> None:
    assert billed_usage(Usage(0, 4), request_body, 40, 16, CONTEXT) == Usage(0, 4)


@pytest.mark.parametrize(
    "request_body",
    [
        {"prompt": "a"},
        {"input": ["a", "b"]},
        {"input": [101, 102]},
        {"prompt": [[101], [102]]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    ],
)
def test_a_prompt_of_nothing_is_not_believed_where_there_is_one(request_body: dict[str, Any]) -> None:
    usage = billed_usage(Usage(0, 4), request_body, 40, 16, CONTEXT)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.unreported) == (10, 4, False)


def test_the_bytes_of_an_image_are_no_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400_000}}
    body = {"messages": [{"role": "user", "content": [image, {"type": "text", "text": "what is it?"}]}]}
    assert billed_usage(Usage(1105, 20), body, 400_200, 60, CONTEXT) == Usage(1105, 20)


@pytest.mark.parametrize(
    ("reported", "tokens", "clipped"),
    [
        (Usage(900, 2048), (900, 2048), False),  # four times what was asked for
        (Usage(900, 2049), (900, 2048), True),
        (Usage(900, 10**12), (900, 2048), True),
        (Usage(900, 6000, details={"reasoning_tokens": 5900}), (900, 6000), False),  # beside `max_tokens`
        (Usage(900, 10**12, details={"reasoning_tokens": 10**12}), (900, CONTEXT), True),
        (Usage(CONTEXT, 100), (CONTEXT, 100), False),
        (Usage(3 * CONTEXT, 100), (CONTEXT, 100), True),
        (Usage(10**12, 100), (1100, 100), True),  # says nothing at all
    ],
)
def test_a_report_beyond_a_small_multiple_is_cut_and_says_so(
    reported: Usage, tokens: tuple[int, int], clipped: bool
) -> None:
    usage = billed_usage(reported, LONG, 4400, 400, CONTEXT)
    assert (usage.prompt_tokens, usage.completion_tokens) == tokens
    assert usage.clipped == clipped
    assert usage.estimated == clipped


def test_a_reply_longer_than_was_asked_for_is_charged_by_its_text() -> None:
    assert billed_usage(Usage(900, 3000), LONG, 4400, 12_000, CONTEXT) == Usage(900, 3000)


@pytest.mark.parametrize(
    ("total", "completion", "reasoning"),
    [(1430, 530, 510), (1432, 532, 512), (1433, 20, None), (12_000, 20, None)],
)
def test_thinking_that_only_a_total_shows_is_believed_as_far_as_the_request_allows(
    total: int, completion: int, reasoning: int | None
) -> None:
    reported = read_usage({"usage": {"prompt_tokens": 900, "completion_tokens": 20, "total_tokens": total}})
    usage = billed_usage(reported, {**LONG, "max_tokens": 532}, 4400, 80, CONTEXT)
    assert (usage.completion_tokens, usage.details.get("reasoning_tokens")) == (completion, reasoning)


def test_parts_of_what_is_not_believed_are_left_out() -> None:
    parts = {"cached_tokens": 1, "reasoning_tokens": 3}
    assert billed_usage(Usage(1, 200, details=parts), LONG, 4400, 400, CONTEXT).details == {"reasoning_tokens": 3}
    assert billed_usage(Usage(900, 3, details=parts), LONG, 4400, 400, CONTEXT).details == {"cached_tokens": 1}


def test_text_is_counted_in_bytes_wherever_it_stands() -> None:
    call = {"function": {"name": "add", "arguments": "{}"}}
    pieces: list[dict[str, Any]] = [
        {"content": "é"},
        {"reasoning_content": "abc", "tool_calls": [call, "x"]},
        {"content": None},
    ]
    assert text_bytes(pieces) == 2 + 3 + 3 + 2
