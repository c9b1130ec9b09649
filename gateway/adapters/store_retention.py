"""Retention in PostgreSQL: texts whose time is over go, with all that hangs on them; money and audit stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Select, delete, func, literal, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters import store_audit
from gateway.adapters.database import transaction
from gateway.adapters.tables import dead_letters, keys, policy_shadows, rollouts
from gateway.adapters.tables_admin import orgs
from gateway.core.audit import Act
from gateway.service.ports_admin import Swept

LOCK_KEY = 0x72657461696E  # "retain": one sweep at a time
BATCH = 500  # rollouts a transaction: each brings its rounds, steps, outcomes and experience along
BATCHES_MAX = 100_000
TIMEOUT_S = 60.0


class PostgresRetention:
    """Port RetentionStore. Rounds, steps, outcomes, experience, gradings and continuations go with their rollout."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def sweep(self, now: datetime, days: int | None, act: Act, *, dry: bool = False) -> Swept:
        found: Counter[str] = Counter()
        shadows = letters = 0
        if dry:
            async with transaction(self._engine, TIMEOUT_S) as connection:
                over = _over(now, days).subquery()
                counted = select(over.c.key_id, func.count()).group_by(over.c.key_id)
                rollouts_over = {key: int(n) for key, n in await connection.execute(counted)}
                return Swept(rollouts_over, dead_letters=await _letters(connection, now, days, dry=True))
        for _ in range(BATCHES_MAX):
            async with transaction(self._engine, TIMEOUT_S) as connection:
                if not await connection.scalar(select(func.pg_try_advisory_xact_lock(LOCK_KEY))):
                    break
                batch = (await connection.execute(_over(now, days).limit(BATCH))).all()
                if batch:
                    gone, more = await _delete(connection, batch)
                    found, shadows = found + gone, shadows + more
                else:
                    letters = await _letters(connection, now, days)
                    swept = Swept(dict(found), shadows, letters)
                    if swept.total:
                        await store_audit.write(connection, act, "retention.swept", "rollouts", None, _shown(swept))
                    return swept
        return Swept(dict(found), shadows, letters)


def _over(now: datetime, days: int | None) -> Select[Any]:
    """(id, key) of rollouts whose time is over, oldest first. Those of keys that are gone follow the settings."""
    kept = func.coalesce(keys.c.retention_days, orgs.c.retention_days, literal(days))
    source = rollouts.outerjoin(keys, keys.c.public_id == rollouts.c.key_id)
    source = source.outerjoin(orgs, orgs.c.name == rollouts.c.org)
    query = select(rollouts.c.id, rollouts.c.key_id).select_from(source)
    age = func.make_interval(0, 0, 0, kept)
    return query.where(kept.is_not(None), rollouts.c.created_at < literal(now) - age).order_by(rollouts.c.created_at)


async def _delete(connection: AsyncConnection, batch: Any) -> tuple[Counter[str], int]:
    ids = [str(row[0]) for row in batch]
    shadows = await connection.execute(delete(policy_shadows).where(policy_shadows.c.rollout_id.in_(ids)))
    await connection.execute(delete(rollouts).where(rollouts.c.id.in_(ids)))
    return Counter(str(row[1]) for row in batch), int(shadows.rowcount)


async def _letters(connection: AsyncConnection, now: datetime, days: int | None, *, dry: bool = False) -> int:
    """Records that could not be stored have no key that could be read: they follow the settings."""
    if days is None:
        return 0
    over = dead_letters.c.at < now - timedelta(days=days)
    if dry:
        return int(await connection.scalar(select(func.count()).where(over)) or 0)
    return int((await connection.execute(delete(dead_letters).where(over))).rowcount)


def _shown(swept: Swept) -> Mapping[str, Any]:
    return {"rollouts": dict(swept.rollouts), "shadows": swept.shadows, "dead_letters": swept.dead_letters}
