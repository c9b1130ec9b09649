"""The retention: texts go when their time is over, with all that hangs on them; money and audit stay."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.admin import PostgresAdmin
from gateway.adapters.postgres.audit import PostgresAudit
from gateway.adapters.postgres.inserts import insert_rows
from gateway.adapters.postgres.store import PostgresStore
from gateway.adapters.postgres.tables import (
    MONTHLY,
    experience,
    ledger,
    metadata,
    outcomes,
    rollouts,
    rounds,
    steps,
)
from gateway.adapters.postgres.upkeep import months as store_months
from gateway.adapters.postgres.upkeep import retention as store_retention
from gateway.adapters.postgres.upkeep.retention import PostgresRetention
from gateway.core.access.audit import Act
from gateway.service.admin.housekeeping import Retention
from gateway.service.ports.admin import OrgRow
from gateway.service.ports.request import Clock
from tests.contract.test_admin_store import KEY
from tests.records import a_rollout, an_outcome, hold_event, rollout_event, settle_event

NOW = datetime(2026, 11, 20, tzinfo=UTC)
ANN = Act("local:ann", "because")


class StoppedClock(Clock):
    def now(self) -> datetime:
        return NOW

    def monotonic_s(self) -> float:
        return 0.0


async def counted(engine: AsyncEngine) -> dict[str, int]:
    tables = (rollouts, rounds, steps, outcomes, experience, ledger)
    async with engine.connect() as connection:
        return {t.name: int(await connection.scalar(select(func.count()).select_from(t)) or 0) for t in tables}


@pytest.fixture
async def logged(pg_engine: AsyncEngine) -> AsyncEngine:
    """Per key a rollout of 5, 15 and 45 days ago, judged and paid for: `short` keeps 10 days, `org` as its organisation
    (30), `plain` as the settings say."""
    admin = PostgresAdmin(pg_engine)
    await admin.org_insert(OrgRow("acme", NOW, retention_days=30), ANN)
    keys: dict[str, dict[str, Any]] = {
        "short": {"retention_days": 10, "org": "acme"},
        "org": {"retention_days": None, "org": "acme"},
        "plain": {"retention_days": None, "org": "default"},
    }
    store = PostgresStore(pg_engine)
    for name, fields in keys.items():
        await admin.key_insert(type(KEY)(**{**_fields(KEY), "public_id": name, **fields}), ANN)
        for days in (5, 15, 45):
            at_us = int((NOW - timedelta(days=days)).timestamp() * 1_000_000)
            record = a_rollout(key_id=name, org=fields["org"], created_us=at_us)
            async with pg_engine.begin() as connection:
                for event in (
                    rollout_event(record),
                    hold_event(record.id, record.id, 9, (f"key:{name}", None)),
                    settle_event(record.id, record.id, "posted", 7, f"key:{name}"),
                ):
                    await connection.run_sync(insert_rows, rows.event_rows(event))
            await store.outcome_insert(an_outcome(record.id, key_id=name))
    return pg_engine


def _fields(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__slots__}


@pytest.mark.parametrize(
    ("days", "left"), [(None, {"short": 1, "org": 2, "plain": 3}), (7, {"short": 1, "org": 2, "plain": 1})]
)
async def test_each_key_keeps_what_it_or_its_organisation_or_the_settings_say(
    logged: AsyncEngine, days: int | None, left: dict[str, int]
) -> None:
    before = await counted(logged)
    retention = Retention(PostgresRetention(logged), StoppedClock(), days)
    seen = await retention.run(ANN, dry=True)
    assert await counted(logged) == before
    swept = await retention.run(ANN)
    assert dict(seen.rollouts) == dict(swept.rollouts) == {key: 3 - n for key, n in left.items() if n < 3}
    after = await counted(logged)
    share = sum(left.values()) / 9
    expected = {name: round(n * share) for name, n in before.items() if name != "ledger"}
    assert after == expected | {"ledger": before["ledger"]}
    assert (await PostgresStore(logged).books(0)).posted == {f"key:{key}": 21 for key in left}
    (entry,) = await PostgresAudit(logged).latest(1)
    assert (entry.entry.act, entry.entry.actor) == ("retention.swept", "local:ann")
    assert entry.entry.after is not None
    assert entry.entry.after["rollouts"] == dict(swept.rollouts)
    assert (await retention.run(ANN)).total == 0
    assert (await PostgresAudit(logged).head()).seq == entry.entry.seq  # nothing was done: nothing is written


async def test_much_is_deleted_in_small_transactions(logged: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_retention, "BATCH", 1)
    swept = await Retention(PostgresRetention(logged), StoppedClock(), 1).run(ANN)
    assert dict(swept.rollouts) == {"short": 2, "org": 1, "plain": 3}
    assert (await counted(logged))["rollouts"] == 3


def test_every_table_with_a_rollout_in_it_loses_it() -> None:
    """A new table that hangs on rollouts must go with them, by row and with a whole month, or say why it stays."""
    stays = {"ledger"}
    named = {table.name for table in metadata.tables.values() if "rollout_id" in table.c}
    cascading = {
        table.name
        for table in metadata.tables.values()
        for key in table.foreign_keys
        if key.column.table is rollouts and key.ondelete == "CASCADE"
    }
    parts = set(MONTHLY) - {"rollouts"}  # which refer to their month's rollouts: test_retention_months.py
    assert named - cascading - parts - stays == {"policy_shadows"}  # which the sweep deletes by name
    assert {table.name for table in store_months.BOUND} == cascading
    assert {table.name for table in store_months.HANGING} == named - parts - stays
