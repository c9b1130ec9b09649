"""`BackgroundStore`: in memory, and on PostgreSQL."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text

from gateway.adapters.postgres.background import PostgresBackground
from gateway.core.log.events import uuid7
from gateway.errors import RateLimited
from gateway.service.ports.background import BackgroundRequest, BackgroundStore
from tests.fakes.background import FakeBackground
from tests.kit import KEY, TestClock
from tests.waiting import until

HERE, THERE = (f"00000000-0000-4000-8000-00000000000{n}" for n in (1, 2))
HOUR_US = 3_600_000_000
STATE = {"meter": {"spent": 2**52}, "open": {"1.0": [5, True]}}


def a_request(**changes: Any) -> BackgroundRequest:
    now_us = TestClock().now_us()
    response_id = "resp_" + uuid7(now_us // 1000).replace("-", "")
    body = {"model": "baton", "input": "half a pair \ud83d and \x00", "background": True}
    made = BackgroundRequest(response_id, KEY.public_id, body, {"x-baton-pool": "main"}, "queued", now_us, now_us)
    return replace(made, expires_us=now_us + HOUR_US, **changes)


@pytest.fixture(params=["fake", "postgres"])
def store(request: pytest.FixtureRequest) -> BackgroundStore:
    return FakeBackground() if request.param == "fake" else PostgresBackground(request.getfixturevalue("pg_engine"))


async def test_a_request_is_taken_once_saved_and_ended(store: BackgroundStore) -> None:
    first, second = a_request(), a_request()
    await store.create(first, 9)
    await store.create(second, 9)
    assert await store.get(KEY.public_id, first.id) == first
    assert await store.get("keyBBBBBBBBB", first.id) is None
    assert await store.holds() == {first.rollout_id, second.rollout_id}
    [mine] = await store.take(HERE, 1, 60.0)
    [other] = await store.take(THERE, 9, 60.0)
    assert (mine.id, mine.status, mine.state, mine.records, other.id) == (first.id, "in_progress", None, {}, second.id)
    assert await store.take(THERE, 9, 60.0) == []
    records: dict[str, Any] = {
        "p1": {"record": {"plan_logprobs": [float("-inf")]}},
        "1.0": {"body": {"content": "\ud83d\x00"}},
    }
    assert await store.save(first.id, THERE, STATE, records) is None
    assert await store.save(first.id, HERE, STATE, {"1.0": {"body": None}}) == "in_progress"
    assert await store.save(first.id, HERE, STATE, records) == "in_progress"
    await store.release(HERE)
    assert await store.save(first.id, HERE, STATE, {}) is None
    [again] = await store.take(THERE, 9, 60.0)
    assert (again.body, again.options, again.state, again.records) == (first.body, first.options, STATE, records)
    assert not await store.end(first.id, HERE, "done")
    assert await store.end(first.id, THERE, "failed", {"code": "pool_changed"})
    assert not await store.end(first.id, THERE, "done")
    ended = await store.get(KEY.public_id, first.id)
    assert ended is not None
    assert (ended.status, ended.error, ended.state, ended.open) == ("failed", {"code": "pool_changed"}, None, False)
    assert not await store.delete(KEY.public_id, second.id)
    assert await store.delete(KEY.public_id, first.id)
    assert await store.get(KEY.public_id, first.id) is None
    assert await store.holds() == {second.rollout_id}


async def test_a_claim_ends_with_its_lease_unless_it_is_renewed(store: BackgroundStore) -> None:
    one = a_request()
    await store.create(one, 9)
    await store.take(HERE, 9, 0.2)
    assert await store.renew(HERE, [one.id], 60.0) == set()
    assert await store.take(THERE, 9, 60.0) == []
    assert await store.renew(HERE, [one.id], 0.2) == set()
    assert [taken.id for taken in await until(lambda: store.take(THERE, 9, 60.0))] == [one.id]
    assert await store.save(one.id, HERE, STATE, {}) is None


async def test_one_that_is_put_off_is_free_at_its_time(store: BackgroundStore) -> None:
    soon, late = a_request(), a_request()
    for one in (soon, late):
        await store.create(one, 9)
    await store.take(HERE, 9, 60.0)
    for one, delay_s in ((late, 60.0), (soon, 0.2)):
        await store.postpone(one.id, HERE, delay_s)
        assert await store.save(one.id, HERE, STATE, {}) is None
    assert [taken.id for taken in await until(lambda: store.take(THERE, 9, 60.0))] == [soon.id]


async def test_a_cancelled_one_ends_as_cancelled(store: BackgroundStore) -> None:
    one = a_request()
    await store.create(one, 9)
    await store.take(HERE, 9, 60.0)
    assert await store.cancel("keyBBBBBBBBB", one.id) is None
    stopping = await store.cancel(KEY.public_id, one.id)
    assert stopping is not None
    assert (stopping.status, stopping.open) == ("cancelling", True)
    assert await store.renew(HERE, [one.id], 60.0) == {one.id}
    assert await store.save(one.id, HERE, STATE, {}) == "cancelling"
    assert await store.end(one.id, HERE, "done")
    ended = await store.cancel(KEY.public_id, one.id)
    assert ended is not None
    assert ended.status == "cancelled"


async def test_a_key_has_so_many_open_ones_and_no_more(store: BackgroundStore) -> None:
    for _ in range(2):
        await store.create(a_request(), 2)
    with pytest.raises(RateLimited):
        await store.create(a_request(), 2)
    await store.create(a_request(key_id="keyBBBBBBBBB"), 2)


async def test_no_more_are_open_when_many_come_at_once(store: BackgroundStore) -> None:
    tries = await asyncio.gather(*(store.create(a_request(), 2) for _ in range(8)), return_exceptions=True)
    assert [type(one) for one in tries if one is not None] == [RateLimited] * 6


async def test_what_ended_long_ago_is_swept(pg_engine: Any) -> None:
    store = PostgresBackground(pg_engine)
    logged, lost, open_one = a_request(), a_request(), a_request()
    for one in (logged, lost, open_one):
        await store.create(one, 9)
    await store.take(HERE, 2, 60.0)
    await store.end(logged.id, HERE, "done")
    await store.end(lost.id, HERE, "failed", {})
    async with pg_engine.begin() as connection:
        await connection.execute(text("UPDATE background_requests SET ended_at = ended_at - interval '2 hours'"))
    assert await store.sweep(10) == 1
    assert [await store.get(KEY.public_id, one.id) is None for one in (logged, lost, open_one)] == [True, False, False]
