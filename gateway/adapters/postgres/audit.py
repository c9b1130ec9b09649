"""The audit in PostgreSQL: one chain for the installation, written by every transaction that changes something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres.admin_tables import audit
from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.rows import clean
from gateway.core.access.audit import FIRST, Act, Anchor, Entry, Link, link, plain_json

LOCK_KEY = 0x6175646974  # "audit": one chain, so one writer at a time
PAGE_MAX = 1_000


async def write(
    connection: AsyncConnection,
    act: Act,
    what: str,
    target: str,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Add an entry to the open transaction. Call it last: it locks the chain until the transaction ends."""
    await connection.execute(select(func.pg_advisory_xact_lock(LOCK_KEY)))
    head = await _head(connection)
    was, became = (None if changed is None else plain_json(clean(changed)) for changed in (before, after))
    why, now = str(clean(act.why)), datetime.now(UTC)
    entry = Entry(head.seq + 1, now, act.actor, what, target, was, became, why)
    new = link(entry, head.hash)
    values = {name: getattr(entry, name) for name in Entry.__slots__}
    await connection.execute(insert(audit).values(**values, prev=new.prev, hash=new.hash))


async def _head(connection: AsyncConnection) -> Anchor:
    query = select(audit.c.seq, audit.c.hash).order_by(audit.c.seq.desc()).limit(1)
    found = (await connection.execute(query)).first()
    return Anchor(0, FIRST) if found is None else Anchor(int(found[0]), bytes(found[1]))


class PostgresAudit:
    """Port AuditLog. Every call raises Unavailable when PostgreSQL is away."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def head(self) -> Anchor:
        async with transaction(self._engine) as connection:
            return await _head(connection)

    async def walk(self, after: int, limit: int) -> Sequence[Link]:
        query = select(audit).where(audit.c.seq > after).order_by(audit.c.seq).limit(min(limit, PAGE_MAX))
        async with transaction(self._engine) as connection:
            return [_link(row) for row in (await connection.execute(query)).mappings()]

    async def latest(
        self,
        limit: int,
        before: int | None = None,
        target: str | None = None,
        actor: str | None = None,
        act: str | None = None,
    ) -> Sequence[Link]:
        query = select(audit).order_by(audit.c.seq.desc()).limit(min(limit, PAGE_MAX))
        if before is not None:
            query = query.where(audit.c.seq < before)
        for name, value in {"target": target, "actor": actor, "act": act}.items():
            if value is not None:
                query = query.where(audit.c[name] == str(clean(value)))
        async with transaction(self._engine) as connection:
            return [_link(row) for row in (await connection.execute(query)).mappings()]


def _link(row: Mapping[Any, Any]) -> Link:
    return Link(Entry(*(row[name] for name in Entry.__slots__)), bytes(row["prev"]), bytes(row["hash"]))
