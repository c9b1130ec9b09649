"""The RestStore port, on the fake and on Redis."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest

from gateway.adapters.redis.rests import RedisRests
from gateway.core.pool.breaker import Health
from gateway.errors import Unavailable
from gateway.service.ports.pools import RestStore
from tests.fakes.rests import FakeRestStore
from tests.redis_server import RedisServer

RESTING = Health(3, 1, "failed", began_s=100.5, until_s=110.5, told_s=0.0, try_s=0.0, at_s=1_795_000_100.5)


@pytest.fixture(params=["fake", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[RestStore]:
    if request.param == "fake":
        yield FakeRestStore()
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    rests = RedisRests(server.url, prefix=secrets.token_hex(4), deadline_s=5.0)
    yield rests
    await rests.close()


async def test_nothing_is_stored_at_first(store: RestStore) -> None:
    assert await store.exchange({}) == {}


async def test_what_one_stores_the_others_get(store: RestStore) -> None:
    assert await store.exchange({"one": RESTING}) == {"one": RESTING}
    other = RESTING._replace(fault="silent")
    assert await store.exchange({"two": other}) == {"one": RESTING, "two": other}


async def test_the_later_change_counts_whoever_comes_last(store: RestStore) -> None:
    closed = Health(at_s=RESTING.at_s + 0.001)
    assert await store.exchange({"one": closed}) == {"one": closed}
    assert await store.exchange({"one": RESTING}) == {"one": closed}


async def test_a_store_that_is_away_is_unavailable() -> None:
    rests = RedisRests("redis://127.0.0.1:1/0", deadline_s=1.0)
    with pytest.raises(Unavailable):
        await rests.exchange({})
    await rests.close()


async def test_what_another_release_stored_is_left_out(redis_server: RedisServer) -> None:
    rests = RedisRests(redis_server.url, prefix=secrets.token_hex(4), deadline_s=5.0)
    await rests._run("HSET", rests._key, "odd", "not JSON", "longer", "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]")
    assert await rests.exchange({"one": RESTING}) == {"one": RESTING}
    await rests.close()
