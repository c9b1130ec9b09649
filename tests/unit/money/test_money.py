"""Every bound of `core/money/amounts.py` holds for any usage within it, and is no larger than it must be."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.money.amounts import (
    NANO_MAX,
    TOKENS_PER_MEDIA_PART,
    TOKENS_PER_MESSAGE,
    TOKENS_PER_REQUEST,
    Usage,
    cost_nano,
    input_tokens_bound,
    media_tokens_bound,
    nano_to_usd,
    output_tokens_that_fit,
    usd_to_nano,
    worst_case_nano,
)
from gateway.core.pool.prices import HOUR_PARTS, MEDIA_PARTS, PROMPT_PARTS, REPLY_PARTS, Price

usd = st.decimals(min_value=0, max_value=1000, places=7)
parts = {name: st.none() | usd for name in (*PROMPT_PARTS.values(), *REPLY_PARTS.values())}
prices = st.builds(Price, input_usd_per_mtok=usd, output_usd_per_mtok=usd, call_usd=usd, **parts)
tokens = st.integers(min_value=0, max_value=2_000_000)


def price(input_usd: str, output_usd: str, call_usd: str = "0") -> Price:
    return Price(
        input_usd_per_mtok=Decimal(input_usd), output_usd_per_mtok=Decimal(output_usd), call_usd=Decimal(call_usd)
    )


def test_cost_is_exact_and_rounded_up() -> None:
    assert cost_nano(price("3", "15"), Usage(1000, 100)) == 4_500_000
    assert cost_nano(price("0.0001", "0"), Usage(1, 0)) == 1  # 0.1 nano-dollars
    assert cost_nano(price("0", "0", "0.01"), Usage(5, 5)) == 10_000_000
    assert cost_nano(price("0", "0"), Usage(5, 5)) == 0


@given(prices, tokens, tokens, st.integers(1, 4), st.data())
def test_the_worst_case_covers_any_usage_within_its_bounds(
    p: Price, input_bound: int, output_max: int, attempts: int, data: st.DataObject
) -> None:
    details = st.dictionaries(st.sampled_from(sorted((*PROMPT_PARTS, *REPLY_PARTS))), tokens)
    usages = [
        Usage(data.draw(st.integers(0, input_bound)), data.draw(st.integers(0, output_max)), details=data.draw(details))
        for _ in range(attempts)
    ]
    media = any(MEDIA_PARTS & usage.details.keys() for usage in usages)
    hour = any(HOUR_PARTS & usage.details.keys() for usage in usages)
    worst = worst_case_nano(p, input_bound, output_max, attempts, media=media, hour=hour)
    assert sum(cost_nano(p, usage) for usage in usages) <= worst


@given(prices, tokens, st.integers(0, 10**13), st.integers(1, 4))
def test_the_output_bound_fits_and_one_token_more_does_not(
    p: Price, input_bound: int, budget: int, attempts: int
) -> None:
    fit = output_tokens_that_fit(p, input_bound, budget, attempts)
    if fit < 0:
        assert worst_case_nano(p, input_bound, 0, attempts) > budget
        return
    assert worst_case_nano(p, input_bound, fit, attempts) <= budget
    if fit < NANO_MAX:
        assert worst_case_nano(p, input_bound, fit + 1, attempts) > budget


def test_free_output_fits_without_bound() -> None:
    assert output_tokens_that_fit(price("0", "0"), 10, 0) == NANO_MAX
    assert output_tokens_that_fit(price("1", "0"), 10, 0) == -1


def test_rounding_never_costs_a_token_that_fits() -> None:
    # Input 0.4 and output 0.6 nano-dollars make exactly 1: rounding the input up first would lose the token.
    assert output_tokens_that_fit(price("0.0004", "0.0006"), 1, 1) == 1


def test_the_room_for_what_a_template_adds_is_as_it_says() -> None:
    assert input_tokens_bound([]) == 64
    assert input_tokens_bound([{"role": "user", "content": "four"}]) == 64 + 16 + 4


def test_the_default_is_one_attempt() -> None:
    price = Price(input_usd_per_mtok=Decimal(1), output_usd_per_mtok=Decimal(2))
    assert worst_case_nano(price, 3, 4) == worst_case_nano(price, 3, 4, 1) == 11_000
    assert output_tokens_that_fit(price, 3, 11_000) == 4


def test_usage_adds_up() -> None:
    assert Usage() == Usage(0, 0, False)
    assert Usage(1, 2) + Usage(3, 4, estimated=True) == Usage(4, 6, estimated=True)
    assert Usage(1, 2) + Usage(3, 4) == Usage(4, 6)


@given(st.text())
def test_the_input_bound_counts_every_byte(text: str) -> None:
    body = {"role": "user", "content": text}
    expected = TOKENS_PER_REQUEST + TOKENS_PER_MESSAGE + len(text.encode("utf-8", "surrogatepass"))
    assert input_tokens_bound([body]) == expected
    assert input_tokens_bound([{"role": "user", "content": [{"type": "text", "text": text}]}]) >= expected


def test_the_input_bound_counts_tools_parts_and_extra_text() -> None:
    base = TOKENS_PER_REQUEST + TOKENS_PER_MESSAGE
    assert input_tokens_bound([]) == TOKENS_PER_REQUEST
    assert input_tokens_bound([{"role": "assistant", "content": None}]) == base
    assert input_tokens_bound([], "é") == TOKENS_PER_REQUEST + 2
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    assert input_tokens_bound([{"content": [image]}]) == base + TOKENS_PER_MEDIA_PART
    large = {"type": "file", "file": {"file_data": "data:application/pdf;base64," + "A" * 400_000}}
    assert input_tokens_bound([{"content": [large]}]) >= base + 300_000
    sound = {"type": "input_audio", "input_audio": {"data": "A" * 400_000, "format": "mp3"}}
    assert input_tokens_bound([{"content": [sound]}]) == base + 300_000 // 16
    assert input_tokens_bound([{"content": [{"type": "file", "file": {"file_id": "f"}}, {"type": "file"}]}]) == (
        base + 2 * TOKENS_PER_MEDIA_PART
    )
    assert input_tokens_bound([{"content": "a", "name": "bob"}]) == base + 4
    call = [{"id": "c1", "function": {"name": "f", "arguments": "{}"}}]
    assert input_tokens_bound([{"content": None, "tool_calls": call}]) == base + len(str(call))


def test_a_lone_surrogate_is_counted_not_refused() -> None:
    assert input_tokens_bound([{"content": "\ud800"}]) == TOKENS_PER_REQUEST + TOKENS_PER_MESSAGE + 3


@pytest.mark.parametrize(
    ("text", "nano"),
    [
        ("0", 0),
        ("1", 10**9),
        (5, 5 * 10**9),
        (Decimal("0.5"), 5 * 10**8),
        ("0.0000000001", 1),
        ("1e-999999", 1),
        ("1.00000000000000000000000000000000001", 10**9 + 1),
        ("9007199.254740991", NANO_MAX),
    ],
)
def test_dollars_become_nano_dollars_rounded_up(text: str | Decimal | int, nano: int) -> None:
    assert usd_to_nano(text) == nano


@pytest.mark.parametrize("text", ["", "ten", "-1", "-0.1", "NaN", "sNaN", "Infinity", "1,5"])
def test_nonsense_is_no_amount(text: str) -> None:
    with pytest.raises(ValueError, match="is not an amount in dollars"):
        usd_to_nano(text)


@pytest.mark.parametrize("text", ["9007199.254740992", "1e400", "1e999999"])
def test_an_amount_that_lua_could_not_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"over the largest amount, \$9,007,199"):
        usd_to_nano(text)


@given(st.integers(0, NANO_MAX))
def test_nano_dollars_are_written_exactly(nano: int) -> None:
    assert usd_to_nano(nano_to_usd(nano)) == nano
    assert "E" not in nano_to_usd(nano)


def test_nano_dollars_as_text() -> None:
    assert [nano_to_usd(n) for n in (0, 1, 123_000, 10**9, 100 * 10**9)] == ["0", "0.000000001", "0.000123", "1", "100"]


def test_flags_of_a_usage_default_to_false_and_survive_sums() -> None:
    assert not Usage(1, 2).estimated
    assert not Usage(1, 2).unreported
    assert Usage(1, 2, True, True) == Usage(1, 2, True), "who counted is not what was counted"
    for left, right in ((False, True), (True, False), (True, True), (False, False)):
        total = Usage(1, 2, left, right) + Usage(3, 4, right, left)
        assert (total.prompt_tokens, total.completion_tokens) == (4, 6)
        assert (total.estimated, total.unreported) == (left or right, left or right)


def test_a_part_that_is_no_text_is_held_for_as_4096_tokens() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}
    assert media_tokens_bound(image) == media_tokens_bound("nonsense") == 4096


def test_a_long_prompt_has_its_own_prices_and_is_held_by_the_dearest_that_it_may_have() -> None:
    tier = {"prompt_tokens": 200_000, "input_usd_per_mtok": "2.5", "cache_read_usd_per_mtok": "0.25"}
    plain = {"input_usd_per_mtok": "1.25", "output_usd_per_mtok": "10", "cache_read_usd_per_mtok": "0.125"}
    price = Price.model_validate({**plain, "above": [tier]})
    for tokens, rate in ((200_000, 1250), (200_001, 2500)):
        assert cost_nano(price, Usage(tokens, 3)) == tokens * rate + 3 * 10_000
        assert worst_case_nano(price, tokens, 3) == tokens * rate + 3 * 10_000
        assert output_tokens_that_fit(price, tokens, tokens * rate + 3 * 10_000) == 3
    cached = Usage(200_001, 0, details={"cached_tokens": 200_000})
    assert cost_nano(price, cached) == 200_000 * 250 + 2500
    cheaper = Price.model_validate({**plain, "above": [{"prompt_tokens": 9, "input_usd_per_mtok": "1"}]})
    assert worst_case_nano(cheaper, 10, 0) == 10 * 1250  # nobody knows yet that it will be so long
    for wrong in ([tier, tier], [{**tier, "prompt_tokens": 0}]):
        with pytest.raises(ValueError, match="above"):
            Price.model_validate({**plain, "above": wrong})
