"""What the gateway tells its worker, the judge's key, and the schedule on a real PostgreSQL."""

from __future__ import annotations

import stat
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.inserts import insert_outcome, insert_rows
from gateway.adapters.postgres.policies.jobs import JobStore, queue_app
from gateway.cli.process.datadir import JUDGE, DataDir
from gateway.cli.process.keyring import judge_key, key_admin
from gateway.cli.process.worker import WORKER, worker_settings, write_settings
from gateway.config import settings as config
from gateway.config.settings import Services
from gateway.errors import ConfigError
from policy.jobs.schedule import Schedule, check
from policy.jobs.worker import WorkerSettings, read_settings
from tests.records import a_rollout, an_outcome, rollout_event

POOL = """
workers:
  - {name: one, handle: atlas, kind: openai, model: m, url: "http://127.0.0.1:1/v1",
     price: {input_usd_per_mtok: 1, output_usd_per_mtok: 2}}
  - {name: wise, handle: birch, kind: openai, model: w, url: "http://127.0.0.1:1/v1",
     price: {input_usd_per_mtok: 1, output_usd_per_mtok: 2}}
pools: {main: [one], judges: [wise]}
default: main
"""


@pytest.fixture
def services(tmp_path: Path, database_url: str) -> Services:
    (tmp_path / "pool.yaml").write_text(POOL)
    return Services(database_url, redis_url="", pool_file=tmp_path / "pool.yaml", pepper=b"0123456789abcdef")


# ---------------------------------------------------------------- what is told


def test_a_worker_reads_what_the_gateway_wrote_and_nobody_else_can(tmp_path: Path, database_url: str) -> None:
    settings = config.load(data_dir=tmp_path, retrain_arguments="--env logged --tag 'team=a b'", judge="worker:wise")
    path = write_settings(settings, DataDir(tmp_path), database_url)
    assert path == tmp_path / WORKER
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    told = read_settings(path)
    assert told.retrain_arguments == ["--env", "logged", "--tag", "team=a b"]
    assert told.judge is not None
    assert (told.judge.worker, told.judge.source, told.judge.share) == ("wise", "judge:wise", 0.1)
    assert told.policies == (tmp_path / "policies").resolve()
    assert told.shipped is not None
    assert (told.shipped / "manifest.json").exists()


def test_every_fact_is_one_that_the_worker_knows(tmp_path: Path, database_url: str) -> None:
    settings = config.load(data_dir=tmp_path, conductor="worker:one")
    assert set(worker_settings(settings, DataDir(tmp_path), database_url)) <= set(WorkerSettings.model_fields)


def test_retrain_arguments_that_cannot_be_split_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="BATON_RETRAIN_ARGUMENTS"):
        worker_settings(config.load(data_dir=tmp_path, retrain_arguments="'"), DataDir(tmp_path), "postgresql://x/y")


# ---------------------------------------------------------------- the judge's key


async def test_the_judge_has_one_key_for_itself_alone_under_its_budget_a_day(
    services: Services, tmp_path: Path
) -> None:
    data = DataDir(tmp_path / "data")
    await judge_key(services, data, "wise", "2.50")
    first = data.read(JUDGE)
    assert first is not None
    assert first["pools"] == ["judges"]
    await judge_key(services, data, "wise", "3")
    assert data.read(JUDGE) == first  # two keys would spend the budget of a day twice
    async with key_admin(services) as (admin, _):
        (row,) = [row for row in (await admin.list_keys(10))[0] if row.name == "judge"]
    assert (row.budget_nano, row.budget_day_nano) == (None, 3_000_000_000)
    assert (row.workers, row.pools, row.train) == (("wise",), ("judges",), False)


async def test_a_judge_that_no_pool_has_is_refused(services: Services, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="BATON_JUDGE=unheard-of: no pool has such a worker"):
        await judge_key(services, DataDir(tmp_path / "data"), "unheard-of", "1")


def test_rubrics_are_read_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "rubrics.yaml"
    path.write_text("default: It answers.\nletters: It is polite.\n")
    settings = config.load(data_dir=tmp_path, judge="worker:wise", judge_rubrics=path)
    told = read_settings(write_settings(settings, DataDir(tmp_path), "postgresql://x/y")).judge
    assert told is not None
    question = {"messages": [{"role": "user", "content": "Dear"}]}
    assert told.reference(question, "letters") == {"question": "Dear", "rubric": "It is polite."}
    assert told.reference(question, "sums")["rubric"] == "It answers."
    for wrong in ("- a list", "letters: {a: b}", "letters: ''"):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=r"rubrics\.yaml:1"):
            worker_settings(settings, DataDir(tmp_path), "postgresql://x/y")


@pytest.mark.parametrize("text", ["wise", "worker:", "http://x/v1#m"])
def test_a_judge_is_written_as_a_worker(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"BATON_JUDGE=.*write worker:NAME"):
        config.load(data_dir=tmp_path, judge=text)


def test_settings_of_an_earlier_release_name_their_successors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_JUDGE_MODEL", "wise")
    monkeypatch.setenv("BATON_JUDGE_BUDGET_USD", "1")
    with pytest.raises(ConfigError) as refused:
        config.load(data_dir=tmp_path)
    assert "write BATON_JUDGE=worker:NAME" in str(refused.value)
    assert "set BATON_JUDGE_USD_A_DAY" in str(refused.value)


# ---------------------------------------------------------------- the schedule


@pytest.fixture
def store(pg_engine: AsyncEngine, database_url: str) -> JobStore:
    return JobStore(pg_engine, queue_app(database_url))


async def judged(engine: AsyncEngine, n: int) -> None:
    """That many new outcomes."""
    for _ in range(n):
        record = a_rollout()
        outcome = an_outcome(record.id, created_at=datetime.now(UTC) + timedelta(milliseconds=1))
        async with engine.begin() as connection:
            await connection.run_sync(insert_rows, rows.event_rows(rollout_event(record)))
            await connection.run_sync(insert_outcome, outcome)


async def test_enough_outcomes_make_one_job_and_the_next_wants_as_many_again(
    pg_engine: AsyncEngine, store: JobStore
) -> None:
    schedule = Schedule("conductor", 3, auto=True)
    await judged(pg_engine, 2)
    assert await check(schedule, store) is None
    await judged(pg_engine, 1)
    job = await check(schedule, store)
    assert job is not None
    assert (job.policy, job.by, job.spec["auto"]) == ("conductor", "schedule", True)
    await judged(pg_engine, 3)
    assert await check(schedule, store) is None  # the policy has a job
    await store.cancel(job.id)
    again = await check(schedule, store)
    assert again is not None
    await store.cancel(again.id)
    assert await check(schedule, store) is None  # nothing new since


async def test_a_week_later_it_is_trained_again_if_anything_came(pg_engine: AsyncEngine, store: JobStore) -> None:
    weekly = Schedule("conductor", every_s=7 * 86_400)
    assert await check(weekly, store) is None  # nothing was ever judged
    await judged(pg_engine, 1)
    first = await check(weekly, store)
    assert first is not None
    await store.cancel(first.id)
    await judged(pg_engine, 1)
    assert await check(weekly, store) is None
    async with pg_engine.begin() as connection:
        await connection.execute(text("UPDATE policy_jobs SET created_at = created_at - interval '8 days'"))
    assert await check(weekly, store) is not None
    assert await check(replace(weekly, every_s=0), store) is None
