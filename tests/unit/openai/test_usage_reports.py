"""Every vendor's report of usage comes to the right bill, and survives the way through the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.money.amounts import Usage, cost_nano
from gateway.core.openai.vendors.dialects import UsageTally
from gateway.core.openai.vendors.usage import billed_usage, read_usage, usage_body
from gateway.core.pool.workers import Price

REPORTS: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "usage_reports.yaml").read_text())
USD: dict[str, str] = {  # a million tokens
    "input": "1",
    "cache_read": "0.1",
    "cache_write": "1.25",
    "cache_write_1h": "2",
    "input_audio": "10",
    "input_image": "3",
    "output": "4",
    "output_audio": "20",
    "output_image": "30",
}
PRICE = Price.model_validate({f"{name}_usd_per_mtok": usd for name, usd in USD.items()})
REQUEST: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4096}


def _names(value: Any) -> Iterator[str]:
    """Every name in a report."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield name
        yield from _names(inner)
    for item in value if isinstance(value, list) else ():
        yield from _names(item)


def billed(bodies: list[dict[str, Any]]) -> Usage:
    """The usage to bill for a short question and these reports."""
    tally = UsageTally()
    for body in bodies:
        tally.add(body)
    return billed_usage(tally.usage(), REQUEST, 80, 30, 100_000)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report["name"])
def test_each_dialect_has_its_bill(report: dict[str, Any]) -> None:
    read = billed(report["says"])
    assert [read.prompt_tokens, read.completion_tokens] == report["tokens"]
    assert read.details == report.get("parts", {})
    assert cost_nano(PRICE, read) == sum(tokens * Decimal(USD[name]) * 1000 for name, tokens in report["bill"].items())
    assert (read.estimated, read.unreported, read.clipped) == (report.get("estimated", False), False, False)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report["name"])
def test_what_was_understood_stays_so(report: dict[str, Any]) -> None:
    once = billed(report["says"])
    again = read_usage({"usage": usage_body(once)})
    assert again == once
    assert again is not None
    assert again.details == once.details


def test_writes_for_an_hour_cost_what_the_vendor_asks_where_no_price_is_given() -> None:
    written = Usage(1000, 0, details={"cache_write_tokens": 1000, "cache_write_1h_tokens": 400})
    five, hour = Decimal("3.75"), Decimal(7)  # dollars a million
    by_ratio = Price(input_usd_per_mtok=Decimal(3), cache_write_usd_per_mtok=five)
    assert cost_nano(by_ratio, written) == (600 * five + 400 * 6) * 1000
    both = Price(input_usd_per_mtok=Decimal(3), cache_write_usd_per_mtok=five, cache_write_1h_usd_per_mtok=hour)
    assert cost_nano(both, written) == (600 * five + 400 * hour) * 1000
    hours_alone = Price(input_usd_per_mtok=Decimal(3), cache_write_1h_usd_per_mtok=hour)
    assert cost_nano(hours_alone, written) == (600 * 3 + 400 * hour) * 1000
    assert cost_nano(Price(input_usd_per_mtok=Decimal(3)), written) == 1000 * 3 * 1000


@pytest.mark.parametrize(
    ("counts", "usd"),
    [
        ({"cost": 0.00095, "is_byok": False, "cost_details": {"upstream_inference_cost": 0.00095}}, "0.00095"),
        ({"cost": 0.95, "cost_details": {"upstream_inference_cost": 19}}, "19.95"),
        ({"cost": 0.001, "is_byok": True, "cost_details": {"upstream_inference_cost": 0.0004}}, "0.0014"),
        ({"cost": {"input_tokens_cost": 0.001, "request_cost": 0.005, "total_cost": 0.006}}, "0.006"),
        ({"cost_in_usd_ticks": 232_856_000}, "0.0232856"),
        ({"cost": "0.25"}, "0.25"),
        ({"cost": 0}, "0"),
        ({"cost": -1}, None),
        ({"cost": True}, None),
        ({"cost": "dear"}, None),
        ({"cost": float("nan")}, None),
    ],
)
def test_what_a_worker_bills_is_read_in_its_own_unit(counts: dict[str, Any], usd: str | None) -> None:
    read = read_usage({"usage": {"prompt_tokens": 5, "completion_tokens": 5, **counts}})
    assert read is not None
    assert read.bill_nano == (None if usd is None else int(Decimal(usd) * 10**9))


NAMES = sorted({name for report in REPORTS for body in report["says"] for name in _names(body)})
SUMS = ["prompt_tokens", "input_tokens", "completion_tokens", "output_tokens", "total_tokens"]
NUMBERS: st.SearchStrategy[Any] = st.one_of(
    st.integers(0, 20_000), st.floats(), st.sampled_from([None, True, -1, 10**12, 10**400, "12", "1,200", "x", [], {}])
)
COUNTS = st.dictionaries(st.sampled_from(SUMS), NUMBERS, max_size=4)
PARTS = st.dictionaries(st.sampled_from(NAMES), NUMBERS | st.dictionaries(st.sampled_from(NAMES), NUMBERS), max_size=5)


@settings(max_examples=300)
@given(st.lists(st.tuples(COUNTS, PARTS, st.sampled_from(NAMES)), max_size=3), st.integers(0, 2000))
def test_any_report_makes_sense_once_it_is_read(reports: list[Any], reply_bytes: int) -> None:
    bodies = [{"usage": {**parts, **counts}, place: counts} for counts, parts, place in reports]
    tally = UsageTally()
    for body in bodies:
        tally.add(body)
    once = billed_usage(tally.usage(), REQUEST, 80, reply_bytes, 100_000)
    parts = once.details
    assert 0 < once.prompt_tokens <= 100_000
    assert 0 <= once.completion_tokens <= 4096 + 32_768
    assert parts.get("cached_tokens", 0) + parts.get("cache_write_tokens", 0) <= once.prompt_tokens
    assert parts.get("cache_write_1h_tokens", 0) <= parts.get("cache_write_tokens", 0)
    assert parts.get("reasoning_tokens", 0) <= once.completion_tokens
    again = read_usage({"usage": usage_body(once)})
    assert again == once
    assert again is not None
    assert again.details == parts
