"""The log by month: what has a month goes there, an old month goes as a whole, nothing that is kept goes with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, func, insert, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.admin import PostgresAdmin
from gateway.adapters.postgres.audit import PostgresAudit
from gateway.adapters.postgres.inserts import insert_rows
from gateway.adapters.postgres.store import PostgresStore
from gateway.adapters.postgres.tables import (
    continuations,
    experience,
    gradings,
    ledger,
    metadata,
    outcomes,
    policy_shadows,
    rollouts,
    rounds,
    steps,
)
from gateway.adapters.postgres.upkeep import months as store_months
from gateway.adapters.postgres.upkeep import retention as store_retention
from gateway.adapters.postgres.upkeep.retention import PostgresRetention
from gateway.core.access.audit import Act
from gateway.core.log.events import uuid7
from gateway.core.log.months import Month
from gateway.service.ports.admin import SweepReport
from tests.contract.test_admin_store import KEY
from tests.records import a_rollout, an_outcome, hold_event, rollout_event, settle_event

NOW = datetime(2026, 11, 20, tzinfo=UTC)
JUNE, JULY = datetime(2026, 6, 15, tzinfo=UTC), datetime(2026, 7, 15, tzinfo=UTC)
ANN = Act("local:ann", "because")
LOG = (rollouts, rounds, steps, outcomes, experience, gradings, continuations, policy_shadows, ledger)
DAYS = 100  # on NOW all of June and July are over, for those who follow the settings


class Log:
    """A log to fill and to sweep."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine

    async def sweep(self, now: datetime = NOW, days: int | None = DAYS, *, dry: bool = False) -> SweepReport:
        return await PostgresRetention(self.engine).sweep(now, days, ANN, dry=dry)

    def begin(self) -> AbstractAsyncContextManager[AsyncConnection]:
        return self.engine.begin()

    async def add(self, at: datetime, key: str = "plain") -> str:
        """A rollout of that time with something in every table that can hang on it."""
        at_us = int(at.timestamp() * 1_000_000)
        record = a_rollout(id=uuid7(at_us // 1000), key_id=key, org="default", created_us=at_us)
        async with self.begin() as connection:
            for event in (
                rollout_event(record),
                hold_event(record.id, record.id, 9, (f"key:{key}", None)),
                settle_event(record.id, record.id, "posted", 7, f"key:{key}"),
            ):
                await connection.run_sync(insert_rows, rows.event_rows(event))
            for table, row in _hanging(record.id, key, at).items():
                await connection.execute(insert(metadata.tables[table]).values(**row))
        await PostgresStore(self.engine).outcome_insert(an_outcome(record.id, key_id=key))
        return record.id

    async def keep_for_ever(self, key: str) -> None:
        """A key whose own time is so long that nothing of it is over."""
        fields = {name: getattr(KEY, name) for name in KEY.__slots__}
        await PostgresAdmin(self.engine).key_insert(
            type(KEY)(**{**fields, "public_id": key, "org": "default", "retention_days": 30_000}), ANN
        )

    async def counts(self) -> dict[str, int]:
        async with self.engine.connect() as connection:
            return {t.name: int(await connection.scalar(select(func.count()).select_from(t)) or 0) for t in LOG}

    async def contents(self) -> dict[str, list[str]]:
        """Every row of every table, as text."""
        async with self.engine.connect() as connection:
            return {
                t.name: sorted(await connection.scalars(text(f"SELECT to_jsonb(t)::text FROM {t.name} AS t")))  # noqa: S608
                for t in LOG
            }

    async def months(self) -> list[str]:
        async with self.engine.connect() as connection:
            return [str(month) for month in await store_months.existing(connection)]

    async def lies_in(self, rollout_id: str) -> list[str]:
        """The parts that the rollout and its rounds and steps are in."""
        async with self.engine.connect() as connection:
            found = []
            for name, key in (("rollouts", "id"), ("rounds", "rollout_id"), ("steps", "rollout_id")):
                asked = f"SELECT DISTINCT tableoid::regclass::text FROM {name} WHERE {key} = '{rollout_id}'"  # noqa: S608
                found += list(await connection.scalars(text(asked)))
            return found


def _hanging(rollout_id: str, key: str, at: datetime) -> dict[str, dict[str, Any]]:
    shadow = {"id": uuid7(int(at.timestamp() * 1000)), "version": "conductor@8", "latency_ms": 1, "live_latency_ms": 1}
    mark = {"key_id": key, "mark": rollout_id, "worker": "alpha", "until": NOW + timedelta(days=1)}
    grading = {"grader": "exact", "reference": "4", "state": "waiting", "attempts": 0, "created_at": at, "due_at": at}
    return {
        "policy_shadows": {"rollout_id": rollout_id, **shadow, "prompt_tokens": 1, "completion_tokens": 1}
        | {"cost_nano": 1, "at": at},
        "continuations": {"rollout_id": rollout_id, **mark},
        "gradings": {"rollout_id": rollout_id, **grading},
    }


@pytest.fixture
async def log(pg_engine: AsyncEngine) -> Log:
    """With tables for June and July."""
    log = Log(pg_engine)
    await log.sweep(JUNE)
    return log


def _sums(before: dict[str, int], share: float) -> dict[str, int]:
    return {name: round(n * share) for name, n in before.items() if name != "ledger"} | {"ledger": before["ledger"]}


async def _acts(log: Log, limit: int = 10) -> list[tuple[str, str]]:
    latest: Sequence[Any] = await PostgresAudit(log.engine).latest(limit)
    return [(one.entry.act, one.entry.target) for one in latest]


async def test_an_old_month_goes_as_a_whole_with_all_that_hangs_on_it(log: Log) -> None:
    for at in (JUNE, JUNE + timedelta(days=1), JULY, NOW):
        await log.add(at)
    before = await log.counts()
    assert all(before.values())
    told = await log.sweep(dry=True)
    assert await log.counts() == before
    swept = await log.sweep()
    assert list(swept.months) == list(told.months)
    assert [(one.month, one.rollouts, one.rounds, one.steps) for one in swept.months[:2]] == [
        ("2026-06", {"plain": 2}, 2, 4),
        ("2026-07", {"plain": 1}, 1, 2),
    ]
    assert (swept.total, swept.by_row, swept.held) == (3, 0, [])
    assert await log.counts() == _sums(before, 1 / 4)
    assert not {"2026-06", "2026-07"} & set(await log.months())
    entry = (await PostgresAudit(log.engine).latest(10, target="rollouts:2026-06"))[0].entry
    assert (entry.act, entry.actor, entry.why) == ("retention.month_dropped", "local:ann", "because")
    assert entry.after == {
        **{"rollouts": {"plain": 2}, "rounds": 2, "steps": 4, "outcomes": 2, "experience": 4},
        **{"gradings": 2, "continuations": 2, "policy_shadows": 2},
    }
    assert ("retention.swept", "rollouts") not in await _acts(log)
    assert (await log.sweep()).total == 0


async def test_a_month_with_one_rollout_to_keep_stays_and_the_rest_of_it_goes_by_row(log: Log) -> None:
    await log.keep_for_ever("kept")
    kept = await log.add(JUNE, "kept")
    for _ in range(3):
        await log.add(JUNE)
    await log.add(JULY)
    swept = await log.sweep()
    assert [one.month for one in swept.months if one.rollouts] == ["2026-07"]
    assert dict(swept.rollouts) == {"plain": 3}
    assert await log.lies_in(kept) == [f"months.{name}_2026_06" for name in ("rollouts", "rounds", "steps")]
    assert (await log.counts())["outcomes"] == 1
    assert ("retention.swept", "rollouts") in await _acts(log)


async def test_for_ever_is_for_ever(log: Log) -> None:
    await log.add(JUNE)
    before = await log.counts()
    swept = await log.sweep(days=None)
    assert (swept.total, [one for one in swept.months if one.rollouts]) == (0, [])
    assert await log.counts() == before


async def test_a_month_just_over_waits_a_day_for_what_the_journals_bring(log: Log) -> None:
    first = datetime(2026, 8, 1, tzinfo=UTC)
    await log.sweep(first + timedelta(hours=23), days=1)
    assert "2026-07" in await log.months()
    await log.sweep(first + timedelta(hours=24), days=1)
    assert "2026-07" not in await log.months()


async def test_in_use_it_is_left_for_the_next_time_and_after_a_day_goes_by_row(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_months, "GIVE_WAY_MS", 50)
    await log.add(JUNE)
    await log.add(JULY)
    before, contents = await log.counts(), await log.contents()
    over = JULY + timedelta(days=DAYS, hours=1)
    async with log.engine.connect() as reader:
        await reader.scalar(select(func.count()).select_from(rollouts))  # an export under way
        swept = await log.sweep(over)
        assert (swept.held, swept.months) == (["2026-06", "2026-07"], [])
        assert dict(swept.rollouts) == {"plain": 1}  # June's, which is over for longer than a day
        assert await log.counts() == _sums(before, 1 / 2)
    assert {"2026-06", "2026-07"} <= set(await log.months())
    assert [row for row in (await log.contents())["outcomes"] if row not in contents["outcomes"]] == []
    swept = await log.sweep(over)
    assert (swept.held, [one.month for one in swept.months if one.rollouts]) == ([], ["2026-07"])
    assert await log.counts() == _sums(before, 0)


async def test_a_rollout_to_keep_that_comes_while_its_month_is_dropped_stays(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes late, between the first look at the month and the drop."""
    await log.keep_for_ever("kept")
    await log.add(JUNE)
    fence = store_months.fence

    async def late(connection: AsyncConnection, month: Month) -> None:
        if str(month) == "2026-06":
            await log.add(JUNE, "kept")
        await fence(connection, month)

    monkeypatch.setattr(store_months, "fence", late)
    swept = await log.sweep()
    assert "2026-06" in await log.months()
    assert dict(swept.rollouts) == {"plain": 1}
    assert (await log.counts())["rollouts"] == 1


async def test_outcomes_that_arrive_while_their_month_is_dropped_go_too(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    untold = [await log.add(JUNE)]
    lock = store_months._lock_log

    async def told(connection: AsyncConnection) -> None:
        while untold:
            late = an_outcome(untold.pop(), None, key_id="plain", kind="comment", comment="late")
            await PostgresStore(log.engine).outcome_insert(late)
        await lock(connection)

    monkeypatch.setattr(store_months, "_lock_log", told)
    await log.sweep()
    assert (await log.counts())["outcomes"] == 0
    entry = (await PostgresAudit(log.engine).latest(10, target="rollouts:2026-06"))[0].entry
    assert (entry.after or {})["outcomes"] == 2


async def test_references_hold_after_a_month_went(log: Log) -> None:
    gone, there = await log.add(JUNE), await log.add(NOW)
    await log.sweep()
    for table, row in _hanging(gone, "plain", NOW).items():
        if table == "policy_shadows":
            continue  # has none
        async with log.begin() as connection:
            with pytest.raises(IntegrityError):
                await connection.execute(insert(metadata.tables[table]).values(**row))
    async with log.begin() as connection:
        await connection.execute(delete(rollouts).where(rollouts.c.id == there))
    found = await log.counts()
    assert {name for name, n in found.items() if n} == {"policy_shadows", "ledger"}


async def test_this_month_and_the_next_have_tables_before_anything_is_of_them(log: Log) -> None:
    now = datetime(2031, 12, 31, 23, 59, tzinfo=UTC)
    await log.sweep(now)
    assert {"2031-12", "2032-01"} <= set(await log.months())
    rollout_id = await log.add(now + timedelta(minutes=2))
    assert await log.lies_in(rollout_id) == [f"months.{name}_2032_01" for name in ("rollouts", "rounds", "steps")]


async def test_rollouts_of_a_month_without_a_table_move_there_with_all_their_rows(log: Log) -> None:
    at = datetime(2033, 3, 3, tzinfo=UTC)
    ids = [await log.add(at + timedelta(days=days)) for days in (0, 1, 40)]
    await log.add(JUNE)
    assert [(await log.lies_in(one))[0] for one in ids] == ["months.rollouts_rest"] * 3
    before = await log.contents()
    async with log.engine.connect() as reader:  # as a request that looks something up: it ends, and is waited for
        await reader.scalar(select(func.count()).select_from(rollouts))
    await log.sweep(at, days=None)
    assert await log.contents() == before
    parts = [f"months.{name}_2033_{number}" for number in ("03", "04") for name in ("rollouts", "rounds", "steps")]
    assert [await log.lies_in(one) for one in ids] == [parts[:3], parts[:3], parts[3:]]


async def test_more_than_can_be_moved_at_once_stays_and_goes_by_row(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_months, "MOVED_MAX", 1)
    at = datetime(2033, 3, 3, tzinfo=UTC)
    for _ in range(2):
        await log.add(at)
    await log.sweep(at)
    assert "2033-03" not in await log.months()
    assert "2033-04" in await log.months()
    assert dict((await log.sweep(at + timedelta(days=200))).rollouts) == {"plain": 2}


async def test_a_role_that_may_not_make_tables_loses_nothing(log: Log) -> None:
    async with log.begin() as connection:
        await connection.execute(text("CREATE ROLE clerk"))
        await connection.execute(text("GRANT ALL ON ALL TABLES IN SCHEMA public, months TO clerk"))
        await connection.execute(text("GRANT USAGE ON SCHEMA months TO clerk"))
    await log.add(JUNE)
    try:
        async with log.begin() as connection:
            await connection.execute(text(f'ALTER DATABASE "{log.engine.url.database}" SET role = clerk'))
        await log.engine.dispose()
        swept = await log.sweep(JUNE + timedelta(days=DAYS, hours=1))
        assert (swept.total, swept.held[:1]) == (0, ["2026-06"])
        swept = await log.sweep()  # days later
        assert dict(swept.rollouts) == {"plain": 1}
    finally:
        async with log.begin() as connection:
            await connection.execute(text("SET ROLE postgres"))
            await connection.execute(text("DROP OWNED BY clerk"))
            await connection.execute(text(f'ALTER DATABASE "{log.engine.url.database}" RESET role'))
            await connection.execute(text("DROP ROLE clerk"))


async def test_another_sweep_under_way_is_left_alone(log: Log) -> None:
    await log.add(JUNE)
    async with log.begin() as connection:
        await connection.execute(select(func.pg_advisory_xact_lock(store_retention.LOCK_KEY)))
        assert (await log.sweep()).total == 0
    assert (await log.counts())["rollouts"] == 1


async def test_every_part_of_rounds_and_steps_goes_with_its_rollout(log: Log) -> None:
    asked = """
    SELECT conrelid::regclass::text, confrelid::regclass::text, confdeltype, convalidated FROM pg_constraint
    WHERE contype = 'f' AND conrelid IN (
      SELECT inhrelid FROM pg_inherits WHERE inhparent IN ('rounds'::regclass, 'steps'::regclass))
    """
    async with log.engine.connect() as connection:
        found = {row[0]: tuple(row[1:]) for row in await connection.execute(text(asked))}
        months = [month.table("") for month in await store_months.existing(connection)]
    assert found == {
        f"months.{name}{month}": (f"months.rollouts{month}", "c", True)
        for name in ("rounds", "steps")
        for month in ("_rest", *months)
    }


BY_ID = {
    "SELECT * FROM rollouts WHERE id = '{id}'": "rollouts_2026_06",
    "SELECT * FROM steps WHERE rollout_id = '{id}' ORDER BY round, step": "steps_2026_06",
    "SELECT * FROM rounds WHERE rollout_id IN ('{id}')": "rounds_2026_06",
    "DELETE FROM rollouts WHERE id IN ('{id}')": "rollouts_2026_06",
}
BY_OTHERS = (
    "SELECT * FROM rollouts WHERE completion_id = 'c' AND key_id = 'k' ORDER BY depth LIMIT 1",
    "SELECT * FROM rollouts WHERE key_id = 'k' AND depth = 0 ORDER BY created_at DESC, id DESC LIMIT 20",
    "SELECT * FROM rollouts WHERE {recent} AND depth = 0 ORDER BY created_at DESC LIMIT 9",
    "SELECT * FROM rollouts WHERE parent_id = '{id}'",
    "SELECT * FROM rollouts WHERE policy_assigned = 'c@1' AND {recent}",
    "SELECT * FROM rollouts JOIN rounds ON rollout_id = id WHERE {recent} ORDER BY created_at, id, round",
    "SELECT * FROM rollouts JOIN steps ON rollout_id = id WHERE {recent}",
    "SELECT * FROM experience JOIN rollouts ON id = rollout_id WHERE worker = 'a' LIMIT 5",
    "SELECT * FROM outcomes JOIN steps USING (rollout_id) WHERE rollout_id IN ('{id}')",
)


async def test_the_log_is_read_by_index_and_an_id_in_its_month_alone(log: Log) -> None:
    async with log.begin() as connection:
        for how in ("seqscan", "hashjoin", "mergejoin"):  # the tables are too small for it to be worth it
            await connection.execute(text(f"SET LOCAL enable_{how} = off"))
        for query in (*BY_ID, *BY_OTHERS):
            june = uuid7(int(JUNE.timestamp() * 1000))
            wanted = query.format(id=june, recent="created_at > now() - interval '1 h'")
            plan = "\n".join(await connection.scalars(text(f"EXPLAIN {wanted}")))
            assert "Seq Scan" not in plan, plan
            named = set(re.findall(r"\b(?:rollouts|rounds|steps)_(?:\d{4}_\d\d|rest)\b", plan))
            assert named == {BY_ID[query]} if query in BY_ID else named, plan
