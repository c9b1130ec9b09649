"""What workers sell by the piece: images, characters of speech, seconds of sound, searches, moderated texts. Pure.

A worker's price has `unit_usd`, the dollars of one unit; which unit that is, its task says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.core.pool.prices import Price


@dataclass(frozen=True, slots=True)
class SoldUnit:
    """`size`: how many pieces make the unit that has a price. `documents`: of one search."""

    what: str
    size: int = 1
    documents: int = 1


UNITS: Mapping[str, SoldUnit] = {
    "images": SoldUnit("an image"),
    "characters": SoldUnit("a million characters", 1_000_000),
    "seconds": SoldUnit("a minute", 60),
    "searches": SoldUnit("a search in up to 100 documents", documents=100),
    "texts": SoldUnit("a text or image"),
}


def units_nano(price: Price, units: Mapping[str, int]) -> int:
    """The nano-dollars of these pieces, rounded up; other names count nothing."""
    sold = ((count, UNITS[name].size) for name, count in units.items() if name in UNITS)
    return sum(-(-count * price.unit_nano // size) for count, size in sold)
