"""Retention in PostgreSQL: delete texts whose time is over, with all rows that belong to them; money and audit stay.

A month in which nothing is to be kept is deleted by dropping its tables; other rows are deleted one by one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Select, delete, func, literal, not_, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres import audit as store_audit
from gateway.adapters.postgres.admin_tables import keys, orgs
from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.tables import dead_letters, policy_shadows, rollouts, rounds, steps
from gateway.adapters.postgres.upkeep import months as store_months
from gateway.adapters.postgres.upkeep.months import Held, within
from gateway.core.access.audit import Act
from gateway.core.log.months import Month
from gateway.service.ports.admin import DroppedMonth, SweepReport

log = logging.getLogger("gateway.retention")
LOCK_KEY = 0x72657461696E  # "retain": one sweep at a time
BATCH = 500  # rollouts a transaction, each with its rounds, steps, outcomes and experience
BATCHES_MAX = 100_000
TIMEOUT_S = 60.0
MONTH_TIMEOUT_S = 600.0
LATE = timedelta(days=1)  # after a month's end, until the journals have shipped all of it
HELD_MAX = timedelta(days=1)  # then a month that cannot be dropped is deleted by row


class PostgresRetention:
    """The port RetentionStore. A rollout is deleted with its rounds, steps, outcomes, experience, gradings and
    continuations."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def sweep(self, now: datetime, days: int | None, act: Act, *, dry: bool = False) -> SweepReport:
        if dry:
            return await self._would(now, days)
        for month in (Month.of(now), Month.of(now).next):
            await self._made(month)
        gone: list[DroppedMonth] = []
        held: list[Month] = []
        for month in await self._past(now, days):
            try:
                dropped = await self._drop(month, now, days, act)
            except Held as why:
                log.warning("the log of %s is over and cannot be dropped now: %s", month, why)
                held.append(month)
            else:
                gone += [] if dropped is None else [dropped]
        waits = [month for month in held if not await self._too_long(month, now, days)]
        swept = await self._by_row(now, days, act, waits)
        return SweepReport(swept.rollouts, swept.shadows, swept.dead_letters, gone, [str(month) for month in held])

    async def _would(self, now: datetime, days: int | None) -> SweepReport:
        months = await self._past(now, days)
        async with transaction(self._engine, MONTH_TIMEOUT_S) as connection:
            gone = [await _counted(connection, month) for month in months]
            over = _over(now, days, months).subquery()
            counted = select(over.c.key_id, func.count()).group_by(over.c.key_id)
            by_row = {str(key): int(n) for key, n in await connection.execute(counted)}
            return SweepReport(by_row, dead_letters=await _letters(connection, now, days, dry=True), months=gone)

    # ---------------------------------------------------------------- by month

    async def _made(self, month: Month) -> None:
        """Make a month's tables before its first row. If that fails, its rows go to the rest."""
        try:
            async with transaction(self._engine, TIMEOUT_S) as connection:
                if not await _mine(connection) or month in await store_months.existing(connection):
                    return
                moved = await store_months.make(connection, month)
        except Held as why:
            log.warning("the log of %s has no tables of its own yet: %s", month, why)
        else:
            log.info("the log of %s has tables of its own; %d rollouts were moved there", month, moved)

    async def _past(self, now: datetime, days: int | None) -> list[Month]:
        """Months in which nothing is to be kept, oldest first."""
        async with transaction(self._engine, TIMEOUT_S) as connection:
            ended = [m for m in await store_months.existing(connection) if m.next.start + LATE <= now]
            return [month for month in ended if not await _keeps(connection, month, now, days)]

    async def _drop(self, month: Month, now: datetime, days: int | None, act: Act) -> DroppedMonth | None:
        """Drop a month in one transaction with its audit entry. None: another sweep runs, or rows came late. Raises
        Held."""
        async with transaction(self._engine, MONTH_TIMEOUT_S) as connection:
            if not await _mine(connection) or month not in await store_months.existing(connection):
                return None
            await store_months.fence(connection, month)
            if await _keeps(connection, month, now, days):
                return None
            gone = await _counted(connection, month)
            others = await store_months.drop(connection, month)
            shown = {name: value for name, value in asdict(gone).items() if name != "month"} | others
            await store_audit.write(connection, act, "retention.month_dropped", f"rollouts:{month}", None, shown)
        return gone

    async def _too_long(self, month: Month, now: datetime, days: int | None) -> bool:
        """Whether the whole month was due long ago: what was promised does not wait for a lock."""
        async with transaction(self._engine, MONTH_TIMEOUT_S) as connection:
            return not await _keeps(connection, month, now - HELD_MAX, days)

    # ---------------------------------------------------------------- by row

    async def _by_row(self, now: datetime, days: int | None, act: Act, but: Sequence[Month]) -> SweepReport:
        by_key: Counter[str] = Counter()
        shadows = letters = 0
        for _ in range(BATCHES_MAX):
            async with transaction(self._engine, TIMEOUT_S) as connection:
                if not await _mine(connection):
                    break
                batch = (await connection.execute(_over(now, days, but).limit(BATCH))).all()
                if batch:
                    gone, more = await _delete(connection, batch)
                    by_key, shadows = by_key + gone, shadows + more
                else:
                    letters = await _letters(connection, now, days)
                    swept = SweepReport(dict(by_key), shadows, letters)
                    if swept.total:
                        await store_audit.write(connection, act, "retention.swept", "rollouts", None, _shown(swept))
                    return swept
        return SweepReport(dict(by_key), shadows, letters)


