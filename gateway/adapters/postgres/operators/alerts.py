"""The outbox of alerts: each is stored once by its subject, lent to one gateway at a time, in order of time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres.admin_tables import alerts, policy_events, policy_jobs, worker_quarantines
from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.rows import clean
from gateway.adapters.postgres.tables import ledger
from gateway.core.log.alerts import Alert, DueAlert
from gateway.core.log.events import lowest, uuid7
from gateway.core.money.amounts import nano_to_usd

LOCK_KEY = 0x616C657274  # "alert": one gateway at a time groups charges, and one lends
SINCE = timedelta(days=2)  # how far back events are looked for
KEPT = timedelta(days=90)
CHARGES_MAX = 100  # in one alert
EVENTS_MAX = 1_000
SAID_CHARS_MAX = 200
ENDED = ("done", "refused", "failed", "cancelled")


class PostgresAlerts:
    """Every call raises Unavailable when PostgreSQL is away."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def store(self, batch: Sequence[Alert], now: datetime) -> int:
        """Store alerts whose subject is new. Return their number."""
        if not batch:
            return 0
        async with transaction(self._engine) as connection:
            return await _insert(connection, batch, now)

    async def collect(self, kinds: Collection[str], now: datetime) -> int:
        """Store alerts about roll-backs, jobs that ended, quarantines and uncertain charges of the last days that were
        not told yet. Return their number."""
        batch: list[Alert] = []
        async with transaction(self._engine) as connection:
            await connection.execute(select(func.pg_advisory_xact_lock(LOCK_KEY)))
            if "rollback" in kinds:
                batch += await _rollbacks(connection, now - SINCE)
            if "job" in kinds:
                batch += await _jobs(connection, now - SINCE)
            if "quarantine" in kinds:
                batch += await _quarantines(connection, now - SINCE)
            if "uncertain" in kinds:
                batch += await _charges(connection, now)
            return await _insert(connection, batch, now) if batch else 0

    async def lend(self, lease_s: float) -> DueAlert | None:
        """Return the oldest alert that waits, if it is due: no other gateway gets it, or a later one, for `lease_s`."""
        c = alerts.c
        oldest = select(c.id).where(c.state == "waiting").order_by(c.at, c.id).limit(1).scalar_subquery()
        lent = update(alerts).where(c.id == oldest, c.due_at <= func.clock_timestamp())
        lent = lent.values(attempts=c.attempts + 1, due_at=_in(lease_s))
        async with transaction(self._engine) as connection:
            await connection.execute(select(func.pg_advisory_xact_lock(LOCK_KEY)))
            row = (await connection.execute(lent.returning(c.id, c.kind, c.at, c.data, c.attempts))).first()
        return None if row is None else DueAlert(*row)

    async def end(self, delivery: DueAlert, state: str, said: str) -> None:
        """Record how a delivery ended: sent or given_up."""
        await self._note(delivery, state=state, said=said, ended_at=func.clock_timestamp())

    async def later(self, delivery: DueAlert, said: str, pause_s: float) -> None:
        """Try again after a pause, unless another gateway has taken it since."""
        await self._note(delivery, said=said, due_at=_in(pause_s))

    async def waiting(self) -> int:
        """Return the number of alerts that wait."""
        async with transaction(self._engine) as connection:
            counted = select(func.count()).select_from(alerts).where(alerts.c.state == "waiting")
            return int(await connection.scalar(counted) or 0)

    async def sweep(self, limit: int) -> int:
        """Forget alerts that are over their time, at most `limit`. Return their number."""
        over = select(alerts.c.id).where(alerts.c.forget_at < func.now(), alerts.c.state != "waiting").limit(limit)
        gone = delete(alerts).where(alerts.c.id.in_(over.scalar_subquery()))
        async with transaction(self._engine) as connection:
            return (await connection.execute(gone)).rowcount

    async def _note(self, delivery: DueAlert, *, said: str, **values: Any) -> None:
        c = alerts.c
        own = (c.id == delivery.id) & (c.attempts == delivery.attempts) & (c.state == "waiting")
        async with transaction(self._engine) as connection:
            await connection.execute(update(alerts).where(own).values(said=str(clean(said))[:SAID_CHARS_MAX], **values))


