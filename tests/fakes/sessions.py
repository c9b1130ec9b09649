"""`SessionStore` in memory; tests/contract/test_sessions.py holds it to PostgreSQL."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from gateway.core.access.audit import Act
from gateway.core.money.sessions import Session, SessionLimits, SessionState
from gateway.errors import Conflict, Unavailable
from gateway.service.ports.sessions import Place


class FakeSessions:
    """Set `away` to make every call raise Unavailable. `acts`: what the audit would have."""

    def __init__(self) -> None:
        self.rows: dict[Place, Session] = {}
        self.acts: list[tuple[str, str]] = []
        self.away = False

    async def enter(self, key_id: str, session_id: str, limits: SessionLimits, now: datetime) -> tuple[Session, bool]:
        self._up()
        new = (key_id, session_id) not in self.rows
        return self.rows.setdefault((key_id, session_id), Session(key_id, session_id, now, limits, limits)), new

    async def find(self, key_id: str, session_id: str) -> Session | None:
        self._up()
        return self.rows.get((key_id, session_id))

    async def page(self, key_id: str | None, limit: int, before: tuple[datetime, str] | None) -> Sequence[Session]:
        self._up()
        rows = [row for row in self.rows.values() if key_id in (None, row.key_id)]
        rows = [row for row in rows if before is None or (row.started_at, row.id) < before]
        return sorted(rows, key=lambda row: (row.started_at, row.id), reverse=True)[:limit]

    async def change(
        self, key_id: str, session_id: str, changes: Mapping[str, Any], act: Act, what: str
    ) -> Session | None:
        self._up()
        row = self.rows.get((key_id, session_id))
        changed = None if row is None else replace(row, **changes)
        if row is None or changed is None or changed == row:
            return row
        if row.state == "killed":
            raise Conflict(f"session `{session_id}` was killed; it cannot be changed", code="session_killed")
        self.rows[key_id, session_id] = changed
        self.acts.append((what, f"session:{key_id}:{session_id}"))
        return changed

    async def states(self, places: Collection[Place]) -> Mapping[Place, SessionState]:
        self._up()
        return {place: self.rows[place].state for place in places if place in self.rows}

    async def sweep(self, before: datetime, limit: int) -> int:
        self._up()
        old = [place for place, row in self.rows.items() if row.started_at < before][:limit]
        for place in old:
            del self.rows[place]
        return len(old)

    def _up(self) -> None:
        if self.away:
            raise Unavailable("the database is not available", code="store_unavailable")
