"""`ConversationStore` in memory, over the fake store's rows (tests/contract/test_stored_conversations.py holds it to
PostgreSQL's answers). Leases are by the real clock."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.errors import BadRequest, ConversationLocked, NotFound, TooLarge
from gateway.service.ports.turns import StoredConversation
from tests.fakes.store import FakeStore


@dataclass
class _Kept:
    shown: StoredConversation
    items: dict[str, Mapping[str, Any] | None] = field(default_factory=dict)  # None: it was deleted
    until_s: float = 0.0

    @property
    def live(self) -> list[Mapping[str, Any]]:
        return [item for item in self.items.values() if item is not None]

    @property
    def is_claimed(self) -> bool:
        return self.shown.turn is not None and self.until_s > time.monotonic()


class FakeStoredConversations:
    """Turns come from the rollouts that the store ingests."""

    def __init__(self, store: FakeStore) -> None:
        self._store = store
        self._kept: dict[str, _Kept] = {}
        self._read = 0

    def _get(self, key_id: str, conversation_id: str) -> _Kept | None:
        self._store._up()
        turns, self._read = self._store.rows.turns[self._read :], len(self._store.rows.turns)
        for turn in turns:
            kept = self._kept.get(turn["conversation_id"])
            if kept is None or kept.shown.key_id != turn["key_id"]:
                continue
            if not any(item["id"] in kept.items for item in turn["items"]):
                self._append(kept, turn["items"])
            if kept.shown.turn == turn["turn"]:
                kept.shown = replace(kept.shown, turn=None)
        kept = self._kept.get(conversation_id)
        return kept if kept is not None and kept.shown.key_id == key_id else None

    def _append(self, kept: _Kept, items: Sequence[Mapping[str, Any]]) -> None:
        kept.items |= {item["id"]: json.loads(json.dumps(item)) for item in items}
        self._count(kept)

    def _count(self, kept: _Kept) -> None:
        kept.shown = replace(kept.shown, items=len(kept.live), size_bytes=_size(kept.live))

    async def create(self, new: StoredConversation, items: Sequence[Mapping[str, Any]], most: int) -> None:
        self._get(new.key_id, new.id)
        if sum(kept.shown.key_id == new.key_id for kept in self._kept.values()) >= most:
            raise BadRequest("too many", code="too_many_conversations")
        self._kept[new.id] = _Kept(new)
        self._append(self._kept[new.id], items)

    async def get(self, key_id: str, conversation_id: str) -> StoredConversation | None:
        kept = self._get(key_id, conversation_id)
        return None if kept is None else kept.shown

    async def update(self, key_id: str, conversation_id: str, metadata: Mapping[str, str]) -> StoredConversation | None:
        if (kept := self._get(key_id, conversation_id)) is None:
            return None
        kept.shown = replace(kept.shown, metadata=dict(metadata))
        return kept.shown

    async def delete(self, key_id: str, conversation_id: str) -> bool:
        return self._get(key_id, conversation_id) is not None and self._kept.pop(conversation_id) is not None

    async def add(
        self, key_id: str, conversation_id: str, items: Sequence[Mapping[str, Any]], bytes_max: int
    ) -> StoredConversation | None:
        if (kept := self._get(key_id, conversation_id)) is None:
            return None
        if kept.is_claimed:
            raise ConversationLocked(conversation_id)
        if kept.shown.size_bytes + _size(items) > bytes_max:
            raise TooLarge("too large", param="items")
        self._append(kept, items)
        return kept.shown

    async def remove(self, key_id: str, conversation_id: str, item_id: str) -> StoredConversation | None:
        if (kept := self._get(key_id, conversation_id)) is None:
            return None
        if kept.is_claimed:
            raise ConversationLocked(conversation_id)
        if kept.items.get(item_id) is None:
            return None
        kept.items[item_id] = None
        self._count(kept)
        return kept.shown

    async def page(
        self, key_id: str, conversation_id: str, *, after: str | None, limit: int, newest_first: bool
    ) -> Sequence[Mapping[str, Any]]:
        kept = self._get(key_id, conversation_id)
        names = [] if kept is None else list(kept.items)
        if newest_first:
            names.reverse()
        if after is not None:
            if after not in names:
                raise NotFound("no such item", param="after")
            names = names[names.index(after) + 1 :]
        live = [kept.items[name] for name in names] if kept is not None else []
        return [item for item in live if item is not None][:limit]

    async def item(self, key_id: str, conversation_id: str, item_id: str) -> Mapping[str, Any] | None:
        kept = self._get(key_id, conversation_id)
        return None if kept is None else kept.items.get(item_id)

    async def begin(
        self, key_id: str, conversation_id: str, turn: str, lease_s: float, *, take_over: bool
    ) -> StoredConversation | None:
        if (kept := self._get(key_id, conversation_id)) is None:
            return None
        if kept.shown.turn not in (None, turn) and (kept.is_claimed or not take_over):
            raise ConversationLocked(conversation_id)
        kept.shown, kept.until_s = replace(kept.shown, turn=turn), time.monotonic() + lease_s
        return kept.shown

    async def leave(self, turn: str) -> None:
        self._store._up()
        for kept in self._kept.values():
            if kept.shown.turn == turn:
                kept.shown = replace(kept.shown, turn=None)

    async def sweep(self, limit: int) -> int:
        return 0  # nothing is over its time here: no key has a retention


def _size(items: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(json.dumps(item, ensure_ascii=False, separators=(",", ":")).encode()) for item in items)
