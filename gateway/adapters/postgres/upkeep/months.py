"""The log by month: `rollouts`, `rounds` and `steps` are partitioned by ranges of ids, and an old month is dropped as
three tables.

A part of `rounds` or `steps` refers to the same month's part of `rollouts`, so that parts can be dropped without
reading the rest. Tables that refer to the whole of `rollouts` (`BOUND`) would be read: their references are removed
while parts change, and restored without reading the table again (docs/adr/0018).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from psycopg import sql
from sqlalchemy import ColumnElement, TableClause, TextClause, column, delete, func, insert, select, table
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.adapters.postgres.database import identifiers, query
from gateway.adapters.postgres.tables import (
    MONTHLY,
    MONTHS_SCHEMA,
    continuations,
    experience,
    gradings,
    outcomes,
    policy_shadows,
    rollouts,
)
from gateway.core.log.months import Month

REST = "rollouts_rest"  # rollouts of months without tables
BOUND = (gradings, continuations, outcomes, experience)  # in the order in which the shipper writes them
HANGING = (*BOUND, policy_shadows)
GIVE_WAY_MS = 1_500  # above PostgreSQL's deadlock_timeout, after which an autovacuum in the way is cancelled
MOVED_MAX = 10_000
# SQLSTATEs of "not now": no lock available, time over, a deadlock; no right to it, a table of that name exists already,
# something depends on it.
_NOT_NOW = ("55P03", "57014", "40P01", "42501", "42P07", "2BP01")
_STORED = query("parts_of_rollouts")


class Held(Exception):
    """The parts of the log cannot be changed now: they are in use, or this role may not. Try again later."""


@asynccontextmanager
async def giving_way() -> AsyncIterator[None]:
    """Raise Held where PostgreSQL says "not now". The transaction is then lost."""
    try:
        yield
    except DBAPIError as error:
        state = getattr(error.orig, "sqlstate", None)
        if state not in _NOT_NOW:
            raise
        raise Held(str(error.orig).splitlines()[0]) from error


async def existing(connection: AsyncConnection) -> list[Month]:
    """Months that have tables of their own, oldest first."""
    names = await connection.scalars(_STORED)
    return sorted(month for name in names if (month := Month.named(name)) is not None)


async def make(connection: AsyncConnection, month: Month) -> int:
    """Give a month its tables; return the number of rollouts that moved there from the rest. Raises Held."""
    async with giving_way():
        waiting = await _waiting(connection, month)
        if waiting > MOVED_MAX:
            raise Held(
                f"{waiting:,} rollouts or more are stored without it; they are deleted by row when their time is over"
            )
        for name in MONTHLY:
            part, whole = _part(name, month), sql.Identifier(name)
            await connection.execute(query("part_create", part=part, whole=whole))
        if waiting:
            await _lock_log(connection)
            async with _unbound(connection):
                await _move(connection, month)
                await _attach(connection, month)
            return waiting
        rest = sql.SQL(", ").join(sql.Identifier(MONTHS_SCHEMA, f"{name}_rest") for name in MONTHLY)
        await _quickly(connection, query("lock_exclusive", tables=rest))
        if await _waiting(connection, month):
            raise Held("a rollout of it has just been stored")
        await _attach(connection, month)
        return 0


async def fence(connection: AsyncConnection, month: Month) -> None:
    """Prevent additions and changes to the month until the transaction ends; it stays readable. Raises Held."""
    async with giving_way():
        await _quickly(connection, query("lock_share", tables=_part("rollouts", month)))


async def drop(connection: AsyncConnection, month: Month) -> dict[str, int]:
    """Drop the month and every row that refers to it; return the number of deleted rows of each table of `HANGING`.
    Raises Held if the log cannot be locked for a moment."""
    async with giving_way():
        gone = {hanging.name: await _clear(connection, hanging, month) for hanging in HANGING}
        await _lock_log(connection)
        async with _unbound(connection):
            for hanging in HANGING:  # again, for rows that came in between
                gone[hanging.name] += await _clear(connection, hanging, month)
            for name in reversed(MONTHLY):
                await connection.execute(query("part_drop", part=_part(name, month)))
    return gone


def within(ids: ColumnElement[Any], month: Month) -> ColumnElement[bool]:
    """The condition that ids belong to that month; PostgreSQL then reads only its tables."""
    return (ids >= month.first_id) & (ids < month.end_id)


async def _clear(connection: AsyncConnection, hanging: Any, month: Month) -> int:
    return int((await connection.execute(delete(hanging).where(within(hanging.c.rollout_id, month)))).rowcount)


async def _waiting(connection: AsyncConnection, month: Month) -> int:
    """Count the month's rollouts among the rest, up to one more than can be moved."""
    rest = _like("rollouts", REST)
    some = select(rest.c.id).where(within(rest.c.id, month)).limit(MOVED_MAX + 1).subquery()
    return int(await connection.scalar(select(func.count()).select_from(some)) or 0)


