"""Prices of workers, as a person writes them and as the integers that Baton computes with. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from functools import cached_property
from itertools import product
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

NANO_PER_USD = 1_000_000_000


class FrozenModel(BaseModel):
    """A part of the pool file: it never changes, and a name that it does not have is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


PartPrice = Annotated[Decimal, Field(ge=0, le=100_000)] | None
# Each part of a prompt or reply (core/money/details.py) that may have a price of its own, and the price's name.
PROMPT_PARTS = {
    "cached_tokens": "cache_read_usd_per_mtok",
    "cache_write_1h_tokens": "cache_write_1h_usd_per_mtok",
    "cache_write_tokens": "cache_write_usd_per_mtok",
    "input_audio_tokens": "input_audio_usd_per_mtok",
    "input_image_tokens": "input_image_usd_per_mtok",
}
REPLY_PARTS = {
    "reasoning_tokens": "reasoning_usd_per_mtok",
    "output_audio_tokens": "output_audio_usd_per_mtok",
    "output_image_tokens": "output_image_usd_per_mtok",
}
MEDIA_PARTS = frozenset(part for part in (*PROMPT_PARTS, *REPLY_PARTS) if "audio" in part or "image" in part)
HOUR_PARTS = frozenset({"cache_write_1h_tokens"})
HOUR_RATIO = Decimal("1.6")  # of Anthropic's cache writes for an hour, at twice the input, to its others, at 1.25 times


class LongPrompt(FrozenModel):
    """The prices of a call whose prompt has more than `prompt_tokens`: of all its tokens, as vendors count. An amount
    that it lacks is the one of shorter prompts."""

    prompt_tokens: int = Field(gt=0, le=10_000_000, description="a longer prompt than this has these prices")
    input_usd_per_mtok: PartPrice = Field(default=None, description="as in `price`")
    output_usd_per_mtok: PartPrice = Field(default=None, description="as in `price`")
    cache_read_usd_per_mtok: PartPrice = Field(default=None, description="as in `price`")
    cache_write_usd_per_mtok: PartPrice = Field(default=None, description="as in `price`")
    cache_write_1h_usd_per_mtok: PartPrice = Field(default=None, description="as in `price`")
    input_audio_usd_per_mtok: PartPrice = Field(default=None, description="as in `price`")
    input_image_usd_per_mtok: PartPrice = Field(default=None, description="as in `price`")
    reasoning_usd_per_mtok: PartPrice = Field(default=None, description="as in `price`")
    output_audio_usd_per_mtok: PartPrice = Field(default=None, description="as in `price`")
    output_image_usd_per_mtok: PartPrice = Field(default=None, description="as in `price`")

    @property
    def amounts(self) -> dict[str, Decimal]:
        """The amounts that it has, by their names."""
        values = self.model_dump(exclude_none=True)
        return {name: usd for name, usd in values.items() if name != "prompt_tokens"}


