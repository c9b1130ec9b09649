"""Graders named by requests, on a real PostgreSQL: one outcome a reply, whatever happens to who grades it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text, update
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.database import connected
from gateway.adapters.postgres.evidence.sampling import JudgeSample, SampledJudge
from gateway.adapters.postgres.inserts import insert_rows
from gateway.adapters.postgres.policies.jobs import GradingStore
from gateway.adapters.postgres.store import PostgresStore
from gateway.adapters.postgres.tables import gradings
from policy.graders import versions
from policy.jobs.grading import ATTEMPTS_MAX, BATCH, Grading
from policy.jobs.judging import JudgeSettings, Judging
from tests.records import a_rollout, rollout_event
from tests.upstreams.openai import OpenAI
from tests.upstreams.vendor import Script

VERDICT = '{"reason": "it says so", "verdict": "right"}'


async def asked(engine: AsyncEngine, grader: str, reference: str, said: str | None = "so: $18.90", **more: Any) -> str:
    """A stored rollout whose request named that grader; its id."""
    reply = None if said is None else {"choices": [{"message": {"role": "assistant", "content": said}}]}
    record = a_rollout(tags={"grader": grader, "reference": reference}, reply=reply, **more)
    async with engine.begin() as connection:
        await connection.run_sync(insert_rows, rows.event_rows(rollout_event(record)))
    return record.id


async def outcomes(engine: AsyncEngine, rollout_id: str) -> Sequence[Any]:
    query = "SELECT kind, value, source, grader_version, key_id FROM outcomes WHERE rollout_id = :id"
    async with engine.connect() as connection:
        return list(await connection.execute(text(query), {"id": rollout_id}))


async def grading(engine: AsyncEngine, rollout_id: str) -> Any:
    async with engine.connect() as connection:
        query = "SELECT state, detail, attempts FROM gradings WHERE rollout_id = :id"
        return (await connection.execute(text(query), {"id": rollout_id})).one()


async def due(engine: AsyncEngine) -> None:
    """What waits for its next attempt or for its lease to end waits no longer."""
    async with engine.begin() as connection:
        await connection.execute(update(gradings).values(due_at=gradings.c.created_at))


@pytest.mark.parametrize(
    ("grader", "reference", "said", "value"),
    [
        ("numeric@1", "18.90", "so: $18.90", 1.0),  # asked before that grader changed
        ("numeric", "75/4", "Answer: 75/4.", 1.0),
        ("numeric", "18.90", "so: $18.95", 0.0),
        ("exact", "new york city", "**New York City**", 1.0),
        ("choice", "B", "The answer is (B).", 1.0),
        ("regex", "^so", "so it is", 1.0),
        ("json_schema", '{"type": "object", "required": ["city"]}', '{"city": "Oslo"}', 1.0),
    ],
)
async def test_a_reply_gets_the_outcome_its_request_asked_for(
    pg_engine: AsyncEngine, grader: str, reference: str, said: str, value: float
) -> None:
    rollout = await asked(pg_engine, grader, reference, said)
    assert await Grading(GradingStore(pg_engine)).round() == 1
    name = grader.partition("@")[0]
    assert await outcomes(pg_engine, rollout) == [("number", value, "grader", f"{name}@{versions()[name]}", "key1")]
    assert (await grading(pg_engine, rollout)).state == "graded"
    async with pg_engine.connect() as connection:
        learned = (await connection.execute(text("SELECT DISTINCT success FROM experience"))).scalars().all()
    assert learned == [value]  # it steers the rule at once, as a client's outcome does


async def test_a_rollout_read_while_it_is_graded_is_of_one_moment(pg_engine: AsyncEngine) -> None:
    """The grade lands between two statements of the reader: it shows the grade with its outcome, or neither."""
    rollout_id = await asked(pg_engine, "exact", "so: $18.90")
    (waiting,) = await GradingStore(pg_engine).lend(1, 60.0)
    url = pg_engine.url.render_as_string(hide_password=False)
    landed: list[bool] = []

    async def grade() -> bool:
        async with connected(url) as engine:
            return await GradingStore(engine).graded(waiting, 1.0, "exact@1", "")

    def land(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if "FROM gradings" in statement and not landed:
            with ThreadPoolExecutor(1) as thread:  # this one's event loop waits for the statement
                landed.append(thread.submit(asyncio.run, grade()).result())

    async with connected(url) as engine:
        event.listen(engine.sync_engine, "before_cursor_execute", land)
        shown = [await PostgresStore(engine).rollout_get(rollout_id, waiting.key_id) for _ in range(2)]
    assert landed == [True]
    states = [(row["gradings"][0]["state"], len(row["outcomes"])) for row in shown if row]
    assert states == [("waiting", 0), ("graded", 1)]


async def test_a_request_that_named_none_is_left_alone(pg_engine: AsyncEngine) -> None:
    record = a_rollout()
    async with pg_engine.begin() as connection:
        await connection.run_sync(insert_rows, rows.event_rows(rollout_event(record)))
    assert await Grading(GradingStore(pg_engine)).round() == 0
    assert await outcomes(pg_engine, record.id) == []


@pytest.mark.parametrize(
    ("grader", "reference", "more", "said"),
    [
        ("numeric", "two", {}, "numeric needs a number"),
        ("regex", "(", {}, "the pattern is not one Python knows"),
        ("judge", "no object", {}, 'judge needs {"question"'),
        ("exact", "x", {"said": None, "status": "failed"}, "there is no text to grade: the request ended failed"),
        ("exact", "x", {"status": "aborted"}, "the request ended aborted"),
        ("exact", "x", {"said": ""}, "there is no text to grade"),
    ],
)
async def test_a_rollout_that_cannot_be_graded_gets_a_reason_and_no_outcome(
    pg_engine: AsyncEngine, grader: str, reference: str, more: dict[str, Any], said: str
) -> None:
    rollout = await asked(pg_engine, grader, reference, **more)
    await Grading(GradingStore(pg_engine)).round()
    found = await grading(pg_engine, rollout)
    assert found.state == "ungraded"
    assert said in found.detail
    assert await outcomes(pg_engine, rollout) == []
    await due(pg_engine)
    assert await Grading(GradingStore(pg_engine)).round() == 0  # nor is it tried again


async def test_many_workers_grade_each_reply_once(pg_engine: AsyncEngine) -> None:
    ids = [await asked(pg_engine, "exact", "so: $18.90") for _ in range(2 * BATCH)]
    workers = [Grading(GradingStore(pg_engine)) for _ in range(4)]
    assert sum(await asyncio.gather(*(worker.round() for worker in workers))) == len(ids)
    assert [len(await outcomes(pg_engine, one)) for one in ids] == [1] * len(ids)


async def test_a_worker_that_dies_while_grading_loses_it_to_the_next(pg_engine: AsyncEngine) -> None:
    store = GradingStore(pg_engine)
    rollout = await asked(pg_engine, "exact", "so: $18.90")
    (lent,) = await store.lend(10, lease_s=60)  # and nothing more is heard of it
    assert await Grading(store).round() == 0
    await due(pg_engine)
    assert await Grading(store).round() == 1
    assert not await store.graded(lent, 0.0, "exact@1", "the dead one's")  # it comes back, too late
    assert [row.value for row in await outcomes(pg_engine, rollout)] == [1.0]


@asynccontextmanager
async def judged(
    engine: AsyncEngine, directory: Path, script: Script, share: float = 0.0
) -> AsyncIterator[tuple[Grading, OpenAI]]:
    """Graders with a judge that answers so, behind what looks like a gateway."""
    upstream = OpenAI("bt_data_judge")
    upstream.script = script
    async with upstream:
        facts, key = directory / "serve.json", directory / "judge.json"
        facts.write_text(json.dumps({"base_url": upstream.base}))
        key.write_text(json.dumps({"judge_key": "bt_data_judge", "pools": ["default"]}))
        judge = JudgeSettings("wise", facts, key, share, {"letters": "It is polite."})
        sample = JudgeSample(engine, SampledJudge(judge.worker, judge.share))
        yield Grading(GradingStore(engine), Judging(judge, sample)), upstream


async def test_the_judge_is_asked_through_the_gateway_with_its_key(pg_engine: AsyncEngine, tmp_path: Path) -> None:
    reference = json.dumps({"question": "How much?", "answer": "18.90"})
    rollout = await asked(pg_engine, "judge", reference)
    async with judged(pg_engine, tmp_path, Script(text=VERDICT)) as (worker, upstream):
        await worker.round()
        (request,) = upstream.requests
    assert request.headers["authorization"] == "Bearer bt_data_judge"
    assert (request.body["model"], request.body["metadata"]) == ("wise", {"train": "false"})
    assert "> so: $18.90" in request.body["messages"][1]["content"]
    assert [(row.value, row.grader_version) for row in await outcomes(pg_engine, rollout)] == [(1.0, "judge@1")]


async def test_a_judge_out_of_money_is_tried_again_and_then_given_up(pg_engine: AsyncEngine, tmp_path: Path) -> None:
    rollout = await asked(pg_engine, "judge", json.dumps({"question": "How much?", "answer": "18.90"}))
    async with judged(pg_engine, tmp_path, Script(status=429, message="the budget is spent")) as (worker, _):
        for attempt in range(1, ATTEMPTS_MAX + 1):
            assert await worker.round() == 1
            found = await grading(pg_engine, rollout)
            assert found.attempts == attempt
            assert "the judge was refused (429): the budget is spent" in found.detail
            await due(pg_engine)
    assert found.state == "ungraded"
    assert await outcomes(pg_engine, rollout) == []


async def test_without_a_judge_nothing_is_asked_and_it_says_so(pg_engine: AsyncEngine) -> None:
    rollout = await asked(pg_engine, "judge", json.dumps({"question": "How much?", "answer": "18.90"}))
    await Grading(GradingStore(pg_engine)).round()
    assert "give the job a judge" in (await grading(pg_engine, rollout)).detail
