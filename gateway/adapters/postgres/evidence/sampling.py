"""Which requests the sampled judge judges: a share of those that it may be shown, and first those that people judged.

A request is drawn by a hash of its id, and what is drawn waits in `gradings`. So nothing is drawn twice, a crash loses
nothing, and several workers share the work. A judge is a worker that is shown texts: a request is drawn only if its key
and itself may train, its log has the texts, its key takes signals, and its key may use the judge.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Double,
    Select,
    Text,
    and_,
    cast,
    exists,
    func,
    literal,
    or_,
    select,
)
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres.admin_tables import keys
from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.reports.books import id_of
from gateway.adapters.postgres.sources import is_posted
from gateway.adapters.postgres.tables import gradings, outcomes, rollouts, sources
from gateway.core.loop.evidence.sources import JUDGE
from gateway.core.pool.workers import EVERY_POOL

LOOK_BACK_FIRST = timedelta(hours=1)  # at a start: older requests that were missed stay unjudged
LOOK_BACK = timedelta(seconds=30)  # since a request began, at most looks
LOOK_BACK_FAR = timedelta(minutes=15)  # for long requests, and a log that came late: once in FAR_S
FAR_S = 60.0
COMPARED_WANTED = 60  # replies that somebody judged too, until the judge's reliability is measured
COMPARED_SHARE = 0.5  # of requests that somebody judged, until then
TEXTS = ("full", "redacted")  # log modes with texts
_BUCKETS = 2**20


@dataclass(frozen=True, slots=True)
class SampledJudge:
    """`worker` judges `share` of the requests."""

    worker: str
    share: float

    @property
    def source(self) -> str:
        """The source of its outcomes, and the grader that its requests wait for."""
        return JUDGE + self.worker


class JudgeSample:
    """Draws requests. Every call raises Unavailable when PostgreSQL is away."""

    def __init__(self, engine: AsyncEngine, judge: SampledJudge) -> None:
        self._engine = engine
        self._judge = judge
        self._far_s: float | None = None  # when it last looked far back, by the monotonic clock

    async def draw(self, limit: int, pools: Sequence[str]) -> int:
        """Let up to `limit` requests wait for the judge, a worker of `pools`. Returns their number."""
        since = id_of(datetime.now(UTC) - self._look_back())
        async with transaction(self._engine) as connection:
            drawn = await self._wait(connection, self._sampled(since, pools), limit)
            if drawn < limit and await self._compared(connection) < COMPARED_WANTED:
                drawn += await self._wait(connection, self._judged(since, pools), limit - drawn)
        return drawn

    def _look_back(self) -> timedelta:
        now_s = time.monotonic()
        if self._far_s is not None and now_s < self._far_s + FAR_S:
            return LOOK_BACK
        first, self._far_s = self._far_s is None, now_s
        return LOOK_BACK_FIRST if first else LOOK_BACK_FAR

    async def _wait(self, connection: AsyncConnection, drawn: Select[Any], limit: int) -> int:
        names = ("rollout_id", "grader", "reference", "state", "attempts", "created_at", "due_at")
        new = pg.insert(gradings).from_select(names, drawn.limit(limit)).on_conflict_do_nothing()
        return len((await connection.execute(new.returning(gradings.c.rollout_id))).all())

    async def _compared(self, connection: AsyncConnection) -> float:
        s = sources.c
        n = func.sum(s.right_accepted + s.right_rejected + s.wrong_accepted + s.wrong_rejected)
        return float(await connection.scalar(select(n).where(s.source == self._judge.source)) or 0)

    def _sampled(self, since: str, pools: Sequence[str]) -> Select[Any]:
        r = rollouts.c
        return self._showable(self._judge.share, pools).where(r.id > since).order_by(r.id)

    def _judged(self, since: str, pools: Sequence[str]) -> Select[Any]:
        r, o = rollouts.c, outcomes.c
        latest = select(o.rollout_id).where(o.id > since, is_posted(o.source), o.value.is_not(None), o.step.is_(None))
        return self._showable(COMPARED_SHARE, pools).where(r.id.in_(latest)).order_by(r.id)

    def _showable(self, share: float, pools: Sequence[str]) -> Select[Any]:
        """The rows of `gradings` for that share of the requests that the judge may be shown and was not."""
        r, k = rollouts.c, keys.c
        values = (r.id, literal(self._judge.source), func.coalesce(r.task_type, ""), literal("waiting"), literal(0))
        query = select(*values, r.created_at, func.clock_timestamp()).join(keys, k.public_id == r.key_id)
        has_texts = and_(r.log_mode.in_(TEXTS), k.log_mode.in_(TEXTS))
        has_texts = and_(has_texts, r.request.has_key("messages"), r.reply.has_key("choices"))
        may_train = and_(r.train, k.train, k.signals)
        waits = exists().where(gradings.c.rollout_id == r.id)
        query = query.where(r.depth == 0, r.status == "done", has_texts, may_train, ~waits, _drawn(r.id, share))
        return query.where(
            _is_empty_or_has(k.workers, [self._judge.worker]), _is_empty_or_has(k.pools, [*pools, EVERY_POOL])
        )


def _drawn(rollout_id: ColumnElement[Any], share: float) -> ColumnElement[bool]:
    """Whether an id is in the share: uniform over ids, and the same at every look."""
    bucket = func.hashtextextended(cast(rollout_id, Text), 0).op("&")(_BUCKETS - 1)
    return cast(bucket, Double) < share * _BUCKETS


def _is_empty_or_has(names: ColumnElement[Any], one_of: Sequence[str]) -> ColumnElement[bool]:
    """Whether a list of names allows all, or one of these."""
    return or_(func.cardinality(names) == 0, names.op("&&")(cast(list(one_of), pg.ARRAY(Text))))