class Price(FrozenModel):
    """Prices in US dollars per million tokens, as a person writes them, and as the integers that Baton computes with.

    A model needs both token prices, which `WorkerSpec` checks; a tool may have only `call_usd`.
    """

    input_usd_per_mtok: Decimal = Field(default=Decimal(0), ge=0, le=100_000)
    output_usd_per_mtok: Decimal = Field(default=Decimal(0), ge=0, le=100_000)
    call_usd: Decimal = Field(default=Decimal(0), ge=0, le=1_000)
    cache_read_usd_per_mtok: PartPrice = Field(default=None, description="cached prompt tokens; else as input")
    cache_write_usd_per_mtok: PartPrice = Field(default=None, description="tokens written to a cache; else as input")
    cache_write_1h_usd_per_mtok: PartPrice = Field(
        default=None, description="tokens written to a cache for an hour; else 1.6 times `cache_write_usd_per_mtok`"
    )
    input_audio_usd_per_mtok: PartPrice = Field(default=None, description="sound in the prompt; else as input")
    input_image_usd_per_mtok: PartPrice = Field(default=None, description="images in the prompt; else as input")
    reasoning_usd_per_mtok: PartPrice = Field(default=None, description="hidden thinking; else as output")
    output_audio_usd_per_mtok: PartPrice = Field(default=None, description="sound in the reply; else as output")
    output_image_usd_per_mtok: PartPrice = Field(default=None, description="images in the reply; else as output")
    unit_usd: Annotated[Decimal, Field(ge=0, le=1_000)] | None = Field(
        default=None,
        description="an image, a million characters of speech, a minute of sound, a search, a moderated text: by task",
    )

    above: tuple[LongPrompt, ...] = Field(
        default=(), max_length=8, description="prices of calls with longer prompts, by rising `prompt_tokens`"
    )

    @model_validator(mode="after")
    def _tiers_rise(self) -> Price:
        starts = [tier.prompt_tokens for tier in self.above]
        if starts != sorted(set(starts)):
            raise ValueError("`above` must list each `prompt_tokens` once, the smallest first")
        return self

    @cached_property
    def tiers(self) -> tuple[tuple[int, Price], ...]:
        """(tokens that a prompt has more than, its price) of each length of prompts, the shortest first."""
        tiers: list[tuple[int, Price]] = [(0, self)]
        for tier in self.above:
            shorter = tiers[-1][1].model_dump(exclude={"above"}, exclude_none=True)
            tiers.append((tier.prompt_tokens, Price.model_validate({**shorter, **tier.amounts})))
        return tuple(tiers)

    def at(self, prompt_tokens: int) -> Price:
        """The price of a call whose prompt has so many tokens."""
        if not self.above:
            return self
        return next(price for start, price in reversed(self.tiers) if prompt_tokens > start or not start)

    @cached_property
    def input_nano_per_mtok(self) -> int:
        """Nano-dollars per million input tokens, rounded up."""
        return math.ceil(self.input_usd_per_mtok * NANO_PER_USD)

    @cached_property
    def output_nano_per_mtok(self) -> int:
        """Nano-dollars per million output tokens, rounded up."""
        return math.ceil(self.output_usd_per_mtok * NANO_PER_USD)

    @cached_property
    def call_nano(self) -> int:
        """Nano-dollars per call of any size, for tools, rounded up."""
        return math.ceil(self.call_usd * NANO_PER_USD)

    @cached_property
    def prompt_part_rates(self) -> Mapping[str, int]:
        """Nano-dollars per million tokens of each part of a prompt that has a price of its own, rounded up."""
        return self._rates(PROMPT_PARTS)

    @property
    def has_hours(self) -> bool:
        """Whether tokens that are cached for an hour have a price of their own."""
        return not HOUR_PARTS.isdisjoint(self.prompt_part_rates)

    @cached_property
    def reply_part_rates(self) -> Mapping[str, int]:
        """The same for the parts of a reply."""
        return self._rates(REPLY_PARTS)

    @cached_property
    def unit_nano(self) -> int:
        """Nano-dollars of one unit of the worker's task, rounded up."""
        return math.ceil((self.unit_usd or 0) * NANO_PER_USD)

    def amount(self, name: str) -> Decimal | None:
        """The amount of this name, or the one that stands in for it if it is not given: of cache writes for an hour."""
        usd: Decimal | None = getattr(self, name)
        if usd is None and name == PROMPT_PARTS["cache_write_1h_tokens"] and self.cache_write_usd_per_mtok is not None:
            return HOUR_RATIO * self.cache_write_usd_per_mtok
        return usd

    def worst(self, prompt_tokens: int, *, media: bool, hour: bool = False) -> tuple[int, int]:
        """The most that a million tokens of prompt and of reply may cost, in nano-dollars, of a prompt of up to so many
        tokens. `media`: whether the request has sound or images. `hour`: whether it is cached for an hour."""
        if not self.above:
            return self._rates_at_most[media, hour]
        rates = [price._rates_at_most[media, hour] for start, price in self.tiers if prompt_tokens > start or not start]
        return max(rate for rate, _ in rates), max(rate for _, rate in rates)

    @cached_property
    def _rates_at_most(self) -> Mapping[tuple[bool, bool], tuple[int, int]]:
        """The dearest rates of prompt and reply, by whether the request has media, and is cached for an hour."""
        rates_of = {}
        for media, hour in product((False, True), repeat=2):
            idle = (frozenset() if media else MEDIA_PARTS) | (frozenset() if hour else HOUR_PARTS)
            prompt, reply = (
                [rate for part, rate in rates.items() if part not in idle]
                for rates in (self.prompt_part_rates, self.reply_part_rates)
            )
            rates_of[media, hour] = max(self.input_nano_per_mtok, *prompt, 0), max(self.output_nano_per_mtok, *reply, 0)
        return rates_of

    def _rates(self, parts: Mapping[str, str]) -> Mapping[str, int]:
        amounts = {part: self.amount(name) for part, name in parts.items()}
        return {part: math.ceil(usd * NANO_PER_USD) for part, usd in amounts.items() if usd is not None}
