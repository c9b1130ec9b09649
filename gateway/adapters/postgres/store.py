"""Named queries of PostgreSQL (ports `Store` and `ResponseStore`). Every query that reads a rollout takes the key that
must own it.

Statements are built once; a database that is away, too slow or out of connections is `Unavailable` (503), in bounded
time. Inserts that the shipper shares are in `inserts`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg import sql
from sqlalchemy import ColumnElement, Select, Table, func, literal_column, select, tuple_, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.admin_tables import keys
from gateway.adapters.postgres.database import Absences, Lookups, Vector, fragment, placeholders, query, transaction
from gateway.adapters.postgres.inserts import insert_outcome
from gateway.adapters.postgres.key_lookups import KeyLookups
from gateway.adapters.postgres.migrate import vector_in_use
from gateway.adapters.postgres.tables import SETTLED, experience, gradings, ledger, outcomes, rollouts, rounds, steps
from gateway.core.log.outcome import Outcome
from gateway.core.log.redact import apply_mode
from gateway.core.loop.experience.likeness import SIMILAR, TASK_TYPE_SIMILARITY, WON
from gateway.errors import NotFound, Unavailable
from gateway.service.ports.admin import KeyRow
from gateway.service.ports.money import Books, Settlement
from gateway.service.ports.request import WonPlan
from gateway.service.ports.turns import LoggedResponse

CHILD_DEPTH_MAX = 4
TREE_ROLLOUTS_MAX = 256
HOLDS_MAX = 100_000
PLANS_RECENT_MAX = 300  # requests of a key among which plans that won are looked for
TOTALS_LOCK_KEY = 0x746F74616C73  # "totals": one gateway at a time sums the ledger
RECOVERY_TIMEOUT_S = 60.0  # of the statements that read the whole ledger at boot

POSTED_TOTALS = query("posted_totals")
PLANS_BY_SIMILARITY = placeholders(query("plans_near", cosine=fragment("cosine")))
PLANS_BY_TYPE = placeholders(query("plans_near", cosine=sql.Literal(0)))
WON_EXISTS = placeholders(query("won_exists"))
_COLUMNS = ("completion_id", "created_at", "finished_at", "status", "request", "reply", "error")
_PART_KEYS: dict[str, tuple[str, ...]] = {"rounds": ("rollout_id", "round"), "steps": ("rollout_id", "round", "step")}
ERASED = "the response was deleted"


class PostgresStore:
    """`lookups`: the engine for the reads that a request waits for."""

    def __init__(self, engine: AsyncEngine, *, lookups: AsyncEngine | None = None) -> None:
        self.engine = engine
        self._lookups = Lookups(lookups or engine)
        self._keys = KeyLookups(self._lookups)
        self._unwon = Absences(self._lookups)  # of keys, of which there may be any number
        self._has_vector: bool | None = None

    def begin(self, timeout_s: float | None = None) -> AbstractAsyncContextManager[AsyncConnection]:
        """A transaction; `timeout_s` replaces the engine's statement time-out inside it. Raises Unavailable."""
        return transaction(self.engine, timeout_s)

    def snapshot(self, timeout_s: float | None = None) -> AbstractAsyncContextManager[AsyncConnection]:
        """A transaction whose statements all read the database as of one moment. Raises Unavailable."""
        return transaction(self.engine, timeout_s, one_moment=True)

    async def ready(self) -> bool:
        """Whether the database answers and is migrated."""
        try:
            async with self.begin() as connection:
                await connection.execute(select(keys.c.public_id).limit(1))
        except (Unavailable, DBAPIError):
            return False
        return True

    # ---------------------------------------------------------------- keys

    async def key_get(self, public_id: str) -> KeyRow | None:
        """A key with its organisation."""
        return await self._keys.get(public_id)

    # ---------------------------------------------------------------- rollouts and outcomes

    async def rollout_get(self, rollout_id: str, key_id: str) -> Mapping[str, Any] | None:
        """The tree of a rollout as of one moment, by its id or its completion id. None for an unknown id and for
        another key's."""
        async with self.snapshot() as connection:
            root = await connection.scalar(_owned(rollout_id, key_id))
            if root is None:
                return None
            ids = list(await connection.scalars(_descendants(root, key_id)))
            tree_rows = (await connection.execute(select(rollouts).where(rollouts.c.id.in_(ids)))).mappings().all()
            parts = {
                table.name: (await connection.execute(_parts(table, order, ids))).mappings().all()
                for table, order in (
                    (rounds, (rounds.c.round,)),
                    (steps, (steps.c.round, steps.c.step)),
                    (outcomes, (outcomes.c.created_at, outcomes.c.id)),
                    (ledger, (ledger.c.at, ledger.c.event_id)),
                    (gradings, (gradings.c.rollout_id,)),
                )
            }
        return rows.tree(root, sorted(map(dict, tree_rows), key=lambda r: (r["created_at"], r["id"])), parts)

    async def outcome_insert(self, outcome: Outcome) -> tuple[str, bool]:
        """Judge a rollout (`rollout_id`: its id or its completion id) as its owner `key_id`. Return (outcome id, True),
        or (id of the first outcome, False) if the pair of key and idempotency key is known. A judgement in [0, 1] at
        once becomes experience of the rollout's workers. Raises NotFound for an unknown or foreign rollout."""
        try:
            async with self.begin() as connection:
                rollout = await connection.scalar(_owned(outcome.rollout_id, outcome.key_id))
                if rollout is None:
                    raise NotFound(f"no rollout `{outcome.rollout_id}` of this key", param="rollout_id")
                if await connection.run_sync(insert_outcome, replace(outcome, rollout_id=str(rollout))):
                    return outcome.id, True
                first = select(outcomes.c.id).where(
                    outcomes.c.key_id == outcome.key_id, outcomes.c.idempotency_key == outcome.idempotency_key
                )
                return str(await connection.scalar(first) or outcome.id), False
        finally:
            self._unwon.forget()

    async def plans_near(
        self, key_id: str, task_type: str | None, embedding: Sequence[float], embedder: str, k: int
    ) -> Sequence[WonPlan]:
        """See `ports.Store.plans_near`. Without pgvector only requests of the same task type are alike. Searched at
        most every two seconds while nothing of the key was judged well."""
        if self._unwon.known(key_id):
            return []
        values: dict[str, Any] = {"key_id": key_id, "task_type": task_type, "same_type": TASK_TYPE_SIMILARITY, "k": k}
        values |= {"near": SIMILAR, "won": WON, "recent": PLANS_RECENT_MAX}
        similar = any(embedding) and await self._vectors()
        statement = PLANS_BY_SIMILARITY if similar else PLANS_BY_TYPE
        question = {"embedding": Vector(embedding), "embedder": embedder} if similar else {}
        near = await self._lookups.rows(statement, values | question)
        if not near:
            await self._unwon.look([key_id], WON_EXISTS, {"won": WON})
        return [rows.won_plan(*row) for row in near]

    async def _vectors(self) -> bool:
        """Whether the database compares vectors."""
        if self._has_vector is None:
            async with self.begin() as connection:
                self._has_vector = await connection.run_sync(vector_in_use)
        return self._has_vector

    # ---------------------------------------------------------------- money

    async def books(self, settled_max: int) -> Books:
        """The state that Redis is rebuilt from, as of one moment, with the latest `settled_max` settlements."""
        async with self.snapshot(RECOVERY_TIMEOUT_S) as connection:
            return Books(await _posted(connection), await _open(connection), await _settled(connection, settled_max))

    async def posted_totals(self) -> Mapping[str, int] | None:
        """See `service.money.drift.LedgerTotals`."""
        async with self.snapshot(RECOVERY_TIMEOUT_S) as connection:
            free = await connection.scalar(select(func.pg_try_advisory_xact_lock(TOTALS_LOCK_KEY)))
            return await _posted(connection) if free else None

    async def open_holds(self) -> Sequence[Mapping[str, Any]]:
        """Holds without a settlement, as large as they have grown, oldest first: {hold_id, rollout_id, amount_nano,
        scopes, at, dispatched_nano}: what the calls could cost that left under it, None where none did."""
        async with self.begin(RECOVERY_TIMEOUT_S) as connection:
            return await _open(connection)

    async def settled_latest(self, limit: int, since: datetime) -> Sequence[Settlement]:
        """The latest settlements, newest first."""
        async with self.begin(RECOVERY_TIMEOUT_S) as connection:
            return await _settled(connection, limit, since)

    async def settled_nano(self, hold_id: str) -> int | None:
        """The nano-dollars that a hold was charged in the ledger; None if it has no settlement there."""
        query = select(ledger.c.amount_nano).where(ledger.c.hold_id == hold_id, ledger.c.kind.in_(SETTLED)).limit(1)
        async with self.begin() as connection:
            charged = await connection.scalar(query)
        return None if charged is None else int(charged)


