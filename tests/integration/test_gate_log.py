"""The gate's triage on a real PostgreSQL: what the log gives back is what was sampled, to the last log-prob."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.database import sync_engine
from gateway.adapters.postgres.inserts import insert_outcome, insert_rows
from gateway.core.log.rollout import as_payload
from gateway.errors import ConfigError, NotFound
from policy.dataset.select import Selection
from policy.engines.choice import EngineChoice
from policy.engines.directory import read_conductors
from policy.engines.opening import open_engine
from policy.evaluate.entrants import SHIPPED
from policy.gate import triage
from policy.gate.checks import Thresholds
from policy.gate.logged import Log, RolloutSource, read, rows_of
from policy.serve.manifest import read_complete
from tests.policy.gate_rows import arena_episodes
from tests.records import an_outcome, event


async def check_scores(log: Log) -> None:
    async def made(_key: Sequence[object], make: Callable[[], Awaitable[Any]]) -> Any:
        return await make()

    async with open_engine(read_conductors([SHIPPED])[SHIPPED], EngineChoice(threads=1)) as engine:
        assert (await triage.replay(engine, log, Thresholds(), made, lambda *_: None)).alike
        for reply in await triage.ask(engine, log.requests, made, lambda *_: None):
            assert reply.weight_log == pytest.approx(0.0, abs=1e-3)


def test_the_log_is_scored_as_it_was_sampled(database_url: str) -> None:
    found = arena_episodes(SHIPPED, 12)
    engine = sync_engine(database_url)
    with engine.connect() as connection:
        for at, (_, episode) in enumerate(found):
            loops = (episode.record, *episode.children)
            for loop in loops:
                payload = as_payload(replace(loop, finished_us=loop.created_us + 1))
                insert_rows(connection, rows.event_rows(event("rollout", payload)))
            root = episode.record
            judged = an_outcome(root.id, float(at % 2), key_id=root.key_id, created_at=rows.EPOCH)
            insert_outcome(connection, judged)
        connection.commit()
    engine.dispose()
    log = read(rows_of(RolloutSource(database_url=database_url)), read_complete(SHIPPED).manifest.prompt_hash)
    assert (len(log.requests), log.left_out) == (12, {})
    asyncio.run(check_scores(log))
    with pytest.raises(NotFound, match="no planning call matches"):
        rows_of(RolloutSource(database_url=database_url, selection=Selection(pools=("elsewhere",))))
    with pytest.raises(ConfigError, match="every outcome is"):
        read([replace(row, outcome=1.0) for row in rows_of(RolloutSource(database_url=database_url))], "")
