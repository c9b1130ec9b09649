"""The parts of a prompt and a reply that vendors count, and some price, apart. Pure.

A worker reports them in the details of its `usage` (core/openai/vendors/dialects.py). A part is there only if a worker
reported it: 0 is a report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

PROMPT_DETAILS, REPLY_DETAILS = "prompt_tokens_details", "completion_tokens_details"
# Baton's name of each part: the object and the name under which OpenAI's usage has it.
PLACES: Mapping[str, tuple[str, str]] = {
    "cached_tokens": (PROMPT_DETAILS, "cached_tokens"),
    "cache_write_tokens": (PROMPT_DETAILS, "cache_write_tokens"),
    "cache_write_1h_tokens": (PROMPT_DETAILS, "cache_write_1h_tokens"),
    "input_audio_tokens": (PROMPT_DETAILS, "audio_tokens"),
    "input_image_tokens": (PROMPT_DETAILS, "image_tokens"),
    "reasoning_tokens": (REPLY_DETAILS, "reasoning_tokens"),
    "output_audio_tokens": (REPLY_DETAILS, "audio_tokens"),
    "output_image_tokens": (REPLY_DETAILS, "image_tokens"),
    "accepted_prediction_tokens": (REPLY_DETAILS, "accepted_prediction_tokens"),
    "rejected_prediction_tokens": (REPLY_DETAILS, "rejected_prediction_tokens"),
}
BILLED = "billed_nano"  # what a worker says that a call cost: no tokens, but kept and summed with them
# A part that is counted in another one too, and costs its own price.
WITHIN: Mapping[str, str] = {"cache_write_tokens": "cache_write_1h_tokens"}


def details_json(details: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Both detail objects of OpenAI's usage, with the parts that were reported."""
    objects: dict[str, dict[str, int]] = {PROMPT_DETAILS: {}, REPLY_DETAILS: {}}
    for part, count in details.items():
        if part not in PLACES:  # pieces that are no tokens (core/money/units.py), and a bill
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
        count = min(max(0, details.get(part, 0) - details.get(WITHIN.get(part, ""), 0)), left)
        left -= count
        yield count, rate
    yield left, base