async def _posted(connection: AsyncConnection) -> dict[str, int]:
    return {scope: int(total) for scope, total in await connection.execute(POSTED_TOTALS)}


async def _open(connection: AsyncConnection) -> list[dict[str, Any]]:
    other, larger = ledger.alias(), ledger.alias()
    settled = select(other.c.hold_id).where(other.c.hold_id == ledger.c.hold_id, other.c.kind.in_(SETTLED))
    sent = select(func.sum(other.c.amount_nano)).where(
        other.c.hold_id == ledger.c.hold_id, other.c.kind == "dispatched"
    )
    names = ("hold_id", "rollout_id", "amount_nano", "scopes", "at")
    query = select(*(ledger.c[name] for name in names), sent.scalar_subquery().label("dispatched_nano"))
    grown = select(larger.c.hold_id).where(
        larger.c.hold_id == ledger.c.hold_id,
        larger.c.kind == "hold",
        tuple_(larger.c.amount_nano, larger.c.event_id) > tuple_(ledger.c.amount_nano, ledger.c.event_id),
    )
    query = query.where(ledger.c.kind == "hold", ~settled.exists(), ~grown.exists())
    rows_found = (await connection.execute(query.order_by(ledger.c.at).limit(HOLDS_MAX))).mappings()
    return [{**row, "dispatched_nano": _int(row["dispatched_nano"])} for row in rows_found]


