"""Money when Redis hangs, is gone, comes back empty or comes back with old data: refused in time, never wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.adapters.redis.budgets import RedisBudgets
from gateway.core.money.ledger import Balance, Hold, Scope
from gateway.errors import BudgetExceeded, ConfigError, MoneyUnavailable
from gateway.service.ports.money import Settlement
from tests.redis_server import RedisServer, free_port, start_redis
from tests.sizes import SIZE, SLACK
from tests.waiting import BOUND_S, at_some_pace

KEY = Scope("key:k", 50)
REFUSED_WITHIN_S = 0.25
CALLS, CONNECTIONS, DEADLINE_S = 400, 4, 0.2
PERSISTENT = ("--appendonly", "yes", "--appendfsync", "always")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    redis = start_redis(tmp_path)
    yield redis
    redis.stop()


@pytest.fixture
async def budgets(server: RedisServer) -> AsyncIterator[RedisBudgets]:
    adapter = RedisBudgets(server.url)
    await adapter.load({})
    yield adapter
    await adapter.close()


async def refused_in_time(call: Callable[[], Awaitable[object]]) -> None:
    """The fastest of three: the machine may be busy, the gateway may not be slow. `make test` holds no clock to it."""
    took_s = []
    for _ in range(3):
        started_s = time.monotonic()
        with pytest.raises(MoneyUnavailable):
            await call()
        took_s.append(time.monotonic() - started_s)
    assert SIZE == "small" or min(took_s) < REFUSED_WITHIN_S * SLACK


@pytest.mark.sized
async def test_a_hung_redis_refuses_in_time_and_works_again_when_it_wakes(
    server: RedisServer, budgets: RedisBudgets
) -> None:
    await budgets.hold("a", 10, 10, [KEY], 60)
    server.freeze()
    await refused_in_time(lambda: budgets.hold("b", 1, 1, [KEY], 60))
    await refused_in_time(lambda: budgets.post("a", 1))
    assert not await budgets.ready()
    assert not budgets.epoch_lost
    server.thaw()
    assert await budgets.post("a", 1) == 1  # whether or not the call that timed out was carried out
    assert (await budgets.balance("key:k")).posted_nano == 1


async def test_waiting_for_a_connection_counts_into_the_deadline(server: RedisServer) -> None:
    async def story(pace: int) -> None:
        budgets = RedisBudgets(server.url, connections_max=CONNECTIONS, deadline_s=DEADLINE_S * pace)
        await budgets.load({})
        server.freeze()
        calls = [budgets.hold(f"h{n}", 1, 1, [KEY], 60) for n in range(CALLS)]
        try:
            async with asyncio.timeout(CALLS / CONNECTIONS * DEADLINE_S * pace / 2):  # in turns they take twice that
                results = await asyncio.gather(*calls, return_exceptions=True)
        finally:
            server.thaw()
            await budgets.close()
        assert {type(result) for result in results} == {MoneyUnavailable}

    await at_some_pace(story)


@pytest.mark.sized
async def test_a_closed_port_refuses_in_time() -> None:
    adapter = RedisBudgets(f"redis://127.0.0.1:{free_port()}")
    await refused_in_time(lambda: adapter.load({}))
    await refused_in_time(lambda: adapter.hold("a", 1, 1, [KEY], 60))
    assert not await adapter.ready()
    await adapter.close()


async def test_a_restarted_redis_refuses_until_rebuilt(
    server: RedisServer, budgets: RedisBudgets, tmp_path: Path
) -> None:
    await budgets.hold("open", 20, 20, [KEY], 60)
    server.stop()
    await refused_in_time(lambda: budgets.post("open", 5))
    again = start_redis(tmp_path, port=server.port)
    try:
        await refused_in_time(lambda: budgets.post("open", 5))
        assert budgets.epoch_lost
        await budgets.load({"key:k": 7})
        assert await budgets.balance("key:k") == Balance(12, 0)  # what the first attempt to post it said
        assert await budgets.post("open", 9) == 5
    finally:
        again.stop()


async def test_a_gateway_without_the_epoch_refuses_without_a_call(
    server: RedisServer, budgets: RedisBudgets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis may be hanging, and would say no more than that."""
    redis: Redis = Redis.from_url(server.url)
    await redis.flushall()
    with pytest.raises(MoneyUnavailable, match="rebuilding"):
        await budgets.hold("a", 1, 1, [KEY], 60)
    with monkeypatch.context() as patched:
        patched.setattr(budgets, "_script", None)
        with pytest.raises(MoneyUnavailable, match="rebuilding"):
            await budgets.hold("b", 1, 1, [KEY], 60)
    await budgets.load({})
    assert (await budgets.hold("c", 1, 1, [KEY], 60)).granted_nano == 1
    await redis.aclose()


