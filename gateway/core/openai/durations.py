"""Durations in Go's notation, which OpenAI's rate-limit headers use: `120ms`, `6m0s`. Pure."""

from __future__ import annotations


def go_duration(seconds: float) -> str:
    """Format a duration in Go's notation, rounded up to whole milliseconds. A negative duration counts as zero."""
    milliseconds = max(0, -int(-seconds * 1000 // 1))
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    total_s, fraction_ms = divmod(milliseconds, 1000)
    hours, minutes, rest_s = total_s // 3600, total_s // 60 % 60, total_s % 60
    fraction = f".{fraction_ms:03d}".rstrip("0") if fraction_ms else ""
    head = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{head}{rest_s}{fraction}s"
