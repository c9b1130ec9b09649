"""What an operator looks at (port `Reports`): sums over a window, pages of rollouts, and the rollout of any key.
Read-only.

Reports use the background's connections, so that no request waits for a slow one, and at most REPORTS_MAX of them, so
that policy versions and administration do not wait either. Every statement has a time-out, every list a limit.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import CTE, ColumnElement, Float, Integer, Select, case, cast, func, literal, select, text
from sqlalchemy.dialects.postgresql import JSONPATH
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.admin_tables import keys
from gateway.adapters.postgres.database import query, transaction
from gateway.adapters.postgres.reports import books, search
from gateway.adapters.postgres.sources import known_sources
from gateway.adapters.postgres.store import PostgresStore, by_name
from gateway.adapters.postgres.tables import rollouts, steps
from gateway.core.log.counterfactual import JudgedPlan
from gateway.core.policies.earning import Rewards
from gateway.errors import Unavailable
from gateway.service.ports.admin import RolloutsQuery

REPORTS_MAX = 2
WORK_MEM = text("SELECT set_config('work_mem', '32MB', true)")  # of a sort: a day of requests fits, and needs no disk
TURN_S = 2.0  # the longest wait for a connection
STEP = timedelta(milliseconds=1)  # of the time in an id
BUCKETS = 60
JUDGED_MAX = 10_000  # latest judged requests that rule and conductor are compared on
GROUPS_MAX = 50
ALIKE_MAX = 2_000  # rounds of judged plans that an explanation reads
NEARLY_THE_SAME = 0.93  # cosine of two texts of one kind: sums are 0.94 and more alike, sums and products 0.92 at most
PLANNER_REWARDS, FIGURES = query("planner_rewards"), query("figures")
JUDGED_PLANS = query("judged_plans")
OWN_TRIES = "$[*] ? (!exists(@.worker))"  # of the attempts of a step: not those of checkers, tools and summaries
FIGURES_ROLLOUTS_MAX = 20_000  # the latest requests of versions that the figures cover
Rows = list[dict[str, Any]]


class PostgresReports:
    """`rollouts_max`: the most recent requests of a window that its sums cover. `scanned_max`: the requests that one
    page of a search looks at. `timeout_s`: time-out of each statement."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        rollouts_max: int = 200_000,
        scanned_max: int = search.SCANNED_MAX,
        timeout_s: float = 10.0,
    ) -> None:
        self._engine = engine
        self._store = PostgresStore(engine)
        self._rollouts_max = rollouts_max
        self._scanned_max = scanned_max
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(REPORTS_MAX)

    async def overview(self, until: datetime, window_s: int) -> Mapping[str, Any]:
        """Sums over the top-level rollouts of the `window_s` seconds that end at `until`."""
        since = until - timedelta(seconds=window_s)
        recent = self._recent(since, until)
        parts = {
            "totals": select(*_measures(recent)).select_from(recent),
            "series": _series(recent, since, window_s),
            "by_key": _by_key(recent),
            "by_policy": _by_policy(recent),
        }
        async with self._reading() as connection:
            tables = await _together(connection, parts)
            by_worker = await _all(connection, self._by_worker(since, until))
        (totals,) = tables["totals"]
        return {
            "since": since.astimezone(UTC).isoformat(),
            "until": until.astimezone(UTC).isoformat(),
            "truncated": totals["requests"] == self._rollouts_max,
            **tables,
            "totals": totals,
            "by_worker": by_worker,
        }

    async def planner_rewards(self, right_usd: Mapping[str, float]) -> Sequence[Rewards]:
        """The rewards of rule and conductor by organisation, pool and task type, in right answers, over the latest
        judged requests to `baton` that may train. `right_usd`: dollars that a right answer is worth, by pool."""
        values = {"right_usd": json.dumps(right_usd), "recent": JUDGED_MAX}
        async with self._reading() as connection:
            return [Rewards(*row) for row in await connection.execute(PLANNER_REWARDS, values)]

    async def figures(self, now: datetime) -> Sequence[tuple[str, str | None, float]]:
        """The gauges of the stores, see `service.admin.figures`: (gauge, value of its label or None, number)."""
        hour, day = now - timedelta(hours=1), now - timedelta(days=1)
        ids = {f"{name}_id": books.id_of(at) for name, at in (("hour", hour), ("day", day))}
        values = {**ids, "day": day, "rollouts_max": FIGURES_ROLLOUTS_MAX}
        async with self._reading() as connection:
            return [(str(row[0]), row[1], float(row[2])) for row in await connection.execute(FIGURES, values)]

    async def spend(self, until: datetime, days: int) -> Mapping[str, Any]:
        """Nano-dollars by UTC day and key, and by day and worker."""
        async with self._reading() as connection:
            return await books.spend(connection, until, days, self._rollouts_max)

    async def open_holds(self, now: datetime) -> Sequence[Mapping[str, Any]]:
        """Open holds, newest first."""
        async with self._reading() as connection:
            return await books.open_holds(connection, now)

    async def workers(self, until: datetime, window_s: int, names: Sequence[str]) -> Mapping[str, Any]:
        """Calls and errors of the window by worker, success of the named workers by kind of task, and sources."""
        since = until - timedelta(seconds=window_s)
        async with self._reading() as connection:
            return {
                "calls": await _all(connection, self._by_worker(since, until)),
                "errors": await books.errors(connection, since, self._rollouts_max),
                "success": await books.success(connection, names),
                "sources": await known_sources(connection),
            }

    async def rollouts_page(self, query: RolloutsQuery) -> Mapping[str, Any]:
        """A page of rollouts, newest first. Raises BadRequest for a `before` that did not come from a page."""
        async with self._reading() as connection:
            return await search.page(connection, query, self._scanned_max)

    async def rollout_any(self, rollout_id: str) -> Mapping[str, Any] | None:
        """The tree of a rollout of any key, by rollout or completion id; values that JSON cannot represent are null."""
        async with self._reading() as connection:
            named = select(rollouts.c.key_id).where(by_name(rollout_id)).order_by(rollouts.c.depth).limit(1)
            owner = await connection.scalar(named)
        tree = None if owner is None else await self._store.rollout_get(rollout_id, owner)
        return None if tree is None else rows.clean(tree)

    async def judged_plans(self, rollout_id: str, key: str | None) -> tuple[str, Sequence[JudgedPlan]]:
        """Judged requests like a rollout, of its organisation and of one key or all, and what they have in common."""
        c = rollouts.c
        wanted = select(c.org, c.pool_name, c.task_type, c.task_embedding, c.task_embedder).where(c.id == rollout_id)
        async with self._reading() as connection:
            own = (await connection.execute(wanted)).mappings().first()
            if own is None or not (own["task_type"] or own["task_embedding"]):
                return "none: the request has neither a task type nor a vector", ()
            values = {"org": own["org"], "pool": own["pool_name"], "rollout": rollout_id, "key": key}
            values |= {"task_type": own["task_type"], "embedder": own["task_embedder"]}
            values |= {"recent": JUDGED_MAX, "most": ALIKE_MAX}
            judged = (await connection.execute(JUDGED_PLANS, values)).mappings().all()
        if own["task_type"]:
            return f"requests of task type {own['task_type']}", rows.judged_plans_of(judged)
        near = [row for row in judged if rows.cosine(row["embedding"], own["task_embedding"]) >= NEARLY_THE_SAME]
        what = f"requests with nearly this text (cosine of {NEARLY_THE_SAME:g} or more); a task type would say more"
        return what, rows.judged_plans_of(near)

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[AsyncConnection]:
        """A transaction, once fewer than REPORTS_MAX others read. Raises Unavailable."""
        try:
            async with asyncio.timeout(TURN_S):
                await self._turns.acquire()
        except TimeoutError:
            raise Unavailable(f"{REPORTS_MAX} reports are read already; retry shortly", code="reports_busy") from None
        try:
            async with transaction(self._engine, self._timeout_s) as connection:
                await connection.execute(WORK_MEM)
                yield connection
        finally:
            self._turns.release()

    def _recent(self, since: datetime, until: datetime) -> CTE:
        """The rollouts of a window with their latency, without child loops."""
        latency_ms = _seconds(rollouts.c.finished_at - rollouts.c.created_at) * 1000
        names = ("id", "created_at", "key_id", "policy_used", "status", "fallback", "capped", "cost_nano")
        query = select(*(rollouts.c[name] for name in names), rollouts.c.overhead_ms, latency_ms.label("latency_ms"))
        query = query.where(rollouts.c.created_at > since, rollouts.c.created_at <= until, rollouts.c.depth == 0)
        return query.order_by(rollouts.c.created_at.desc()).limit(self._rollouts_max).cte("recent")

    def _by_worker(self, since: datetime, until: datetime) -> Select[Any]:
        """Steps by worker, child loops included; latencies are of steps that succeeded. What a step on `self` cost
        counts once, with the steps of its own loop. The window is one of ids, to the millisecond: rollouts themselves
        need not be read."""
        first, after = (literal(books.id_of(at + STEP), rollouts.c.id.type) for at in (since, until))
        ids = select(rollouts.c.id).where(rollouts.c.id >= first, rollouts.c.id < after).order_by(rollouts.c.id.desc())
        cut = ids.offset(self._rollouts_max - 1).limit(1).scalar_subquery()  # null: the window holds fewer
        within = (steps.c.rollout_id < after, steps.c.rollout_id >= func.coalesce(cut, first))
        took_ms = _seconds(steps.c.finished_at - steps.c.started_at) * 1000
        well = steps.c.status == "done"
        tries, own_tries = steps.c.attempts, func.jsonb_path_query_array(steps.c.attempts, cast(OWN_TRIES, JSONPATH))
        more = func.greatest(func.jsonb_array_length(own_tries) - 1, 0)
        tried_again = case((func.jsonb_array_length(tries) > 1, more), else_=0)  # a path is dear, and most have one
        called = steps.c.status.not_in(("refused", "skipped"))  # for want of money or time, or by the plan
        calls = func.count().filter(called).label("calls")
        own = steps.c.child_rollout_id.is_(None)
        query = select(
            steps.c.worker,
            calls,
            func.count().filter(steps.c.status == "failed").label("errors"),
            func.coalesce(func.sum(tried_again), 0).label("retries"),
            func.coalesce(func.sum(steps.c.cost_nano).filter(own), 0).label("cost_nano"),
            func.coalesce(func.sum(steps.c.prompt_tokens + steps.c.completion_tokens).filter(own), 0).label("tokens"),
            _quantile(0.5, took_ms).filter(well).label("latency_p50_ms"),
            _quantile(0.95, took_ms).filter(well).label("latency_p95_ms"),
        ).where(*within)
        return query.group_by(steps.c.worker).order_by(calls.desc(), steps.c.worker).limit(GROUPS_MAX)