async def test_a_restart_with_old_data_on_disk_is_fenced_too(tmp_path: Path) -> None:
    server = start_redis(tmp_path, args=PERSISTENT)
    budgets = RedisBudgets(server.url)
    await budgets.load({"key:k": 1})
    await budgets.hold("open", 20, 20, [KEY], 60)
    server.stop()
    server = start_redis(tmp_path, port=server.port, args=PERSISTENT)
    try:
        with pytest.raises(MoneyUnavailable, match="rebuilding"):
            await budgets.balance("key:k")
        await budgets.load({"key:k": 30})
        assert await budgets.balance("key:k") == Balance(30, 20)
    finally:
        await budgets.close()
        server.stop()


async def test_a_flushed_script_cache_is_reloaded(server: RedisServer, budgets: RedisBudgets) -> None:
    redis: Redis = Redis.from_url(server.url)
    await redis.script_flush()
    assert (await budgets.hold("a", 10, 10, [KEY], 60)).granted_nano == 10
    await redis.aclose()


async def test_a_rebuild_that_dies_halfway_leaves_money_refused_and_another_takes_over(
    server: RedisServer, budgets: RedisBudgets
) -> None:
    redis: Redis = Redis.from_url(server.url)
    await redis.delete("{baton}:epoch")
    await redis.hset("{baton}:epoch", "loading", "a rebuild that died")
    with pytest.raises(MoneyUnavailable, match="rebuilding"):
        await budgets.balance("key:k")
    await budgets.load({"key:k": 3})
    assert await budgets.balance("key:k") == Balance(3, 0)
    await redis.aclose()


async def test_a_rebuild_that_was_overtaken_changes_nothing(server: RedisServer) -> None:
    slow, quick = RedisBudgets(server.url), RedisBudgets(server.url)
    await slow._run("begin", "slow")
    await quick.load({"key:k": 3})
    for step in (("fill", "slow", "key:k", 40), ("commit", "slow")):
        with pytest.raises(MoneyUnavailable, match="rebuilding"):
            await slow._run(*step)
    assert await quick.balance("key:k") == Balance(3, 0)
    await slow.load({"key:k": 40})
    assert await slow.balance("key:k") == Balance(3, 0)
    await slow.close()
    await quick.close()


