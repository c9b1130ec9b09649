"""Arithmetic on recorded times. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def covered_us(spans: Iterable[tuple[int, int]]) -> int:
    """Length of the union of [start, end) spans in microseconds: time in which at least one was open."""
    total, reach = 0, 0
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        total += max(0, end - max(start, reach))
        reach = max(reach, end)
    return total
