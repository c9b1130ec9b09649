"""The store under contract, the fake or PostgreSQL, and a way to fill it with events as the shipper does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.database import async_engine
from gateway.adapters.postgres.evidence.remembered import PostgresPast
from gateway.adapters.postgres.inserts import insert_rows
from gateway.adapters.postgres.store import PostgresStore
from gateway.core.log.events import Event
from tests.fakes.store import FakePast, FakeStore
from tests.records import a_rollout, an_outcome, rollout_event

NOW = datetime(2026, 3, 4, 5, 6, 7, 123456, tzinfo=UTC)


@dataclass(slots=True)
class World:
    """A store, and `ingest`, which adds an event as the shipper does."""

    store: Any  # Store, and the queries of boot and admin
    ingest: Callable[[Event], Awaitable[None]]
    past: Any  # JudgedPast

    async def rollout(self, **changes: Any) -> str:
        record = a_rollout(**changes)
        await self.ingest(rollout_event(record))
        return record.id

    async def judge(
        self, rollout_id: str, value: float | None = 1.0, at: datetime = NOW, **changes: Any
    ) -> tuple[str, bool]:
        result: tuple[str, bool] = await self.store.outcome_insert(
            an_outcome(rollout_id, value, **({"created_at": at} | changes))
        )
        return result


@pytest.fixture(params=["fake", "postgres"])
async def store_world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "fake":
        fake = FakeStore()

        async def ingest_fake(one: Event) -> None:
            fake.ingest(one)

        yield World(fake, ingest_fake, FakePast(fake))
        return
    store = PostgresStore(async_engine(request.getfixturevalue("database_url"), statement_timeout_s=20.0))

    async def ingest_real(one: Event) -> None:
        async with store.engine.begin() as connection:
            await connection.run_sync(insert_rows, rows.event_rows(one))

    yield World(store, ingest_real, PostgresPast(store.engine))
    await store.engine.dispose()
