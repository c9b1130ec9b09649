"""Amounts of money, as integers of nano-dollars. Every bound in this file is an upper bound, rounded up.

Redis Lua computes in doubles, so no amount may reach 2**53 nano-dollars (about $9.0 million). The settings, this file
and the script each assert it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Decimal, InvalidOperation, localcontext
from typing import Any

from gateway.core.money.details import split, sum_details
from gateway.core.money.units import units_nano
from gateway.core.pool.workers import NANO_PER_USD, Price

NANO_MAX = 2**53 - 1
TOKENS_PER_MESSAGE = 16  # role, separators and template: more than any published chat template uses
TOKENS_PER_REQUEST = 64
TOKENS_PER_MEDIA_PART = 4096
AUDIO_BYTES_PER_TOKEN = (
    16  # the poorest MP3 has 1,000 bytes a second; no published model counts over 60 tokens a second
)


_COUNTED_ELSEWHERE = {"role", "content"}


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of one call. `estimated`: the worker did not report these counts. `unreported`: it reported none at
    all, and a byte count replaces the tokenizer's count. `bill_nano`: what the worker says the call cost; it is charged
    only where the pool file says that the worker bills. `details`: the parts that the worker reported, by the names of
    `core/money/details.py`. `hidden`: tokens of the completion that only the report's total shows. `clipped`: the
    report was a multiple of what was asked for, and was cut."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    estimated: bool = False
    unreported: bool = field(default=False, compare=False)
    bill_nano: int | None = field(default=None, compare=False)
    details: Mapping[str, int] = field(default_factory=dict, compare=False)
    hidden: int = field(default=0, compare=False)
    clipped: bool = field(default=False, compare=False)

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.estimated or other.estimated,
            self.unreported or other.unreported,
            details=sum_details((self.details, other.details)),
        )


def cost_nano(price: Price, usage: Usage) -> int:
    """The actual cost of one call in nano-dollars, rounded up once. Each part that was reported and has a price of its
    own costs that; the rest costs the price of input or output. The length of the prompt says which tier holds."""
    price = price.at(usage.prompt_tokens)
    prompt = split(usage.prompt_tokens, usage.details, price.prompt_part_rates, price.input_nano_per_mtok)
    reply = split(usage.completion_tokens, usage.details, price.reply_part_rates, price.output_nano_per_mtok)
    per_million = sum(tokens * rate for tokens, rate in (*prompt, *reply))
    return -(-per_million // 1_000_000) + price.call_nano + units_nano(price, usage.details)


def worst_case_nano(
    price: Price,
    input_tokens_bound: int,
    output_tokens_max: int,
    attempts: int = 1,
    *,
    media: bool = False,
    hour: bool = False,
) -> int:
    """The largest cost of `attempts` attempts of one call, in nano-dollars: each token at the dearest price that it may
    have. `media`: whether the request has sound or images. `hour`: whether it is cached for an hour."""
    input_rate, output_rate = price.worst(input_tokens_bound, media=media, hour=hour)
    per_million = input_rate * input_tokens_bound + output_rate * output_tokens_max
    return attempts * (-(-per_million // 1_000_000) + price.call_nano)


def output_tokens_that_fit(
    price: Price,
    input_tokens_bound: int,
    budget_nano: int,
    attempts: int = 1,
    *,
    media: bool = False,
    hour: bool = False,
) -> int:
    """The largest output bound whose worst case fits `budget_nano`. Negative if even the input does not fit."""
    input_rate, output_rate = price.worst(input_tokens_bound, media=media, hour=hour)
    millionths = (budget_nano // attempts - price.call_nano) * 1_000_000 - input_rate * input_tokens_bound
    if millionths < 0:
        return -1
    if output_rate == 0:
        return NANO_MAX
    return millionths // output_rate


def input_tokens_bound(messages: Iterable[Mapping[str, Any]], extra_text: str = "") -> int:
    """An upper bound of the prompt tokens: a byte-level tokenizer makes at most one token per UTF-8 byte."""
    total = TOKENS_PER_REQUEST + _bytes(extra_text)
    for message in messages:
        total += TOKENS_PER_MESSAGE + _content_bound(message.get("content"))
        total += sum(_bytes(str(message[name])) for name in message.keys() - _COUNTED_ELSEWHERE if message[name])
    return total


def _content_bound(content: Any) -> int:
    if content is None:
        return 0
    if isinstance(content, str):
        return _bytes(content)
    bound = 0
    for part in content:
        is_text = isinstance(part, Mapping) and part.get("type") in ("text", "refusal")
        bound += _bytes(str(part)) if is_text else media_tokens_bound(part)
    return bound


def media_tokens_bound(part: Any) -> int:
    """An upper bound of the tokens of a media part. A file counts by its bytes, because it becomes text; sound by its
    length; an image as a constant."""
    if not isinstance(part, Mapping):
        return TOKENS_PER_MEDIA_PART
    file, audio = part.get("file"), part.get("input_audio")
    tokens = _decoded_bytes(file, "file_data") + _decoded_bytes(audio, "data") // AUDIO_BYTES_PER_TOKEN
    return max(TOKENS_PER_MEDIA_PART, tokens)


def _decoded_bytes(body: Any, name: str) -> int:
    """An upper bound of the bytes that the base64 text at `name` decodes to."""
    text = body.get(name) if isinstance(body, Mapping) else None
    return len(text) * 3 // 4 if isinstance(text, str) else 0


def _bytes(text: str) -> int:
    # JSON may contain a lone surrogate (`"\ud800"`), which strict UTF-8 refuses to encode.
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def usd_to_nano(text: str | Decimal | int) -> int:
    """Convert dollars, as a person writes them, to nano-dollars, rounded up. Raises ValueError for text that is not an
    amount and for an amount out of range."""
    try:
        usd = Decimal(str(text))
    except InvalidOperation:
        raise ValueError(f"`{text}` is not an amount in dollars") from None
    if not usd.is_finite() or usd < 0:
        raise ValueError(f"`{text}` is not an amount in dollars")
    if usd > Decimal(NANO_MAX) / NANO_PER_USD:
        raise ValueError(f"${text} is over the largest amount, ${NANO_MAX // NANO_PER_USD:,}")
    with localcontext(rounding=ROUND_CEILING):
        return int((usd * NANO_PER_USD).to_integral_value())


def nano_to_usd(nano: int) -> str:
    """Convert nano-dollars to dollars as exact text, such as `0.000123`."""
    text = f"{Decimal(nano) / NANO_PER_USD:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
