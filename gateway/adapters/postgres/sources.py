"""How far each source of outcomes is believed: measured in the log, stored by organisation, and what it weighs in
experience."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from sqlalchemy import ColumnElement, and_, bindparam, cast, func, select, tuple_, update
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres.database import query, transaction
from gateway.adapters.postgres.tables import experience, sources
from gateway.core.loop.evidence.calibration import Calibration
from gateway.core.loop.evidence.sources import JUDGE, SIGNAL, Reliability, Said, reliabilities

JUDGED_MAX = 50_000  # the latest judged requests, of all organisations, that sources are compared on
ALIKE_MAX = 20_000  # groups of requests of which the same was said by the same sources
CHANGED_MAX = 5_000  # rows of experience that one sweep gives another weight
CHANGE_MIN = 0.02  # of a weight, below which experience is left as it is
TIMEOUT_S = 60.0
LOCK_KEY = 0x736F7572  # "sour": one gateway at a time measures
SAID_TOGETHER = query("said_together")


def is_posted(source: ColumnElement[str]) -> ColumnElement[bool]:
    """Whether somebody posted the outcome: neither a judge's nor a signal's."""
    return and_(~func.starts_with(source, JUDGE), ~func.starts_with(source, SIGNAL))


def is_heard(source: ColumnElement[str]) -> ColumnElement[bool]:
    """Whether an outcome counts beyond experience: where requests are compared one by one a signal is too weak."""
    return ~func.starts_with(source, SIGNAL)


def what_counts_first(of: Any) -> tuple[ColumnElement[Any], ColumnElement[Any]]:
    """The order of the outcomes of one request, of the table's columns `of`: a judge's after those that somebody
    posted, and then the latest."""
    return func.starts_with(of.source, JUDGE), of.created_at.desc()


class PostgresSources:
    """Measures sources. Every call raises Unavailable when PostgreSQL is away."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def sweep(self, _limit: int) -> int:
        """Measure every source, and weigh experience anew where a weight has changed. Returns 0: there is no more."""
        async with transaction(self._engine, TIMEOUT_S) as connection:
            if not await connection.scalar(select(func.pg_try_advisory_xact_lock(LOCK_KEY))):
                return 0  # another gateway does
            groups = await connection.execute(SAID_TOGETHER, {"recent": JUDGED_MAX, "most": ALIKE_MAX})
            said: dict[str, list[Said]] = defaultdict(list)
            for org, names, values, count in groups:
                said[org].append(Said(dict(zip(names, values, strict=True)), count))
            rows = [_row(org, one) for org, replies in said.items() for one in reliabilities(replies).values()]
            if rows:
                await connection.execute(_STORE, rows)
            await connection.execute(_WEIGH)
        return 0


_WEIGHTS = ("weight_right", "weight_wrong")
_CELLS = ("right_accepted", "right_rejected", "wrong_accepted", "wrong_rejected")


async def known_sources(connection: AsyncConnection) -> list[dict[str, Any]]:
    """What was measured of every source, as JSON, by organisation and name."""
    rows = await connection.execute(select(sources).order_by(*sources.primary_key.columns))
    cells = [(row, {name: row[name] for name in _CELLS}) for row in rows.mappings()]
    return [{"org": row["org"], **Reliability(Calibration(row["source"], **seen)).as_json()} for row, seen in cells]


def _row(org: str, known: Reliability) -> dict[str, Any]:
    cells = {name: getattr(known.seen, name) for name in _CELLS}
    return {"org": org, "source": known.source, **cells, **dict(zip(_WEIGHTS, known.weights, strict=True))}


def _store_statement() -> Any:
    new = pg.insert(sources).values(
        **{name: bindparam(name) for name in ("org", "source", *_CELLS, *_WEIGHTS)}, measured_at=func.clock_timestamp()
    )
    changed = (*_CELLS, *_WEIGHTS, "measured_at")
    return new.on_conflict_do_update(
        index_elements=list(sources.primary_key.columns), set_={name: new.excluded[name] for name in changed}
    )


def _weigh_statement() -> Any:
    """Give the latest steps whose source weighs another now that weight."""
    e, s = experience.c, sources.c
    key = (e.rollout_id, e.round, e.step)
    now = e.success * s.weight_right + (1 - e.success) * s.weight_wrong
    stale = select(*key, now.label("now")).join(sources, and_(s.org == e.org, s.source == e.source))
    stale = stale.where(func.abs(e.weight - now) > CHANGE_MIN).order_by(e.rollout_id.desc()).limit(CHANGED_MAX)
    old = stale.subquery()
    change = update(experience).values(weight=cast(old.c.now, e.weight.type), changed_at=func.clock_timestamp())
    return change.where(tuple_(*key) == tuple_(old.c.rollout_id, old.c.round, old.c.step))


_STORE, _WEIGH = _store_statement(), _weigh_statement()
