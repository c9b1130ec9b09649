"""Vendors' list prices: what a pool file has otherwise, and what it lacks."""

from __future__ import annotations

import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gateway.adapters.host.listprices import NAMES, differences, list_price
from gateway.cli import main
from gateway.core.pool.workers import Price, WorkerSpec
from gateway.errors import ConfigError
from tests.kit import model_worker

NOW = datetime(2026, 11, 1, tzinfo=UTC)


def claude(**more: Any) -> WorkerSpec:
    given = {"kind": "litellm", "model": "anthropic/claude-sonnet-4-6", "url": None, "context_tokens": 200_000}
    return model_worker("claude", "quill", **{**given, **more})


def test_a_price_is_found_by_vendor_or_by_url_and_otherwise_none() -> None:
    by_vendor = list_price(claude(), NOW)
    assert by_vendor is not None
    assert (by_vendor.vendor, by_vendor.amounts["cache_read_usd_per_mtok"]) == ("anthropic", Decimal("0.3"))
    by_url = list_price(model_worker("gpt", "atlas", model="gpt-5.1", url="https://api.openai.com/v1"), NOW)
    assert by_url is not None
    assert (by_url.vendor, by_url.amounts["output_usd_per_mtok"]) == ("openai", Decimal(10))
    gemini = list_price(claude(model="gemini/gemini-2.5-flash"), NOW)
    assert gemini is not None
    assert gemini.amounts["input_audio_usd_per_mtok"] == 1
    assert list_price(model_worker("own", "atlas"), NOW) is None
    assert list_price(claude(model="nobody/nothing"), NOW) is None


def test_a_long_context_reaches_the_dearest_tier_and_a_new_price_its_day() -> None:
    before = datetime(2026, 3, 1, tzinfo=UTC)
    assert {name: list_price(claude(context_tokens=size), before).amounts["input_usd_per_mtok"]  # type: ignore[union-attr]
            for name, size in (("short", 200_000), ("long", 1_000_000))} == {"short": 3, "long": 6}  # fmt: skip
    now = list_price(claude(context_tokens=1_000_000), NOW)
    assert now is not None
    assert (now.since, now.amounts["input_usd_per_mtok"]) == (date(2026, 3, 13), Decimal(3))


def test_what_differs_is_told_and_what_the_vendor_asked_before_is_old() -> None:
    amounts = {"input_usd_per_mtok": "6", "output_usd_per_mtok": "14", "cache_read_usd_per_mtok": "0.30"}
    worker = claude(price=Price.model_validate(amounts), context_tokens=1_000_000)
    listed = list_price(worker, NOW)
    assert listed is not None
    found = {one.name: (one.in_file, one.is_old) for one in differences(worker, listed)}
    assert found == {
        "input_usd_per_mtok": (Decimal(6), True),
        "output_usd_per_mtok": (Decimal(14), False),
        "cache_write_usd_per_mtok": (None, False),
        "cache_write_1h_usd_per_mtok": (None, False),
    }


def test_tiers_are_compared_one_by_one_where_the_file_has_them() -> None:
    before = datetime(2026, 3, 1, tzinfo=UTC)
    tiers = [{"prompt_tokens": 200_000, "input_usd_per_mtok": "6", "output_usd_per_mtok": "22.5"}]
    amounts = {"input_usd_per_mtok": "3", "output_usd_per_mtok": "14", "above": tiers}
    worker = claude(price=Price.model_validate(amounts), context_tokens=1_000_000)
    listed = list_price(worker, before)
    assert listed is not None
    assert [(start, asked["input_usd_per_mtok"]) for start, asked in listed.tiers] == [
        (0, Decimal(3)),
        (200_000, Decimal(6)),
    ]
    found = [(one.name, one.in_file, one.listed) for one in differences(worker, listed) if "cache" not in one.name]
    assert found == [("output_usd_per_mtok", Decimal(14), Decimal(15))]


def test_every_name_is_a_price_of_the_pool_file() -> None:
    assert set(NAMES.values()) == set(Price.model_fields) - {"call_usd", "unit_usd", "above"}


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "genai_prices.data_snapshot", None)
    with pytest.raises(ConfigError, match="extra prices"):
        list_price(claude(), NOW)


POOL = """
workers:
  - {name: claude, handle: quill, kind: litellm, model: anthropic/claude-sonnet-4-6, context_tokens: 200000,
     price: {input_usd_per_mtok: 3, output_usd_per_mtok: 14}}
  - {name: gpt, handle: atlas, kind: openai, model: gpt-5.1, url: https://api.openai.com/v1,
     price: {input_usd_per_mtok: 1.25, output_usd_per_mtok: 10, cache_read_usd_per_mtok: 0.125}}
  - {name: own, handle: birch, kind: openai, model: m, url: http://127.0.0.1:1/v1,
     price: {input_usd_per_mtok: 0, output_usd_per_mtok: 0}}
  - {name: vote, handle: tally, kind: tool, url: builtin:vote}
pools: {default: [claude, gpt, own, vote]}
"""


def test_the_command_compares_and_fills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(POOL)
    assert main(["pools", "prices", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    claude_now = "anthropic claude-sonnet-4-6 since 2026-03-13"
    assert lines == [
        f"warn claude: output_usd_per_mtok: 14 is not the vendor's; {claude_now} asks 15",
        f"warn claude: cache_read_usd_per_mtok: is not in the file; {claude_now} asks 0.3",
        f"warn claude: cache_write_usd_per_mtok: is not in the file; {claude_now} asks 3.75",
        f"warn claude: cache_write_1h_usd_per_mtok: is not in the file; {claude_now} asks 6",
        "ok   gpt: as openai gpt-5.1",
        "--   own: no list price",
        "--   vote: no list price",
    ]
    assert main(["pools", "prices", str(path), "--fill"]) == 0
    filled = capsys.readouterr().out
    assert "price: {input_usd_per_mtok: 1.25, output_usd_per_mtok: 10, cache_read_usd_per_mtok: 0.125}" in filled
