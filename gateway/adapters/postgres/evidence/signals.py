"""Signals in PostgreSQL: the latest requests beside the earlier ones of their key and end user, and what they say of
them as outcomes. What a request may be looked at for is as for the judge (sampling.py): train mark, log mode, key."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, case, func, or_, select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres.admin_tables import keys
from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.evidence.sampling import TEXTS
from gateway.adapters.postgres.inserts import insert_outcome
from gateway.adapters.postgres.reports.books import id_of
from gateway.adapters.postgres.tables import rollouts
from gateway.core.log.events import uuid7
from gateway.core.log.outcome import Judgement, Outcome
from gateway.core.loop.evidence.signals import Asked, Signal, signals_of

WINDOW = timedelta(minutes=30)  # before a request, in which those lie of which it may say something
LOOK_BACK = timedelta(minutes=10)  # since a request began: long ones and a log that came late are looked at too
EARLIER_MAX = 30  # requests beside which one is looked at, the latest ones
SEEN_MAX = 10_000  # requests that are remembered as looked at
MESSAGES_MIN = 3  # of a conversation that goes on: asked, answered, asked again
_MICROSECOND = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class PostgresSignals:
    """Looks at new requests, each once, and again after a start: an outcome is stored once. Raises Unavailable when
    PostgreSQL is away."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._seen: deque[str] = deque(maxlen=SEEN_MAX)

    async def look(self, limit: int) -> int:
        """Look at up to `limit` requests that may say something, the latest first. Returns their number."""
        since = datetime.now(UTC) - LOOK_BACK
        async with transaction(self._engine) as connection:
            new = (await connection.execute(self._new(since).limit(limit))).mappings().all()
        for row in new:
            self._seen.append(str(row["id"]))
            async with transaction(self._engine) as connection:
                earlier = (await connection.execute(_earlier(row))).mappings().all()
                for signal in signals_of(_asked(row), [_asked(one) for one in earlier]):
                    await connection.run_sync(_store, signal, row)
        return len(new)

    def _new(self, since: datetime) -> Select[Any]:
        """Requests that go on with a conversation, or whose end user is known."""
        r, k = rollouts.c, keys.c
        messages = r.request["messages"]
        count = case((func.jsonb_typeof(messages) == "array", func.jsonb_array_length(messages)))
        query = _requests().join(keys, k.public_id == r.key_id).where(k.train, k.signals, k.log_mode.in_(TEXTS))
        query = query.where(r.id > id_of(since), r.id.not_in(list(self._seen)))
        return query.where(or_(r.end_user.is_not(None), count >= MESSAGES_MIN)).order_by(r.id.desc())


def _requests() -> Select[Any]:
    """Requests of clients that were answered, with their texts."""
    r = rollouts.c
    columns = (r.id, r.key_id, r.end_user, r.created_at, r.finished_at, r.reply, r.task_embedding, r.task_embedder)
    query = select(*columns, r.request["messages"].label("messages"))
    return query.where(r.depth == 0, r.status == "done", r.train, r.log_mode.in_(TEXTS), r.request.has_key("messages"))


def _earlier(row: Mapping[Any, Any]) -> Select[Any]:
    r, began = rollouts.c, row["created_at"]
    mine = and_(r.key_id == row["key_id"], _equals(r.end_user, row["end_user"]))
    within = and_(r.created_at < began, r.created_at > began - WINDOW, r.id > id_of(began - WINDOW))
    return _requests().where(mine, within).order_by(r.created_at.desc()).limit(EARLIER_MAX)


def _equals(column: ColumnElement[Any], value: str | None) -> ColumnElement[bool]:
    return column.is_(None) if value is None else column == value


def _asked(row: Mapping[Any, Any]) -> Asked:
    choices = (row["reply"] or {}).get("choices") or ()
    return Asked(
        rollout_id=str(row["id"]),
        end_user=row["end_user"],
        began_us=_us(row["created_at"]),
        ended_us=_us(row["finished_at"] or row["created_at"]),
        messages=_objects(row["messages"]),
        replies=_objects([choice.get("message") for choice in _objects(choices)]),
        question=row["task_embedding"] or (),
        embedder=row["task_embedder"],
    )


def _objects(values: Any) -> Sequence[Mapping[str, Any]]:
    return [one for one in values if isinstance(one, Mapping)] if isinstance(values, list | tuple) else []


def _us(at: datetime) -> int:
    return (at - _EPOCH) // _MICROSECOND


def _store(connection: Connection, signal: Signal, row: Mapping[Any, Any]) -> None:
    """Store a signal as an outcome, unless there is one of the same source already."""
    judgement = Judgement(
        kind="number",
        value=round(signal.value, 3),
        source=signal.source,
        metadata={"by": str(row["id"]), "why": signal.why},
    )
    outcome = Outcome(
        id=uuid7(time.time_ns() // 1_000_000),
        rollout_id=signal.rollout_id,
        key_id=row["key_id"],
        created_at=datetime.now(UTC),
        judgement=judgement,
        idempotency_key=f"{signal.source}:{signal.rollout_id}",
    )
    insert_outcome(connection, outcome)
