"""The ports of state that outlives a request: replies by Idempotency-Key, the worker of a conversation, stored
responses, stored conversations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.core.access.keys import Principal
from gateway.core.loop.turns.replanning import NO_FACTS, TurnFacts


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
    (core/loop/turns/marks.py)."""

    key_id: str
    rollout_id: str
    worker: str
    marks: Mapping[str, float]  # mark -> seconds for which it is valid
    facts: TurnFacts = NO_FACTS


@dataclass(frozen=True, slots=True)
class LastTurn:
    """The worker that answered a conversation last, and what its turn left."""

    worker: str
    facts: TurnFacts = NO_FACTS


class ConversationLog(Protocol):
    """The workers of conversations in the log. Each call is bounded in time and raises Unavailable beyond."""

    async def find(self, key_id: str, marks: Sequence[str]) -> LastTurn | None:
        """Return the turn stored for the first known one of `marks`; None if none is known. Never another key's."""
        ...

    async def sweep(self, limit: int) -> int:
        """Delete up to `limit` marks whose time is over; return how many."""
        ...


class Conversations(ConversationLog, Protocol):
    """The workers of conversations, known from the moment of the reply."""

    async def remember(self, turn: TurnMarks) -> None:
        """Make `find` return the turn for each of the marks, as long as the mark counts."""
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


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A conversation of one key. `items` and `size_bytes`: of all that it holds. `turn`: the claim of the response that
    is being made, or whose rollout is not in the database yet."""

    id: str
    key_id: str
    created_s: int
    metadata: Mapping[str, str]
    items: int = 0
    size_bytes: int = 0
    turn: str | None = None


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """A turn that may begin. `turn`: its claim; None for a request that only reads. `items`: the conversation before
    it, `messages`: the same for a worker."""

    conversation_id: str
    turn: str | None
    items: Sequence[Mapping[str, Any]]
    messages: Sequence[Mapping[str, Any]]


class ConversationTurns(Protocol):
    """The turns that responses take in conversations. `turn_s`: how long a turn may have its conversation, unless it is
    made in the background."""

    turn_s: float

    def new_turn(self) -> str:
        """The claim of a new turn. A response in the background has it as its id."""
        ...

    async def open(self, who: Principal, conversation_id: str, turn: str | None, lease_s: float) -> OpenTurn:
        """Begin a turn; `turn` None: only read the conversation. Raises BadRequest, NotFound, ConversationLocked,
        TooLarge, Unavailable."""
        ...

    async def leave(self, turn: str | None) -> None:
        """Give up a turn that has no rollout and will have none. While the store is away its lease ends it."""
        ...


class ConversationStore(Protocol):
    """Conversations by id, one key at a time. Every call raises Unavailable when the store is away.

    One turn at a time has a conversation. What it adds comes with its rollout: the same transaction stores the rollout,
    adds the items and ends the claim, so a reply is added once, whatever dies on the way."""

    async def create(self, new: StoredConversation, items: Sequence[Mapping[str, Any]], most: int) -> None:
        """Store a conversation with its first items. Raises BadRequest where the key has `most` already."""
        ...

    async def get(self, key_id: str, conversation_id: str) -> StoredConversation | None:
        """Return a conversation of this key; None if there is none."""
        ...

    async def update(self, key_id: str, conversation_id: str, metadata: Mapping[str, str]) -> StoredConversation | None:
        """Replace its metadata and return it; None if there is none."""
        ...

    async def delete(self, key_id: str, conversation_id: str) -> bool:
        """Delete it with its items. Return False if there is none. A turn that ends later adds nothing."""
        ...

    async def add(
        self, key_id: str, conversation_id: str, items: Sequence[Mapping[str, Any]], bytes_max: int
    ) -> StoredConversation | None:
        """Add items at the end; None if there is no such conversation. Raises ConversationLocked during a turn, and
        TooLarge where it would hold more than `bytes_max`."""
        ...

    async def remove(self, key_id: str, conversation_id: str, item_id: str) -> StoredConversation | None:
        """Delete an item; None if there is none. Raises ConversationLocked during a turn."""
        ...

    async def page(
        self, key_id: str, conversation_id: str, *, after: str | None, limit: int, newest_first: bool
    ) -> Sequence[Mapping[str, Any]]:
        """Return up to `limit` items behind the item `after`. Raises NotFound where there is no item `after`."""
        ...

    async def item(self, key_id: str, conversation_id: str, item_id: str) -> Mapping[str, Any] | None:
        """Return one item; None if there is none."""
        ...

    async def begin(
        self, key_id: str, conversation_id: str, turn: str, lease_s: float, *, take_over: bool
    ) -> StoredConversation | None:
        """Claim it for a turn, for `lease_s`; None if there is none. A claim that this turn has is renewed.
        `take_over`: also from a turn whose lease is over. Raises ConversationLocked while another turn has it."""
        ...

    async def leave(self, turn: str) -> None:
        """Give up the claim of a turn that has no rollout and will have none."""
        ...

    async def sweep(self, limit: int) -> int:
        """Delete up to `limit` items and empty conversations that are over the retention of their key; return how
        many."""
        ...
