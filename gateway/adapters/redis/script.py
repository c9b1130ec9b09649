"""One Lua script on one Redis, with a hard deadline; budgets and rate limits share it.

Every failure of Redis (refused, hung, restarting, read-only, out of memory) is the one error RedisAway.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, cast

import hiredis

from gateway.adapters.redis.pipe import LinkLost, Part, Pipe, RedisAway, packed

__all__ = ["RedisAway", "RedisScript"]


class RedisScript:
    """`deadline_s` bounds the wait for the reply, and the wait for a connection; at most `connections_max` connections
    are open, of which one takes new calls. The file's script must be idempotent."""

    def __init__(self, url: str, file_name: str, *, deadline_s: float, connections_max: int) -> None:
        self._pipe = Pipe(url, deadline_s=deadline_s, connections_max=connections_max)
        self._text = (files("gateway.adapters.redis") / file_name).read_text(encoding="utf-8")
        self._digest = hashlib.sha1(self._text.encode(), usedforsecurity=False).hexdigest()  # Redis's name of a script

    async def __call__(self, keys: Sequence[str], args: Sequence[Part]) -> list[Any]:
        """Run the script and return its reply: integers and bytes. Raises RedisAway."""
        reply = await self._reply("EVALSHA", self._digest, keys, args)
        if isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT"):
            reply = await self._reply("EVAL", self._text, keys, args)
        if isinstance(reply, hiredis.ReplyError):
            raise RedisAway(f"{type(reply).__name__}: {reply}")
        return cast(list[Any], reply)

    async def _reply(self, command: str, script: str, keys: Sequence[str], args: Sequence[Part]) -> Any:
        """Send the command, and again if its connection closed, as Redis closes idle ones."""
        data = packed((command, script, len(keys), *keys, *args))
        try:
            return await self._pipe.send(data)
        except LinkLost:
            return await self._pipe.send(data)

    async def close(self) -> None:
        self._pipe.close()
        await asyncio.sleep(0)  # a turn of the event loop, in which the connections end
