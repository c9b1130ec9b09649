"""The signed depth header, by which a gateway that is another gateway's worker continues its depth. Pure.

The form is `x-baton-depth: 2;<hex hmac-sha256>`. Only gateways that share the secret believe each other; a header
signed with another secret counts as absent.
"""

from __future__ import annotations

import hmac
import re
from functools import lru_cache

DEPTH_HEADER = "x-baton-depth"
DEPTH_MAX = 999


@lru_cache(maxsize=64)
def sign(depth: int, secret: bytes) -> str:
    """The header's value for a call at `depth`. Raises ValueError outside 0 … DEPTH_MAX."""
    if not 0 <= depth <= DEPTH_MAX:
        raise ValueError(f"depth {depth} is outside 0 … {DEPTH_MAX}")
    return f"{depth};{_mac(depth, secret)}"


def verify(value: str | None, secret: bytes) -> int | None:
    """The depth that a header proves, or None if it is absent, malformed or signed with another secret."""
    number, _, mac = (value or "").partition(";")
    if not re.fullmatch("[0-9]{1,3}", number) or not mac.isascii():
        return None
    return int(number) if hmac.compare_digest(mac, _mac(int(number), secret)) else None


def _mac(depth: int, secret: bytes) -> str:
    return hmac.digest(secret, f"{DEPTH_HEADER}:{depth}".encode(), "sha256").hex()
