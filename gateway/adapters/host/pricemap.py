"""Prices out of LiteLLM's packaged map, without importing LiteLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gateway.adapters.upstream.litellm import MISSING
from gateway.core.pool.workers import Price
from gateway.errors import ConfigError

PRICES = {  # Baton's names of prices, and the map's
    "input_usd_per_mtok": "input_cost_per_token",
    "output_usd_per_mtok": "output_cost_per_token",
    "cache_read_usd_per_mtok": "cache_read_input_token_cost",
    "cache_write_usd_per_mtok": "cache_creation_input_token_cost",
    "cache_write_1h_usd_per_mtok": "cache_creation_input_token_cost_above_1hr",
    "input_audio_usd_per_mtok": "input_cost_per_audio_token",
    "output_audio_usd_per_mtok": "output_cost_per_audio_token",
    "reasoning_usd_per_mtok": "output_cost_per_reasoning_token",
}
PRICE_MAP = "model_prices_and_context_window_backup.json"


def offline_price(model: str, context_tokens: int = 0) -> Price | None:
    """The price of a model id in LiteLLM's packaged map, or None. Does not import LiteLLM.

    If a vendor charges more for longer prompts, the price has each tier that `context_tokens` can reach. Raises
    ConfigError if LiteLLM is not installed.
    """
    entry = _entry(_price_map(), model)
    if entry is None:
        return None
    amounts = {name: usd for name, key in PRICES.items() if (usd := _usd_per_mtok(entry.get(key))) is not None}
    if not {"input_usd_per_mtok", "output_usd_per_mtok"} <= amounts.keys():
        return None
    tiers = [
        {"prompt_tokens": start, **above}
        for start in _starts(entry)
        if start < context_tokens and (above := _amounts_above(entry, start, amounts))
    ]
    return Price.model_validate({**amounts, "above": tiers})


def _entry(prices: Mapping[str, Any], model: str) -> Mapping[str, Any] | None:
    """The map's entry under the full id, or under the name without the provider if it is of that provider."""
    provider, _, short_name = model.partition("/")
    for name in (model, short_name):
        entry = prices.get(name)
        if isinstance(entry, dict) and (name == model or str(entry.get("litellm_provider")) == provider):
            return entry
    return None


def _starts(entry: Mapping[str, Any]) -> list[int]:
    """The sizes of prompts, in tokens, above which the entry has other prices; the smallest first."""
    keys = "|".join(map(re.escape, PRICES.values()))
    thresholds = (re.fullmatch(rf"(?:{keys})_above_(\d+)k_tokens", name) for name in entry)
    return sorted({int(match[1]) * 1000 for match in thresholds if match is not None})


def _amounts_above(entry: Mapping[str, Any], start: int, base: Mapping[str, str]) -> dict[str, str]:
    """The prices of prompts above a size, of those parts that have a price at all."""
    prices = {name: entry.get(f"{PRICES[name]}_above_{start // 1000}k_tokens") for name in base}
    return {name: usd for name, cost in prices.items() if (usd := _usd_per_mtok(cost)) is not None}


def _usd_per_mtok(cost: Any) -> str | None:
    """A price by the token as one by the million tokens; None for none."""
    return None if cost is None else f"{Decimal(str(cost)) * 1_000_000:f}"


@cache
def _price_map() -> Mapping[str, Any]:
    spec = find_spec("litellm")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(MISSING)
    text = (Path(spec.submodule_search_locations[0]) / PRICE_MAP).read_text(encoding="utf-8")
    prices: dict[str, Any] = json.loads(text, parse_float=Decimal)
    return prices
