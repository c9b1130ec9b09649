"""The Conversations port, on the fake, on Redis, and on PostgreSQL where Redis has lost everything or is away."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.database import async_engine
from gateway.adapters.postgres.inserts import insert_rows
from gateway.adapters.postgres.turns import PostgresConversations
from gateway.adapters.redis.conversations import RedisConversations
from gateway.core.loop.turns.replanning import TurnFacts
from gateway.errors import Unavailable
from gateway.service.ports.turns import Conversations, LastTurn, TurnMarks
from tests.fakes.replies import FakeConversations
from tests.records import a_rollout, rollout_event
from tests.redis_server import RedisServer
from tests.waiting import BOUND_S, until

NOWHERE = "redis://127.0.0.1:1/0"


class _Logged:
    """What is remembered reaches PostgreSQL by the log alone, as after a Redis that was lost."""

    def __init__(self, stored: RedisConversations, engine: AsyncEngine) -> None:
        self._stored = stored
        self._engine = engine
        self.find, self.sweep = stored.find, stored.sweep

    async def remember(self, answered: TurnMarks) -> None:
        record = a_rollout(key_id=answered.key_id, answered_by=answered.worker, marks=dict(answered.marks))
        record.facts = answered.facts.as_json()
        record.created_us = record.finished_us = time.time_ns() // 1000
        async with self._engine.begin() as connection:
            await connection.run_sync(insert_rows, rows.event_rows(rollout_event(record)))


@pytest.fixture(params=["fake", "redis", "postgres", "postgres without redis"])
async def conversations(request: pytest.FixtureRequest) -> AsyncIterator[Conversations]:
    if request.param == "fake":
        yield FakeConversations()
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    engine = async_engine(request.getfixturevalue("database_url"), statement_timeout_s=20.0)
    url = NOWHERE if request.param == "postgres without redis" else server.url
    stored = RedisConversations(
        url, PostgresConversations(engine), prefix=secrets.token_hex(4), deadline_s=5.0, timeout_s=20.0
    )
    yield stored if request.param == "redis" else _Logged(stored, engine)
    await stored.close()
    await engine.dispose()


def answered(worker: str, key: str = "key1", **marks: float) -> TurnMarks:
    return TurnMarks(key, "unused", worker, marks)


async def find(conversations: Conversations, *marks: str, key: str = "key1") -> str | None:
    last = await conversations.find(key, marks)
    return None if last is None else last.worker


async def test_find_returns_the_worker_that_answered(conversations: Conversations) -> None:
    assert await find(conversations, "a") is None
    await conversations.remember(answered("alpha", a=60, b=60))
    assert await find(conversations, "a") == "alpha"
    assert await find(conversations, "b") == "alpha"
    assert await find(conversations, "c") is None
    assert await find(conversations) is None


async def test_find_returns_what_the_turn_left(conversations: Conversations) -> None:
    facts = TurnFacts("mark", "empty", 1200, 34, 5_600_000, 2)
    await conversations.remember(TurnMarks("key1", "unused", "alpha", {"a": 60.0}, facts))
    assert await conversations.find("key1", ["a"]) == LastTurn("alpha", facts)


async def test_the_first_mark_that_is_known_counts(conversations: Conversations) -> None:
    await conversations.remember(answered("alpha", a=60))
    await conversations.remember(answered("beta", b=60))
    assert await find(conversations, "x", "b", "a") == "beta"
    assert await find(conversations, "a", "b") == "alpha"


async def test_the_latest_answer_under_a_mark_counts(conversations: Conversations) -> None:
    await conversations.remember(answered("alpha", a=60))
    await conversations.remember(answered("beta", a=60))
    assert await find(conversations, "a") == "beta"


async def test_keys_do_not_see_each_other(conversations: Conversations) -> None:
    await conversations.remember(answered("alpha", a=60))
    assert await find(conversations, "a", key="key2") is None


async def test_a_mark_whose_time_is_over_is_not_found_and_is_swept(conversations: Conversations) -> None:
    await conversations.remember(answered("alpha", short=0.02, long=60))

    async def is_over() -> bool:
        return await find(conversations, "short") is None

    await until(is_over)
    assert await find(conversations, "long") == "alpha"
    assert await conversations.sweep(10) in (0, 1)  # Redis forgets by itself
    assert await conversations.sweep(10) == 0
    assert await find(conversations, "long") == "alpha"


async def test_a_reply_without_marks_is_nothing(conversations: Conversations) -> None:
    marks: Mapping[str, Any] = {}
    await conversations.remember(TurnMarks("key1", "unused", "alpha", marks))
    assert await find(conversations, "a") is None


async def test_both_away_is_said_in_bounded_time(empty_database_url: str, pg_server: Any) -> None:
    engine = async_engine(empty_database_url)
    stored = RedisConversations(NOWHERE, PostgresConversations(engine), timeout_s=0.2)
    pg_server.shut(empty_database_url)
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(Unavailable):
            await stored.find("key1", ["a"])
        with pytest.raises(Unavailable):
            await stored.remember(answered("alpha", a=60))
    await stored.close()
    await engine.dispose()