def _int(total: Any) -> int | None:
    return None if total is None else int(total)


async def _settled(connection: AsyncConnection, limit: int, since: datetime | None = None) -> list[Settlement]:
    columns = (ledger.c.hold_id, ledger.c.amount_nano, ledger.c.scopes)
    query = select(*columns).where(ledger.c.kind.in_(SETTLED)).order_by(ledger.c.event_id.desc()).limit(limit)
    result = await connection.execute(query if since is None else query.where(ledger.c.at >= since))
    return [Settlement(hold_id, int(nano), tuple(str(name) for name, _ in scopes)) for hold_id, nano, scopes in result]


def by_name(rollout_or_completion_id: str) -> ColumnElement[bool]:
    """The condition on `rollouts` for an id from a client."""
    try:
        return rollouts.c.id == str(UUID(rollout_or_completion_id))
    except ValueError:
        return rollouts.c.completion_id == str(rows.clean(rollout_or_completion_id))


def _owned(rollout_or_completion_id: str, key_id: str) -> Select[Any]:
    """The rollout's id if that key owns it; a completion id stands for the root of its tree."""
    named = by_name(rollout_or_completion_id)
    return select(rollouts.c.id).where(named, rollouts.c.key_id == key_id).order_by(rollouts.c.depth).limit(1)


