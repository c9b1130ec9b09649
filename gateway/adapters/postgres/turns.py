"""State that outlives one request, in PostgreSQL: stored replies of Idempotency-Keys, the worker of each conversation,
and sessions.

The row of a reply is its lock: the gateway that inserts it, or takes over one whose lease or time is over, serves the
request. Times are the database's, so that gateways whose clocks differ agree.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, tuple_, update
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres import audit as store_audit
from gateway.adapters.postgres.admin_tables import sessions
from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.tables import continuations, idempotent_replies
from gateway.core.access.audit import Act
from gateway.core.loop.turns.replanning import TurnFacts
from gateway.core.money.sessions import Session, SessionLimits, SessionState
from gateway.errors import Conflict, IdempotencyReused, IdempotencyRunning
from gateway.service.ports.sessions import Place
from gateway.service.ports.turns import LastTurn, Slot, StoredReply

MARKS_MAX = 64
SESSIONS_PAGE_MAX = 1_000
_c = idempotent_replies.c
_s = sessions.c


class PostgresReplies:
    """The port ReplyStore: one statement before the request, one after it. `timeout_s` bounds each statement."""

    def __init__(self, engine: AsyncEngine, *, timeout_s: float = 2.0) -> None:
        self._engine = engine
        self._timeout_s = timeout_s

    async def claim(self, slot: Slot, lease_s: float, keep_s: float) -> StoredReply | None:
        async with transaction(self._engine, self._timeout_s) as connection:
            if await connection.scalar(_claiming(slot, lease_s, keep_s)):
                return None
            row = (await connection.execute(select(idempotent_replies).where(_is(slot)))).mappings().first()
        if row is None:  # just released: the next try gets it
            raise IdempotencyRunning
        return _reply_of(row, slot)

    async def keep(self, slot: Slot, reply: StoredReply) -> bool:
        values = {"status": reply.status, "headers": dict(reply.headers), "body": reply.body}
        change = update(idempotent_replies).where(_is(slot), _c.claim == slot.claim, _c.status.is_(None))
        async with transaction(self._engine, self._timeout_s) as connection:
            return (await connection.execute(change.values(**values))).rowcount == 1

    async def release(self, slot: Slot) -> bool:
        gone = delete(idempotent_replies).where(_is(slot), _c.claim == slot.claim, _c.status.is_(None))
        async with transaction(self._engine, self._timeout_s) as connection:
            return (await connection.execute(gone)).rowcount == 1

    async def sweep(self, keep_s: float, limit: int) -> int:
        async with transaction(self._engine, self._timeout_s) as connection:
            return await _sweep(connection, _c.created_at <= _ago(keep_s), limit)


async def _sweep(connection: AsyncConnection, old: ColumnElement[bool], limit: int) -> int:
    some = select(_c.key_id, _c.digest).where(old).limit(limit).with_for_update(skip_locked=True).cte("some")
    gone = delete(idempotent_replies).where(_c.key_id == some.c.key_id, _c.digest == some.c.digest)
    return int((await connection.execute(gone)).rowcount)


def _claiming(slot: Slot, lease_s: float, keep_s: float) -> Any:
    """Insert the row or take it over; return its claim if this gateway holds it now."""
    values = {
        "key_id": slot.key_id,
        "digest": slot.digest,
        "fingerprint": slot.fingerprint,
        "claim": slot.claim,
        "created_at": func.now(),
        "lease_until": func.now() + timedelta(seconds=lease_s),
    }
    new = pg.insert(idempotent_replies).values(**values)
    given_up = and_(_c.status.is_(None), _c.lease_until <= func.now(), _c.fingerprint == slot.fingerprint)
    emptied: dict[str, Any] = {"status": None, "headers": None, "body": None}
    return new.on_conflict_do_update(
        index_elements=["key_id", "digest"],
        set_={name: new.excluded[name] for name in ("fingerprint", "claim", "created_at", "lease_until")} | emptied,
        where=or_(_c.created_at <= _ago(keep_s), given_up),
    ).returning(_c.claim)


def _is(slot: Slot) -> ColumnElement[bool]:
    return and_(_c.key_id == slot.key_id, _c.digest == slot.digest)


def _ago(seconds: float) -> Any:
    return func.now() - timedelta(seconds=seconds)


def _reply_of(row: Mapping[Any, Any], slot: Slot) -> StoredReply:
    if bytes(row["fingerprint"]) != slot.fingerprint:
        raise IdempotencyReused
    if row["status"] is None:
        raise IdempotencyRunning
    body = None if row["body"] is None else bytes(row["body"])
    return StoredReply(row["status"], dict(row["headers"]), body)


class PostgresConversations:
    """The port ConversationLog: the marks that the shipper stores with each rollout."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def find(self, key_id: str, marks: Sequence[str]) -> LastTurn | None:
        c = continuations.c
        query = select(c.mark, c.worker, c.facts).where(c.key_id == key_id, c.mark.in_(marks), c.until > func.now())
        async with transaction(self._engine) as connection:
            turns = {mark: (worker, facts) for mark, worker, facts in await connection.execute(query.limit(MARKS_MAX))}
        worker, facts = next((turns[mark] for mark in marks if mark in turns), ("", None))
        return LastTurn(worker, TurnFacts.read(facts)) if worker else None

    async def sweep(self, limit: int) -> int:
        c = continuations.c
        some = select(c.key_id, c.mark).where(c.until <= func.now()).limit(limit).with_for_update(skip_locked=True)
        old = some.cte("old")
        gone = delete(continuations).where(c.key_id == old.c.key_id, c.mark == old.c.mark)
        async with transaction(self._engine) as connection:
            return int((await connection.execute(gone)).rowcount)


