"""`PoolRevisions`: the fake and PostgreSQL keep the same pools, and write the same audit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres.admin import PostgresPools
from gateway.adapters.postgres.audit import PostgresAudit
from gateway.adapters.postgres.database import async_engine
from gateway.core.access.audit import Verifier
from gateway.core.pool.revision import canonical_text, revision_of
from gateway.errors import Unavailable
from gateway.service.ports.pools import PoolRevision
from tests.fakes.admin import FakeAdmin
from tests.fakes.pools import FakePools
from tests.fakes.store import FakeStore
from tests.kit import model_worker, pool_file
from tests.stores import NOW

FIRST, SECOND = pool_file(), pool_file(model_worker("delta", "dune"))
AFTER = {"hash": "x", "changes": {"workers": {"added": ["delta"]}}}


def revision(pools: Any = FIRST, **changes: Any) -> PoolRevision:
    return replace(PoolRevision(revision_of(pools), canonical_text(pools), NOW, "local:ann", "new models"), **changes)


@dataclass(slots=True)
class Shelf:
    pools: Any
    entries: Any

    async def acts(self) -> list[tuple[str, str, str, Any, Any]]:
        """(actor, act, why, before, after) of every entry; the chain is whole."""
        links = await self.entries.walk(0, 1_000)
        verifier = Verifier([])
        assert [*verifier.walk(links), *verifier.end()] == []
        assert {one.entry.target for one in links} <= {"pools"}
        return [(e.actor, e.act, e.why, e.before, e.after) for e in (one.entry for one in links)]


@pytest.fixture(params=["fake", "postgres"])
async def shelf(request: pytest.FixtureRequest) -> AsyncIterator[Shelf]:
    if request.param == "fake":
        admin = FakeAdmin(FakeStore())
        yield Shelf(FakePools(admin), admin)
        return
    engine = async_engine(request.getfixturevalue("database_url"), statement_timeout_s=20.0)
    yield Shelf(PostgresPools(engine), PostgresAudit(engine))
    await engine.dispose()


async def test_a_pool_comes_back_as_it_went_in_and_is_audited_once(shelf: Shelf) -> None:
    one = revision()
    assert await shelf.pools.note(one, AFTER)
    assert not await shelf.pools.note(replace(one, at=NOW + timedelta(hours=1), actor="baton"), AFTER)
    assert await shelf.pools.get(one.hash) == one
    assert await shelf.pools.get("no such\x00hash") is None
    assert await shelf.acts() == [("local:ann", "pool.loaded", "new models", None, AFTER)]


async def test_each_change_is_audited_also_one_back_to_what_was(shelf: Shelf) -> None:
    one, other = revision(), revision(SECOND, at=NOW + timedelta(hours=1), why="")
    await shelf.pools.note(one, AFTER)
    await shelf.pools.change(other, {"hash": one.hash}, AFTER)
    await shelf.pools.change(replace(one, at=NOW + timedelta(hours=2)), {"hash": other.hash}, {"hash": one.hash})
    assert await shelf.pools.list(10) == [other, one]  # the first time that it served stands
    assert await shelf.pools.list(1) == [other]
    acts = await shelf.acts()
    assert [act for _, act, *_ in acts] == ["pool.loaded", "pool.reloaded", "pool.reloaded"]
    assert acts[1] == ("local:ann", "pool.reloaded", "", {"hash": one.hash}, AFTER)


async def test_away_is_said_and_keeps_nothing() -> None:
    store = FakeStore()
    shelf = FakePools(FakeAdmin(store))
    store.away = True
    with pytest.raises(Unavailable):
        await shelf.change(revision(), {}, AFTER)
    away = async_engine("postgresql://nobody@127.0.0.1:1/none")
    for call in (PostgresPools(away).note(revision(), AFTER), PostgresPools(away).list(1)):
        with pytest.raises(Unavailable):
            await call
    await away.dispose()
    assert shelf.kept == {}


async def test_the_table_takes_no_other_text_under_a_hash_and_forgets_nothing(pg_engine: AsyncEngine) -> None:
    pools = PostgresPools(pg_engine)
    with pytest.raises(IntegrityError):
        await pools.note(revision(file=canonical_text(SECOND)), AFTER)
    assert (await PostgresAudit(pg_engine).head()).seq == 0  # neither the pool nor the entry
    await pools.note(revision(), AFTER)
    for statement in (
        "UPDATE pool_revisions SET actor = 'eve'",
        "DELETE FROM pool_revisions",
        "TRUNCATE pool_revisions",
    ):
        with pytest.raises(IntegrityError, match="append-only"):
            async with pg_engine.begin() as connection:
                await connection.execute(text(statement))
