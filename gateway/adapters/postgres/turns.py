"""State that outlives one request, in PostgreSQL: stored replies of Idempotency-Keys, and the worker of each
conversation.

The row of a reply is its lock: the gateway that inserts it, or takes over one whose lease or time is over, serves the
request. Times are the database's, so that gateways whose clocks differ agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, update
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.tables import continuations, idempotent_replies
from gateway.errors import IdempotencyReused, IdempotencyRunning
from gateway.service.ports.turns import Slot, StoredReply

MARKS_MAX = 64
_c = idempotent_replies.c


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

    async def find(self, key_id: str, marks: Sequence[str]) -> str | None:
        c = continuations.c
        query = select(c.mark, c.worker).where(c.key_id == key_id, c.mark.in_(marks), c.until > func.now())
        async with transaction(self._engine) as connection:
            workers = {mark: worker for mark, worker in await connection.execute(query.limit(MARKS_MAX))}
        return next((workers[mark] for mark in marks if mark in workers), None)

    async def sweep(self, limit: int) -> int:
        c = continuations.c
        some = select(c.key_id, c.mark).where(c.until <= func.now()).limit(limit).with_for_update(skip_locked=True)
        old = some.cte("old")
        gone = delete(continuations).where(c.key_id == old.c.key_id, c.mark == old.c.mark)
        async with transaction(self._engine) as connection:
            return int((await connection.execute(gone)).rowcount)
