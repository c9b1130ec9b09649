"""Responses in the background in PostgreSQL (docs/adr/0032): the request, the state of its work, its records.

A gateway claims a request under the id of its process, with a lease that it renews, like the lines of a
batch. Only the claim that a request has can save its work or end it. Leases are by the database's clock.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import (
    CheckConstraint,
    Column,
    ColumnElement,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    Table,
    Text,
    and_,
    case,
    delete,
    func,
    insert,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres.conversations import end_turn
from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.rows import at, clean
from gateway.adapters.postgres.tables import JSONB, metadata, required, timestamp, uuid_column
from gateway.errors import RateLimited
from gateway.service.ports.background import OPEN, BackgroundRequest, Status

LOGGED_KEPT, OTHERS_KEPT = timedelta(hours=1), timedelta(days=30)  # after the end; the log has those that are `done`
RETRY_S = 5.0
LOCK_CLASS = 0x6267  # "bg": a class of advisory locks of our own, by key
background_requests = Table(
    "background_requests",
    metadata,
    Column("id", Text, primary_key=True),
    required("key_id", Text),
    required("body", LargeBinary),
    required("options", JSONB),
    required("status", Text),
    Column("error", JSONB),
    Column("state", LargeBinary),
    timestamp("created_at", nullable=False),
    timestamp("expires_at", nullable=False),
    timestamp("ended_at"),
    uuid_column("claim"),
    timestamp("lease_until"),
    Index(
        "background_requests_open_idx",
        "created_at",
        postgresql_where=text("status IN ('queued', 'in_progress', 'cancelling')"),
    ),
    Index("background_requests_ended_at_idx", "ended_at", postgresql_where=text("ended_at IS NOT NULL")),
    CheckConstraint("status IN ('queued', 'in_progress', 'cancelling', 'done', 'cancelled', 'failed')", name="status"),
)

background_records = Table(
    "background_records",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("place", Text, primary_key=True),
    required("data", LargeBinary),
    ForeignKeyConstraint(["request_id"], ["background_requests.id"], ondelete="CASCADE"),
)

_r, _d = background_requests.c, background_records.c
_IS_OPEN = _r.status.in_(OPEN)
_FREE = {"claim": None, "lease_until": None}


class PostgresBackground:
    """The port BackgroundStore."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    # ------------------------------------------------------------ for clients

    async def create(self, request: BackgroundRequest, open_max: int) -> None:
        row = {
            "id": request.id,
            "key_id": request.key_id,
            "body": _bytes(request.body),
            "options": clean(dict(request.options)),
            "status": request.status,
            "created_at": at(request.created_us),
            "expires_at": at(request.expires_us),
        }
        count = select(func.count()).select_from(background_requests).where(_r.key_id == request.key_id, _IS_OPEN)
        async with transaction(self._engine) as connection:
            lock = func.pg_advisory_xact_lock(LOCK_CLASS, func.hashtext(request.key_id))  # else two count the same
            await connection.execute(select(lock))
            if (await connection.scalar(count) or 0) >= open_max:
                problem = f"this key has {open_max} responses in the background that have not ended"
                raise RateLimited(problem, retry_after_s=RETRY_S)
            await connection.execute(insert(background_requests).values(**row))

    async def get(self, key_id: str, response_id: str) -> BackgroundRequest | None:
        query = select(background_requests).where(_r.id == response_id, _r.key_id == key_id)
        async with transaction(self._engine) as connection:
            row = (await connection.execute(query)).mappings().first()
        return None if row is None else _request(row, {})

    async def cancel(self, key_id: str, response_id: str) -> BackgroundRequest | None:
        change = update(background_requests).where(_r.id == response_id, _r.key_id == key_id, _IS_OPEN)
        async with transaction(self._engine) as connection:
            await connection.execute(change.values(status="cancelling"))
        return await self.get(key_id, response_id)

    async def delete(self, key_id: str, response_id: str) -> bool:
        gone = delete(background_requests).where(_r.id == response_id, _r.key_id == key_id, ~_IS_OPEN)
        async with transaction(self._engine) as connection:
            return (await connection.execute(gone)).rowcount == 1

    # ------------------------------------------------------------ for runners

    async def take(self, runner: str, limit: int, lease_s: float) -> Sequence[BackgroundRequest]:
        free = or_(_r.lease_until.is_(None), _r.lease_until <= func.now())
        some = select(_r.id).where(_IS_OPEN, free).order_by(_r.created_at).limit(limit)
        some = some.with_for_update(skip_locked=True)
        begun = case((_r.status == "queued", "in_progress"), else_=_r.status)
        change = update(background_requests).where(_r.id.in_(some.scalar_subquery()))
        change = change.values(claim=runner, lease_until=_in(lease_s), status=begun)
        async with transaction(self._engine) as connection:
            rows = (await connection.execute(change.returning(background_requests))).mappings().all()
            return [_request(row, await _records(connection, row["id"])) for row in rows]

    async def save(
        self, response_id: str, runner: str, state: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]]
    ) -> Status | None:
        change = update(background_requests).where(_is(response_id, runner)).values(state=_bytes(state))
        new = [{"request_id": response_id, "place": place, "data": _bytes(data)} for place, data in records.items()]
        async with transaction(self._engine) as connection:
            status: Status | None = await connection.scalar(change.returning(_r.status))
            if status is not None and new:
                insertion = pg.insert(background_records).values(new)
                data = {"data": insertion.excluded.data}
                keys = list(background_records.primary_key.columns)
                await connection.execute(insertion.on_conflict_do_update(index_elements=keys, set_=data))
        return status

    async def end(self, response_id: str, runner: str, status: Status, error: Mapping[str, Any] | None = None) -> bool:
        ended = case((_r.status == "cancelling", "cancelled"), else_=status)
        values = {"status": ended, "error": clean(error), "state": None, "ended_at": func.now(), **_FREE}
        async with transaction(self._engine) as connection:
            change = update(background_requests).where(_is(response_id, runner)).values(**values)
            if (await connection.execute(change)).rowcount != 1:
                return False
            await connection.execute(delete(background_records).where(_d.request_id == response_id))
            if status != "done":
                await end_turn(connection, response_id)
        return True

    async def postpone(self, response_id: str, runner: str, delay_s: float) -> None:
        async with transaction(self._engine) as connection:
            change = update(background_requests).where(_is(response_id, runner))
            await connection.execute(change.values(claim=None, lease_until=_in(delay_s)))

    async def renew(self, runner: str, response_ids: Sequence[str], lease_s: float) -> Collection[str]:
        mine = update(background_requests).where(_r.id.in_(response_ids), _r.claim == runner, _IS_OPEN)
        async with transaction(self._engine) as connection:
            change = mine.values(lease_until=_in(lease_s)).returning(_r.id, _r.status)
            return {row.id for row in await connection.execute(change) if row.status == "cancelling"}

    async def release(self, runner: str) -> None:
        async with transaction(self._engine) as connection:
            mine = update(background_requests).where(_r.claim == runner, _IS_OPEN)
            await connection.execute(mine.values(**_FREE))

    async def holds(self) -> Collection[str]:
        async with transaction(self._engine) as connection:
            ids = await connection.scalars(select(_r.id).where(_IS_OPEN))
            return frozenset(BackgroundRequest.hold_of(one) for one in ids)

    async def sweep(self, limit: int) -> int:
        logged = and_(_r.status == "done", _r.ended_at < func.now() - LOGGED_KEPT)
        past = or_(logged, _r.ended_at < func.now() - OTHERS_KEPT)
        some = select(_r.id).where(_r.ended_at.is_not(None), past).limit(limit).with_for_update(skip_locked=True)
        async with transaction(self._engine) as connection:
            gone = delete(background_requests).where(_r.id.in_(some.scalar_subquery()))
            return (await connection.execute(gone)).rowcount


async def _records(connection: AsyncConnection, response_id: str) -> dict[str, Any]:
    rows = await connection.execute(select(_d.place, _d.data).where(_d.request_id == response_id))
    return {row.place: json.loads(bytes(row.data)) for row in rows}


def _is(response_id: str, runner: str) -> ColumnElement[bool]:
    return and_(_r.id == response_id, _r.claim == runner, _IS_OPEN)


def _in(seconds: float) -> Any:
    return func.now() + timedelta(seconds=seconds)


def _bytes(value: Any) -> bytes:
    """JSON as ASCII, so that half a surrogate pair and infinities come back as they went."""
    return json.dumps(value, separators=(",", ":"), default=dict).encode()


def _request(row: Mapping[Any, Any], records: Mapping[str, Any]) -> BackgroundRequest:
    return BackgroundRequest(
        id=row["id"],
        key_id=row["key_id"],
        body=json.loads(bytes(row["body"])),
        options=row["options"],
        status=row["status"],
        created_us=round(row["created_at"].timestamp() * 1e6),
        expires_us=round(row["expires_at"].timestamp() * 1e6),
        error=row["error"],
        state=None if row["state"] is None else json.loads(bytes(row["state"])),
        records=records,
    )
