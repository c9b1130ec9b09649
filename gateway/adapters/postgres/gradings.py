"""Gradings in PostgreSQL: which rollouts wait for a grade, and each grade as one outcome.

A worker gets waiting gradings for a limited time; if it dies, the next worker gets them. One transaction writes the
outcome and ends the grading, so that a crash leaves neither two outcomes nor none.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.inserts import insert_outcome
from gateway.adapters.postgres.tables import gradings, rollouts
from gateway.core.log.events import uuid7
from gateway.core.log.outcome import Judgement, Outcome
from gateway.core.policies.grading import SOURCE

DETAIL_CHARS_MAX = 500


@dataclass(frozen=True, slots=True)
class Waiting:
    """A rollout to grade. `reply` is the body of the reply as logged; None if there is none."""

    rollout_id: str
    key_id: str
    grader: str
    reference: str
    attempts: int
    status: str
    reply: Mapping[str, Any] | None


class GradingStore:
    """Every call raises Unavailable when PostgreSQL is away."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def lend(self, limit: int, lease_s: float) -> Sequence[Waiting]:
        """Return up to `limit` gradings that are due, the longest waiting first. No other worker gets them for
        `lease_s`."""
        due = select(gradings.c.rollout_id).where(gradings.c.state == "waiting", gradings.c.due_at <= func.now())
        due = due.order_by(gradings.c.due_at).limit(limit).with_for_update(skip_locked=True)
        until = func.now() + timedelta(seconds=lease_s)
        change = update(gradings).where(gradings.c.rollout_id.in_(due.scalar_subquery()))
        change = change.values(attempts=gradings.c.attempts + 1, due_at=until)
        names = ("rollout_id", "grader", "reference", "attempts")
        async with transaction(self._engine) as connection:
            lent = (await connection.execute(change.returning(*(gradings.c[n] for n in names)))).mappings().all()
            ids = [row["rollout_id"] for row in lent]
            query = select(rollouts.c.id, rollouts.c.key_id, rollouts.c.status, rollouts.c.reply)
            rollout_of = {row.id: row for row in await connection.execute(query.where(rollouts.c.id.in_(ids)))}
        of = [(row, rollout_of[row["rollout_id"]]) for row in lent]
        return [Waiting(**row, key_id=r.key_id, status=r.status, reply=r.reply) for row, r in of]

    async def graded(self, waiting: Waiting, value: float, version: str, detail: str) -> bool:
        """Store the grade as an outcome. Return False if the rollout has one already."""
        outcome = Outcome(
            id=uuid7(time.time_ns() // 1_000_000),
            rollout_id=waiting.rollout_id,
            key_id=waiting.key_id,
            created_at=datetime.now(UTC),
            judgement=Judgement(kind="number", value=value, source=SOURCE, grader_version=version),
            idempotency_key=f"{SOURCE}:{waiting.rollout_id}",
        )
        done = {"state": "graded", "detail": _short(detail), "outcome_id": outcome.id}
        mine = (gradings.c.rollout_id == waiting.rollout_id) & (gradings.c.state == "waiting")
        async with transaction(self._engine) as connection:
            if not (await connection.execute(update(gradings).where(mine).values(**done))).rowcount:
                return False
            return await connection.run_sync(insert_outcome, outcome)

    async def ungraded(self, waiting: Waiting, reason: str) -> None:
        """End the grading without a grade; the rollout shows the reason."""
        await self._note(waiting, state="ungraded", detail=_short(reason))

    async def later(self, waiting: Waiting, reason: str, pause_s: float) -> None:
        """Try again after a pause."""
        await self._note(waiting, detail=_short(reason), due_at=func.now() + timedelta(seconds=pause_s))

    async def _note(self, waiting: Waiting, **values: Any) -> None:
        mine = (gradings.c.rollout_id == waiting.rollout_id) & (gradings.c.state == "waiting")
        async with transaction(self._engine) as connection:
            await connection.execute(update(gradings).where(mine).values(**values))


def _short(text: str) -> str:
    return str(rows.clean(text))[:DETAIL_CHARS_MAX]
