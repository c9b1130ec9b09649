"""The ports of what outlives one request: replies kept for their Idempotency-Key, and who answered a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Slot:
    """One Idempotency-Key of one API key, as one request claims it. Nothing in it can be turned back into text.

    `digest` is that of the header, `fingerprint` that of path and body (both SHA-256); `claim` is new for each request.
    """

    key_id: str
    digest: bytes
    fingerprint: bytes
    claim: str


@dataclass(frozen=True, slots=True)
class KeptReply:
    """What a request was answered. `body` None: it was carried out, and its reply was not kept."""

    status: int
    headers: Mapping[str, str]
    body: bytes | None


class Replies(Protocol):
    """Replies by Idempotency-Key. Every call raises Unavailable when the store is away; then nothing has changed."""

    async def claim(self, slot: Slot, lease_s: float, keep_s: float) -> KeptReply | None:
        """None: the slot is this request's, for `lease_s`. Else the reply that was kept for it.

        Raises IdempotencyReused where the slot belongs to another fingerprint, and IdempotencyRunning while another
        claim holds it. A claim whose lease is over counts as given up, a slot older than `keep_s` as never used.
        """
        ...

    async def keep(self, slot: Slot, reply: KeptReply) -> bool:
        """The slot's reply from now on. False where the claim is no longer this one's; then nothing has changed."""
        ...

    async def release(self, slot: Slot) -> bool:
        """The request did nothing that must not be done twice: the slot is free. False as in `keep`."""
        ...

    async def sweep(self, keep_s: float, limit: int) -> int:
        """Forget up to `limit` slots older than `keep_s`; how many."""
        ...


@dataclass(frozen=True, slots=True)
class Answered:
    """Who answered, under every mark by which a later turn of the conversation will be known (core/loop/turns.py)."""

    key_id: str
    rollout_id: str
    worker: str
    marks: Mapping[str, float]  # mark -> seconds for which it counts


class ConversationLog(Protocol):
    """Which worker a conversation goes back to, as the log has it. Each call is bounded in time and raises Unavailable
    beyond."""

    async def find(self, key_id: str, marks: Sequence[str]) -> str | None:
        """Return the worker stored for the first of `marks` that is known; None where none is. Never another key's."""
        ...

    async def sweep(self, limit: int) -> int:
        """Delete up to `limit` marks whose time is over; return how many."""
        ...


class Conversations(ConversationLog, Protocol):
    """Which worker a conversation goes back to, from the moment of the reply on."""

    async def remember(self, answered: Answered) -> None:
        """Make `find` return the worker for each of the marks, for as long as the mark counts."""
        ...
