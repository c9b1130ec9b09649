"""The pure rules of Idempotency-Keys: how Baton recognises a request, and which replies it stores.

A request is identified by its path and body. Baton stores a reply if repeating the request could spend money again:
every reply of a rollout, except one that says "try again" (408, 409, 429, 5xx) and has cost nothing. It does not store
a refusal before a rollout began (a bad body, a limit, no money), so that the client may send the same request again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

IDEMPOTENCY_HEADER = "idempotency-key"
REPLAY_HEADER = "x-baton-idempotent-replay"
CHARS_MAX = 255
RETRYABLE = (408, 409, 429)  # and 5xx: OpenAI's SDKs send these again
MOMENTARY = ("content-length", "x-ratelimit-")  # prefixes of headers that belong to the moment, not to the reply


def digest_of(key: str) -> bytes:
    """The SHA-256 of the header's value, 32 bytes; the value itself is not stored."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def fingerprint_of(path: str, body: Any) -> bytes:
    """The SHA-256 of a path and a decoded JSON body, 32 bytes. The order of properties and white space do not
    matter."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(f"{path}\n{text}".encode("utf-8", "surrogatepass")).digest()


def is_final(status: int, headers: Mapping[str, str]) -> bool:
    """Whether the reply answers every repetition of its request."""
    if "x-baton-rollout-id" not in headers:
        return False
    retryable = status in RETRYABLE or status >= 500
    return not retryable or headers.get("x-baton-cost-usd", "0") != "0"


def replay_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers to store with a reply: those that belong to the reply itself."""
    return {name: value for name, value in headers.items() if not name.startswith(MOMENTARY)}
