"""A log that was one table each goes into its months, with every row, or stays as it was; and back."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, inspect, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.database import sync_engine
from gateway.adapters.postgres.inserts import insert_rows
from gateway.adapters.postgres.migrate import downgrade, upgrade
from gateway.core.log.events import uuid7
from gateway.core.log.months import Month
from gateway.core.log.rollout import RolloutRecord
from tests.records import a_rollout, new_id, rollout_event

BEFORE, MONTHS = "0006", "0007"
TIMES = (
    datetime(2025, 12, 31, 23, 59, 59, 999_000, UTC),
    datetime(2026, 1, 1, tzinfo=UTC),
    datetime(2026, 5, 5, tzinfo=UTC),
)
NO_MONTH = ("00000000-0000-0000-0000-000000000000", "ffffffff-ffff-4fff-bfff-ffffffffffff")
JUDGE = text(
    "INSERT INTO outcomes (id, rollout_id, key_id, kind, value, source, created_at) "
    "VALUES (:id, :rollout, 'key1', 'number', 1, 'client', :at)"
)
CREDIT = text(
    "INSERT INTO experience (rollout_id, round, step, worker, worker_version, pool_name, success, cost_nano, "
    "latency_ms, at) SELECT rollout_id, round, step, worker, worker_version, 'default', 1, cost_nano, 100, :at "
    "FROM steps WHERE rollout_id = :rollout"
)
YOUNGER = (
    "allowed",
    "quality",
    "shown",
    "flags",
    "task_embedder",
    "lowered",
    "usage_details",
    "request_id",
    "turn",
    "memory",
    "decision",
)  # came later
LOG = ("rollouts", "rounds", "steps", "outcomes", "experience", "gradings", "continuations", "policy_shadows", "ledger")


@pytest.fixture
def old(empty_database_url: str) -> Iterator[Engine]:
    """A database of the revision before, with rollouts of three months, of now, and of no month at all."""
    upgrade(empty_database_url, BEFORE)
    engine = sync_engine(empty_database_url)
    ids = [uuid7(round(at.timestamp() * 1000)) for at in (*TIMES, datetime.now(UTC))]
    with engine.begin() as connection:
        for rollout_id in (*ids, *NO_MONTH):
            tags = {"grader": "exact", "reference": "4"}
            insert_rows(connection, logged(a_rollout(id=rollout_id, tags=tags)))
            judged = {"id": new_id(), "rollout": rollout_id, "at": TIMES[0]}
            connection.execute(JUDGE, judged)
            connection.execute(CREDIT, judged)
    yield engine
    engine.dispose()


def logged(rollout: RolloutRecord) -> rows.Rows:
    """Its rows as these revisions have them."""
    found = rows.event_rows(rollout_event(rollout))
    for table in (found.rollouts, found.rounds, found.steps):
        table[:] = [{name: row[name] for name in row if name not in YOUNGER} for row in table]
    return found


def contents(engine: Engine) -> dict[str, list[str]]:
    with engine.connect() as connection:
        return {
            name: sorted(connection.scalars(text(f"SELECT to_jsonb(t)::text FROM {name} AS t")))  # noqa: S608
            for name in LOG
        }


def parts(engine: Engine, name: str) -> dict[str, int]:
    with engine.connect() as connection:
        query = f"SELECT tableoid::regclass::text, count(*) FROM {name} GROUP BY 1"  # noqa: S608
        return {part.removeprefix(f"months.{name}_"): n for part, n in connection.execute(text(query))}


def references(engine: Engine) -> set[tuple[str, str, str]]:
    """What refers to `rollouts`, with what happens to it when a rollout goes."""
    asked = (
        "SELECT conrelid::regclass::text, conname, confdeltype FROM pg_constraint "
        "WHERE contype = 'f' AND confrelid = 'rollouts'::regclass AND convalidated"
    )
    with engine.connect() as connection:
        return {(row[0], row[1], row[2]) for row in connection.execute(text(asked))}


def indexes(engine: Engine) -> set[str]:
    return {str(each["name"]) for name in LOG[:3] for each in inspect(engine).get_indexes(name)}


def test_every_row_goes_to_its_month_and_back(old: Engine, empty_database_url: str) -> None:
    before, referring, indexed = contents(old), references(old), indexes(old)
    assert all(before[name] for name in LOG[:6])
    upgrade(empty_database_url, MONTHS)
    assert contents(old) == before
    now = Month.of(datetime.now(UTC)).table("").removeprefix("_")
    assert (
        parts(old, "rollouts") == parts(old, "rounds") == {"2025_12": 1, "2026_01": 1, "2026_05": 1, now: 1, "rest": 2}
    )
    assert parts(old, "steps") == {name: 2 * n for name, n in parts(old, "rollouts").items()}
    assert indexes(old) == indexed
    upgrade(empty_database_url, MONTHS)  # nothing left to do
    downgrade(empty_database_url, BEFORE)
    assert contents(old) == before
    assert (references(old), indexes(old)) == (referring, indexed)
    assert not {"months", "was"} & set(inspect(old).get_schema_names())
    upgrade(empty_database_url, MONTHS)
    assert contents(old) == before


def test_it_is_all_or_nothing(old: Engine, empty_database_url: str) -> None:
    before = contents(old)
    with old.begin() as connection:
        connection.execute(text("CREATE VIEW mine AS SELECT count(*) FROM rollouts"))  # dropping what it reads fails
    with pytest.raises(DBAPIError, match="view mine depends on"):
        upgrade(empty_database_url, MONTHS)
    assert contents(old) == before
    assert inspect(old).get_pk_constraint("rollouts")["name"] == "rollouts_pkey"
    with old.begin() as connection:
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == BEFORE
        connection.execute(text("DROP VIEW mine"))
    upgrade(empty_database_url, MONTHS)
    assert contents(old) == before


def test_unique_constraints_and_references_survive_the_migration(old: Engine, empty_database_url: str) -> None:
    upgrade(empty_database_url, MONTHS)
    again = uuid7(round((TIMES[1] + timedelta(days=1)).timestamp() * 1000))
    with old.begin() as connection:
        insert_rows(connection, logged(a_rollout(id=again)))
        insert_rows(connection, logged(a_rollout(id=again, key_id="other")))
        asked = text("SELECT key_id FROM rollouts WHERE id = :id")
        assert list(connection.scalars(asked, {"id": again})) == ["key1"]
    with old.begin() as connection:
        connection.execute(text("DELETE FROM rollouts"))
    assert not any(contents(old).values())
    stray = logged(a_rollout(id=again))
    for part in (rows.Rows(rounds=stray.rounds), rows.Rows(steps=stray.steps)):
        with old.begin() as connection, pytest.raises(IntegrityError):
            insert_rows(connection, part)
