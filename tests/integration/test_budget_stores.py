"""Gateways on one ledger count in one budget store: a gateway on another Redis is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gateway.adapters.host.clock import SystemClock
from gateway.adapters.postgres.upkeep.claims import StoreLocks
from gateway.adapters.redis.budgets import RedisBudgets
from gateway.core.money.ledger import Scope
from gateway.errors import ConfigError, MoneyUnavailable
from gateway.service.money.stores import StoreGuard
from tests.redis_server import RedisServer, start_redis

KEY = Scope("key:k", 50)
GRACE_S = 1.0


class Gateway:
    """The budgets of one gateway, its claim and its guard."""

    def __init__(self, redis: RedisServer, database_url: str) -> None:
        self.budgets = RedisBudgets(redis.url, deadline_s=5.0)
        self.locks = StoreLocks(database_url, timeout_s=20.0)
        self.guard = StoreGuard(self.budgets, self.locks, SystemClock(), grace_s=GRACE_S)

    async def close(self) -> None:
        await self.budgets.close()
        await self.locks.close()


@pytest.fixture
async def gateway(database_url: str) -> AsyncIterator[Callable[[RedisServer], Gateway]]:
    async with AsyncExitStack() as opened:

        def make(redis: RedisServer) -> Gateway:
            made = Gateway(redis, database_url)
            opened.push_async_callback(made.close)
            return made

        yield make


@pytest.fixture
def other_redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = start_redis(tmp_path)
    yield server
    server.stop()


async def test_a_second_store_is_refused_while_the_first_lives(
    gateway: Callable[[RedisServer], Gateway], redis_server: RedisServer, other_redis: RedisServer
) -> None:
    first, beside, stranger = gateway(redis_server), gateway(redis_server), gateway(other_redis)
    await first.guard.start()
    await beside.guard.start()  # another gateway on the same store
    with pytest.raises(ConfigError, match="count budgets in another Redis"):
        await stranger.guard.start()
    assert await first.guard.check()
    await first.close()
    assert not await stranger.guard.check()
    await beside.close()
    await stranger.guard.start()  # a store that nobody uses any more binds no one
    with pytest.raises(ConfigError):
        await gateway(redis_server).guard.start()


async def test_two_that_start_at_once_do_not_both_serve(
    gateway: Callable[[RedisServer], Gateway], redis_server: RedisServer, other_redis: RedisServer
) -> None:
    one, two = gateway(redis_server), gateway(other_redis)
    served = []
    for each in (one, two):
        for _ in range(3):
            served.append((each, await each.guard.check()))
    assert {each for each, claimed in served if claimed} == {one}


async def test_gateways_move_together_when_their_store_restarts(
    gateway: Callable[[RedisServer], Gateway], tmp_path: Path
) -> None:
    server = start_redis(tmp_path)
    one, two = gateway(server), gateway(server)
    assert await one.guard.check()
    assert await two.guard.check()
    server.stop()
    assert await one.guard.check()  # the store is away: nothing to claim, and budgets refuse by themselves
    again = start_redis(tmp_path, port=int(server.url.rpartition(":")[2].partition("/")[0]))
    assert not await one.guard.check()  # the other one still claims the server from before
    assert await two.guard.check()
    assert await one.guard.check()
    again.stop()


async def test_no_money_is_reserved_while_another_store_is_claimed(
    gateway: Callable[[RedisServer], Gateway], redis_server: RedisServer, other_redis: RedisServer
) -> None:
    late = gateway(other_redis)
    await late.budgets.load({})
    await gateway(redis_server).guard.start()

    async def stop_after(seconds: float) -> None:
        ticks.append(seconds)
        late.guard._contradicted_s = -GRACE_S if late.guard._contradicted_s is not None else None
        if len(ticks) == 4:
            raise KeyboardInterrupt

    ticks: list[float] = []
    with pytest.raises(KeyboardInterrupt):
        await late.guard.run(stop_after)
    with pytest.raises(MoneyUnavailable, match="another Redis"):
        await late.budgets.hold("a", 1, 1, [KEY], 60.0)
