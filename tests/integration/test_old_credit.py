"""What was credited under earlier rules is credited again, once, and wherever the work was cut off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import insert, select, update

from gateway import cli
from gateway.adapters.postgres import credit as stored_experience
from gateway.adapters.postgres.credit import OldCredit
from gateway.adapters.postgres.database import async_engine
from gateway.adapters.postgres.inserts import insert_rows
from gateway.adapters.postgres.rows import event_rows
from gateway.adapters.postgres.store import PostgresStore
from gateway.adapters.postgres.tables import experience, outcomes
from gateway.core.log.rollout import AttemptRecord
from tests.records import a_rollout, a_step, an_outcome, rollout_event

ESSAYS = [
    f"{word} trees make a street worth walking along, and everybody knows it." for word in ("Old", "Young", "Tall")
]


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[PostgresStore]:
    """Three requests with three essays each, of which two are credited 0.0, as the first rules had it."""
    made = PostgresStore(async_engine(database_url, statement_timeout_s=20.0))
    for _ in range(3):
        said = zip(("alpha", "beta", "gamma"), ESSAYS, strict=True)
        record = a_rollout(
            steps=[a_step(i, name, task=None, see=[], reply=text) for i, (name, text) in enumerate(said)]
        )
        async with made.engine.begin() as connection:
            await connection.run_sync(insert_rows, event_rows(rollout_event(record)))
        await made.outcome_insert(an_outcome(record.id, 1.0))
        async with made.engine.begin() as connection:
            stored = await connection.execute(select(experience).where(experience.c.rollout_id == record.id))
            row = stored.mappings().one()
            for step, worker in enumerate(("alpha", "beta")):
                old = {**row, "step": step, "worker": worker, "success": 0.0}
                await connection.execute(insert(experience).values(old))
            await connection.execute(update(outcomes).values(credited=0))
    yield made
    await made.engine.dispose()


async def credits_of(store: PostgresStore) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    async with store.engine.begin() as connection:
        for worker, success in await connection.execute(select(experience.c.worker, experience.c.success)):
            found.setdefault(worker, []).append(success)
    return found


async def test_old_credit_is_counted_again_once(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_experience, "BATCH", 2)
    assert await credits_of(store) == {"alpha": [0.0] * 3, "beta": [0.0] * 3, "gamma": [1.0] * 3}
    work = OldCredit(store.engine)
    assert (await work.left(), await work.sweep(2), await work.left()) == (3, 2, 1)
    assert await credits_of(store) == {"alpha": [0.0], "beta": [0.0], "gamma": [1.0] * 3}
    after_a_crash = OldCredit(store.engine)
    assert (await after_a_crash.sweep(100), await after_a_crash.left()) == (1, 0)
    assert await credits_of(store) == {"gamma": [1.0] * 3}
    assert await after_a_crash.sweep(100) == 0  # it rests until the next start


async def test_the_command_counts_what_is_left(
    store: PostgresStore, database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    assert await asyncio.to_thread(cli.main, ["experience", "recredit", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"counted": 0, "left": 3}
    assert await asyncio.to_thread(cli.main, ["experience", "recredit"]) == 0
    assert "outcomes counted again: 3; left: 0" in capsys.readouterr().out
    assert await credits_of(store) == {"gamma": [1.0] * 3}


async def test_a_judge_is_compared_with_people(
    store: PostgresStore, database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for accept, value in ((True, 1.0), (True, 0.0), (False, 0.0), (True, 0.8)):
        said = json.dumps({"accept": accept, "by": "builtin:judge@1"})
        steps = [a_step(0, "alpha"), a_step(1, "umpire", kind="tool", reply=said)]
        record = a_rollout(steps=[*steps, a_step(2, "beta", see=[0])])
        async with store.engine.begin() as connection:
            await connection.run_sync(insert_rows, event_rows(rollout_event(record)))
        await store.outcome_insert(an_outcome(record.id, value, source="person"))
        await store.outcome_insert(an_outcome(record.id, 1.0, source="grader", grader_version="judge@1"))
    monkeypatch.setenv("DATABASE_URL", database_url)
    assert await asyncio.to_thread(cli.main, ["experience", "judges", "--json"]) == 0
    grader, judge = json.loads(capsys.readouterr().out)
    assert grader == {"judge": "judge@1", "n": 4, "agreement": 0.5, "kappa": 0.0} | {
        "false_accepts": 1.0,
        "false_rejects": 0.0,
    }
    assert (judge["judge"], judge["n"], judge["agreement"], judge["kappa"]) == ("umpire", 4, 0.75, 0.5)
    assert (judge["false_accepts"], judge["false_rejects"]) == (0.5, 0.0)


async def test_a_checker_is_compared_with_people_too(
    store: PostgresStore, database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for accept, value in ((True, 1.0), (True, 0.0), (True, 0.0), (False, 1.0), (None, 1.0)):
        verdict = AttemptRecord(1, 2, verdict={"by": "verify", "accept": accept, "why": ""})
        steps = [a_step(0, "alpha"), a_step(1, "check", kind="tool", see=[0], reply="a word", attempts=[verdict])]
        steps += [a_step(2, "beta", see=[])] if accept is False else []  # the answer, the same as the rejected reply
        record = a_rollout(steps=steps)
        async with store.engine.begin() as connection:
            await connection.run_sync(insert_rows, event_rows(rollout_event(record)))
        await store.outcome_insert(an_outcome(record.id, value, source="person"))
    monkeypatch.setenv("DATABASE_URL", database_url)
    assert await asyncio.to_thread(cli.main, ["experience", "judges", "--json"]) == 0
    [checker] = json.loads(capsys.readouterr().out)
    assert (checker["judge"], checker["n"]) == ("check", 4)
    assert (checker["false_accepts"], checker["false_rejects"]) == (1.0, 0.5)
