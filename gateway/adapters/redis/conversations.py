"""Which worker a conversation goes back to (port `Conversations`): Redis first, PostgreSQL where Redis does not know.

Redis is written before the reply ends. PostgreSQL has the same from the rollouts that the shipper stores, a moment
later: it answers for a Redis that is away, was emptied, or was restarted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.tables_turns import continuations
from gateway.adapters.redis.script import RedisAway, RedisScript
from gateway.errors import Unavailable
from gateway.service.ports.turns import Answered

FOUND_MAX = 64


class StoredConversations:
    """`deadline_s` bounds Redis, `timeout_s` the whole look-up, PostgreSQL included."""

    def __init__(
        self,
        redis_url: str,
        engine: AsyncEngine,
        *,
        prefix: str = "baton",
        deadline_s: float = 0.1,
        timeout_s: float = 0.25,
        connections_max: int = 64,
    ) -> None:
        self._script = RedisScript(
            redis_url, "conversations.lua", deadline_s=deadline_s, connections_max=connections_max
        )
        self._engine = engine
        self._prefix = prefix
        self._timeout_s = timeout_s

    async def close(self) -> None:
        await self._script.close()

    async def remember(self, answered: Answered) -> None:
        if not answered.marks:
            return
        times = [max(1, round(seconds * 1000)) for seconds in answered.marks.values()]
        try:
            await self._script(self._keys(answered.key_id, list(answered.marks)), ["put", answered.worker, *times])
        except RedisAway as away:
            raise Unavailable(f"conversations are not remembered ({away})", code="store_unavailable") from away

    async def find(self, key_id: str, marks: Sequence[str]) -> str | None:
        if not marks:
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._known(key_id, marks) or await self._logged(key_id, marks)
        except TimeoutError:
            raise Unavailable("conversations cannot be looked up in time", code="store_unavailable") from None

    async def _known(self, key_id: str, marks: Sequence[str]) -> str | None:
        try:
            found = await self._script(self._keys(key_id, marks), ["find"])
        except RedisAway:
            return None
        return bytes(found[0]).decode() if found else None

    async def _logged(self, key_id: str, marks: Sequence[str]) -> str | None:
        c = continuations.c
        query = select(c.mark, c.worker).where(c.key_id == key_id, c.mark.in_(marks), c.until > func.now())
        async with transaction(self._engine) as connection:
            workers = {mark: worker for mark, worker in await connection.execute(query.limit(FOUND_MAX))}
        return next((workers[mark] for mark in marks if mark in workers), None)

    async def sweep(self, limit: int) -> int:
        c = continuations.c
        some = select(c.key_id, c.mark).where(c.until <= func.now()).limit(limit).with_for_update(skip_locked=True)
        old = some.cte("old")
        gone = delete(continuations).where(c.key_id == old.c.key_id, c.mark == old.c.mark)
        async with transaction(self._engine) as connection:
            return int((await connection.execute(gone)).rowcount)

    def _keys(self, key_id: str, marks: Sequence[str]) -> list[str]:
        tag = "{" + f"{self._prefix}:{key_id}" + "}"
        return [f"{tag}:turn:{mark}" for mark in marks]
