"""Vectors that an earlier embedder left in the experience, computed again from the logged questions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ARRAY, REAL, Select, bindparam, cast, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.rows import question_vector
from gateway.adapters.postgres.tables import experience, rollouts
from gateway.core.loop.experience import Embedding

BATCH = 100  # rows a transaction
TIMEOUT_S = 60.0
_e = experience.c
_KEY = (_e.rollout_id, _e.round, _e.step)
_SET = (
    update(experience)
    .where(*(column == bindparam(f"of_{column.name}") for column in _KEY))
    .values(embedding=cast(bindparam("vector"), ARRAY(REAL)), embedder=bindparam("name"))
)


class OldVectors:
    """Gives each stored vector of an embedder that `embedding` replaces, or of none known, a vector of `embedding`.

    It goes through the experience once, newest first, and then rests until the next start. A gateway that is killed in
    between goes on where it was, because rows of the present embedder are skipped. Several gateways share the work.
    """

    def __init__(self, engine: AsyncEngine, embedding: Embedding | None) -> None:
        """`embedding`: None for an endpoint, whose calls nobody ordered."""
        self._engine = engine
        self._embedding = embedding
        self._is_done = embedding is None or not embedding.replaces
        self._last: tuple[Any, ...] | None = None  # the key of the last row looked at

    async def sweep(self, limit: int) -> int:
        """Replace up to `limit` vectors and return their number. A row whose question is not logged loses its vector.
        Raises Unavailable."""
        count = 0
        while self._embedding is not None and not self._is_done and count < limit:
            replaced = await self._batch(self._embedding, min(BATCH, limit - count))
            count += replaced
            self._is_done = not replaced
        return count

    async def _batch(self, embedding: Embedding, size: int) -> int:
        async with transaction(self._engine, TIMEOUT_S) as connection:
            old = (await connection.execute(self._old(embedding).limit(size))).all()
            changes = []
            for row in old:
                changes.append(_change(row, embedding))
                await asyncio.sleep(0)  # requests go on between two texts
            if changes:
                await connection.execute(_SET, changes)
        if old:
            self._last = tuple(old[-1][:3])
        return len(old)

    def _old(self, embedding: Embedding) -> Select[Any]:
        """(key, request) of rows with a vector to replace, newest first. Rows that another gateway works on are left
        to it."""
        query = select(*_KEY, rollouts.c.request).join(rollouts, rollouts.c.id == _e.rollout_id)
        query = query.where(_e.embedding.is_not(None), or_(_e.embedder.is_(None), _e.embedder.in_(embedding.replaces)))
        if self._last is not None:
            query = query.where(tuple_(*_KEY) < self._last)
        query = query.order_by(*(column.desc() for column in _KEY))
        return query.with_for_update(of=experience, skip_locked=True)


def _change(row: Sequence[Any], embedding: Embedding) -> dict[str, Any]:
    rollout_id, round_index, step, request = row
    vector = question_vector(request or {}, embedding)
    key = {"of_rollout_id": rollout_id, "of_round": round_index, "of_step": step}
    return key | {"vector": vector if any(vector) else None, "name": embedding.name}
