"""The breakers of workers (port `RestStore`) in Redis, where every process and gateway finds them: one hash, the id of
a place or account → its breaker.

Two that store the same one at once may overwrite each other; each keeps what it knows to be newer, and says so with its
next change.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import hiredis

from gateway.adapters.redis.pipe import LinkLost, Part, Pipe, RedisAway, packed
from gateway.core.pool.breaker import Health, newer
from gateway.errors import Unavailable

KEEP_S = 7_200  # longer than any rest


class RedisRests:
    """`deadline_s` bounds each command."""

    def __init__(self, redis_url: str, *, prefix: str = "baton", deadline_s: float = 0.1) -> None:
        self._pipe = Pipe(redis_url, deadline_s=deadline_s, connections_max=2)
        self._key = f"{prefix}:rests"

    async def close(self) -> None:
        """Close the connections."""
        self._pipe.close()
        await asyncio.sleep(0)  # a turn of the event loop, in which the connections end

    async def exchange(self, changed: Mapping[str, Health]) -> Mapping[str, Health]:
        """See `ports.pools.RestStore.exchange`. What another release stored and this one cannot read is left out."""
        try:
            stored = _read(await self._run("HGETALL", self._key))
            later = {name: one for name, one in changed.items() if newer(stored.get(name, Health()), one) is one}
            if later:
                fields = [part for name, one in later.items() for part in (name, json.dumps(one))]
                await self._run("HSET", self._key, *fields)
                await self._run("EXPIRE", self._key, KEEP_S)
        except RedisAway as away:
            raise Unavailable(f"rests are not shared ({away})", code="store_unavailable") from away
        return stored | later

    async def _run(self, *parts: Part) -> Any:
        """The reply to a command, which is sent again if its connection closed. Raises RedisAway."""
        try:
            reply = await self._pipe.send(packed(parts))
        except LinkLost:
            reply = await self._pipe.send(packed(parts))
        if isinstance(reply, hiredis.ReplyError):
            raise RedisAway(f"{type(reply).__name__}: {reply}")
        return reply


def _read(reply: list[bytes]) -> dict[str, Health]:
    stored: dict[str, Health] = {}
    for name, text in zip(reply[::2], reply[1::2], strict=True):
        with suppress(ValueError, TypeError):
            stored[name.decode()] = Health(*json.loads(text))
    return stored
