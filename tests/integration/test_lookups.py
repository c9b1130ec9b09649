"""Look-ups: one statement at a time, over connections that may have been lost since the last one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, cast

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres.database import (
    ABSENT_S,
    LOOKUPS_MAX,
    PRESENT_S,
    Absences,
    Lookups,
    Vector,
    async_engine,
    lookup_engine,
    transaction,
)
from gateway.adapters.postgres.store import PostgresStore
from gateway.errors import Unavailable
from tests.waiting import until

OTHERS = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
KILL_OTHERS = text(f"SELECT pg_terminate_backend(pid) {OTHERS}")
SLEEPERS = text(f"SELECT pid {OTHERS} AND query LIKE '%sleep(600%' AND state = 'active'")


@pytest.fixture
async def lookups(database_url: str) -> AsyncIterator[Lookups]:
    engine = lookup_engine(database_url, statement_timeout_s=20.0)
    yield Lookups(engine)
    await engine.dispose()


@pytest.mark.parametrize("numbers", [[], [0.5], [0.0, -1.5, float("inf"), 3.0e38]])
async def test_a_vector_arrives_as_it_was(lookups: Lookups, numbers: list[float]) -> None:
    ((length, arrived),) = await lookups.rows(
        "SELECT coalesce(array_length(v, 1), 0), v FROM (SELECT CAST(%(v)s AS real[]) AS v) AS given",
        {"v": Vector(numbers)},
    )
    assert length == len(numbers)
    assert arrived == pytest.approx(numbers)


async def test_connections_that_the_server_closed_are_replaced(lookups: Lookups, pg_engine: AsyncEngine) -> None:
    await asyncio.gather(*(lookups.rows("SELECT pg_sleep(0.1)", {}) for _ in range(LOOKUPS_MAX)))
    async with transaction(pg_engine) as connection:
        killed = await connection.scalars(KILL_OTHERS)
        assert len(list(killed)) >= 1
    assert await lookups.rows("SELECT 7", {}) == [(7,)]


async def test_a_look_up_that_is_given_up_leaves_no_statement_behind(lookups: Lookups, pg_engine: AsyncEngine) -> None:
    async def sleeping() -> bool:
        async with transaction(pg_engine) as connection:
            return bool(list(await connection.scalars(SLEEPERS)))

    given_up = asyncio.create_task(lookups.rows("SELECT pg_sleep(600)", {}))
    await until(sleeping)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert not await sleeping()
    assert await lookups.rows("SELECT 7", {}) == [(7,)]


async def test_a_statement_beyond_its_time_is_unavailable(database_url: str) -> None:
    engine = lookup_engine(database_url, statement_timeout_s=0.05)
    with pytest.raises(Unavailable, match="QueryCanceled"):
        await Lookups(engine).rows("SELECT pg_sleep(600)", {})
    await engine.dispose()


async def test_a_database_that_is_away_is_unavailable() -> None:
    engine = lookup_engine("postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(Unavailable, match="not available"):
        await Lookups(engine).rows("SELECT 1", {})
    await engine.dispose()


NOTHING = "SELECT name FROM unnest(CAST(%(names)s AS text[])) AS named (name) WHERE false"
SOMETHING = "SELECT name FROM unnest(CAST(%(names)s AS text[])) AS named (name)"


class Looks:
    """Look-ups that are counted, and a clock."""

    def __init__(self, lookups: Lookups) -> None:
        self._lookups = lookups
        self.count, self.now_s = 0, 100.0
        self.meanwhile: Callable[[], None] = lambda: None

    async def rows(self, statement: str, values: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        self.count += 1
        self.meanwhile()
        return await self._lookups.rows(statement, values)


@pytest.fixture
def looks(lookups: Lookups) -> Looks:
    return Looks(lookups)


@pytest.fixture
def absences(looks: Looks) -> Absences:
    return Absences(cast(Lookups, looks), lambda: looks.now_s)


async def test_what_is_absent_is_not_looked_for_again_for_a_while(absences: Absences, looks: Looks) -> None:
    assert not absences.known("a key")
    await absences.look(["a key"], NOTHING, {})
    assert absences.known("a key")
    assert not absences.known("another key")
    looks.now_s += ABSENT_S
    assert not absences.known("a key")
    await absences.look(["a key"], NOTHING, {})
    assert absences.known("a key")
    assert looks.count == 2


async def test_an_absence_ends_with_a_change(absences: Absences, looks: Looks) -> None:
    await absences.look(["a key"], NOTHING, {})
    absences.forget()
    assert not absences.known("a key")
    looks.meanwhile = absences.forget  # a change that the look may not have seen
    await absences.look(["a key"], NOTHING, {})
    assert not absences.known("a key")


async def test_what_is_there_is_searched_each_time_and_looked_at_rarely(absences: Absences, looks: Looks) -> None:
    for _ in range(3):
        await absences.look(["a key"], SOMETHING, {})
        assert not absences.known("a key")
    assert looks.count == 1
    looks.now_s += PRESENT_S
    await absences.look(["a key"], NOTHING, {})
    assert absences.known("a key")


async def test_a_name_is_looked_at_once_whichever_others_are_asked_for(absences: Absences, looks: Looks) -> None:
    only_b = f"{SOMETHING} WHERE name = 'b'"
    for names in ("ab", "bc", "ca"):
        await absences.look(names, only_b, {})
    assert [absences.known(name) for name in "abcd"] == [True, False, True, False]
    assert looks.count == 2  # for a and b, then for c


async def test_a_key_is_read_without_a_transaction(database_url: str) -> None:
    away = async_engine("postgresql://127.0.0.1:1/none")
    engine = lookup_engine(database_url, statement_timeout_s=20.0)
    assert await PostgresStore(away, lookups=engine).key_get("abc124") is None
    await engine.dispose()
    await away.dispose()
