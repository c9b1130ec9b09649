"""The queries printed in docs/schema.md run, and the first ones show what they promise."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres import rows, tables
from gateway.adapters.postgres.inserts import insert_rows
from gateway.adapters.postgres.store import PostgresStore
from gateway.core.log.rollout import RolloutRecord
from tests.records import T0_US, a_rollout, a_step, an_outcome, hold_event, rollout_event, settle_event

DOC = Path(__file__).parents[2] / "docs" / "schema.md"
BLOCKS = re.findall(r"```sql\n(.*?)```", DOC.read_text(), re.DOTALL)
QUERIES = [query.strip() for block in BLOCKS for query in block.split(";") if query.strip()]


@pytest.fixture
async def record(pg_engine: AsyncEngine) -> RolloutRecord:
    """One judged rollout of two steps, of which the second starts before the first ends."""
    later = {"started_us": T0_US + 100_000, "finished_us": T0_US + 200_000}
    record = a_rollout(steps=[a_step(0), a_step(1, "beta", see=[], **later)])
    events = (
        rollout_event(record),
        hold_event("h1", record.id, 9_000, ("key:key1", None)),
        hold_event("h2", record.id, 5, ("key:key1", None)),
        settle_event("h1", record.id, "posted", 805, "key:key1"),
    )
    async with pg_engine.begin() as connection:
        for one in events:
            await connection.run_sync(insert_rows, rows.event_rows(one))
    await PostgresStore(pg_engine).outcome_insert(an_outcome(record.id))
    return record


async def run(engine: AsyncEngine, query: str, rollout_id: str) -> Sequence[Any]:
    async with engine.connect() as connection:
        found = await connection.execute(
            text(query.replace(":'rollout_id'", ":rollout_id")), {"rollout_id": rollout_id}
        )
        return list(found.mappings())


async def test_each_step_with_the_sampled_tokens_and_their_logprobs(
    pg_engine: AsyncEngine, record: RolloutRecord
) -> None:
    found = await run(pg_engine, QUERIES[0], record.id)
    assert [(row["step"], row["worker"], row["see"]) for row in found] == [(0, "alpha", []), (1, "beta", [])]
    assert found[0]["plan_token_ids"] == [10, 11, 12]
    assert found[0]["plan_logprobs"] == [-0.1, -2.5, -0.000001]
    assert found[0]["took_ms"] == 100


async def test_the_sampled_tokens_one_a_row(pg_engine: AsyncEngine, record: RolloutRecord) -> None:
    found = await run(pg_engine, QUERIES[1], record.id)
    assert [(row["position"], row["token_id"], row["is_decision"]) for row in found] == [
        (1, 10, True),
        (2, 11, False),
        (3, 12, True),
    ]
    assert found[2]["probability"] == pytest.approx(0.999999)


async def test_steps_that_ran_at_the_same_time(pg_engine: AsyncEngine, record: RolloutRecord) -> None:
    (pair,) = await run(pg_engine, QUERIES[2], record.id)
    assert (pair["one"], pair["other"], pair["together_ms"]) == (0, 1, 30)


async def test_every_other_query_runs(pg_engine: AsyncEngine, record: RolloutRecord) -> None:
    assert len(QUERIES) == 8
    sizes = [len(await run(pg_engine, query, record.id)) for query in QUERIES]
    assert sizes[3:] == [0, 1, 1, 2, 0]  # the rollout is too old for the query about the last day


def test_every_table_is_on_the_page() -> None:
    page = DOC.read_text()
    assert [name for name in tables.metadata.tables if f"| `{name}` |" not in page] == []
