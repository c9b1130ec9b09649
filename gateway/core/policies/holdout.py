"""What training leaves to the judges. The log's reader, the trainer, the gate and the count of what is still missing
have this one definition. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from typing import Any

HELD_OUT_SHARE = 0.2  # of the judged requests, the latest
KEYS_APART_MIN = 10  # keys, before any is held out whole: a team with a few has none to spare
KEY_SHARE_APART = 0.1  # of the keys


@dataclass(frozen=True, slots=True)
class Bound:
    """Whatever began at `at` or later, and whatever the API keys `keys` asked, is held out. `as_json` goes into the
    reports of trainer and gate."""

    at: datetime | None = None  # None: no time is held out
    keys: tuple[str, ...] = ()  # public ids

    def holds_out(self, created_at: datetime, key_id: str) -> bool:
        """Return whether training must not see a request."""
        return (self.at is not None and created_at >= self.at) or key_id in self.keys

    def as_json(self) -> dict[str, Any]:
        """For a report."""
        return {"from": None if self.at is None else self.at.isoformat(), "keys": list(self.keys)}


def bound_of(requests: Sequence[tuple[datetime, str]], share: float, key_share: float = KEY_SHARE_APART) -> Bound:
    """The bound that holds out the latest `share` of the requests (their beginnings and keys), and of the keys, where
    there are KEYS_APART_MIN or more, those whose hash falls below `key_share`: the same keys in every run."""
    keys = {key for _, key in requests}
    apart = sorted(key for key in keys if _place(key) < key_share) if len(keys) >= KEYS_APART_MIN else []
    return Bound(latest([at for at, _ in requests], share), tuple(apart))


def latest(times: Sequence[datetime], share: float) -> datetime | None:
    """The time from which the latest `share` of the times are; None where that is none of them."""
    count = math.floor(len(times) * Fraction(str(share)))
    return sorted(times)[-count] if count else None


def _place(key: str) -> float:
    """A number in [0, 1) that never changes for a key."""
    return int.from_bytes(hashlib.sha256(f"held out {key}".encode()).digest()[:7]) / 2**56
