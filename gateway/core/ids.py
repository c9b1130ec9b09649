"""Identifiers. UUIDv7 (RFC 9562 §5.7): unique, and sorted by time, so that inserts stay at the end of an index."""

from __future__ import annotations

import secrets


def uuid7(unix_ms: int) -> str:
    """A UUIDv7 for that millisecond, as 36 characters."""
    value = (unix_ms & (2**48 - 1)) << 80 | 0x7 << 76 | secrets.randbits(12) << 64 | 0b10 << 62 | secrets.randbits(62)
    text = f"{value:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
