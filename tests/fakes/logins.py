"""`LoginStore` in memory; tests/contract/test_logins.py holds it to PostgreSQL."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from gateway.adapters.postgres.operators import logins
from gateway.adapters.postgres.rows import clean
from gateway.core.access.login import Person
from gateway.errors import Unavailable
from gateway.service.ports.login import PendingLogin


class FakeLogins:
    """Set `away` to make every call raise Unavailable. `acts`: what the audit would have, as (who, what)."""

    def __init__(self) -> None:
        self.pending: dict[bytes, tuple[PendingLogin, datetime]] = {}
        self.sessions: dict[bytes, tuple[Person, datetime]] = {}
        self.acts: list[tuple[str, str]] = []
        self.away = False

    async def begin(self, state: bytes, login: PendingLogin, until: datetime) -> None:
        self._up()
        newest = sorted(self.pending, key=lambda one: self.pending[one][1], reverse=True)
        for one in newest[logins.PENDING_MAX - 1 :]:
            del self.pending[one]
        self.pending[state] = (login, until)

    async def take(self, state: bytes, now: datetime) -> PendingLogin | None:
        self._up()
        login, until = self.pending.pop(state, (None, now))
        return login if until > now else None

    async def open(self, token: bytes, person: Person, now: datetime, until: datetime) -> None:
        self._up()
        person = replace(person, subject=str(clean(person.subject)), name=str(clean(person.name)))
        self.sessions[token] = (person, until)
        self.acts.append((person.actor, "console.login"))

    async def find(self, token: bytes, now: datetime) -> Person | None:
        self._up()
        person, until = self.sessions.get(token, (None, now))
        return person if until > now else None

    async def close(self, token: bytes) -> Person | None:
        self._up()
        person, _ = self.sessions.pop(token, (None, None))
        if person is not None:
            self.acts.append((person.actor, "console.logout"))
        return person

    async def sweep(self, limit: int) -> int:
        self._up()
        now = datetime.now(UTC)
        old_logins = [state for state, (_, until) in self.pending.items() if until < now][:limit]
        old_sessions = [token for token, (_, until) in self.sessions.items() if until < now]
        old_sessions = old_sessions[: limit - len(old_logins)]
        for state in old_logins:
            del self.pending[state]
        for token in old_sessions:
            del self.sessions[token]
        return len(old_logins) + len(old_sessions)

    def _up(self) -> None:
        if self.away:
            raise Unavailable("the database is not available", code="store_unavailable")
