"""Vendors' list prices, from the data in the package `genai-prices`. Only this file imports it. Nothing is downloaded.

A vendor that charges more above some prompt size is compared tier by tier where the pool file has `above`, else by the
dearest tier that the worker's context can reach, as prices count that come from LiteLLM's map.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from gateway.core.pool.workers import Price, WorkerSpec
from gateway.errors import ConfigError

NAMES: Mapping[str, str] = {  # the package's names of prices, and Baton's
    "input_mtok": "input_usd_per_mtok",
    "output_mtok": "output_usd_per_mtok",
    "cache_read_mtok": "cache_read_usd_per_mtok",
    "cache_write_mtok": "cache_write_usd_per_mtok",
    "cache_write_1h_mtok": "cache_write_1h_usd_per_mtok",
    "input_audio_mtok": "input_audio_usd_per_mtok",
    "input_image_mtok": "input_image_usd_per_mtok",
    "output_reasoning_mtok": "reasoning_usd_per_mtok",
    "output_audio_mtok": "output_audio_usd_per_mtok",
    "output_image_mtok": "output_image_usd_per_mtok",
}
_PROVIDERS = {  # LiteLLM's names of vendors that the package calls otherwise
    "gemini": "google", "vertex_ai": "google", "bedrock": "aws", "xai": "x-ai", "together_ai": "together",
    "fireworks_ai": "fireworks", "moonshot": "moonshotai",
}  # fmt: skip
_MISSING = "list prices need the extra prices; pip install '.[prices]'"
Amounts = Mapping[str, Decimal]  # dollars a million tokens, by the names of a pool file's `price`


@dataclass(frozen=True, slots=True)
class ListPrice:
    """What a vendor asks for a model now. `amounts`: at the dearest tier that the worker's context can reach; `tiers`:
    of each tier that it can reach, by the tokens that a prompt has more than, the first by 0. `since`: the day from
    which it does, if the package knows it. `former`: what it asked before."""

    vendor: str
    model: str
    amounts: Amounts
    since: date | None
    former: tuple[Amounts, ...]
    tiers: tuple[tuple[int, Amounts], ...] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """One amount of a pool file that is not the vendor's. `in_file`: None where the file has none. `is_old`: the vendor
    asked it before."""

    name: str
    in_file: Decimal | None
    listed: Decimal
    is_old: bool


def list_price(worker: WorkerSpec, now: datetime | None = None) -> ListPrice | None:
    """The list price of a worker's model, or None for one that the package does not know. Raises ConfigError where the
    package is not installed."""
    try:
        from genai_prices.data_snapshot import get_snapshot
    except ImportError:
        raise ConfigError(_MISSING) from None
    vendor, _, short = (worker.model or "").partition("/")
    by_url = worker.kind == "openai"
    name, provider = (worker.model or "", None) if by_url else (short or vendor, _PROVIDERS.get(vendor, vendor))
    try:
        provider_model, model = get_snapshot().find_provider_model(name, None, provider, worker.url if by_url else None)
    except LookupError:
        return None
    today = (now or datetime.now(UTC)).date()
    size = worker.context_tokens
    stages = list(_stages(model.prices))
    begun = [stage for stage in stages if stage[0] is None or stage[0] <= today]
    since, prices = begun[-1] if begun else stages[0]
    former = tuple(_amounts(earlier, size) for _, earlier in begun[:-1])
    return ListPrice(provider_model.id, model.id, _amounts(prices, size), since, former, tuple(_tiers(prices, size)))


def differences(worker: WorkerSpec, prices: ListPrice) -> list[Difference]:
    """What the pool file says otherwise. An amount that it lacks counts as the price of input or output, so it differs
    only where the vendor's is another."""
    price = worker.price
    if price is None or not price.above:
        return _differences(price, prices.amounts, prices)
    starts = {*(start for start, _ in price.tiers), *(start for start, _ in prices.tiers)}
    pairs = [(price.at(start + 1), _vendor_amounts(prices, start)) for start in sorted(starts)]
    return list(dict.fromkeys(one for own, vendors in pairs for one in _differences(own, vendors, prices)))


def _vendor_amounts(prices: ListPrice, start: int) -> Amounts:
    """What a vendor asks for a prompt of more than `start` tokens."""
    return next(amounts for begin, amounts in reversed(prices.tiers) if begin <= start)


def _differences(price: Price | None, amounts: Amounts, prices: ListPrice) -> list[Difference]:
    gaps = []
    for name, usd in amounts.items():
        in_file = price.amount(name) if price is not None else None
        if in_file != usd:
            is_old = in_file is not None and any(in_file == former.get(name) for former in prices.former)
            gaps.append(Difference(name, in_file, usd, is_old))
    return gaps


def _stages(prices: Any) -> Iterator[tuple[date | None, Any]]:
    """(first day, price) of each price that a model ever had, oldest first. Prices by time of day are left out."""
    for stage in prices if isinstance(prices, list) else [None]:
        if stage is None:
            yield None, prices
        elif stage.constraint is None or hasattr(stage.constraint, "start_date"):
            yield getattr(stage.constraint, "start_date", None), stage.prices


def _tiers(price: Any, context_tokens: int) -> Iterator[tuple[int, Amounts]]:
    """(tokens that a prompt has more than, amounts) of each tier that so long a context can reach, the first from 0."""
    amounts = {ours: getattr(price, theirs) for theirs, ours in NAMES.items()}
    tiered = {name: amount for name, amount in amounts.items() if amount is not None}
    starts = {tier.start for amount in tiered.values() for tier in getattr(amount, "tiers", ())}
    for start in sorted({0, *(start for start in starts if start < context_tokens)}):
        yield start, {name: _at(amount, start) for name, amount in tiered.items()}


def _at(amount: Any, start: int) -> Decimal:
    """A price at the tier that begins at `start`."""
    if isinstance(amount, Decimal):
        return amount
    usd: Decimal = next((tier.price for tier in reversed(amount.tiers) if tier.start <= start), amount.base)
    return usd


def _amounts(price: Any, context_tokens: int) -> Amounts:
    amounts = {ours: getattr(price, theirs) for theirs, ours in NAMES.items()}
    return {name: _dearest(amount, context_tokens) for name, amount in amounts.items() if amount is not None}


def _dearest(amount: Any, context_tokens: int) -> Decimal:
    """A price, or the dearest of its tiers that so long a context can reach."""
    if isinstance(amount, Decimal):
        return amount
    dearest: Decimal = max([amount.base, *(tier.price for tier in amount.tiers if tier.start < context_tokens)])
    return dearest
