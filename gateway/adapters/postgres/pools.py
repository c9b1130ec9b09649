"""Named queries of pool revisions in PostgreSQL (port `PoolRevisions`): each with its audit entry, or neither."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres import audit as store_audit
from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.rows import clean
from gateway.adapters.postgres.tables_pools import pool_revisions
from gateway.service.ports.pools import PoolRevision, by

TARGET = "pools"


class PostgresPools:
    """Every call raises Unavailable when PostgreSQL is away."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def note(self, revision: PoolRevision, after: Mapping[str, Any]) -> bool:
        async with transaction(self._engine) as connection:
            new = await _keep(connection, revision)
            if new:
                await store_audit.write(connection, by(revision), "pool.loaded", TARGET, None, after)
            return new

    async def change(self, revision: PoolRevision, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        async with transaction(self._engine) as connection:
            await _keep(connection, revision)
            await store_audit.write(connection, by(revision), "pool.reloaded", TARGET, before, after)

    async def list(self, limit: int) -> Sequence[PoolRevision]:
        table = pool_revisions
        query = select(table).order_by(table.c.at.desc(), table.c.hash).limit(limit)
        async with transaction(self._engine) as connection:
            return [PoolRevision(**row) for row in (await connection.execute(query)).mappings()]

    async def get(self, hash_: str) -> PoolRevision | None:
        query = select(pool_revisions).where(pool_revisions.c.hash == str(clean(hash_)))
        async with transaction(self._engine) as connection:
            row = (await connection.execute(query)).mappings().first()
        return None if row is None else PoolRevision(**row)


async def _keep(connection: AsyncConnection, revision: PoolRevision) -> bool:
    """Whether it is new: the first time that a pool was loaded stands."""
    values = {name: getattr(revision, name) for name in PoolRevision.__slots__}
    values["why"] = clean(revision.why)
    query = insert(pool_revisions).values(**values).on_conflict_do_nothing(index_elements=["hash"])
    return bool((await connection.execute(query.returning(pool_revisions.c.hash))).first())
