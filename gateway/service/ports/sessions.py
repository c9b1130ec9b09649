"""The port of sessions: budgets of a run of one key, with their state. What they spent is in `Budgets`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from gateway.core.access.audit import Act
from gateway.core.money.sessions import Session, SessionLimits, SessionState

Place = tuple[str, str]  # (key id, session id)


class SessionStore(Protocol):
    """Sessions by key and id, shared by every gateway. Every call raises Unavailable when the store is away."""

    async def enter(self, key_id: str, session_id: str, limits: SessionLimits, now: datetime) -> tuple[Session, bool]:
        """Return the session, and whether this call made it, with these limits and from `now` on. Of many calls at a
        time one makes it."""
        ...

    async def find(self, key_id: str, session_id: str) -> Session | None: ...

    async def page(self, key_id: str | None, limit: int, before: tuple[datetime, str] | None) -> Sequence[Session]:
        """Return sessions, newest first: of one key or of all, that started before a (time, id)."""
        ...

    async def change(
        self, key_id: str, session_id: str, changes: Mapping[str, Any], act: Act, what: str
    ) -> Session | None:
        """Change `limits` or `state` with an audit entry `what`, and return the session; None if there is none. A
        change that changes nothing is not audited. Raises Conflict for a killed session, unless it is killed again."""
        ...

    async def states(self, places: Collection[Place]) -> Mapping[Place, SessionState]:
        """The state of each of these sessions that is stored."""
        ...

    async def sweep(self, before: datetime, limit: int) -> int:
        """Delete up to `limit` sessions that started before then; return how many."""
        ...
