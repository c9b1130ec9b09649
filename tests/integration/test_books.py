"""Spending, open holds, errors and the success of workers, on a real PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.admin_tables import spend_days
from gateway.adapters.postgres.inserts import insert_outcome, insert_rows
from gateway.adapters.postgres.reports.overview import PostgresReports
from gateway.adapters.postgres.tables import rollouts
from gateway.adapters.postgres.upkeep.days import LOCK_KEY, PostgresDays
from gateway.core.log.events import Event, uuid7
from tests.records import a_rollout, a_step, an_outcome, hold_event, rollout_event, settle_event

NOON = datetime(2026, 3, 4, 12, tzinfo=UTC)


@pytest.fixture
def reports(pg_engine: AsyncEngine) -> PostgresReports:
    return PostgresReports(pg_engine)


async def add(engine: AsyncEngine, *events: Event) -> None:
    async with engine.begin() as connection:
        for event in events:
            await connection.run_sync(insert_rows, rows.event_rows(event))


def at(days_ago: int, **changes: Any) -> Event:
    """A rollout of some days before NOON, which took a second."""
    us = round((NOON - timedelta(days=days_ago)).timestamp() * 1_000_000)
    return rollout_event(a_rollout(id=uuid7(us // 1000), created_us=us, finished_us=us + 1_000_000, **changes))


async def test_spending_is_by_day_and_key_and_by_day_and_worker(
    reports: PostgresReports, pg_engine: AsyncEngine
) -> None:
    child = a_step(2, "self", child_rollout_id=a_rollout().id, cost_nano=99)
    await add(
        pg_engine,
        at(0, cost_nano=10, steps=[a_step(0, "alpha", cost_nano=4), a_step(1, "beta", cost_nano=6), child]),
        at(0, cost_nano=5, steps=[a_step(0, "alpha", cost_nano=5)]),
        at(1, cost_nano=7, key_id="key2", steps=[a_step(0, "alpha", cost_nano=7)]),
        at(2, cost_nano=1_000),
    )
    found = await reports.spend(NOON, 2)
    assert [(row["day"], row["key_id"], row["requests"], row["cost_nano"]) for row in found["by_key"]] == [
        ("2026-03-03", "key2", 1, 7),
        ("2026-03-04", "key1", 2, 15),
    ]
    assert [(row["day"], row["worker"], row["calls"], row["cost_nano"]) for row in found["by_worker"]] == [
        ("2026-03-03", "alpha", 1, 7),
        ("2026-03-04", "alpha", 2, 9),
        ("2026-03-04", "beta", 1, 6),
    ]
    assert (found["since"], found["truncated"]) == ("2026-03-03T00:00:00+00:00", False)
    assert (await PostgresReports(pg_engine, rollouts_max=1).spend(NOON, 2))["truncated"] is True


class Today:
    """A clock that stands still."""

    def __init__(self, now: datetime) -> None:
        self.time = now

    def now(self) -> datetime:
        return self.time


def totals(found: Mapping[str, Any]) -> dict[str, dict[tuple[str, str], tuple[int, int]]]:
    return {
        part: {(row["day"], row[name]): (row[count], row["cost_nano"]) for row in found[part]}
        for part, name, count in (("by_key", "key_id", "requests"), ("by_worker", "worker", "calls"))
    }


async def test_past_days_are_summed_once_and_say_the_same(reports: PostgresReports, pg_engine: AsyncEngine) -> None:
    child = a_step(2, "self", child_rollout_id=a_rollout().id, cost_nano=99)
    await add(
        pg_engine,
        at(0, cost_nano=10, steps=[a_step(0, "alpha", cost_nano=4), a_step(1, "beta", cost_nano=6), child]),
        at(1, cost_nano=7, key_id="key2", steps=[a_step(0, "alpha", cost_nano=7)]),
        at(1, cost_nano=1, key_id="key1"),
        at(4, cost_nano=1_000, steps=[a_step(0, "beta", cost_nano=1_000)]),
    )
    before = totals(await reports.spend(NOON, 30))
    days = PostgresDays(pg_engine, Today(NOON))  # type: ignore[arg-type]
    assert await days.sweep(1_000) == 0
    assert totals(await reports.spend(NOON, 30)) == before
    # Of what was summed no request is read any more, and today's are.
    assert (await PostgresReports(pg_engine, rollouts_max=1).spend(NOON, 30))["truncated"] is True
    assert (await PostgresReports(pg_engine, rollouts_max=2).spend(NOON, 30))["truncated"] is False
    async with pg_engine.begin() as connection:
        summed = (
            await connection.execute(
                select(spend_days.c.day, spend_days.c.count)
                .where(spend_days.c.kind == "day")
                .order_by(spend_days.c.day)
            )
        ).all()
    assert [(str(day), count) for day, count in summed] == [
        ("2026-02-28", 1), ("2026-03-01", 0), ("2026-03-02", 0), ("2026-03-03", 2)
    ]  # fmt: skip


async def test_a_late_request_is_added_and_a_deleted_one_is_not_taken_off(
    reports: PostgresReports, pg_engine: AsyncEngine
) -> None:
    await add(pg_engine, at(1, cost_nano=7), at(3, cost_nano=5))
    days = PostgresDays(pg_engine, today := Today(NOON))  # type: ignore[arg-type]
    await days.sweep(1_000)
    await add(pg_engine, at(1, cost_nano=2))
    await days.sweep(1_000)  # within the hour nothing is summed again
    assert totals(await reports.spend(NOON, 30))["by_key"]["2026-03-03", "key1"] == (1, 7)
    today.time += timedelta(hours=2)
    await days.sweep(1_000)
    assert totals(await reports.spend(NOON, 30))["by_key"]["2026-03-03", "key1"] == (2, 9)
    async with pg_engine.begin() as connection:
        await connection.execute(delete(rollouts))
    today.time += timedelta(hours=2)
    await days.sweep(1_000)
    assert totals(await reports.spend(NOON, 30))["by_key"] == {
        ("2026-03-01", "key1"): (1, 5),
        ("2026-03-03", "key1"): (2, 9),
    }


async def test_no_day_is_summed_while_another_gateway_sums(pg_engine: AsyncEngine) -> None:
    await add(pg_engine, at(1), at(3))
    days = PostgresDays(pg_engine, Today(NOON))  # type: ignore[arg-type]
    count = select(func.count()).select_from(spend_days).where(spend_days.c.kind == "day")
    async with pg_engine.begin() as other:
        await other.execute(select(func.pg_advisory_xact_lock(LOCK_KEY)))
        await days.sweep(1_000)
        assert await other.scalar(count) == 0
    await days.sweep(1_000)
    async with pg_engine.begin() as connection:
        assert await connection.scalar(count) == 3


async def test_a_log_without_requests_has_nothing_to_sum(reports: PostgresReports, pg_engine: AsyncEngine) -> None:
    await PostgresDays(pg_engine, Today(NOON)).sweep(1_000)  # type: ignore[arg-type]
    found = await reports.spend(NOON, 30)
    assert (found["by_key"], found["by_worker"], found["truncated"]) == ([], [], False)


async def test_holds_are_listed_while_they_are_open(reports: PostgresReports, pg_engine: AsyncEngine) -> None:
    one, two, three = (a_rollout().id for _ in range(3))
    scope = ("key:key1", None)
    await add(pg_engine, *(hold_event(f"h{n}", rollout, 100 + n, scope) for n, rollout in enumerate((one, two, three))))
    await add(pg_engine, settle_event("h1", two, "posted", 50, "key:key1"))
    await add(pg_engine, settle_event("h2", three, "uncertain", 60, "key:key1"))
    now = datetime.fromtimestamp(int(one.replace("-", "")[:12], 16) / 1000, UTC) + timedelta(minutes=1)
    found = await reports.open_holds(now)
    assert [(row["hold_id"], row["rollout_id"], row["amount_nano"]) for row in found] == [("h0", one, 100)]
    assert found[0]["scopes"] == ["key:key1"]
    json.dumps(found, allow_nan=False)


async def test_workers_have_their_errors_and_their_success_by_kind(
    reports: PostgresReports, pg_engine: AsyncEngine
) -> None:
    good = a_rollout(steps=[a_step(0, "alpha")])
    await add(pg_engine, rollout_event(good))
    async with pg_engine.begin() as connection:
        await connection.run_sync(insert_outcome, an_outcome(good.id, 0.75))
    failed = a_step(0, "beta", status="failed", error="upstream_timeout")
    await add(pg_engine, at(0, steps=[failed]), at(1, steps=[failed]))
    found = await reports.workers(NOON + timedelta(minutes=1), 3_600, ["alpha", "beta"])
    (error,) = found["errors"]
    assert (error["worker"], error["error"], error["n"]) == ("beta", "upstream_timeout", 1)
    assert [(row["worker"], row["calls"], row["errors"]) for row in found["calls"]] == [("beta", 1, 1)]
    (kind,) = found["success"]
    assert (kind["worker"], kind["task_type"], kind["n"], kind["success"]) == ("alpha", "arithmetic", 1, 0.75)
    json.dumps(found, allow_nan=False)
