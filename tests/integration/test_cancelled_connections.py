"""Whoever is cancelled at any moment of a connection's use gives the connection back."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable

import psycopg.waiting
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres.database import Lookups, lookup_engine, transaction

TURNS = (*range(12), *(12 + round(1.5**n) for n in range(28)))  # of the event loop, before a task is cancelled


async def cancelled_at_each_turn(use: Callable[[], Awaitable[object]], engine: AsyncEngine) -> int:
    """Cancel `use` after each of TURNS until it ends by itself; how often that was. A connection that nobody gives
    back is a warning of the garbage collector, which fails a test."""
    for times, turns in enumerate(TURNS):
        task = asyncio.ensure_future(use())
        for _ in range(turns):
            await asyncio.sleep(0)
        ended = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del task
        gc.collect()
        assert engine.pool.checkedout() == 0, f"cancelled after {turns} turns"  # type: ignore[attr-defined]
        if ended:
            return times
    raise AssertionError(f"it had not ended after {TURNS[-1]} turns")


@pytest.fixture(autouse=True)
def yielding(monkeypatch: pytest.MonkeyPatch) -> None:
    """psycopg lets other tasks run wherever it may: on a busy machine it does, on a quiet one hardly ever."""
    monkeypatch.setattr(psycopg.waiting, "MAX_BUSY_TIME", 0.0)


@pytest.fixture
async def lookups_engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = lookup_engine(database_url, statement_timeout_s=20.0)
    yield engine
    await engine.dispose()


async def test_a_look_up(lookups_engine: AsyncEngine) -> None:
    lookups = Lookups(lookups_engine)
    await lookups.rows("SELECT 7", {})

    async def look_up() -> None:
        assert await lookups.rows("SELECT 7", {}) == [(7,)]

    assert await cancelled_at_each_turn(look_up, lookups_engine) > 2


@pytest.mark.parametrize("one_moment", [False, True])
async def test_a_transaction(pg_engine: AsyncEngine, one_moment: bool) -> None:
    async def read() -> None:
        async with transaction(pg_engine, 5.0, one_moment=one_moment) as connection:
            level = await connection.scalar(text("SHOW transaction_isolation"))
        assert level == ("repeatable read" if one_moment else "read committed")

    await read()
    assert await cancelled_at_each_turn(read, pg_engine) > 2
