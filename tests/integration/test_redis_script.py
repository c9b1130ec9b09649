"""The deadline of a Redis call tells a slow Redis from a process that was itself held up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.adapters.redis.script import RedisAway, RedisScript
from tests.redis_server import RedisServer
from tests.waiting import BOUND_S

BALANCE = (["{t}:epoch", "{t}:posted", "{t}:held", "{t}:open", "{t}:hold:x"], ["ping", "none"])


@pytest.fixture
async def script(redis_server: RedisServer) -> RedisScript:
    return RedisScript(redis_server.url, "budgets.lua", deadline_s=0.2, connections_max=2)


async def test_a_process_that_was_stalled_asks_again(script: RedisScript) -> None:
    await script(*BALANCE)
    asyncio.get_running_loop().call_soon(time.sleep, 0.4)  # longer than the deadline, while Redis answers at once
    assert await script(*BALANCE)
    await script.close()


async def test_a_redis_that_hangs_is_away_within_the_deadline(script: RedisScript, redis_server: RedisServer) -> None:
    await script(*BALANCE)
    redis_server.freeze()
    try:
        with pytest.raises(RedisAway):
            await asyncio.wait_for(script(*BALANCE), BOUND_S)  # it never answers
    finally:
        redis_server.thaw()
        await script.close()


async def test_a_redis_that_left_a_call_unanswered_is_given_no_second_deadline(
    script: RedisScript, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the process notices: on a busy machine every refusal would take twice its time."""
    await script(*BALANCE)
    tries, once = 0, script._once

    async def counted(keys: Sequence[str], args: Sequence[str | int | bytes]) -> list[Any]:
        nonlocal tries
        tries += 1
        return await once(keys, args)

    monkeypatch.setattr(script, "_once", counted)
    redis_server.freeze()
    try:
        for expected in (2, 1, 1):
            tries = 0
            asyncio.get_running_loop().call_later(0.1, time.sleep, 0.3)  # so that the deadline is noticed too late
            with pytest.raises(RedisAway):
                await script(*BALANCE)
            assert tries == expected
    finally:
        redis_server.thaw()
    assert await script(*BALANCE)
    asyncio.get_running_loop().call_soon(time.sleep, 0.4)
    assert await script(*BALANCE)  # it has answered again, and is trusted again
    await script.close()


async def test_a_connection_that_was_closed_under_the_loop_is_away_too(
    script: RedisScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def closed(**_: object) -> None:  # what redis-py lets through of uvloop's transports
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    monkeypatch.setattr(script, "_script", closed)
    with pytest.raises(RedisAway, match="handler is closed"):
        await script(*BALANCE)
    await script.close()
