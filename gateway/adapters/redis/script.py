"""One Lua script on one Redis, with a hard deadline; budgets and rate limits share it.

Every failure of Redis (refused, hung, restarting, read-only, out of memory) is the one error RedisAway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, cast

import redis.exceptions
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

STALL_S = 0.02  # a time-out noticed this much too late means that this process was stalled


class RedisAway(Exception):
    """Redis did not answer with a result within the deadline."""


class RedisTooSlow(RedisAway):
    """The deadline passed without an answer."""


class RedisScript:
    """`deadline_s` bounds a whole call: waiting for one of `connections_max` connections, connecting and answering."""

    def __init__(self, url: str, file_name: str, *, deadline_s: float, connections_max: int) -> None:
        self._deadline_s = deadline_s
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=connections_max,
            timeout=deadline_s,
            socket_timeout=deadline_s,
            socket_connect_timeout=deadline_s,
            retry=Retry(NoBackoff(), 1),  # for a connection that Redis closed while idle; scripts are idempotent
            encoding_errors="surrogatepass",  # an end user's id may hold a lone surrogate
            protocol=2,
        )
        self._redis: Redis = Redis.from_pool(pool)
        text = (files("gateway.adapters.redis") / file_name).read_text(encoding="utf-8")
        self._script = self._redis.register_script(text)
        self._answered = True  # whether the last finished call got an answer

    async def __call__(self, keys: Sequence[str], args: Sequence[str | int | bytes]) -> list[Any]:
        """Run the script and return its reply: integers and bytes. Raises RedisAway."""
        try:
            reply = await self._patient(keys, args)
        except RedisAway:
            self._answered = False
            raise
        self._answered = True
        return reply

    async def _patient(self, keys: Sequence[str], args: Sequence[str | int | bytes]) -> list[Any]:
        """Call `_once`, and again if this process was stalled and not Redis, whose answer may be waiting already. It is
        not repeated if Redis left the last call without an answer, or every refusal on a busy machine would take two
        deadlines."""
        now = asyncio.get_running_loop().time
        until_s = now() + self._deadline_s
        try:
            return await self._once(keys, args)
        except RedisTooSlow:
            if now() < until_s + STALL_S or not self._answered:
                raise
        return await self._once(keys, args)

    async def _once(self, keys: Sequence[str], args: Sequence[str | int | bytes]) -> list[Any]:
        try:
            async with asyncio.timeout(self._deadline_s):
                return cast(list[Any], await self._script(keys=keys, args=args))
        except (TimeoutError, redis.exceptions.TimeoutError):
            raise RedisTooSlow(f"no answer within {self._deadline_s * 1000:.0f} ms") from None
        except (RedisError, OSError, RuntimeError) as error:  # the last: what uvloop raises for a closed connection
            raise RedisAway(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        await self._redis.aclose()
