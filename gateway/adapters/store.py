"""Named queries of PostgreSQL (port `Store`). Every query that reads a rollout takes the key that must own it.

Statements are built once; a database that is away, too slow or out of connections is `Unavailable` (503), in bounded
time. The two inserts at the end are shared with the shipper.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    REAL,
    ColumnElement,
    Connection,
    Integer,
    Select,
    bindparam,
    cast,
    func,
    insert,
    literal_column,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters import rows
from gateway.adapters.migrate import vector_in_use
from gateway.adapters.tables import (
    MODEL_KINDS,
    SETTLED,
    experience,
    keys,
    ledger,
    outcomes,
    rollouts,
    rounds,
    steps,
)
from gateway.core.ids import uuid7
from gateway.errors import Conflict, NotFound, Unavailable
from gateway.service.ports import KeyRow, WorkerExperience

CHILD_DEPTH_MAX = 4
TREE_ROLLOUTS_MAX = 256
OUTCOMES_COUNTED_MAX = 10_000
KEYS_MAX = 100_000
HOLDS_MAX = 100_000

POSTED_TOTALS = text(
    "SELECT scope ->> 0, sum(amount_nano) FROM ledger, jsonb_array_elements(scopes) AS scope "
    "WHERE kind IN ('posted', 'uncertain') GROUP BY 1"
)
# Per worker: of its latest `recent` judged steps, the k nearest; those of the same task type come first.
EXPERIENCE_NEAR = """
SELECT wanted.worker, count(*), avg(near.success), avg(near.cost_nano), avg(near.latency_ms)
FROM unnest(CAST(:workers AS text[]), CAST(:versions AS text[])) AS wanted (worker, version)
CROSS JOIN LATERAL (
  SELECT success, cost_nano, latency_ms
  FROM experience
  WHERE worker = wanted.worker AND worker_version = wanted.version AND at >= coalesce(
    (SELECT at FROM experience AS e WHERE e.worker = wanted.worker ORDER BY at DESC OFFSET :recent - 1 LIMIT 1),
    '-infinity')
  ORDER BY (CAST(:task_type AS text) IS NOT NULL AND task_type IS DISTINCT FROM :task_type), {distance} LIMIT :k
) AS near
GROUP BY wanted.worker ORDER BY wanted.worker
"""
# The question is a sub-select so that a prepared statement turns the array into a vector once, not once a row.
DISTANCE = "embedding <=> (SELECT CAST(CAST(:embedding AS real[]) AS vector)), at DESC"
NEAREST = text(EXPERIENCE_NEAR.format(distance=DISTANCE))
LATEST = text(EXPERIENCE_NEAR.format(distance="at DESC"))


class PostgresStore:
    """`experience_recent_max`: judged steps per worker that are searched; bounds the search, forgets the distant past.
    `recovery_timeout_s`: statement time-out of the two queries that read the whole ledger at boot."""

    def __init__(
        self, engine: AsyncEngine, *, experience_recent_max: int = 1_000, recovery_timeout_s: float = 60.0
    ) -> None:
        self.engine = engine
        self.experience_recent_max = experience_recent_max
        self.recovery_timeout_s = recovery_timeout_s
        self._has_vector: bool | None = None

    async def close(self) -> None:
        await self.engine.dispose()

    @asynccontextmanager
    async def begin(self, timeout_s: float | None = None) -> AsyncIterator[AsyncConnection]:
        """A transaction; `timeout_s` replaces the engine's statement time-out inside it. Raises Unavailable."""
        try:
            async with self.engine.begin() as connection:
                if timeout_s is not None:
                    wanted = f"{round(timeout_s * 1000)}ms"
                    await connection.execute(select(func.set_config("statement_timeout", wanted, True)))
                yield connection
        except (OperationalError, InterfaceError, PoolTimeout) as error:
            reason = type(error.orig or error).__name__ if isinstance(error, DBAPIError) else type(error).__name__
            raise Unavailable(f"the database is not available ({reason})", code="store_unavailable") from error

    async def ready(self) -> bool:
        """Whether the database answers and has been migrated."""
        try:
            async with self.begin() as connection:
                await connection.execute(select(keys.c.public_id).limit(1))
        except (Unavailable, DBAPIError):
            return False
        return True

    # ---------------------------------------------------------------- keys

    async def key_insert(self, key: KeyRow) -> None:
        """Raises Conflict when the public id exists."""
        try:
            async with self.begin() as connection:
                await connection.execute(insert(keys).values(**_key_values(key)))
        except IntegrityError as error:
            raise Conflict(f"key `{key.public_id}` exists or is malformed", code="key_conflict") from error

    async def key_get(self, public_id: str) -> KeyRow | None:
        async with self.begin() as connection:
            found = (await connection.execute(select(keys).where(keys.c.public_id == public_id))).mappings().first()
        return _key(found) if found else None

    async def key_list(self) -> Sequence[KeyRow]:
        """Newest first."""
        query = select(keys).order_by(keys.c.created_at.desc(), keys.c.public_id).limit(KEYS_MAX)
        async with self.begin() as connection:
            return [_key(row) for row in (await connection.execute(query)).mappings()]

    async def key_revoke(self, public_id: str, at: datetime) -> bool:
        """False when there is no such key, or it was revoked before (the first time stands)."""
        change = update(keys).where(keys.c.public_id == public_id, keys.c.revoked_at.is_(None)).values(revoked_at=at)
        async with self.begin() as connection:
            return (await connection.execute(change)).rowcount == 1

    # ---------------------------------------------------------------- rollouts and outcomes

    async def rollout_get(self, rollout_id: str, key_id: str) -> Mapping[str, Any] | None:
        """The tree of a rollout, by its id or its completion id; None for an unknown one and for another key's."""
        async with self.begin() as connection:
            root = await connection.scalar(_owned(rollout_id, key_id))
            if root is None:
                return None
            ids = list(await connection.scalars(_descendants(root, key_id)))
            found = (await connection.execute(select(rollouts).where(rollouts.c.id.in_(ids)))).mappings().all()
            parts = {
                table.name: (await connection.execute(_parts(table, order, ids))).mappings().all()
                for table, order in (
                    (rounds, (rounds.c.round,)),
                    (steps, (steps.c.round, steps.c.step)),
                    (outcomes, (outcomes.c.created_at, outcomes.c.id)),
                    (ledger, (ledger.c.at, ledger.c.event_id)),
                )
            }
        return rows.tree(root, sorted(map(dict, found), key=lambda r: (r["created_at"], r["id"])), parts)

    async def recent_rollouts(self, key_id: str, limit: int) -> Sequence[Mapping[str, Any]]:
        """Summaries of the key's latest top-level rollouts, newest first."""
        query = select(*(rollouts.c[name] for name in rows.SUMMARY))
        query = query.where(rollouts.c.key_id == key_id, rollouts.c.depth == 0)
        query = query.order_by(rollouts.c.created_at.desc(), rollouts.c.id.desc()).limit(limit)
        async with self.begin() as connection:
            return [rows.summary(row) for row in (await connection.execute(query)).mappings()]

    async def outcome_insert(self, row: Mapping[str, Any]) -> tuple[str, bool]:
        """Judge a rollout (`rollout_id`: its id or its completion id) as its owner `key_id`.

        Returns (outcome id, True), or the first one's id and False when (key, idempotency key) is known. A judgement in
        [0, 1] becomes experience of the rollout's workers at once. Raises NotFound for an unknown or foreign rollout,
        BadRequest for a value that does not fit its kind.
        """
        new = rows.outcome_row(row)
        new["created_at"] = new["created_at"] or datetime.now(UTC)
        new["id"] = new["id"] or uuid7(time.time_ns() // 1_000_000)
        async with self.begin() as connection:
            rollout = await connection.scalar(_owned(str(row["rollout_id"]), str(row["key_id"])))
            if rollout is None:
                raise NotFound(f"no rollout `{row['rollout_id']}` of this key", param="rollout_id")
            if await connection.run_sync(insert_outcome, new | {"rollout_id": rollout}):
                return str(new["id"]), True
            first = select(outcomes.c.id).where(
                outcomes.c.key_id == new["key_id"], outcomes.c.idempotency_key == new["idempotency_key"]
            )
            return str(await connection.scalar(first) or new["id"]), False

    async def outcome_count(self, pool: str) -> int:
        """Judged rollouts of a pool, counted up to 10,000."""
        judged = select(experience.c.rollout_id).where(experience.c.pool_name == pool)
        some = judged.group_by(experience.c.rollout_id).limit(OUTCOMES_COUNTED_MAX).subquery()
        async with self.begin() as connection:
            return int(await connection.scalar(select(func.count()).select_from(some)) or 0)

    async def experience_near(
        self, task_type: str | None, embedding: Sequence[float], workers: Mapping[str, str], k: int
    ) -> Sequence[WorkerExperience]:
        """Means over each worker's `k` most similar judged steps; its `k` latest without pgvector or an embedding.
        Steps of the same task type come first. Workers without experience are left out."""
        values: dict[str, Any] = {"workers": list(workers), "versions": list(workers.values())}
        values |= {"task_type": task_type, "k": k}
        values["recent"] = self.experience_recent_max
        async with self.begin() as connection:
            if self._has_vector is None:
                self._has_vector = await connection.run_sync(vector_in_use)
            similar = self._has_vector and any(embedding)
            query = NEAREST if similar else LATEST
            found = await connection.execute(query, values | ({"embedding": list(embedding)} if similar else {}))
            return [WorkerExperience(w, n, float(s), round(c), round(t)) for w, n, s, c, t in found]

    # ---------------------------------------------------------------- money

    async def posted_totals(self) -> Mapping[str, int]:
        """Scope → nano-dollars posted, uncertain ones included: what Redis is rebuilt from."""
        async with self.begin(self.recovery_timeout_s) as connection:
            return {scope: int(total) for scope, total in await connection.execute(POSTED_TOTALS)}

    async def open_holds(self) -> Sequence[Mapping[str, Any]]:
        """Holds without a settlement, oldest first: {hold_id, rollout_id, amount_nano, scopes, at, dispatched}."""
        other = ledger.alias()
        settled = select(other.c.hold_id).where(other.c.hold_id == ledger.c.hold_id, other.c.kind.in_(SETTLED))
        sent = select(other.c.hold_id).where(other.c.hold_id == ledger.c.hold_id, other.c.kind == "dispatched")
        names = ("hold_id", "rollout_id", "amount_nano", "scopes", "at")
        query = select(*(ledger.c[name] for name in names), sent.exists().label("dispatched"))
        query = query.where(ledger.c.kind == "hold", ~settled.exists()).order_by(ledger.c.at).limit(HOLDS_MAX)
        async with self.begin(self.recovery_timeout_s) as connection:
            return [dict(row) for row in (await connection.execute(query)).mappings()]

    async def settled_nano(self, hold_id: str) -> int | None:
        """What a hold was charged, by the ledger; None while it has no settlement there."""
        query = select(ledger.c.amount_nano).where(ledger.c.hold_id == hold_id, ledger.c.kind.in_(SETTLED)).limit(1)
        async with self.begin() as connection:
            charged = await connection.scalar(query)
        return None if charged is None else int(charged)


def _key_values(key: KeyRow) -> dict[str, Any]:
    return asdict(key) | {"pools": list(key.pools), "workers": list(key.workers), "caps": dict(key.caps)}


def _key(row: Mapping[Any, Any]) -> KeyRow:
    lists = {"pools": tuple(row["pools"]), "workers": tuple(row["workers"]), "digest": bytes(row["digest"])}
    return KeyRow(**(dict(row) | lists))


def by_name(rollout_or_completion_id: str) -> ColumnElement[bool]:
    """The condition on `rollouts` that an id from a client stands for."""
    try:
        return rollouts.c.id == str(UUID(rollout_or_completion_id))
    except ValueError:
        return rollouts.c.completion_id == str(rows.clean(rollout_or_completion_id))


def _owned(rollout_or_completion_id: str, key_id: str) -> Select[Any]:
    """The rollout's id where that key owns it; a completion id means the top of its tree."""
    named = by_name(rollout_or_completion_id)
    return select(rollouts.c.id).where(named, rollouts.c.key_id == key_id).order_by(rollouts.c.depth).limit(1)


def _descendants(root: str, key_id: str) -> Select[Any]:
    """Ids of the rollout and its child loops, at most four levels down."""
    tree = select(rollouts.c.id, literal_column("0").label("level")).where(rollouts.c.id == root).cte(recursive=True)
    child = select(rollouts.c.id, (tree.c.level + 1).label("level"))
    child = child.where(rollouts.c.parent_id == tree.c.id, rollouts.c.key_id == key_id, tree.c.level < CHILD_DEPTH_MAX)
    tree = tree.union_all(child)
    return select(tree.c.id).order_by(tree.c.level).limit(TREE_ROLLOUTS_MAX)


def _parts(table: Any, order: Sequence[Any], ids: Sequence[str]) -> Select[Any]:
    return select(table).where(table.c.rollout_id.in_(ids)).order_by(*order)


# ---------------------------------------------------------------- inserts shared with the shipper


def insert_rows(connection: Connection, new: rows.Rows) -> None:
    """Insert what is not there yet. Rows go in by primary key, so that two writers cannot deadlock."""
    for table in (rollouts, rounds, steps, ledger):
        values = getattr(new, table.name)
        if values:
            key = [column.name for column in table.primary_key.columns]
            values.sort(key=lambda row, key=key: tuple(row[name] for name in key))
            connection.execute(pg.insert(table).on_conflict_do_nothing(), values)
    for row in sorted(new.outcomes, key=lambda row: str(row["id"])):
        insert_outcome(connection, row)


def insert_outcome(connection: Connection, row: Mapping[str, Any]) -> bool:
    """Insert an outcome, and with it the experience of the rollout's workers. False: it was there already."""
    added = connection.execute(pg.insert(outcomes).on_conflict_do_nothing().returning(outcomes.c.id), dict(row)).first()
    if added and row["value"] is not None:
        credit = {"credited_id": row["rollout_id"], "credit": row["value"], "judged_at": row["created_at"]}
        connection.execute(_CREDIT, credit)
    return added is not None


def _credit_statement() -> Any:
    """Every finished step of a model worker is credited with the outcome; the latest judgement of a rollout stands."""
    latency_s = func.extract("epoch", steps.c.finished_at - steps.c.started_at)
    source = {
        "rollout_id": steps.c.rollout_id,
        "round": steps.c.round,
        "step": steps.c.step,
        "worker": steps.c.worker,
        "worker_version": steps.c.worker_version,
        "pool_name": rollouts.c.pool_name,
        "task_type": rollouts.c.task_type,
        "embedding": rollouts.c.task_embedding,
        "success": cast(bindparam("credit"), REAL),
        "cost_nano": steps.c.cost_nano,
        "latency_ms": cast(func.coalesce(latency_s * 1000, 0), Integer),
        "at": cast(bindparam("judged_at"), experience.c.at.type),
    }
    found = select(*source.values()).select_from(steps.join(rollouts, rollouts.c.id == steps.c.rollout_id))
    found = found.where(steps.c.rollout_id == bindparam("credited_id"), steps.c.status == "done")
    found = found.where(steps.c.kind.in_(MODEL_KINDS)).order_by(steps.c.round, steps.c.step)
    new = pg.insert(experience).from_select(list(source), found)
    return new.on_conflict_do_update(
        index_elements=list(experience.primary_key.columns),
        set_={"success": new.excluded.success, "at": new.excluded.at},
        where=experience.c.at <= new.excluded.at,
    )


_CREDIT = _credit_statement()
