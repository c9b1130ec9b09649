"""Identifiers. UUIDv7 (RFC 9562 §5.7): unique, and sorted by time, so that inserts stay at the end of an index."""

from __future__ import annotations

import os

_PIECE_BYTES = 16
_PIECES = 256
_pieces: list[bytes] = []  # of the system's randomness, fetched many at once; each is used by one identifier
os.register_at_fork(after_in_child=_pieces.clear)  # or parent and child would give the same identifiers


def uuid7(unix_ms: int) -> str:
    """A UUIDv7 for that millisecond, as 36 characters."""
    bits = int.from_bytes(_random())
    value = (unix_ms & (2**48 - 1)) << 80 | 0x7 << 76 | (bits >> 62 & 0xFFF) << 64 | 0b10 << 62 | bits & (2**62 - 1)
    return _dashed(value)


def lowest(unix_ms: int) -> str:
    """Not above any UUIDv7 of that millisecond or a later one, and above all of those before."""
    return _dashed((unix_ms & (2**48 - 1)) << 80)


def random_hex() -> str:
    """128 random bits as 32 characters, for what is not sorted."""
    return _random().hex()


def _random() -> bytes:
    """Sixteen bytes of `os.urandom`. Asking it gives the interpreter's lock away, which under load is not had back
    before another thread has worked for a while: so it is asked once for many."""
    try:
        return _pieces.pop()
    except IndexError:
        fresh = os.urandom(_PIECE_BYTES * _PIECES)
        _pieces.extend(fresh[at : at + _PIECE_BYTES] for at in range(_PIECE_BYTES, len(fresh), _PIECE_BYTES))
        return fresh[:_PIECE_BYTES]


def _dashed(value: int) -> str:
    text = f"{value:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
