"""Sums of past days (`spend_days`), so that no page sums a month of requests. They outlive the requests.

A day is summed once it is over, from the first day of the log on and without a gap, and again each hour for two more
days, because the log of a gateway that was cut off comes late. A sum never shrinks: retention may have deleted some of
the day's requests since.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres.admin_tables import spend_days
from gateway.adapters.postgres.database import query, transaction
from gateway.adapters.postgres.reports.books import id_of
from gateway.adapters.postgres.tables import rollouts
from gateway.service.ports.request import Clock

LATE = timedelta(days=2)  # after its end a day may still grow
AGAIN = timedelta(hours=1)
TIMEOUT_S = 120.0  # of the sum of one day
LOCK_KEY = 0x64617973  # "days": one gateway at a time sums
DAY = "day"  # the row of a day that was summed; its count is of requests
SUM_DAY = query("sum_day")
_d = spend_days.c


class PostgresDays:
    """Sums days. Every call raises Unavailable when PostgreSQL is away."""

    def __init__(self, engine: AsyncEngine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    async def sweep(self, _limit: int) -> int:
        """Sum every day that is to be summed, each in a transaction of its own. Returns 0: there is no more."""
        now = self._clock.now().astimezone(UTC)
        for day in await self._due(now):
            async with transaction(self._engine, TIMEOUT_S) as connection:
                if not await connection.scalar(select(func.pg_try_advisory_xact_lock(LOCK_KEY))):
                    break  # another gateway sums; a day after one that it fails at would leave a gap
                await _sum(connection, day, now)
        return 0

    async def _due(self, now: datetime) -> list[date]:
        """Days to sum, the oldest first."""
        async with transaction(self._engine) as connection:
            last = await connection.scalar(select(func.max(_d.day)))
            late = select(_d.day).where(
                _d.kind == DAY, _d.day > (now - LATE).date() - timedelta(days=1), _d.summed_at < now - AGAIN
            )
            again = list((await connection.execute(late.order_by(_d.day))).scalars())
            first = await connection.scalar(select(func.min(rollouts.c.created_at))) if last is None else None
        begin = last + timedelta(days=1) if last is not None else first.astimezone(UTC).date() if first else now.date()
        return [*again, *(begin + timedelta(days=n) for n in range((now.date() - begin).days))]


async def _sum(connection: AsyncConnection, day: date, now: datetime) -> None:
    since = datetime.combine(day, time(), UTC)
    until = since + timedelta(days=1)
    values = {
        "day": day,
        "since": since,
        "until": until,
        "since_id": id_of(since),
        "until_id": id_of(until),
        "now": now,
    }
    await connection.execute(SUM_DAY, values)
