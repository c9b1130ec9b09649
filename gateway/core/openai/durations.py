"""Durations as Go writes them, which is how OpenAI's rate headers do: `120ms`, `6m0s`. Pure."""

from __future__ import annotations


def go_duration(seconds: float) -> str:
    """Seconds to the millisecond, rounded up from any rest; nothing below zero."""
    milliseconds = max(0, -int(-seconds * 1000 // 1))
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    whole, rest = divmod(milliseconds, 1000)
    hours, minutes, left = whole // 3600, whole // 60 % 60, whole % 60
    fraction = f".{rest:03d}".rstrip("0") if rest else ""
    head = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{head}{left}{fraction}s"
