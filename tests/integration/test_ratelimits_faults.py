"""Rate limits when Redis is away: open or closed as set, quick either way, and nothing is left behind."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from redis.asyncio import Redis

from gateway.adapters.redis.ratelimits import RedisRateLimits
from gateway.errors import RateLimited, Unavailable
from gateway.service.ports.request import RateState
from tests.redis_server import RedisServer, free_port, start_redis
from tests.waiting import at_some_pace, until

CALLS, DEADLINE_S = 100, 0.2


async def test_closed_limits_refuse_when_redis_is_away() -> None:
    limits = RedisRateLimits(f"redis://127.0.0.1:{free_port()}", fail_open=False)
    with pytest.raises(Unavailable) as caught:
        await limits.admit("k", "a", 1, 1, None, None)
    assert (caught.value.status, caught.value.code) == (503, "rate_limits_unavailable")
    await limits.close()


async def test_open_limits_let_pass_quickly_and_come_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    server = start_redis(tmp_path)

    async def story(pace: int) -> None:
        caplog.clear()
        limits = RedisRateLimits(server.url, pause_s=1.0, deadline_s=DEADLINE_S * pace)
        key = f"k{pace}"

        async def limited() -> bool:
            try:
                await limits.admit(key, "c", 1, 1, None, None)
            except RateLimited:
                return True
            return False

        try:
            await limits.admit(key, "a", 1, 1, None, None)
            server.freeze()
            async with asyncio.timeout(CALLS * DEADLINE_S * pace):  # each at its deadline takes twice that
                for n in range(CALLS):
                    assert await limits.admit(key, f"b{n}", 1, 1, None, None) == RateState()
                    await limits.release(key, f"b{n}", 1)
            server.thaw()
            await until(limited)
            messages = [record.message for record in caplog.records]
            assert [m.split(":")[0] for m in messages] == ["rate limits are off", "rate limits are on again"]
        finally:
            server.thaw()
            await limits.close()

    try:
        await at_some_pace(story)
    finally:
        server.stop()


async def test_an_idle_key_leaves_nothing_behind(redis_server: RedisServer) -> None:
    limits = RedisRateLimits(redis_server.url, prefix="idle", window_s=0.1, lease_s=0.2)
    redis: Redis = Redis.from_url(redis_server.url)

    async def nothing_left() -> bool:
        return await redis.exists("{idle:k}:at", "{idle:k}:tokens", "{idle:k}:flight") == 0

    await limits.admit("k", "a", 5, 5, 50, 5)
    assert not await nothing_left()
    await until(nothing_left)
    await limits.release("k", "a", 9)
    assert await redis.exists("{idle:k}:at", "{idle:k}:tokens", "{idle:k}:flight") == 0
    await redis.aclose()
    await limits.close()