async def _insert(connection: AsyncConnection, batch: Sequence[Alert], now: datetime) -> int:
    values = [
        {
            "id": uuid7(int(one.at.timestamp() * 1000)),
            "kind": one.kind,
            "subject": str(clean(one.subject)),
            "at": one.at,
            "data": clean(dict(one.data)),
            "state": "waiting",
            "attempts": 0,
            "due_at": now,
            "forget_at": None if one.lasting else now + KEPT,
        }
        for one in batch
    ]
    stored = insert(alerts).values(values).on_conflict_do_nothing(index_elements=["subject"])
    return len((await connection.execute(stored.returning(alerts.c.id))).all())


async def _rollbacks(connection: AsyncConnection, since: datetime) -> list[Alert]:
    c = policy_events.c
    query = select(policy_events).where(c.what == "rolled back", c.at > since).order_by(c.id.desc()).limit(EVENTS_MAX)
    return [
        Alert(
            "rollback",
            f"rollback:{row.id}",
            row.at,
            {"version": f"{row.name}@{row.number}", "was": row.was, "by": row.who, "why": row.why}
            | {"cause": row.detail.get("cause")},
        )
        for row in await connection.execute(query)
    ]


async def _jobs(connection: AsyncConnection, since: datetime) -> list[Alert]:
    c = policy_jobs.c
    query = select(policy_jobs).where(c.state.in_(ENDED), c.ended_at > since).order_by(c.ended_at.desc())
    names = ("policy", "state", "stage", "version", "report", "error")
    return [
        Alert(
            "job",
            f"job:{row['id']}:{row['attempts']}:{row['state']}",
            row["ended_at"],
            {"job": row["id"], **{name: row[name] for name in names}},
        )
        for row in (await connection.execute(query.limit(EVENTS_MAX))).mappings()
    ]


async def _quarantines(connection: AsyncConnection, since: datetime) -> list[Alert]:
    """An alert for each quarantine that began, and one for each that ended."""
    c = worker_quarantines.c
    query = select(worker_quarantines).where((c.at > since) | (c.ended_at > since)).order_by(c.at.desc())
    batch = []
    for row in await connection.execute(query.limit(EVENTS_MAX)):
        who = {"worker": row.worker, "version": row.version}
        if row.at > since:
            began = {"state": "began", "by": row.by, "why": row.why}
            batch.append(Alert("quarantine", f"quarantine:{row.id}:began", row.at, who | began))
        if row.ended_at is not None and row.ended_at > since:
            ended = {"state": "ended", "by": row.ended_by, "why": row.ended_why, "probes": row.probes}
            batch.append(Alert("quarantine", f"quarantine:{row.id}:ended", row.ended_at, who | ended))
    return batch


async def _charges(connection: AsyncConnection, now: datetime) -> list[Alert]:
    """One alert about all charges that none has told of, at most CHARGES_MAX."""
    since = lowest(int((now - SINCE).timestamp() * 1000))
    earlier = select(alerts.c.id).where(alerts.c.kind == "uncertain", alerts.c.forget_at > now)
    earlier = earlier.where(alerts.c.data["holds"].has_key(ledger.c.hold_id))
    query = select(ledger.c.hold_id, ledger.c.amount_nano, ledger.c.at)
    query = query.where(ledger.c.kind == "uncertain", ledger.c.event_id > since, ~earlier.exists())
    rows = (await connection.execute(query.order_by(ledger.c.event_id).limit(CHARGES_MAX))).all()
    if not rows:
        return []
    total = nano_to_usd(sum(int(row.amount_nano) for row in rows))
    data = {"charges": len(rows), "usd": total, "holds": [row.hold_id for row in rows]}
    return [Alert("uncertain", f"uncertain:{rows[0].hold_id}", now, data)]


def _in(seconds: float) -> ColumnElement[Any]:
    return func.clock_timestamp() + timedelta(seconds=seconds)