async def test_only_so_many_open_holds_are_remembered(budgets: RedisBudgets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.adapters.redis.budgets._OPEN_MAX", 2)
    for n in range(3):
        await budgets.hold(f"h{n}", 1, 1, [KEY], 60)
    assert list(budgets._open) == ["h1", "h2"]


async def test_records_are_bounded_settled_holds_expire_and_empty_scopes_go(
    server: RedisServer, budgets: RedisBudgets
) -> None:
    redis: Redis = Redis.from_url(server.url)
    await budgets.hold("a", 10, 10, [KEY], 60)
    assert await redis.ttl("{baton}:hold:a") == -1
    await budgets.post("a", 12)
    assert 86_000 < await redis.ttl("{baton}:hold:a") <= 86_400
    assert await redis.hget("{baton}:hold:a", "over") == b"2"
    assert await redis.exists("{baton}:held", "{baton}:open") == 0
    await redis.aclose()


async def test_the_script_itself_refuses_amounts_that_doubles_cannot_hold(
    server: RedisServer, budgets: RedisBudgets
) -> None:
    for amount in (2**53, -1, 0.5, "nan"):
        with pytest.raises(MoneyUnavailable) as refused:
            await budgets._run("hold", "a", str(amount), 0, 60_000, "key:k", "")
        assert "not an amount of nano-dollars" in str(refused.value.__cause__)
        assert "nano" not in refused.value.message  # a client learns nothing of what stands behind
    assert await budgets.balance("key:k") == Balance(0, 0)


@pytest.mark.parametrize("lost", ["posted", "held", "open", "one balance"])
async def test_a_lost_balance_is_rebuilt_and_never_zero(server: RedisServer, budgets: RedisBudgets, lost: str) -> None:
    spent = await budgets.hold("a", 40, 40, [KEY], 60)
    await budgets.post("a", 40)
    await budgets.hold("b", 5, 5, [KEY], 60)
    redis: Redis = Redis.from_url(server.url)
    await (redis.hdel("{baton}:posted", "key:k") if lost == "one balance" else redis.delete("{baton}:" + lost))
    for _ in range(2):
        with pytest.raises(MoneyUnavailable):
            await budgets.hold("c", 30, 30, [KEY], 60)
    assert not await budgets.join()
    await budgets.load({"key:k": 40}, settled=[Settlement("a", 40, ("key:k",))], ours=["a"])
    assert await budgets.balance("key:k") == Balance(40, 5)  # with the hold that this process has open
    with pytest.raises(BudgetExceeded):
        await budgets.hold("c", 30, 30, [KEY], 60)
    assert await budgets.post("b", 3) == 3
    assert await budgets.balance("key:k") == Balance(43, 0)
    assert spent.granted_nano == 40
    await redis.aclose()


async def test_a_lost_hold_is_put_back_by_a_rebuild(server: RedisServer, budgets: RedisBudgets) -> None:
    await budgets.hold("a", 20, 20, [KEY], 60)
    await budgets.hold("b", 10, 10, [KEY], 60)
    redis: Redis = Redis.from_url(server.url)
    await redis.delete("{baton}:hold:a")
    with pytest.raises(MoneyUnavailable):
        await budgets.post("a", 7)
    await budgets.load({})
    assert await budgets.balance("key:k") == Balance(7, 10)
    await redis.aclose()


async def test_a_settlement_from_before_a_rebuild_does_not_count_as_done(
    server: RedisServer, budgets: RedisBudgets
) -> None:
    await budgets.hold("a", 20, 20, [KEY], 60)
    await budgets.post("a", 7)
    redis: Redis = Redis.from_url(server.url)
    await redis.delete("{baton}:posted")
    assert not await budgets.ready()
    await budgets.load({}, open_holds=[Hold("a", 20, (KEY,))])  # the ledger has not heard of the settlement
    assert await budgets.balance("key:k") == Balance(7, 0)
    await redis.aclose()


async def test_a_redis_that_may_evict_is_refused(tmp_path: Path) -> None:
    server = start_redis(tmp_path, args=("--save", "", "--maxmemory-policy", "allkeys-lru"))
    budgets = RedisBudgets(server.url)
    with pytest.raises(ConfigError, match="maxmemory-policy allkeys-lru"):
        await budgets.check()
    for call in (budgets.join(), budgets.load({})):
        with pytest.raises(MoneyUnavailable, match="set maxmemory-policy noeviction"):
            await call
    redis: Redis = Redis.from_url(server.url)
    await redis.config_set("maxmemory-policy", "noeviction")
    await budgets.check()
    await budgets.load({})
    await redis.aclose()
    await budgets.close()
    server.stop()


async def test_what_a_hung_redis_carries_out_late_blocks_no_money(server: RedisServer, budgets: RedisBudgets) -> None:
    await budgets.hold("ends", 10, 10, [KEY], 60)
    server.freeze()
    with pytest.raises(MoneyUnavailable):
        await budgets.hold("refused", 30, 30, [KEY], 60)
    budgets.forsake("refused")
    with pytest.raises(MoneyUnavailable):
        await budgets.post("ends", 4)
    server.thaw()

    async def settled() -> bool:
        return await budgets.ready() and await budgets.balance("key:k") == Balance(4, 0)

    async with asyncio.timeout(BOUND_S):
        while not await settled():
            await asyncio.sleep(0.02)
    assert (await budgets.hold("next", 46, 46, [KEY], 60)).granted_nano == 46


async def said(redis: Redis, *command: str) -> Any:
    """The reply of Redis to a command."""
    return await redis.execute_command(*command)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("fields", [{"format": "3", "sizes": "0 0 0"}, {"format": None, "sizes": None}])
async def test_balances_in_another_form_are_refused_at_the_start_while_somebody_uses_them(
    server: RedisServer, fields: dict[str, str | None]
) -> None:
    """Of a version to come, which names its form, and of the first one, which knew neither form nor sizes."""
    kept = [part for name, value in fields.items() if value is not None for part in (name, value)]
    async with Redis.from_url(server.url) as redis:
        await said(redis, "HSET", "{baton}:epoch", "epoch", "1", "run", "r", "gen", "g", *kept)
        mine = RedisBudgets(server.url)

        async def others_look(seconds: float) -> None:
            await said(redis, "HGET", "{baton}:epoch", "epoch")

        with pytest.raises(ConfigError, match="stop all of them, then start this version"):
            await mine.check(others_look)
        await mine.check()  # in real time nobody looks; it has waited for that
        assert not await mine.join()
        await mine.load({"key:k": 7})
        assert await mine.balance("key:k") == Balance(7, 0)
        await mine.check(others_look)
        assert await said(redis, "HGET", "{baton}:epoch", "format") == b"2"
        await mine.close()


async def test_the_version_before_this_one_counts_beside_it(server: RedisServer, budgets: RedisBudgets) -> None:
    """Its balances do not name their form; its script reads and writes the same fields, grown holds among them."""
    async with Redis.from_url(server.url) as redis:
        await said(redis, "HDEL", "{baton}:epoch", "format")
        grown = await budgets.grow(await budgets.hold("a", 10, 10, [KEY], 60), 30)
        fields = await said(redis, "HMGET", "{baton}:hold:a", "granted", "state", "n")
        assert fields == [b"30", b"open", b"1"]
    assert await budgets.post("a", 12) == 12
    assert (await budgets.balance("key:k"), grown.granted_nano) == (Balance(12, 0), 30)
    other = RedisBudgets(server.url)
    await other.check()
    assert await other.join()
    await other.close()
