"""The CallStates port, on the fake and on Redis."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest

from gateway.adapters.redis.states import RedisCallStates
from gateway.errors import Unavailable
from gateway.service.ports.turns import CallStates
from tests.fakes.replies import FakeCallStates
from tests.redis_server import RedisServer
from tests.waiting import BOUND_S, until


@pytest.fixture(params=["fake", "redis"])
async def states(request: pytest.FixtureRequest) -> AsyncIterator[CallStates]:
    if request.param == "fake":
        yield FakeCallStates(bytes_max=100)
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    stored = RedisCallStates(server.url, prefix=secrets.token_hex(4), deadline_s=5.0, bytes_max=100)
    yield stored
    await stored.close()


async def test_load_returns_what_was_kept(states: CallStates) -> None:
    assert await states.load("key1", ["a"], 60) == {}
    await states.keep("key1", {"a": b"\x00one", "b": b"two"}, 60)
    assert await states.load("key1", ["b", "x", "a"], 60) == {"a": b"\x00one", "b": b"two"}


async def test_the_latest_state_of_a_call_counts(states: CallStates) -> None:
    await states.keep("key1", {"a": b"one"}, 60)
    await states.keep("key1", {"a": b"another"}, 60)
    assert await states.load("key1", ["a"], 60) == {"a": b"another"}


async def test_keys_do_not_see_each_other(states: CallStates) -> None:
    await states.keep("key1", {"a": b"one"}, 60)
    assert await states.load("key2", ["a"], 60) == {}


async def test_the_oldest_make_room(states: CallStates) -> None:
    for number in range(20):
        await states.keep("key1", {f"call{number:02}": b"x" * 20}, 60)
    kept = await states.load("key1", [f"call{number:02}" for number in range(20)], 60)
    assert sorted(kept) == [f"call{number:02}" for number in range(15, 20)]


async def test_a_state_that_is_too_old_is_not_found(states: CallStates) -> None:
    await states.keep("key1", {"a": b"one"}, 60)

    async def gone() -> bool:
        return await states.load("key1", ["a"], 0.05) == {}

    await until(gone, BOUND_S)
    assert await states.load("key1", ["a"], 60) == {"a": b"one"}
    await states.keep("key1", {"b": b"two"}, 0.001)


async def test_redis_that_is_away_is_one_error() -> None:
    stored = RedisCallStates("redis://127.0.0.1:1/0", deadline_s=0.5)
    with pytest.raises(Unavailable):
        await stored.load("key1", ["a"], 60)
    with pytest.raises(Unavailable):
        await stored.keep("key1", {"a": b"one"}, 60)
    await stored.close()
