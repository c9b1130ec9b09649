"""The worker that a conversation goes back to (port `Conversations`): Redis first, then the log.

Redis is written before the reply ends. The log learns the same a moment later from the rollouts that the shipper
stores: it answers when Redis is away, was emptied or was restarted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from gateway.adapters.redis.script import RedisAway, RedisScript
from gateway.core.loop.turns.replanning import TurnFacts
from gateway.errors import Unavailable
from gateway.service.ports.turns import ConversationLog, LastTurn, TurnMarks


class RedisConversations:
    """`logged`: the conversations of the log. `deadline_s` bounds the call to Redis, `timeout_s` the whole look-up."""

    def __init__(
        self,
        redis_url: str,
        logged: ConversationLog,
        *,
        prefix: str = "baton",
        deadline_s: float = 0.1,
        timeout_s: float = 0.25,
        connections_max: int = 64,
    ) -> None:
        self._script = RedisScript(
            redis_url, "conversations.lua", deadline_s=deadline_s, connections_max=connections_max
        )
        self._logged = logged
        self._prefix = prefix
        self._timeout_s = timeout_s

    async def close(self) -> None:
        await self._script.close()

    async def remember(self, turn: TurnMarks) -> None:
        if not turn.marks:
            return
        times = [max(1, round(seconds * 1000)) for seconds in turn.marks.values()]
        try:
            await self._script(self._keys(turn.key_id, list(turn.marks)), ["put", _text(turn), *times])
        except RedisAway as away:
            raise Unavailable(f"conversations are not remembered ({away})", code="store_unavailable") from away

    async def find(self, key_id: str, marks: Sequence[str]) -> LastTurn | None:
        if not marks:
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._remembered(key_id, marks) or await self._logged.find(key_id, marks)
        except TimeoutError:
            raise Unavailable("conversations cannot be looked up in time", code="store_unavailable") from None

    async def sweep(self, limit: int) -> int:
        return await self._logged.sweep(limit)  # Redis expires its own

    async def _remembered(self, key_id: str, marks: Sequence[str]) -> LastTurn | None:
        try:
            reply = await self._script(self._keys(key_id, marks), ["find"])
        except RedisAway:
            return None
        return _turn(bytes(reply[0]).decode()) if reply else None

    def _keys(self, key_id: str, marks: Sequence[str]) -> list[str]:
        tag = "{" + f"{self._prefix}:{key_id}" + "}"
        return [f"{tag}:turn:{mark}" for mark in marks]


def _text(turn: TurnMarks) -> str:
    """The worker, whose name has no white space, and behind it the facts."""
    return f"{turn.worker}\n{json.dumps(turn.facts.as_json(), separators=(',', ':'))}"


def _turn(text: str) -> LastTurn:
    """What `_text` wrote. A worker alone was written before there were facts."""
    worker, _, facts = text.partition("\n")
    return LastTurn(worker, TurnFacts.read(json.loads(facts)) if facts else TurnFacts())
