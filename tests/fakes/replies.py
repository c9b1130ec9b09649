"""`ReplyStore`, `Conversations` and `CallStates` in memory. They pass the contract suites of the real ones."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.errors import IdempotencyReused, IdempotencyRunning, Unavailable
from gateway.service.ports.turns import LastTurn, Slot, StoredReply, TurnMarks


@dataclass
class _Row:
    slot: Slot
    created_s: float
    until_s: float
    reply: StoredReply | None = None


class FakeReplies:
    """Set `away` to make every call raise Unavailable."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, bytes], _Row] = {}
        self.away = False

    def _up(self) -> None:
        if self.away:
            raise Unavailable("the database is not available", code="store_unavailable")

    async def claim(self, slot: Slot, lease_s: float, keep_s: float) -> StoredReply | None:
        self._up()
        now_s = time.monotonic()
        row = self.rows.get((slot.key_id, slot.digest))
        if row is not None and row.created_s > now_s - keep_s:
            if row.slot.fingerprint != slot.fingerprint:
                raise IdempotencyReused
            if row.reply is not None:
                return row.reply
            if row.until_s > now_s:
                raise IdempotencyRunning
        self.rows[slot.key_id, slot.digest] = _Row(slot, now_s, now_s + lease_s)
        return None

    async def keep(self, slot: Slot, reply: StoredReply) -> bool:
        self._up()
        row = self._mine(slot)
        if row is not None:
            row.reply = reply
        return row is not None

    async def release(self, slot: Slot) -> bool:
        self._up()
        if self._mine(slot) is None:
            return False
        del self.rows[slot.key_id, slot.digest]
        return True

    async def sweep(self, keep_s: float, limit: int) -> int:
        self._up()
        until_s = time.monotonic() - keep_s
        old = [place for place, row in self.rows.items() if row.created_s <= until_s][:limit]
        for place in old:
            del self.rows[place]
        return len(old)

    def _mine(self, slot: Slot) -> _Row | None:
        row = self.rows.get((slot.key_id, slot.digest))
        return row if row is not None and row.reply is None and row.slot.claim == slot.claim else None


class FakeConversations:
    """Set `away` to make every call raise Unavailable. `asked` counts the calls of `find`."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], tuple[LastTurn, float]] = {}
        self.away = False
        self.asked = 0

    async def remember(self, turn: TurnMarks) -> None:
        self._up()
        now_s = time.monotonic()
        for mark, seconds in turn.marks.items():
            self.known[turn.key_id, mark] = (LastTurn(turn.worker, turn.facts), now_s + seconds)

    async def find(self, key_id: str, marks: Sequence[str]) -> LastTurn | None:
        self.asked += 1
        self._up()
        now_s = time.monotonic()
        for mark in marks:
            turn, until_s = self.known.get((key_id, mark), (None, 0.0))
            if until_s > now_s:
                return turn
        return None

    async def sweep(self, limit: int) -> int:
        self._up()
        now_s = time.monotonic()
        old = [place for place, (_, until_s) in self.known.items() if until_s <= now_s][:limit]
        for place in old:
            del self.known[place]
        return len(old)

    def _up(self) -> None:
        if self.away:
            raise Unavailable("conversations are not available", code="store_unavailable")


class FakeCallStates:
    """Set `away` to make every call raise Unavailable. `loads` counts the calls of `load`."""

    def __init__(self, bytes_max: int = 8 << 20) -> None:
        self.known: dict[tuple[str, str], tuple[bytes, float]] = {}
        self.away = False
        self.loads = 0
        self._bytes_max = bytes_max

    async def keep(self, key_id: str, states: Mapping[str, bytes], keep_s: float) -> None:
        self._up()
        for name, state in states.items():
            self.known.pop((key_id, name), None)
            self.known[key_id, name] = (state, time.monotonic())
        while sum(len(state) for (key, _), (state, _) in self.known.items() if key == key_id) > self._bytes_max:
            del self.known[next(place for place in self.known if place[0] == key_id)]

    async def load(self, key_id: str, ids: Sequence[str], keep_s: float) -> Mapping[str, bytes]:
        self.loads += 1
        self._up()
        kept = {name: self.known[key_id, name] for name in ids if (key_id, name) in self.known}
        return {name: state for name, (state, kept_s) in kept.items() if kept_s + keep_s > time.monotonic()}

    def _up(self) -> None:
        if self.away:
            raise Unavailable("vendor state is not available", code="store_unavailable")
