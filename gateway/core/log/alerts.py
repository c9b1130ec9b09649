"""Alerts that go out by webhook: what they say, when they are tried again, and their signature (Standard Webhooks).

A `subject` names what an alert tells, once and for all: another alert with the same subject is the same alert.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from gateway.errors import ConfigError

Kind = Literal["budget", "drift", "quarantine", "rollback", "uncertain", "job"]
Fate = Literal["sent", "refused", "failed"]
KINDS: tuple[Kind, ...] = ("budget", "drift", "quarantine", "rollback", "uncertain", "job")
SECRET_PREFIX = "whsec_"  # noqa: S105 - says what follows
SECRET_BYTES_MIN, SECRET_BYTES_MAX = 24, 64
RETRY_S, RETRY_S_MAX = 5.0, 900.0
GIVEN_UP_S = 86_400.0  # age of an alert that is not tried again
REFUSALS_MAX = 5  # after so many replies of 4xx it is not tried again


@dataclass(frozen=True, slots=True)
class Alert:
    """Something to tell. `lasting`: its subject never comes again, so it is remembered for ever."""

    kind: Kind
    subject: str
    at: datetime
    data: Mapping[str, Any]
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class DueAlert:
    """An alert that is due. `attempts`: those begun, this one included."""

    id: str
    kind: str
    at: datetime
    data: Mapping[str, Any]
    attempts: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """What came back: the HTTP status, or None with the name of the error. `text`: the start of the reply."""

    status: int | None
    text: str

    @property
    def fate(self) -> Fate:
        """`refused`: a 4xx, which another attempt seldom changes."""
        if self.status is not None and 200 <= self.status < 300:
            return "sent"
        busy = self.status is None or self.status in (408, 425, 429) or not 400 <= self.status < 500
        return "failed" if busy else "refused"

    @property
    def line(self) -> str:
        """What came back, in one line."""
        return self.text if self.status is None else f"HTTP {self.status}"


def body_of(delivery: DueAlert) -> bytes:
    """The body of the request; the same bytes at each attempt."""
    at = delivery.at.astimezone(UTC).isoformat()
    body = {"type": f"baton.{delivery.kind}", "timestamp": at, "id": delivery.id, "data": dict(delivery.data)}
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def secret_bytes(secret: str) -> bytes:
    """The key behind `whsec_` and base64. Raises ConfigError, which does not repeat it."""
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error:
        key = b""
    if not secret.startswith(SECRET_PREFIX) or not SECRET_BYTES_MIN <= len(key) <= SECRET_BYTES_MAX:
        raise ConfigError(
            f"BATON_ALERTS_SECRET: write {SECRET_PREFIX} and base64 of {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} random "
            f'bytes: echo "{SECRET_PREFIX}$(openssl rand -base64 32)"'
        )
    return key


def signed(key: bytes, message_id: str, now: datetime, body: bytes) -> dict[str, str]:
    """The headers of Standard Webhooks: HMAC-SHA256 over id, timestamp and body."""
    timestamp = str(int(now.timestamp()))
    digest = hmac.new(key, f"{message_id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    signature = f"v1,{base64.b64encode(digest).decode()}"
    return {"webhook-id": message_id, "webhook-timestamp": timestamp, "webhook-signature": signature}


def pause_s(attempts: int) -> float:
    """Seconds from that attempt to the next one."""
    return float(min(RETRY_S_MAX, RETRY_S * 2.0 ** min(attempts - 1, 16)))


def is_over(delivery: DueAlert, fate: Fate, now: datetime) -> bool:
    """Whether an alert that did not get through is given up."""
    old = (now - delivery.at).total_seconds() + pause_s(delivery.attempts) > GIVEN_UP_S
    return old or (fate == "refused" and delivery.attempts >= REFUSALS_MAX)
