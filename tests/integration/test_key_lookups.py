"""Look-ups of keys: those that are wanted at a time are one read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres import key_lookups
from gateway.adapters.postgres.admin import PostgresAdmin
from gateway.adapters.postgres.database import Lookups, lookup_engine
from gateway.adapters.postgres.key_lookups import KeyLookups
from gateway.errors import Unavailable
from gateway.service.admin.keys import ITSELF, UNLIMITED
from gateway.service.ports.admin import KeyRow
from tests.stores import NOW


@pytest.fixture
async def lookups(database_url: str) -> AsyncIterator[Lookups]:
    engine = lookup_engine(database_url, statement_timeout_s=20.0)
    yield Lookups(engine)
    await engine.dispose()


class SlowLooks:
    """Look-ups of which each waits for `go`."""

    def __init__(self, lookups: Lookups) -> None:
        self._lookups = lookups
        self.go = asyncio.Semaphore(0)
        self.ids: list[list[str]] = []
        self.error: Exception | None = None

    async def rows(self, statement: str, values: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        self.ids.append(values["public_ids"])
        await self.go.acquire()
        if self.error is not None:
            raise self.error
        return await self._lookups.rows(statement, values)


async def test_keys_that_are_wanted_at_a_time_are_one_read(lookups: Lookups, pg_engine: AsyncEngine) -> None:
    office = PostgresAdmin(pg_engine)
    for name in ("ka", "kb"):
        key = KeyRow(name, "data", name, b"digest", 1, "default", created_at=NOW, **UNLIMITED)
        await office.key_insert(key, ITSELF)
    looks = SlowLooks(lookups)
    reads = KeyLookups(cast(Lookups, looks))
    first = [asyncio.create_task(reads.get(name)) for name in ("ka", "none", "ka")]
    await asyncio.sleep(0.01)
    second = [asyncio.create_task(reads.get(name)) for name in ("kb", "ka")]  # while the first read is under way
    await asyncio.sleep(0.01)
    assert looks.ids == [["ka", "none"]]
    looks.go.release()
    looks.go.release()
    names = [None if key is None else key.name for key in await asyncio.gather(*first, *second)]
    assert names == ["ka", None, "ka", "kb", "ka"]
    assert looks.ids == [["ka", "none"], ["kb", "ka"]]
    last = asyncio.create_task(reads.get("kb"))
    looks.go.release()
    assert (await last).name == "kb"  # type: ignore[union-attr]


async def test_a_caller_that_leaves_and_a_read_that_fails_are_no_harm_to_others(lookups: Lookups) -> None:
    looks = SlowLooks(lookups)
    reads = KeyLookups(cast(Lookups, looks))
    leaves, stays = (asyncio.create_task(reads.get("ka")) for _ in range(2))
    await asyncio.sleep(0.01)
    leaves.cancel()
    looks.error = Unavailable("away", code="store_unavailable")
    looks.go.release()
    with pytest.raises(Unavailable):
        await stays
    looks.error = None
    again = asyncio.create_task(reads.get("ka"))
    looks.go.release()
    assert await again is None


async def test_a_read_of_keys_that_hangs_ends(lookups: Lookups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_lookups, "READ_S", 0.05)
    reads = KeyLookups(cast(Lookups, SlowLooks(lookups)))
    with pytest.raises(Unavailable, match="does not answer"):
        await reads.get("ka")