# ---------------------------------------------------------------- sums over a window


def _seconds(interval: ColumnElement[Any]) -> Any:
    """Seconds as a float; those of `extract` are numeric, and slow to sum and to sort."""
    return func.date_part("epoch", interval, type_=Float)


def _quantile(share: float, value: ColumnElement[Any]) -> Any:
    return func.percentile_cont(share).within_group(value)


def _measures(recent: CTE) -> list[Any]:
    """The figures of any set of requests. `errors` failed; the client left `aborted`."""
    c = recent.c
    return [
        func.count().label("requests"),
        func.count().filter(c.status == "failed").label("errors"),
        func.count().filter(c.status == "aborted").label("aborted"),
        func.count().filter(c.fallback.is_not(None)).label("fallbacks"),
        func.count().filter(c.capped.is_not(None)).label("capped"),
        func.coalesce(func.sum(c.cost_nano), 0).label("cost_nano"),
        _quantile(0.5, c.latency_ms).label("latency_p50_ms"),
        _quantile(0.95, c.latency_ms).label("latency_p95_ms"),
        _quantile(0.5, c.overhead_ms).label("overhead_p50_ms"),
        _quantile(0.95, c.overhead_ms).label("overhead_p95_ms"),
    ]


def _by_policy(recent: CTE) -> Select[Any]:
    query = select(recent.c.policy_used.label("policy"), *_measures(recent)).group_by(recent.c.policy_used)
    return query.order_by(func.count().desc(), recent.c.policy_used).limit(GROUPS_MAX)


