"""The breakers of workers (port `RestStore`) in Redis, where every process and gateway finds them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress

from gateway.adapters.redis.script import RedisAway, RedisScript
from gateway.core.pool.breaker import Health
from gateway.errors import Unavailable

KEEP_S = 7_200.0  # longer than any rest


class RedisRests:
    """`deadline_s` bounds each exchange."""

    def __init__(self, redis_url: str, *, prefix: str = "baton", deadline_s: float = 0.1) -> None:
        self._script = RedisScript(redis_url, "rests.lua", deadline_s=deadline_s, connections_max=2)
        self._key = "{" + prefix + ":rests}"

    async def close(self) -> None:
        """Close the connections."""
        await self._script.close()

    async def exchange(self, changed: Mapping[str, Health]) -> Mapping[str, Health]:
        """See `ports.pools.RestStore.exchange`. What another release stored and this one cannot read is left out."""
        entries = [part for name, one in changed.items() for part in (name, f"{one.at_s:.6f}", json.dumps(one))]
        try:
            reply = [bytes(part).decode() for part in await self._script([self._key], [round(KEEP_S * 1000), *entries])]
        except RedisAway as away:
            raise Unavailable(f"rests are not shared ({away})", code="store_unavailable") from away
        stored: dict[str, Health] = {}
        for name, text in zip(reply[::2], reply[1::2], strict=True):
            with suppress(ValueError, TypeError):
                stored[name] = Health(*json.loads(text))
        return stored
