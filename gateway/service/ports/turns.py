"""The ports of state that outlives a request: replies by Idempotency-Key, the worker of a conversation, stored
responses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Slot:
    """One Idempotency-Key of one API key, as one request claims it. It reveals no text: `digest` is that of the header,
    `fingerprint` that of path and body (both SHA-256); `claim` is new for each request."""

    key_id: str
    digest: bytes
    fingerprint: bytes
    claim: str


@dataclass(frozen=True, slots=True)
class StoredReply:
    """The reply to a request. `body` None: the request was served, and its reply was too large to store."""

    status: int
    headers: Mapping[str, str]
    body: bytes | None


class ReplyStore(Protocol):
    """Replies by Idempotency-Key. Every call raises Unavailable when the store is away; then nothing has changed."""

    async def claim(self, slot: Slot, lease_s: float, keep_s: float) -> StoredReply | None:
        """Return None if the slot is now this request's, for `lease_s`; otherwise the stored reply. Raises
        IdempotencyReused if the slot has another fingerprint, and IdempotencyRunning while another claim holds it. A
        claim whose lease is over counts as given up, a slot older than `keep_s` as unused."""
        ...

    async def keep(self, slot: Slot, reply: StoredReply) -> bool:
        """Store the slot's reply. Return False, without a change, if the claim is lost."""
        ...

    async def release(self, slot: Slot) -> bool:
        """Free the slot of a request that may be repeated. Return False as `keep` does."""
        ...

    async def sweep(self, keep_s: float, limit: int) -> int:
        """Delete up to `limit` slots older than `keep_s`; return how many."""
        ...


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """The worker of a turn, with the marks by which a later turn of the conversation is recognised
    (core/loop/turns.py)."""

    key_id: str
    rollout_id: str
    worker: str
    marks: Mapping[str, float]  # mark -> seconds for which it is valid


class ConversationLog(Protocol):
    """The workers of conversations in the log. Each call is bounded in time and raises Unavailable beyond."""

    async def find(self, key_id: str, marks: Sequence[str]) -> str | None:
        """Return the worker stored for the first known one of `marks`; None if none is known. Never another key's."""
        ...

    async def sweep(self, limit: int) -> int:
        """Delete up to `limit` marks whose time is over; return how many."""
        ...


class Conversations(ConversationLog, Protocol):
    """The workers of conversations, known from the moment of the reply."""

    async def remember(self, turn: TurnMarks) -> None:
        """Make `find` return the worker for each of the marks, as long as the mark counts."""
        ...


class CallStates(Protocol):
    """The vendor state of tool calls, by the id of the call, one API key at a time. Every call raises Unavailable when
    the store is away."""

    async def keep(self, key_id: str, states: Mapping[str, bytes], keep_s: float) -> None:
        """Keep these states. Those that are older than `keep_s`, and the oldest beyond the store's bound, go."""
        ...

    async def load(self, key_id: str, ids: Sequence[str], keep_s: float) -> Mapping[str, bytes]:
        """Return the states of those calls that are known and no older than `keep_s`. Never another key's."""
        ...


@dataclass(frozen=True, slots=True)
class LoggedResponse:
    """A rollout of the Responses API. `request` and `reply` are those of the chat that served it."""

    id: str
    created_s: int
    finished_s: int
    status: str  # of the rollout: done | failed | aborted
    request: Mapping[str, Any]
    reply: Mapping[str, Any] | None
    error: Mapping[str, Any] | None

    @property
    def stored(self) -> bool:
        """Whether it can be read back: its client wanted it stored, its key logs text, and it was not erased."""
        return "response" in self.request


class ResponseStore(Protocol):
    """Responses by id, one key at a time. Every call raises Unavailable when the store is away."""

    async def find(self, response_ids: Collection[str], key_id: str) -> Mapping[str, LoggedResponse]:
        """Return those responses that are in the log, by id."""
        ...

    async def erase(self, response_id: str, key_id: str) -> bool:
        """Delete every text of the rollout's tree, as if the key logged only metadata, and exclude it from training.
        Cost, times and workers stay. Return False if the log has no such response."""
        ...