async def _mine(connection: AsyncConnection) -> bool:
    """Try to become the only sweep, until the transaction ends; return whether it worked."""
    return bool(await connection.scalar(select(func.pg_try_advisory_xact_lock(LOCK_KEY))))


_KEPT_OF = rollouts.outerjoin(keys, keys.c.public_id == rollouts.c.key_id).outerjoin(
    orgs, orgs.c.name == rollouts.c.org
)


def _ends(days: int | None) -> ColumnElement[Any]:
    """When a rollout's time is over; null: never. Rollouts of deleted keys follow the settings."""
    kept = func.coalesce(keys.c.retention_days, orgs.c.retention_days, literal(days))
    return rollouts.c.created_at + func.make_interval(0, 0, 0, kept)


def _over(now: datetime, days: int | None, but: Sequence[Month]) -> Select[Any]:
    """(id, key) of rollouts whose time is over, oldest first, without those of the months `but`."""
    kept = func.coalesce(keys.c.retention_days, orgs.c.retention_days, literal(days))
    query = select(rollouts.c.id, rollouts.c.key_id).select_from(_KEPT_OF)
    age = func.make_interval(0, 0, 0, kept)
    query = query.where(kept.is_not(None), rollouts.c.created_at < literal(now) - age)
    query = query.where(*(not_(within(rollouts.c.id, month)) for month in but))
    return query.order_by(rollouts.c.created_at)


async def _keeps(connection: AsyncConnection, month: Month, now: datetime, days: int | None) -> bool:
    """Whether any row of a month is still to be kept, by its own key's rule."""
    ends = _ends(days)
    one = select(literal(1)).select_from(_KEPT_OF).where(within(rollouts.c.id, month), or_(ends.is_(None), ends >= now))
    return await connection.scalar(one.limit(1)) is not None


async def _counted(connection: AsyncConnection, month: Month) -> DroppedMonth:
    by_key = select(rollouts.c.key_id, func.count()).where(within(rollouts.c.id, month)).group_by(rollouts.c.key_id)
    rollouts_of = {str(key): int(n) for key, n in await connection.execute(by_key)}
    parts = [select(func.count()).where(within(part.c.rollout_id, month)) for part in (rounds, steps)]
    return DroppedMonth(str(month), rollouts_of, *[int(await connection.scalar(part) or 0) for part in parts])


async def _delete(connection: AsyncConnection, batch: Any) -> tuple[Counter[str], int]:
    ids = [str(row[0]) for row in batch]
    shadows = await connection.execute(delete(policy_shadows).where(policy_shadows.c.rollout_id.in_(ids)))
    await connection.execute(delete(rollouts).where(rollouts.c.id.in_(ids)))
    return Counter(str(row[1]) for row in batch), int(shadows.rowcount)


async def _letters(connection: AsyncConnection, now: datetime, days: int | None, *, dry: bool = False) -> int:
    """Delete dead letters. They have no readable key, so they follow the settings."""
    if days is None:
        return 0
    over = dead_letters.c.at < now - timedelta(days=days)
    if dry:
        return int(await connection.scalar(select(func.count()).where(over)) or 0)
    return int((await connection.execute(delete(dead_letters).where(over))).rowcount)


def _shown(swept: SweepReport) -> Mapping[str, Any]:
    return {"rollouts": dict(swept.rollouts), "shadows": swept.shadows, "dead_letters": swept.dead_letters}