async def _move(connection: AsyncConnection, month: Month) -> None:
    for name, key in MONTHLY.items():
        rest, part = _like(name, f"{name}_rest"), _like(name, month.table(name))
        mine = select(*rest.c).where(within(rest.c[key], month))
        await connection.execute(insert(part).from_select([c.name for c in rest.c], mine))
    rest = _like("rollouts", REST)
    await connection.execute(delete(rest).where(within(rest.c.id, month)))  # rounds and steps with them


async def _attach(connection: AsyncConnection, month: Month) -> None:
    ids = {"first_id": sql.Literal(month.first_id), "end_id": sql.Literal(month.end_id)}
    for name in MONTHLY:
        part = _part(name, month)
        if name != "rollouts":
            constraint = _reference(month.table(name))
            refer = query("part_refer", part=part, constraint=constraint, rollouts=_part("rollouts", month))
            await connection.execute(refer)
        await _quickly(connection, query("part_attach", whole=sql.Identifier(name), part=part, **ids))


async def _lock_log(connection: AsyncConnection) -> None:
    """Lock the log and all tables that refer to it, exclusively, until the transaction ends."""
    names: Iterable[str] = (*MONTHLY, *(bound.name for bound in BOUND))
    await _quickly(connection, query("lock_exclusive", tables=identifiers(names)))


@asynccontextmanager
async def _unbound(connection: AsyncConnection) -> AsyncIterator[None]:
    """Remove the references to `rollouts` for the block. The block must not break them: PostgreSQL checks nothing when
    they are restored."""
    places = [{"table": sql.Identifier(bound.name), "constraint": _reference(bound.name)} for bound in BOUND]
    for place in places:
        await connection.execute(query("reference_drop", **place))
    yield
    for place in places:
        await connection.execute(query("reference_restore", **place))


async def _quickly(connection: AsyncConnection, statement: TextClause) -> None:
    """Execute with a short time-out, so that statements that queue behind the lock do not wait for long."""
    before = await connection.scalar(select(func.current_setting("statement_timeout")))
    await connection.execute(_timeout(str(GIVE_WAY_MS)))
    await connection.execute(statement)
    await connection.execute(_timeout(before))


def _timeout(value: str | None) -> Any:
    return select(func.set_config("statement_timeout", value, True))


def _part(name: str, month: Month) -> sql.Identifier:
    return sql.Identifier(MONTHS_SCHEMA, month.table(name))


def _reference(name: str) -> sql.Identifier:
    """The name of a table's foreign key to the rollouts."""
    return sql.Identifier(f"{name}_rollout_id_fkey")


def _like(whole: str, name: str) -> TableClause:
    """A part by its name, with the columns of the whole table."""
    return table(name, *(column(c.name, c.type) for c in rollouts.metadata.tables[whole].c), schema=MONTHS_SCHEMA)
