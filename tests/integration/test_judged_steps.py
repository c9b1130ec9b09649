"""The outcomes of steps, as the watch for drift reads them from PostgreSQL."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres.credit import PostgresJudgements
from gateway.adapters.postgres.inserts import insert_rows
from gateway.adapters.postgres.rows import event_rows
from gateway.adapters.postgres.store import PostgresStore
from tests.records import a_rollout, a_step, an_outcome, rollout_event


async def test_each_worker_is_read_from_where_it_was(pg_engine: AsyncEngine) -> None:
    store, source = PostgresStore(pg_engine), PostgresJudgements(pg_engine)
    for value in (1.0, 0.0, 1.0):
        record = a_rollout(steps=[a_step(0, "alpha")])
        async with pg_engine.begin() as connection:
            await connection.run_sync(insert_rows, event_rows(rollout_event(record)))
        await store.outcome_insert(an_outcome(record.id, value))
    began = datetime.now(UTC) - timedelta(days=20_000)
    first, second = await source.judged({"alpha": began, "beta": began}, 2)
    assert (first.worker, first.version, first.task_type, first.at <= second.at) == ("alpha", "1", "arithmetic", True)
    (third,) = await source.judged({"alpha": second.at}, 10)
    assert sorted(one.success for one in (first, second, third)) == [0.0, 1.0, 1.0]
    assert await source.judged({"alpha": third.at, "nobody": began}, 10) == []
    assert await source.judged({}, 10) == []
