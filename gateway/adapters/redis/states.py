"""The vendor state of tool calls (port `CallStates`) in Redis, where every gateway finds it with the next turn.

The log is no place for it: it may be behind, and by log mode it keeps no text. What one API key keeps is bounded in
bytes and in time, so that a busy key cannot fill the Redis that holds the money.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.adapters.redis.script import RedisAway, RedisScript
from gateway.errors import Unavailable

BYTES_PER_KEY_MAX = 8 << 20


class RedisCallStates:
    """`deadline_s` bounds each call; `bytes_max` what one API key keeps."""

    def __init__(
        self,
        redis_url: str,
        *,
        prefix: str = "baton",
        deadline_s: float = 0.1,
        connections_max: int = 64,
        bytes_max: int = BYTES_PER_KEY_MAX,
    ) -> None:
        self._script = RedisScript(redis_url, "states.lua", deadline_s=deadline_s, connections_max=connections_max)
        self._prefix = prefix
        self._bytes_max = bytes_max

    async def close(self) -> None:
        await self._script.close()

    async def keep(self, key_id: str, states: Mapping[str, bytes], keep_s: float) -> None:
        pairs = [part for pair in states.items() for part in pair]
        await self._run(key_id, ["put", _ms(keep_s), self._bytes_max, *pairs])

    async def load(self, key_id: str, ids: Sequence[str], keep_s: float) -> Mapping[str, bytes]:
        reply = [bytes(part) for part in await self._run(key_id, ["load", _ms(keep_s), *ids])]
        return {name.decode(): state for name, state in zip(reply[::2], reply[1::2], strict=True)}

    async def _run(self, key_id: str, args: Sequence[str | int | bytes]) -> Sequence[bytes]:
        tag = "{" + f"{self._prefix}:{key_id}" + "}"
        try:
            return await self._script([f"{tag}:states", f"{tag}:states:at"], args)
        except RedisAway as away:
            raise Unavailable(f"vendor state is not kept ({away})", code="store_unavailable") from away


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