def _by_key(recent: CTE) -> Select[Any]:
    """Keys are named once their requests are summed: a join of each request costs as much as its sums."""
    key, count = recent.c.key_id, func.count()
    summed = select(key, *_measures(recent)).group_by(key).order_by(count.desc(), key).limit(GROUPS_MAX).subquery()
    named = summed.outerjoin(keys, keys.c.public_id == summed.c.key_id)
    query = select(summed.c.key_id, keys.c.name.label("key_name"), *list(summed.c)[1:]).select_from(named)
    return query.order_by(summed.c.requests.desc(), summed.c.key_id)


def _series(recent: CTE, since: datetime, window_s: int) -> Select[Any]:
    """The window in `BUCKETS` equal parts, oldest first, without the parts that have no request."""
    age_s = _seconds(recent.c.created_at - since)
    bucket = func.least(cast(func.floor(age_s * BUCKETS / window_s), Integer), BUCKETS - 1).label("bucket")
    return select(bucket, *_measures(recent)).group_by(bucket).order_by(bucket)


async def _all(connection: AsyncConnection, query: Select[Any]) -> Rows:
    """Rows as dicts for JSON: PostgreSQL's sums are numeric, the replies' are int."""
    records = (await connection.execute(query)).mappings()
    return [_plain(row) for row in records]


async def _together(connection: AsyncConnection, queries: Mapping[str, Select[Any]]) -> dict[str, Rows]:
    """The rows of several queries over one set of requests, in one statement: PostgreSQL then reads the set once."""
    tables = {name: query.subquery(f"of_{name}") for name, query in queries.items()}
    rows_of = (
        select(func.json_agg(func.row_to_json(table.table_valued()))).select_from(table).scalar_subquery().label(name)
        for name, table in tables.items()
    )
    found = (await connection.execute(select(*rows_of))).mappings().one()
    return {name: [_plain(row) for row in found[name] or ()] for name in queries}


def _plain(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {name: _number(name, value) for name, value in row.items()}


def _number(name: str, value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    return round(float(value), 3) if name.endswith("_ms") else int(value)