def _descendants(root: str, key_id: str) -> Select[Any]:
    """Ids of the rollout and its child loops, at most four levels deep."""
    tree = select(rollouts.c.id, literal_column("0").label("level")).where(rollouts.c.id == root).cte(recursive=True)
    child = select(rollouts.c.id, (tree.c.level + 1).label("level"))
    child = child.where(rollouts.c.parent_id == tree.c.id, rollouts.c.key_id == key_id, tree.c.level < CHILD_DEPTH_MAX)
    tree = tree.union_all(child)
    return select(tree.c.id).order_by(tree.c.level).limit(TREE_ROLLOUTS_MAX)


def _parts(table: Any, order: Sequence[Any], ids: Sequence[str]) -> Select[Any]:
    return select(table).where(table.c.rollout_id.in_(ids)).order_by(*order)


class PostgresResponses:
    """The port ResponseStore: rollouts by the id that their client was given."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def find(self, response_ids: Collection[str], key_id: str) -> Mapping[str, LoggedResponse]:
        here = rollouts.c
        query = select(*(here[name] for name in _COLUMNS))
        query = query.where(here.completion_id.in_(list(response_ids)), here.key_id == key_id, here.depth == 0)
        async with transaction(self._engine) as connection:
            result = (await connection.execute(query)).mappings().all()
        return {row["completion_id"]: logged(row) for row in result}

    async def erase(self, response_id: str, key_id: str) -> bool:
        async with transaction(self._engine) as connection:
            root = await connection.scalar(_owned(response_id, key_id))
            if root is None:
                return False
            for rollout_id in list(await connection.scalars(_descendants(root, key_id))):
                await _erase(connection, rollout_id)
        return True


def logged(row: Mapping[Any, Any]) -> LoggedResponse:
    """Convert a row of `rollouts`."""
    return LoggedResponse(
        id=row["completion_id"],
        created_s=int(row["created_at"].timestamp()),
        finished_s=int((row["finished_at"] or row["created_at"]).timestamp()),
        status=row["status"],
        request=row["request"],
        reply=row["reply"],
        error=row["error"],
    )


def erased(rollout: Mapping[str, Any], parts: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """A rollout's row with its `rounds` and `steps`, without texts and excluded from training."""
    bare = apply_mode({**rollout, **parts}, "metadata")
    return bare | {"log_mode": "metadata", "train": False, "task_embedding": None}


async def _erase(connection: AsyncConnection, rollout_id: str) -> None:
    query = select(rollouts).where(rollouts.c.id == rollout_id).with_for_update()
    row = dict((await connection.execute(query)).mappings().one())
    parts = {table.name: await _rows(connection, table, rollout_id) for table in (rounds, steps)}
    bare = erased(row, parts)
    await _change(connection, rollouts, ("id",), row, bare)
    for table in (rounds, steps):
        for old, new in zip(parts[table.name], bare[table.name], strict=True):
            await _change(connection, table, _PART_KEYS[table.name], old, new)
    await connection.execute(
        update(experience)
        .where(experience.c.rollout_id == rollout_id)
        .values(embedding=None, changed_at=func.clock_timestamp())
    )
    asked = update(gradings).where(gradings.c.rollout_id == rollout_id)
    await connection.execute(asked.values(reference="", detail=ERASED))
    await connection.execute(asked.where(gradings.c.state == "waiting").values(state="ungraded"))


async def _change(
    connection: AsyncConnection, table: Table, key: tuple[str, ...], old: Mapping[str, Any], new: Mapping[str, Any]
) -> None:
    values = {name: new[name] for name in old if new[name] != old[name]}
    if values:
        await connection.execute(update(table).where(*(table.c[name] == old[name] for name in key)).values(**values))


async def _rows(connection: AsyncConnection, table: Table, rollout_id: str) -> list[dict[str, Any]]:
    result = await connection.execute(select(table).where(table.c.rollout_id == rollout_id))
    return [dict(row) for row in result.mappings()]
