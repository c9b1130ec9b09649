"""What an Idempotency-Key promises, as far as it can be said without doing anything. Pure.

A request is known by its path and body. What it did is kept where doing it again could spend again: every reply of a
rollout, except one that says "try again" (408, 409, 429, 5xx) and has cost nothing. A refusal before any rollout began
(a bad body, a limit, no money) is not kept, so that the same request may be sent again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

HEADER = "idempotency-key"
REPLAY_HEADER = "x-baton-idempotent-replay"
CHARS_MAX = 255
PASSING = (408, 409, 429)  # and 5xx: what OpenAI's SDKs send again
NOT_KEPT = ("content-length", "x-ratelimit-")  # of that moment, not of the reply


def digest_of(key: str) -> bytes:
    """What is stored of the header's value."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def fingerprint_of(path: str, body: Any) -> bytes:
    """Of a decoded JSON body, whatever the order of its properties and its white space."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(f"{path}\n{text}".encode("utf-8", "surrogatepass")).digest()


def is_final(status: int, headers: Mapping[str, str]) -> bool:
    """Whether the reply stands for every repetition of its request."""
    if "x-baton-rollout-id" not in headers:
        return False
    may_pass = status in PASSING or status >= 500
    return not may_pass or headers.get("x-baton-cost-usd", "0") != "0"


def kept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Those that belong to the reply itself."""
    return {name: value for name, value in headers.items() if not name.startswith(NOT_KEPT)}
