"""Look-ups: one statement at a time, over connections that may have been lost since the last one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres.database import LOOKUPS_MAX, Lookups, Vector, lookup_engine, transaction
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
