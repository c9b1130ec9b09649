"""What the pages of money and workers show, by named queries: spending, open holds, errors, success."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from sqlalchemy import TextClause, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.adapters.postgres.admin_tables import spend_days
from gateway.adapters.postgres.database import query
from gateway.core.log.events import lowest

LIST_MAX = 100
HOLDS_DAYS = 30  # how far back open holds are looked for
EXPERIENCE_RECENT_MAX = 1_000  # judged steps of each worker that its success is averaged over
RATES = ("success",)
BY_KEY, BY_WORKER = query("spend_by_key"), query("spend_by_worker")
HOLDS, SUCCESS, ERRORS = query("open_holds"), query("worker_success"), query("worker_errors")
Rows = list[dict[str, Any]]


async def spend(connection: AsyncConnection, until: datetime, days: int, rollouts_max: int) -> Mapping[str, Any]:
    """Nano-dollars by UTC day and key, and by day and worker, of the `days` that end with today. Past days come from
    their sums (`upkeep/days.py`); `rollouts_max` bounds the requests of those that were not summed yet."""
    first = (until.astimezone(UTC) - timedelta(days=days - 1)).replace(hour=0, minute=0, second=0, microsecond=0)
    summed = await connection.scalar(select(func.max(spend_days.c.day)))
    live = max(first, datetime.combine(summed, time(), UTC) + timedelta(days=1)) if summed else first
    values = {"first": first.date(), "live_since": live, "live_since_id": id_of(live), "rollouts_max": rollouts_max}
    by_key = await _rows(connection, BY_KEY, values)
    read = sum(row["requests"] for row in by_key if row.pop("live"))
    return {
        "since": first.isoformat(),
        "until": until.astimezone(UTC).isoformat(),
        "truncated": read >= rollouts_max,
        "by_key": by_key,
        "by_worker": await _rows(connection, BY_WORKER, values),
    }


async def open_holds(connection: AsyncConnection, now: datetime) -> Rows:
    """Holds that nothing settled, newest first."""
    since = now - timedelta(days=HOLDS_DAYS)
    return await _rows(connection, HOLDS, {"since_id": id_of(since), "most": LIST_MAX})


async def success(connection: AsyncConnection, workers: Sequence[str]) -> Rows:
    """How well each of the workers did each kind of task, on a scale from 0 to 1."""
    return await _rows(connection, SUCCESS, {"workers": list(workers), "recent": EXPERIENCE_RECENT_MAX})


async def errors(connection: AsyncConnection, since: datetime, rollouts_max: int) -> Rows:
    """Failed calls since a time by worker and error."""
    values = {"since": since, "since_id": id_of(since), "rollouts_max": rollouts_max, "most": LIST_MAX}
    return await _rows(connection, ERRORS, values)


def id_of(since: datetime) -> str:
    """Not above the id of any rollout that was made at that time or later. Ids begin with their time: without it a
    query of the latest steps reads all of them."""
    return lowest(int(since.timestamp() * 1000))


async def _rows(connection: AsyncConnection, statement: TextClause, values: Mapping[str, Any]) -> Rows:
    records = (await connection.execute(statement, values)).mappings()
    return [{name: _plain(name, value) for name, value in row.items()} for row in records]


def _plain(name: str, value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, float | Decimal):
        return float(value) if name in RATES else round(value)
    if name == "scopes":
        return [scope for scope, _ in value]
    return value if value is None or isinstance(value, str | int) else str(value)
