"""The port LoginStore: logins that have begun, and sessions. Tokens are stored as digests."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres import audit as store_audit
from gateway.adapters.postgres.admin_tables import console_logins
from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.rows import clean
from gateway.core.access.audit import Act
from gateway.core.access.login import Person
from gateway.service.ports.login import PendingLogin

PENDING_MAX = 1_000  # that have begun and not ended: beyond, the oldest are forgotten
_c = console_logins.c


class PostgresLogins:
    """Every call raises Unavailable when PostgreSQL is away."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def begin(self, state: bytes, login: PendingLogin, until: datetime) -> None:
        data = {"browser": login.browser.hex(), "nonce": login.nonce, "verifier": login.verifier}
        old = select(_c.digest).where(_c.kind == "pending").order_by(_c.expires_at.desc()).offset(PENDING_MAX - 1)
        async with transaction(self._engine) as connection:
            await connection.execute(delete(console_logins).where(_c.digest.in_(old.scalar_subquery())))
            await _insert(connection, state, "pending", data, until)

    async def take(self, state: bytes, now: datetime) -> PendingLogin | None:
        taken = delete(console_logins).where(_c.digest == state, _c.kind == "pending")
        async with transaction(self._engine) as connection:
            row = (await connection.execute(taken.returning(_c.data, _c.expires_at))).first()
        if row is None or row.expires_at <= now:
            return None
        return PendingLogin(bytes.fromhex(row.data["browser"]), row.data["nonce"], row.data["verifier"])

    async def open(self, token: bytes, person: Person, now: datetime, until: datetime) -> None:
        data = {"subject": str(clean(person.subject)), "name": str(clean(person.name)), "role": person.role}
        async with transaction(self._engine) as connection:
            await _insert(connection, token, "session", data, until)
            after = {"name": data["name"], "role": person.role, "until": until.isoformat()}
            await store_audit.write(connection, _act(data), "console.login", "console", None, after)

    async def find(self, token: bytes, now: datetime) -> Person | None:
        query = select(_c.data).where(_c.digest == token, _c.kind == "session", _c.expires_at > now)
        async with transaction(self._engine) as connection:
            data = await connection.scalar(query)
        return None if data is None else Person(**data)

    async def close(self, token: bytes) -> Person | None:
        gone = delete(console_logins).where(_c.digest == token, _c.kind == "session").returning(_c.data)
        async with transaction(self._engine) as connection:
            data = await connection.scalar(gone)
            if data is None:
                return None
            await store_audit.write(connection, _act(data), "console.logout", "console")
        return Person(**data)

    async def sweep(self, limit: int) -> int:
        over = select(_c.digest).where(_c.expires_at < func.now()).limit(limit).scalar_subquery()
        async with transaction(self._engine) as connection:
            return (await connection.execute(delete(console_logins).where(_c.digest.in_(over)))).rowcount


async def _insert(
    connection: AsyncConnection, digest: bytes, kind: str, data: Mapping[str, Any], until: datetime
) -> None:
    values = {"digest": digest, "kind": kind, "data": dict(data), "expires_at": until}
    await connection.execute(insert(console_logins).values(**values))


def _act(data: Mapping[str, Any]) -> Act:
    return Act(f"oidc:{data['subject']}", role=data["role"])
