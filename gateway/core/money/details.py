"""The parts of a prompt and a reply that vendors count, and some price, apart. Pure.

A worker reports them in the details of its `usage`. A part is there only where a worker reported it: 0 is a report.
Vendors' own names for the same count are read too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

PROMPT_DETAILS, REPLY_DETAILS = "prompt_tokens_details", "completion_tokens_details"
# Baton's name of each part: the object and the name under which OpenAI's usage has it.
PLACES: Mapping[str, tuple[str, str]] = {
    "cached_tokens": (PROMPT_DETAILS, "cached_tokens"),
    "cache_write_tokens": (PROMPT_DETAILS, "cache_write_tokens"),
    "input_audio_tokens": (PROMPT_DETAILS, "audio_tokens"),
    "input_image_tokens": (PROMPT_DETAILS, "image_tokens"),
    "reasoning_tokens": (REPLY_DETAILS, "reasoning_tokens"),
    "output_audio_tokens": (REPLY_DETAILS, "audio_tokens"),
    "output_image_tokens": (REPLY_DETAILS, "image_tokens"),
    "accepted_prediction_tokens": (REPLY_DETAILS, "accepted_prediction_tokens"),
    "rejected_prediction_tokens": (REPLY_DETAILS, "rejected_prediction_tokens"),
}
_ALIASES: Mapping[str, tuple[tuple[str | None, str], ...]] = {  # (object, or None for `usage` itself; name)
    "cached_tokens": ((None, "cache_read_input_tokens"), (None, "prompt_cache_hit_tokens")),
    "cache_write_tokens": ((PROMPT_DETAILS, "cache_creation_tokens"), (None, "cache_creation_input_tokens")),
}


_SUMS = frozenset(("prompt_tokens", "completion_tokens", "total_tokens"))


def read_details(usage: Mapping[str, Any]) -> dict[str, int]:
    """The parts that a `usage` object reports. What is not a whole number counts as missing."""
    if _SUMS.issuperset(usage):
        return {}
    counts = ((part, _first(usage, (place, *_ALIASES.get(part, ())))) for part, place in PLACES.items())
    return {part: count for part, count in counts if count is not None}


def details_json(details: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """The inverse of `read_details`: both detail objects of OpenAI's usage, with the parts that were reported."""
    objects: dict[str, dict[str, int]] = {PROMPT_DETAILS: {}, REPLY_DETAILS: {}}
    for part, count in details.items():
        if part not in PLACES:  # pieces that are no tokens (core/money/units.py)
            continue
        where, name = PLACES[part]
        objects[where][name] = count
    return objects


def sum_details(several: Iterable[Mapping[str, int] | None]) -> dict[str, int]:
    """The parts summed, each over those that reported it."""
    total: dict[str, int] = {}
    for details in several:
        for part, count in (details or {}).items():
            total[part] = total.get(part, 0) + count
    return total


def split(tokens: int, details: Mapping[str, int], rates: Mapping[str, int], base: int) -> Iterator[tuple[int, int]]:
    """Yield (tokens, rate) of the parts that have a rate of their own, then of the rest at rate `base`. The parts are
    cut to `tokens` in all."""
    left = tokens
    for part, rate in rates.items():
        count = min(details.get(part, 0), left)
        left -= count
        yield count, rate
    yield left, base


def _first(usage: Mapping[str, Any], places: Iterable[tuple[str | None, str]]) -> int | None:
    for where, name in places:
        holder = usage if where is None else usage.get(where)
        count = holder.get(name) if isinstance(holder, Mapping) else None
        if isinstance(count, int) and not isinstance(count, bool) and count >= 0:
            return count
    return None
