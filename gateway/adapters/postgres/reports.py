"""What an operator looks at (port `Reports`): sums over a window, pages of rollouts, and the rollout of any key.
Read-only.

Reports use the background's connections, so that no request waits for a slow one, and at most REPORTS_MAX of them, so
that policy versions and administration do not wait either. Every statement has a time-out, every list a limit.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import CTE, ColumnElement, Integer, Select, cast, func, literal, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.admin_tables import keys
from gateway.adapters.postgres.database import query, transaction
from gateway.adapters.postgres.store import PostgresStore, by_name
from gateway.adapters.postgres.tables import rollouts, steps
from gateway.core.policies.earning import Rewards
from gateway.errors import BadRequest, Unavailable
from gateway.service.ports.admin import RolloutsQuery

REPORTS_MAX = 2
TURN_S = 2.0  # the longest wait for a connection
BUCKETS = 60
JUDGED_MAX = 10_000  # latest judged requests that rule and conductor are compared on
GROUPS_MAX = 50
CURSOR = re.compile(r"(\d{1,17})\.([0-9a-f-]{36})")
PLANNER_REWARDS = query("planner_rewards")
Rows = list[dict[str, Any]]


class PostgresReports:
    """`rollouts_max`: the most recent requests of a window that its sums cover. `timeout_s`: time-out of each
    statement."""

    def __init__(self, engine: AsyncEngine, *, rollouts_max: int = 200_000, timeout_s: float = 10.0) -> None:
        self._engine = engine
        self._store = PostgresStore(engine)
        self._rollouts_max = rollouts_max
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(REPORTS_MAX)

    async def overview(self, until: datetime, window_s: int) -> Mapping[str, Any]:
        """Sums over the top-level rollouts of the `window_s` seconds that end at `until`."""
        since = until - timedelta(seconds=window_s)
        recent = self._recent(since, until)
        async with self._reading() as connection:
            totals = (await _all(connection, select(*_measures(recent)).select_from(recent)))[0]
            return {
                "since": since.astimezone(UTC).isoformat(),
                "until": until.astimezone(UTC).isoformat(),
                "truncated": totals["requests"] == self._rollouts_max,
                "totals": totals,
                "series": await _all(connection, _series(recent, since, window_s)),
                "by_key": await _all(connection, _by_key(recent)),
                "by_policy": await _all(connection, _by_policy(recent)),
                "by_worker": await _all(connection, self._by_worker(since, until)),
            }

    async def planner_rewards(self, success: float, cost_per_usd: float) -> Sequence[Rewards]:
        """The rewards of rule and conductor by pool and task type, over the latest judged requests to `baton` that may
        train. The arguments are the weights of an outcome and of a dollar."""
        values = {"success": success, "cost": cost_per_usd, "recent": JUDGED_MAX}
        async with self._reading() as connection:
            return [Rewards(*row) for row in await connection.execute(PLANNER_REWARDS, values)]

    async def rollouts_page(self, query: RolloutsQuery) -> Mapping[str, Any]:
        """A page of rollouts, newest first. Raises BadRequest for a `before` that did not come from a page."""
        wanted = _page(query).limit(query.limit + 1)
        async with self._reading() as connection:
            records = (await connection.execute(wanted)).mappings().all()
            shown = records[: query.limit]
            called = await _workers_of(connection, [row["id"] for row in shown])
        more = len(records) > len(shown)
        return {
            "object": "list",
            "data": [_line(row, called.get(row["id"], [])) for row in shown],
            "next": _cursor(shown[-1]) if more else None,
        }

    async def rollout_any(self, rollout_id: str) -> Mapping[str, Any] | None:
        """The tree of a rollout of any key, by rollout or completion id; values that JSON cannot represent are null."""
        async with self._reading() as connection:
            named = select(rollouts.c.key_id).where(by_name(rollout_id)).order_by(rollouts.c.depth).limit(1)
            owner = await connection.scalar(named)
        tree = None if owner is None else await self._store.rollout_get(rollout_id, owner)
        return None if tree is None else rows.clean(tree)

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
                yield connection
        finally:
            self._turns.release()

    def _recent(self, since: datetime, until: datetime, *, children: bool = False) -> CTE:
        """The rollouts of a window with their latency, with or without child loops."""
        latency_ms = func.extract("epoch", rollouts.c.finished_at - rollouts.c.created_at) * 1000
        names = ("id", "created_at", "key_id", "policy_used", "status", "fallback", "capped", "cost_nano")
        query = select(*(rollouts.c[name] for name in names), rollouts.c.overhead_ms, latency_ms.label("latency_ms"))
        query = query.where(rollouts.c.created_at > since, rollouts.c.created_at <= until)
        if not children:
            query = query.where(rollouts.c.depth == 0)
        return query.order_by(rollouts.c.created_at.desc()).limit(self._rollouts_max).cte("recent")

    def _by_worker(self, since: datetime, until: datetime) -> Select[Any]:
        """Steps by worker, child loops included; latencies are of steps that succeeded."""
        recent = self._recent(since, until, children=True)
        took_ms = func.extract("epoch", steps.c.finished_at - steps.c.started_at) * 1000
        well = steps.c.status == "done"
        tried_again = func.greatest(func.jsonb_array_length(steps.c.attempts) - 1, 0)
        calls = func.count().label("calls")
        query = select(
            steps.c.worker,
            calls,
            func.count().filter(steps.c.status == "failed").label("errors"),
            func.coalesce(func.sum(tried_again), 0).label("retries"),
            func.sum(steps.c.cost_nano).label("cost_nano"),
            func.sum(steps.c.prompt_tokens + steps.c.completion_tokens).label("tokens"),
            _quantile(0.5, took_ms).filter(well).label("latency_p50_ms"),
            _quantile(0.95, took_ms).filter(well).label("latency_p95_ms"),
        ).select_from(recent.join(steps, steps.c.rollout_id == recent.c.id))
        return query.group_by(steps.c.worker).order_by(calls.desc(), steps.c.worker).limit(GROUPS_MAX)


# ---------------------------------------------------------------- sums over a window


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
    named = recent.outerjoin(keys, keys.c.public_id == recent.c.key_id)
    query = select(recent.c.key_id, keys.c.name.label("key_name"), *_measures(recent)).select_from(named)
    query = query.group_by(recent.c.key_id, keys.c.name)
    return query.order_by(func.count().desc(), recent.c.key_id).limit(GROUPS_MAX)


def _series(recent: CTE, since: datetime, window_s: int) -> Select[Any]:
    """The window in `BUCKETS` equal parts, oldest first, without the parts that have no request."""
    age_s = func.extract("epoch", recent.c.created_at - since)
    bucket = func.least(cast(func.floor(age_s * BUCKETS / window_s), Integer), BUCKETS - 1).label("bucket")
    return select(bucket, *_measures(recent)).group_by(bucket).order_by(bucket)


async def _all(connection: AsyncConnection, query: Select[Any]) -> Rows:
    """Rows as dicts for JSON: PostgreSQL's sums are numeric, the replies' are int."""
    records = (await connection.execute(query)).mappings()
    return [{name: _number(name, value) for name, value in row.items()} for row in records]


def _number(name: str, value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    return round(float(value), 3) if name.endswith("_ms") else int(value)


# ---------------------------------------------------------------- rollouts


def _page(query: RolloutsQuery) -> Select[Any]:
    c = rollouts.c
    named = rollouts.outerjoin(keys, keys.c.public_id == c.key_id)
    shown = (*(c[name] for name in rows.SUMMARY), c.key_id, c.error, keys.c.name.label("key_name"))
    page = select(*shown).select_from(named).where(c.depth == 0)
    if query.before is not None:
        page = page.where(tuple_(c.created_at, c.id) < _place(query.before))
    if query.key is not None:
        page = page.where(c.key_id == rows.clean(query.key))
    if query.policy is not None:
        policy = rows.clean(query.policy)
        page = page.where(or_(c.policy_used == policy, c.policy_requested == policy))
    if query.status is not None:
        page = page.where(_status(query.status))
    return page.order_by(c.created_at.desc(), c.id.desc())


def _status(wanted: str) -> ColumnElement[bool]:
    flags = {"fallback": rollouts.c.fallback, "capped": rollouts.c.capped}
    return flags[wanted].is_not(None) if wanted in flags else rollouts.c.status == wanted


def _cursor(row: Mapping[Any, Any]) -> str:
    return f"{(row['created_at'] - rows.EPOCH) // timedelta(microseconds=1)}.{row['id']}"


def _place(cursor: str) -> Any:
    """Parse `before`: microseconds and id of the last row seen; the id orders rows of one microsecond."""
    match = CURSOR.fullmatch(cursor)
    try:
        after = str(UUID(match[2])) if match else None
    except ValueError:
        after = None
    if match is None or after is None:
        raise BadRequest("`before` must be the `next` of another page", param="before")
    at = rows.EPOCH + timedelta(microseconds=int(match[1]))
    return tuple_(literal(at, rollouts.c.created_at.type), literal(after, rollouts.c.id.type))


async def _workers_of(connection: AsyncConnection, ids: Sequence[str]) -> dict[str, list[str]]:
    """Map each rollout to the workers of its steps, in order."""
    query = select(steps.c.rollout_id, steps.c.worker).where(steps.c.rollout_id.in_(ids))
    called: dict[str, list[str]] = {}
    for rollout_id, worker in await connection.execute(query.order_by(steps.c.round, steps.c.step)):
        called.setdefault(rollout_id, []).append(worker)
    return called


def _line(row: Mapping[Any, Any], workers: list[str]) -> dict[str, Any]:
    """One line of the list: client, worker, cost; never a prompt or a reply."""
    ended = row["finished_at"]
    took_ms = None if ended is None else (ended - row["created_at"]) / timedelta(milliseconds=1)
    who = {name: row[name] for name in ("key_id", "key_name")}
    code = (row["error"] or {}).get("code")
    return rows.summary(row) | who | {"workers": workers, "latency_ms": took_ms, "error_code": code}
