"""Batches and their lines in PostgreSQL (docs/adr/0025).

A gateway claims a line under the id of its process, with a lease that it renews. Only the claim that a line has can
write its result, and only once. Leases are by the database's clock, so that gateways whose clocks differ agree.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    SmallInteger,
    Table,
    Text,
    and_,
    delete,
    exists,
    func,
    insert,
    not_,
    or_,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.files import FileWriter, insert_file
from gateway.adapters.postgres.rows import clean
from gateway.adapters.postgres.tables import JSONB, metadata, required, timestamp, uuid_column
from gateway.core.openai.batches.lines import not_served
from gateway.core.openai.batches.objects import (
    OPEN,
    OUTPUT,
    BatchLine,
    BatchOrder,
    LineResult,
    LineTokens,
    OpenBatch,
    Status,
    UploadedFile,
)
from gateway.errors import NotFound, RateLimited

LOCK_CLASS = 0x6261  # "ba": a class of advisory locks of our own, by key
RETRY_S = 60.0  # after which one of too many batches may have ended
PAGE_LINES = 200  # that are read at a time when the files are written
batches = Table(
    "batches",
    metadata,
    Column("id", Text, primary_key=True),
    required("key_id", Text),
    required("asked", JSONB),
    required("budget_nano", BigInteger),
    required("status", Text),
    timestamp("created_at", nullable=False),
    timestamp("expires_at", nullable=False),
    required("times", JSONB),
    required("errors", JSONB),
    required("total", Integer),
    required("completed", Integer),
    required("failed", Integer),
    required("input_tokens", BigInteger),
    required("output_tokens", BigInteger),
    Column("cached_tokens", BigInteger, nullable=False, server_default="0"),
    Column("reasoning_tokens", BigInteger, nullable=False, server_default="0"),
    Column("output_file_id", Text),
    Column("error_file_id", Text),
    uuid_column("claim"),
    timestamp("lease_until"),
    Index(None, "key_id", "created_at"),
    Index(
        "batches_open_idx",
        "created_at",
        postgresql_where=text("status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"),
    ),
    CheckConstraint(
        "status IN ('validating', 'failed', 'in_progress', 'finalizing', 'completed', 'expired', 'cancelling', "
        "'cancelled')",
        name="status",
    ),
)

batch_lines = Table(
    "batch_lines",
    metadata,
    Column("batch_id", Text, primary_key=True),
    Column("n", Integer, primary_key=True, autoincrement=False),
    required("request", LargeBinary),
    Column("result", LargeBinary),
    Column("failed", Boolean),
    required("attempts", SmallInteger),
    timestamp("due_at", nullable=False),
    uuid_column("claim"),
    timestamp("lease_until"),
    Index("batch_lines_open_idx", "n", "batch_id", postgresql_where=text("result IS NULL")),
    Index("batch_lines_claim_idx", "claim", postgresql_where=text("result IS NULL AND claim IS NOT NULL")),
    ForeignKeyConstraint(["batch_id"], ["batches.id"], ondelete="CASCADE"),
    CheckConstraint("(result IS NULL) = (failed IS NULL)", name="result"),
)

_b, _l = batches.c, batch_lines.c
_TOKENS = _b.input_tokens, _b.output_tokens, _b.cached_tokens, _b.reasoning_tokens  # in the order of LineTokens


class PostgresBatches:
    """The port BatchStore. `output_keep_s`: how long output is kept where the batch does not say."""

    def __init__(self, engine: AsyncEngine, *, output_keep_s: int) -> None:
        self._engine = engine
        self._output_keep_s = output_keep_s

    # ------------------------------------------------------------ for clients

    async def create(self, batch: OpenBatch, open_max: int) -> None:
        order = batch.order
        content = {
            "endpoint": order.endpoint,
            "input_file_id": order.input_file_id,
            "completion_window": order.completion_window,
            "metadata": dict(order.metadata),
            "options": dict(order.options),
            "output_keep_s": order.output_keep_s,
        }
        row = {"id": batch.id, "key_id": batch.key_id, "asked": clean(content), "budget_nano": order.budget_nano}
        row |= {"status": batch.status, "created_at": _at(batch.created_s), "expires_at": _at(batch.expires_s)}
        zeros = dict.fromkeys(("total", "completed", "failed", "input_tokens", "output_tokens"), 0)
        count = select(func.count()).where(_b.key_id == batch.key_id, _b.status.in_(OPEN))
        async with self._begin() as connection:
            lock = func.pg_advisory_xact_lock(LOCK_CLASS, func.hashtext(batch.key_id))  # else two count the same
            await connection.execute(select(lock))
            if (await connection.scalar(count) or 0) >= open_max:
                raise RateLimited(f"this key has {open_max} batches that have not ended", retry_after_s=RETRY_S)
            await connection.execute(insert(batches).values(**row, **zeros, times={}, errors=[]))

    async def get(self, key_id: str, batch_id: str) -> OpenBatch | None:
        batch = await self.owner(batch_id)
        return batch if batch is not None and batch.key_id == key_id else None

    async def owner(self, batch_id: str) -> OpenBatch | None:
        async with self._begin() as connection:
            row = (await connection.execute(select(batches).where(_b.id == batch_id))).mappings().first()
        return None if row is None else _batch(row)

    async def page(self, key_id: str, *, after: str | None, limit: int) -> Sequence[OpenBatch]:
        query = select(batches).where(_b.key_id == key_id).order_by(_b.created_at.desc(), _b.id.desc()).limit(limit)
        async with self._begin() as connection:
            if after is not None:
                last = await connection.scalar(select(_b.created_at).where(_b.id == after, _b.key_id == key_id))
                if last is None:
                    raise NotFound(f"No batch found with id '{after[:64]}'.", param="after")
                query = query.where(tuple_(_b.created_at, _b.id) < (last, after))
            return [_batch(row) for row in (await connection.execute(query)).mappings()]

    async def cancel(self, key_id: str, batch_id: str, now_s: int) -> OpenBatch | None:
        change = update(batches).where(_b.id == batch_id, _b.key_id == key_id)
        change = change.where(_b.status.in_(("validating", "in_progress")))
        async with self._begin() as connection:
            await connection.execute(change.values(status="cancelling", times=_with_time("cancelling", now_s)))
        return await self.get(key_id, batch_id)

    # ------------------------------------------------------------ whole batches

    async def claim(self, runner: str, lease_s: float) -> OpenBatch | None:
        open_line = exists().where(_l.batch_id == _b.id, _l.result.is_(None)).correlate(batches)
        served = exists().where(_l.batch_id == _b.id, _l.result.is_(None), _l.lease_until > func.now())
        stopped = or_(_b.status == "cancelling", _b.expires_at <= func.now())
        ready = or_(
            _b.status.in_(("validating", "finalizing")),
            and_(_b.status == "in_progress", not_(open_line)),
            and_(stopped, not_(served.correlate(batches))),
        )
        some = select(_b.id).where(_b.status.in_(OPEN), _free(_b.lease_until), ready).order_by(_b.created_at).limit(1)
        one = some.with_for_update(skip_locked=True).scalar_subquery()
        change = update(batches).where(_b.id == one).values(claim=runner, lease_until=_in(lease_s)).returning(batches)
        async with self._begin() as connection:
            row = (await connection.execute(change)).mappings().first()
        return None if row is None else _batch(row)

    async def add_lines(self, lines: Sequence[BatchLine]) -> None:
        if not lines:
            return
        rows = [
            {"batch_id": line.batch_id, "n": line.n, "request": line.request, "attempts": 0, "due_at": func.now()}
            for line in lines
        ]
        async with self._begin() as connection:
            for at in range(0, len(rows), PAGE_LINES):
                await connection.execute(
                    pg.insert(batch_lines).values(rows[at : at + PAGE_LINES]).on_conflict_do_nothing()
                )

    async def begin(self, batch_id: str, runner: str, total: int, now_s: int) -> bool:
        values = {"status": "in_progress", "total": total, "times": _with_time("in_progress", now_s)}
        return await self._change(batch_id, runner, ("validating",), **values, claim=None, lease_until=None)

    async def refuse(self, batch_id: str, runner: str, errors: Sequence[Mapping[str, Any]], now_s: int) -> bool:
        values = {"status": "failed", "errors": clean(list(errors)), "times": _with_time("failed", now_s)}
        async with self._begin() as connection:
            refused = await _change(connection, batch_id, runner, ("validating",), **values, claim=None)
            if refused:
                await connection.execute(delete(batch_lines).where(_l.batch_id == batch_id))
        return refused

    async def note_finalizing(self, batch_id: str, runner: str, now_s: int) -> bool:
        values = {"status": "finalizing", "times": _with_time("finalizing", now_s)}
        return await self._change(batch_id, runner, ("in_progress",), **values)

    async def end(
        self, batch: OpenBatch, runner: str, file_ids: tuple[str, str], reason: tuple[str, str] | None, now_s: int
    ) -> bool:
        expires_s = now_s + (batch.order.output_keep_s or self._output_keep_s)
        async with self._begin() as connection:
            times = {"status": batch.status, "times": _with_time(batch.status, now_s)}
            if not await _change(connection, batch.id, runner, OPEN, **times, claim=None, lease_until=None):
                return False
            output = _Results(connection, batch, file_ids[0], "output", now_s, expires_s)
            errors = _Results(connection, batch, file_ids[1], "error", now_s, expires_s)
            async for result in _results(connection, batch.id, reason):
                await (errors if result.failed else output).add(result)
            ids = {"output_file_id": await output.close(), "error_file_id": await errors.close()}
            await connection.execute(update(batches).where(_b.id == batch.id).values(**ids, failed=errors.count))
            await connection.execute(delete(batch_lines).where(_l.batch_id == batch.id))
        return True

    # ------------------------------------------------------------ lines

    async def take(self, runner: str, limit: int, lease_s: float) -> Sequence[BatchLine]:
        some = (
            select(_l.batch_id, _l.n)
            .join(batches, _b.id == _l.batch_id)
            .where(_b.status == "in_progress", _b.expires_at > func.now())
            .where(_l.result.is_(None), _l.due_at <= func.now(), _free(_l.lease_until))
            .order_by(_l.n, _l.batch_id)
            .limit(limit)
            .with_for_update(of=batch_lines, skip_locked=True)
            .cte("some")
        )
        change = update(batch_lines).where(_l.batch_id == some.c.batch_id, _l.n == some.c.n)
        change = change.values(claim=runner, lease_until=_in(lease_s))
        async with self._begin() as connection:
            rows = (await connection.execute(change.returning(batch_lines))).mappings().all()
        return [_line(row) for row in rows]

    async def keep(self, line: BatchLine, runner: str, result: LineResult) -> bool:
        async with self._begin() as connection:
            values = {"result": result.text, "failed": result.failed, "claim": None, "lease_until": None}
            change = await connection.execute(update(batch_lines).where(_is(line, runner)).values(**values))
            if change.rowcount != 1:
                return False
            count = _b.failed if result.failed else _b.completed
            counts = zip(_TOKENS, result.tokens, strict=True)
            sums = {count.name: count + 1} | {column.name: column + tokens for column, tokens in counts}
            await connection.execute(update(batches).where(_b.id == line.batch_id).values(**sums))
        return True

    async def postpone(self, line: BatchLine, runner: str, delay_s: float, *, counts: bool) -> None:
        values = {"claim": None, "lease_until": None, "due_at": _in(delay_s), "attempts": _l.attempts + int(counts)}
        async with self._begin() as connection:
            await connection.execute(update(batch_lines).where(_is(line, runner)).values(**values))

    async def renew(self, runner: str, lines: Sequence[BatchLine], batch_id: str | None, lease_s: float) -> None:
        places = [(line.batch_id, line.n) for line in lines]
        mine = update(batch_lines).where(_l.claim == runner, _l.result.is_(None))
        async with self._begin() as connection:
            if places:
                some = mine.where(tuple_(_l.batch_id, _l.n).in_(places))
                await connection.execute(some.values(lease_until=_in(lease_s)))
            if batch_id is not None:
                await _change(connection, batch_id, runner, OPEN, lease_until=_in(lease_s))

    async def release(self, runner: str) -> None:
        free = {"claim": None, "lease_until": None}
        async with self._begin() as connection:
            mine = update(batch_lines).where(_l.claim == runner, _l.result.is_(None))
            await connection.execute(mine.values(**free))
            await connection.execute(update(batches).where(_b.claim == runner, _b.status.in_(OPEN)).values(**free))

    async def _change(self, batch_id: str, runner: str, states: Sequence[Status], **values: Any) -> bool:
        async with self._begin() as connection:
            return await _change(connection, batch_id, runner, states, **values)

    @asynccontextmanager
    async def _begin(self) -> AsyncIterator[AsyncConnection]:
        async with transaction(self._engine) as connection:
            yield connection


class _Results:
    """The output or the error file of a batch, which exists once it has a line."""

    def __init__(
        self, connection: AsyncConnection, batch: OpenBatch, file_id: str, kind: str, now_s: int, expires_s: int
    ) -> None:
        name = f"{batch.id}_{kind}.jsonl"
        self._connection = connection
        self._file = UploadedFile(file_id, batch.key_id, name, OUTPUT, 0, now_s, expires_s)
        self._writer = FileWriter(connection, file_id)
        self.count = 0

    async def add(self, result: LineResult) -> None:
        if not self.count:
            await insert_file(self._connection, self._file)
        self.count += 1
        await self._writer.write(result.text)

    async def close(self) -> str | None:
        """The id of the file, or None if it has no line."""
        if not self.count:
            return None
        await self._writer.close()
        return self._file.id


async def _results(
    connection: AsyncConnection, batch_id: str, reason: tuple[str, str] | None
) -> AsyncIterator[LineResult]:
    """Yield the result of each line in order; `reason` is that of lines without one."""
    last = -1
    while rows := (await connection.execute(_lines_after(batch_id, last))).mappings().all():
        last = rows[-1]["n"]
        for row in rows:
            if row["result"] is not None:
                yield LineResult(bytes(row["result"]), row["failed"])
            elif reason is not None:
                yield not_served(_line(row), reason)


async def _change(
    connection: AsyncConnection, batch_id: str, runner: str, states: Sequence[Status], **values: Any
) -> bool:
    """Change a batch that this runner has claimed and that is in one of these states."""
    change = update(batches).where(_b.id == batch_id, _b.claim == runner, _b.status.in_(states))
    return (await connection.execute(change.values(**values))).rowcount == 1


def _lines_after(batch_id: str, n: int) -> Any:
    return select(batch_lines).where(_l.batch_id == batch_id, _l.n > n).order_by(_l.n).limit(PAGE_LINES)


def _is(line: BatchLine, runner: str) -> ColumnElement[bool]:
    return and_(_l.batch_id == line.batch_id, _l.n == line.n, _l.claim == runner, _l.result.is_(None))


def _free(lease_until: ColumnElement[Any]) -> ColumnElement[bool]:
    return or_(lease_until.is_(None), lease_until <= func.now())


def _in(seconds: float) -> Any:
    return func.now() + timedelta(seconds=seconds)


def _with_time(state: str, now_s: int) -> Any:
    return _b.times.op("||")(func.jsonb_build_object(state, now_s))


def _at(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _line(row: Mapping[Any, Any]) -> BatchLine:
    request = bytes(row["request"])
    return BatchLine(row["batch_id"], row["n"], json.loads(request)["custom_id"], request, row["attempts"])


def _batch(row: Mapping[Any, Any]) -> OpenBatch:
    asked = dict(row["asked"])
    return OpenBatch(
        id=row["id"],
        key_id=row["key_id"],
        order=BatchOrder(**asked, budget_nano=row["budget_nano"]),
        status=row["status"],
        created_s=int(row["created_at"].timestamp()),
        expires_s=int(row["expires_at"].timestamp()),
        times=row["times"],
        errors=tuple(row["errors"]),
        counts=(row["total"], row["completed"], row["failed"]),
        tokens=LineTokens(*(row[column.name] for column in _TOKENS)),
        output_file_id=row["output_file_id"],
        error_file_id=row["error_file_id"],
    )
