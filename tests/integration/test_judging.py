"""The sampled judge on a real PostgreSQL: what it may be shown, what comes of it, and what a crash loses."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.admin import PostgresAdmin
from gateway.adapters.postgres.evidence.sampling import COMPARED_WANTED, JudgeSample, SampledJudge
from gateway.adapters.postgres.inserts import insert_outcome, insert_rows
from gateway.adapters.postgres.policies.jobs import GradingStore
from gateway.adapters.postgres.sources import PostgresSources
from gateway.core.log.events import uuid7
from gateway.service.admin.keys import KeyAdmin
from policy.jobs import judging
from policy.jobs.grading import BATCH, Grading
from tests.integration.test_grading import VERDICT, due, grading, judged, outcomes
from tests.kit import TestClock
from tests.records import a_rollout, a_step, an_outcome, rollout_event
from tests.upstreams.openai import OpenAI
from tests.upstreams.vendor import Script

ALL = SampledJudge("wise", 1.0)
POOLS = {"default": ["alpha", "wise"], "other": ["alpha"]}


async def a_key(engine: AsyncEngine, **rights: Any) -> str:
    """A data key with these rights; its id."""
    admin = KeyAdmin(PostgresAdmin(engine), {1: b"0123456789abcdef"}, TestClock(), POOLS)
    row, _ = await admin.create_key("app", **rights)
    return row.public_id


def now_id() -> str:
    return uuid7(time.time_ns() // 1_000_000)


async def stored(engine: AsyncEngine, key: str, **changes: Any) -> str:
    """A rollout that began now; its id."""
    record = a_rollout(id=now_id(), key_id=key, steps=[a_step(0)], **changes)
    async with engine.begin() as connection:
        await connection.run_sync(insert_rows, rows.event_rows(rollout_event(record)))
    return record.id


async def drawn(engine: AsyncEngine) -> set[str]:
    async with engine.begin() as connection:
        query = "SELECT rollout_id FROM gradings WHERE grader LIKE 'judge:%'"
        return {str(one) for one in await connection.scalars(text(query))}


async def test_it_is_shown_what_keys_and_requests_allow(pg_engine: AsyncEngine) -> None:
    free = await a_key(pg_engine)
    shown = {
        await stored(pg_engine, free),
        await stored(pg_engine, free, log_mode="redacted"),
        await stored(pg_engine, await a_key(pg_engine, workers=["alpha", "wise"])),
        await stored(pg_engine, await a_key(pg_engine, pools=["default"])),
        await stored(pg_engine, await a_key(pg_engine, pools=["*"])),
    }
    for changes in (
        {"train": False},
        {"log_mode": "metadata", "reply": None},
        {"status": "failed"},
        {"depth": 1, "parent_id": next(iter(shown))},
        {"tags": {"grader": "exact", "reference": "x"}},
        {"request": {"model": "m", "input": "a text to embed"}},
    ):
        await stored(pg_engine, free, **changes)
    for rights in (
        {"train": False},
        {"log_mode": "metadata"},
        {"signals": False},
        {"workers": ["alpha"]},
        {"pools": ["other"]},
    ):
        await stored(pg_engine, await a_key(pg_engine, **rights))
    await stored(pg_engine, "nokeyatall00")
    assert await JudgeSample(pg_engine, ALL).draw(100, ["default"]) == len(shown)
    assert await drawn(pg_engine) == shown
    assert await JudgeSample(pg_engine, ALL).draw(100, ["default"]) == 0


async def test_a_share_is_drawn_by_the_id_alone(pg_engine: AsyncEngine) -> None:
    key = await a_key(pg_engine)
    for _ in range(300):
        await stored(pg_engine, key)
    some = SampledJudge("wise", 0.2)
    first = await JudgeSample(pg_engine, some).draw(1_000, ["default"])
    assert 30 < first < 90
    assert await JudgeSample(pg_engine, some).draw(1_000, ["default"]) == 0
    both = await asyncio.gather(*(JudgeSample(pg_engine, ALL).draw(1_000, ["default"]) for _ in range(2)))
    assert sum(both) == 300 - first  # two workers draw each request once


async def test_what_people_judged_is_judged_too_until_the_judge_is_known(pg_engine: AsyncEngine) -> None:
    key, nobody = await a_key(pg_engine), SampledJudge("wise", 0.0)
    for _ in range(40):
        rollout = await stored(pg_engine, key)
        async with pg_engine.begin() as connection:
            outcome = an_outcome(rollout, id=now_id(), key_id=key, source="person")
            await connection.run_sync(insert_outcome, outcome)
    await stored(pg_engine, key)
    assert 8 < await JudgeSample(pg_engine, nobody).draw(100, ["default"]) < 32
    for rollout in await drawn(pg_engine):
        async with pg_engine.begin() as connection:
            outcome = an_outcome(rollout, id=now_id(), key_id=key, source="judge:wise")
            await connection.run_sync(insert_outcome, outcome)
    await PostgresSources(pg_engine).sweep(1)
    async with pg_engine.begin() as connection:
        await connection.execute(text("UPDATE sources SET right_accepted = :n"), {"n": COMPARED_WANTED})
        await connection.execute(text("DELETE FROM gradings"))
    assert await JudgeSample(pg_engine, nobody).draw(100, ["default"]) == 0


async def test_its_verdict_is_an_outcome_of_its_own_source_by_the_rubric_of_the_kind(
    pg_engine: AsyncEngine, tmp_path: Path
) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Write to Ann."}]
    key = await a_key(pg_engine)
    rollout = await stored(pg_engine, key, task_type="letters", request={"model": "baton", "messages": messages})
    async with judged(pg_engine, tmp_path, Script(text=VERDICT), share=1.0) as (worker, upstream):
        assert await worker.round() == 1
        (request,) = upstream.requests
    prompt = request.body["messages"][1]["content"]
    assert "> system: Be kind.\n> \n> user: Write to Ann." in prompt
    assert "Rubric:\n> It is polite." in prompt
    assert "Reply:\n> 4" in prompt
    assert request.body["metadata"] == {"train": "false"}
    assert await outcomes(pg_engine, rollout) == [("number", 1.0, "judge:wise", "judge@1", key)]
    async with pg_engine.connect() as connection:
        query = "SELECT source, success, weight FROM experience"
        ((source, success, weight),) = (await connection.execute(text(query))).all()
    assert (source, success, round(weight, 2)) == ("judge:wise", 1.0, 0.62)


async def test_a_worker_that_is_killed_loses_no_verdict_and_doubles_none(
    pg_engine: AsyncEngine, tmp_path: Path
) -> None:
    rollout = await stored(pg_engine, await a_key(pg_engine))
    await JudgeSample(pg_engine, ALL).draw(10, ["default"])
    (lent,) = await GradingStore(pg_engine).lend(10, 60.0)  # and nothing more is heard of it
    await due(pg_engine)
    async with judged(pg_engine, tmp_path, Script(text=VERDICT), share=1.0) as (worker, _):
        assert await worker.round() == 1
    assert not await GradingStore(pg_engine).graded(lent, 0.0, "judge@1", "the dead one's")
    assert [row.value for row in await outcomes(pg_engine, rollout)] == [1.0]


async def test_once_the_days_dollars_are_spent_it_rests(
    pg_engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await a_key(pg_engine)
    rollout = await stored(pg_engine, key)
    refusal = {"error": {"message": "the budget of today is spent", "code": "insufficient_quota"}}
    monkeypatch.setattr(OpenAI, "error", lambda *_: refusal)
    async with judged(pg_engine, tmp_path, Script(status=429), share=1.0) as (worker, upstream):
        assert await worker.round() == 1
        found = await grading(pg_engine, rollout)
        assert (found.state, found.attempts) == ("waiting", 1)
        assert "the budget of today is spent" in found.detail
        later = await stored(pg_engine, key)
        assert await worker.round() == 0
        assert later not in await drawn(pg_engine)
        assert len(upstream.requests) == 1


async def test_another_judge_does_not_speak_for_the_one_before(pg_engine: AsyncEngine, tmp_path: Path) -> None:
    rollout = await stored(pg_engine, await a_key(pg_engine))
    await JudgeSample(pg_engine, replace(ALL, worker="sage")).draw(10, ["default"])
    async with judged(pg_engine, tmp_path, Script(text=VERDICT)) as (worker, upstream):
        assert await worker.round() == 1
        assert not upstream.requests
    assert (await grading(pg_engine, rollout)).detail == "judge:sage judges no more"


async def test_without_a_gateway_or_a_share_nothing_is_drawn(
    pg_engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "DRAW_S", 0.0)
    rollout = await stored(pg_engine, await a_key(pg_engine))
    settings = judging.JudgeSettings("wise", tmp_path / "facts", tmp_path / "key", share=1.0)
    work = judging.Judging(settings, JudgeSample(pg_engine, ALL))
    assert await work.draw(BATCH) == 0
    (tmp_path / "key").write_text(json.dumps({"judge_key": "k", "pools": ["default"]}))
    assert await judging.Judging(replace(settings, share=0.0), JudgeSample(pg_engine, ALL)).draw(BATCH) == 0
    assert await work.draw(BATCH) == 1
    assert await drawn(pg_engine) == {rollout}
    assert await Grading(GradingStore(pg_engine)).round() == 1
    assert "judges no more" in (await grading(pg_engine, rollout)).detail
