"""The log by month: `rollouts`, `rounds` and `steps` are cut by ranges of ids, and an old month goes as three tables.

A part of `rounds` or `steps` refers to the same month's part of `rollouts`, so that parts can go without the rest being
looked through. What refers to `rollouts` as a whole (`BOUND`) would be looked through: its references are taken off for
the moment in which parts change, and put back without reading the table again (docs/adr/0018).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import ColumnElement, TableClause, column, delete, func, insert, select, table, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.adapters.postgres.tables import MONTHLY, experience, outcomes, policy_shadows, rollouts
from gateway.adapters.postgres.tables_jobs import gradings
from gateway.adapters.postgres.tables_turns import continuations
from gateway.core.log.months import Month

SCHEMA = "months"
BOUND = (gradings, continuations, outcomes, experience)  # in the order in which the shipper writes them
HANGING = (*BOUND, policy_shadows)
GIVE_WAY_MS = 1_500  # above PostgreSQL's deadlock_timeout, after which an autovacuum in the way is sent off
MOVED_MAX = 10_000
LIKE = "INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE INCLUDING COMPRESSION"
# No lock to be had, time over, a deadlock; no right to it, a table of that name already, something that depends on it.
_HELD = ("55P03", "57014", "40P01", "42501", "42P07", "2BP01")
_PARTS = text(
    "SELECT c.relname FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid "
    "WHERE i.inhparent = CAST('rollouts' AS regclass)"
)


class Held(Exception):
    """The parts of the log cannot be changed now: they are in use, or this role may not. To be tried again."""


@asynccontextmanager
async def giving_way() -> AsyncIterator[None]:
    """Makes Held of whatever says so. The transaction is lost."""
    try:
        yield
    except DBAPIError as error:
        state = getattr(error.orig, "sqlstate", None)
        if state not in _HELD:
            raise
        raise Held(str(error.orig).splitlines()[0]) from error


async def existing(connection: AsyncConnection) -> list[Month]:
    """Months that have tables of their own, oldest first."""
    names = await connection.scalars(_PARTS)
    return sorted(month for name in names if (month := Month.named(name)) is not None)


async def make(connection: AsyncConnection, month: Month) -> int:
    """Give a month its tables; returns how many rollouts of it were waiting among the rest. Raises Held."""
    async with giving_way():
        found = await _waiting(connection, month)
        if found > MOVED_MAX:
            raise Held(
                f"{found:,} rollouts or more are stored without it; they are deleted by row when their time is over"
            )
        for name in MONTHLY:
            await _do(connection, f"CREATE TABLE {_part(name, month)} (LIKE {name} {LIKE})")
        if found:
            await _alone(connection)
            async with _unbound(connection):
                await _move(connection, month)
                await _attach(connection, month)
            return found
        await _quickly(connection, f"LOCK TABLE {', '.join(_rest(name) for name in MONTHLY)} IN ACCESS EXCLUSIVE MODE")
        if await _waiting(connection, month):
            raise Held("a rollout of it has just been stored")
        await _attach(connection, month)
        return 0


async def fence(connection: AsyncConnection, month: Month) -> None:
    """Until the transaction ends nothing is added to the month or changed in it; it can be read. Raises Held."""
    async with giving_way():
        await _quickly(connection, f"LOCK TABLE {_part('rollouts', month)} IN SHARE MODE")


async def drop(connection: AsyncConnection, month: Month) -> dict[str, int]:
    """The month with all that hangs on it; how many rows of `HANGING` went. Raises Held where it cannot be alone with
    the log for a moment."""
    async with giving_way():
        gone = {each.name: await _clear(connection, each, month) for each in HANGING}
        await _alone(connection)
        async with _unbound(connection):
            for each in HANGING:  # what came in between
                gone[each.name] += await _clear(connection, each, month)
            for name in reversed(MONTHLY):
                await _do(connection, f"DROP TABLE {_part(name, month)}")
    return gone


def within(ids: ColumnElement[Any], month: Month) -> ColumnElement[bool]:
    """The condition that ids are of that month; PostgreSQL then looks into its tables alone."""
    return (ids >= month.first_id) & (ids < month.end_id)


async def _clear(connection: AsyncConnection, each: Any, month: Month) -> int:
    return int((await connection.execute(delete(each).where(within(each.c.rollout_id, month)))).rowcount)


async def _waiting(connection: AsyncConnection, month: Month) -> int:
    """Rollouts of the month that are stored with the rest, counted a little further than can be moved."""
    rest = _table("rollouts", "rollouts_rest")
    some = select(rest.c.id).where(within(rest.c.id, month)).limit(MOVED_MAX + 1).subquery()
    return int(await connection.scalar(select(func.count()).select_from(some)) or 0)


async def _move(connection: AsyncConnection, month: Month) -> None:
    for name, key in MONTHLY.items():
        rest, part = _table(name, f"{name}_rest"), _table(name, month.table(name))
        mine = select(*rest.c).where(within(rest.c[key], month))
        await connection.execute(insert(part).from_select([each.name for each in rest.c], mine))
    rest = _table("rollouts", "rollouts_rest")
    await connection.execute(delete(rest).where(within(rest.c.id, month)))  # rounds and steps with them


async def _attach(connection: AsyncConnection, month: Month) -> None:
    bounds = f"FROM ('{month.first_id}') TO ('{month.end_id}')"
    for name in MONTHLY:
        part = _part(name, month)
        if name != "rollouts":
            named = f"CONSTRAINT {month.table(name)}_rollout_id_fkey FOREIGN KEY (rollout_id)"
            whole = f"REFERENCES {_part('rollouts', month)} (id) ON DELETE CASCADE"
            await _do(connection, f"ALTER TABLE {part} ADD {named} {whole}")
        await _quickly(connection, f"ALTER TABLE {name} ATTACH PARTITION {part} FOR VALUES {bounds}")


async def _alone(connection: AsyncConnection) -> None:
    """Nobody else at the log until the transaction ends."""
    names = (*MONTHLY, *(each.name for each in BOUND))
    await _quickly(connection, f"LOCK TABLE {', '.join(names)} IN ACCESS EXCLUSIVE MODE")


@asynccontextmanager
async def _unbound(connection: AsyncConnection) -> AsyncIterator[None]:
    """Without the references to `rollouts` as a whole. What is left must keep to them: it is not read again."""
    for each in BOUND:
        await _do(connection, f"ALTER TABLE {each.name} DROP CONSTRAINT {each.name}_rollout_id_fkey")
    yield
    for each in BOUND:
        named = f"CONSTRAINT {each.name}_rollout_id_fkey FOREIGN KEY (rollout_id)"
        whole = "REFERENCES rollouts (id) ON DELETE CASCADE NOT VALID"
        await _do(connection, f"ALTER TABLE {each.name} ADD {named} {whole}")


async def _quickly(connection: AsyncConnection, statement: str) -> None:
    """With a time-out of its own, so that those who wait behind it do not wait for long."""
    before = await connection.scalar(select(func.current_setting("statement_timeout")))
    await _do(connection, f"SET LOCAL statement_timeout = {GIVE_WAY_MS}")
    await _do(connection, statement)
    await _do(connection, f"SET LOCAL statement_timeout = '{before}'")


async def _do(connection: AsyncConnection, statement: str) -> None:
    """A statement of names and numbers of ours; a name cannot be a parameter."""
    await connection.execute(text(statement))


def _part(name: str, month: Month) -> str:
    return f"{SCHEMA}.{month.table(name)}"


def _rest(name: str) -> str:
    return f"{SCHEMA}.{name}_rest"


def _table(like: str, name: str) -> TableClause:
    """A part, with the columns of the whole."""
    return table(name, *(column(each.name, each.type) for each in rollouts.metadata.tables[like].c), schema=SCHEMA)