class PostgresSessions:
    """The port SessionStore: one row each, which every gateway reads when a request enters. `timeout_s` bounds each
    statement, because requests wait for them."""

    def __init__(self, engine: AsyncEngine, *, timeout_s: float = 2.0) -> None:
        self._engine = engine
        self._timeout_s = timeout_s

    async def enter(self, key_id: str, session_id: str, limits: SessionLimits, now: datetime) -> tuple[Session, bool]:
        values = {"key_id": key_id, "id": session_id, "started_at": now, "state": "open", "first": asdict(limits)}
        new = pg.insert(sessions).values(**values, **asdict(limits)).on_conflict_do_nothing().returning(sessions)
        async with transaction(self._engine, self._timeout_s) as connection:
            row = (await connection.execute(_session_row(key_id, session_id))).mappings().first()
            if row is not None:
                return _session(row), False
            made = (await connection.execute(new)).mappings().first()
            if made is not None:
                return _session(made), True
            return _session((await connection.execute(_session_row(key_id, session_id))).mappings().one()), False

    async def find(self, key_id: str, session_id: str) -> Session | None:
        async with transaction(self._engine, self._timeout_s) as connection:
            row = (await connection.execute(_session_row(key_id, session_id))).mappings().first()
        return None if row is None else _session(row)

    async def page(self, key_id: str | None, limit: int, before: tuple[datetime, str] | None) -> Sequence[Session]:
        query = select(sessions).order_by(_s.started_at.desc(), _s.id.desc()).limit(min(limit, SESSIONS_PAGE_MAX))
        if key_id is not None:
            query = query.where(_s.key_id == key_id)
        if before is not None:
            query = query.where(tuple_(_s.started_at, _s.id) < before)
        async with transaction(self._engine, self._timeout_s) as connection:
            return [_session(row) for row in (await connection.execute(query)).mappings()]

    async def change(
        self, key_id: str, session_id: str, changes: Mapping[str, Any], act: Act, what: str
    ) -> Session | None:
        async with transaction(self._engine) as connection:
            row = (await connection.execute(_session_row(key_id, session_id).with_for_update())).mappings().first()
            if row is None:
                return None
            limits = changes.get("limits")
            columns = ({} if limits is None else asdict(limits)) | {k: v for k, v in changes.items() if k == "state"}
            differs = {name: value for name, value in columns.items() if row[name] != value}
            if not differs:
                return _session(row)
            if row["state"] == "killed":
                raise Conflict(f"session `{session_id}` was killed; it cannot be changed", code="session_killed")
            await connection.execute(update(sessions).where(_s.key_id == key_id, _s.id == session_id).values(**differs))
            before = {name: row[name] for name in differs}
            await store_audit.write(connection, act, what, f"session:{key_id}:{session_id}", before, differs)
        return _session({**row, **differs})

    async def states(self, places: Collection[Place]) -> Mapping[Place, SessionState]:
        query = select(_s.key_id, _s.id, _s.state).where(tuple_(_s.key_id, _s.id).in_(list(places)))
        async with transaction(self._engine, self._timeout_s) as connection:
            return {(key_id, session_id): state for key_id, session_id, state in await connection.execute(query)}

    async def sweep(self, before: datetime, limit: int) -> int:
        some = select(_s.key_id, _s.id).where(_s.started_at < before).limit(limit).with_for_update(skip_locked=True)
        old = some.cte("old")
        gone = delete(sessions).where(and_(_s.key_id == old.c.key_id, _s.id == old.c.id))
        async with transaction(self._engine) as connection:
            return int((await connection.execute(gone)).rowcount)


def _session_row(key_id: str, session_id: str) -> Any:
    return select(sessions).where(_s.key_id == key_id, _s.id == session_id)


def _session(row: Mapping[Any, Any]) -> Session:
    limits = SessionLimits(row["nano"], row["calls"], row["minutes"])
    return Session(row["key_id"], row["id"], row["started_at"], limits, SessionLimits(**row["first"]), row["state"])
