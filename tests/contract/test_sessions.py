"""`SessionStore`: the fake and PostgreSQL give the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from gateway.adapters.postgres.audit import PostgresAudit
from gateway.adapters.postgres.database import async_engine
from gateway.adapters.postgres.turns import PostgresSessions
from gateway.core.access.audit import Act
from gateway.core.money.sessions import Session, SessionLimits
from gateway.errors import Conflict
from tests.fakes.sessions import FakeSessions
from tests.stores import NOW

ANN = Act("key:adm", "as asked for")
LIMITS = SessionLimits(1_000, 5, 30)


class Audited(PostgresSessions):
    """With the acts of its audit, as the fake has them."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine, timeout_s=20.0)
        self.audit = PostgresAudit(engine)


@pytest.fixture(params=["fake", "postgres"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    if request.param == "fake":
        yield FakeSessions()
        return
    engine = async_engine(request.getfixturevalue("database_url"), statement_timeout_s=20.0)
    yield Audited(engine)
    await engine.dispose()


async def acts(store: Any) -> list[tuple[str, str]]:
    if isinstance(store, FakeSessions):
        return store.acts
    return [(one.entry.act, one.entry.target) for one in await store.audit.walk(0, 100)]


async def test_the_first_of_many_makes_it_and_its_limits_stay(store: Any) -> None:
    asked = [SessionLimits(nano) for nano in range(1, 9)]
    entered = await asyncio.gather(*(store.enter("k1", "run-1", limits, NOW) for limits in asked))
    [(made, _)] = [one for one in entered if one[1]]
    assert {session for session, _ in entered} == {made}
    assert (made.limits, made.first, made.state, made.started_at) == (made.first, made.limits, "open", NOW)
    assert await store.find("k1", "run-1") == made
    assert (await store.enter("k1", "run-1", LIMITS, NOW + timedelta(hours=1))) == (made, False)


async def test_a_session_is_its_keys_alone(store: Any) -> None:
    mine, _ = await store.enter("k1", "run-1", LIMITS, NOW)
    theirs, new = await store.enter("k2", "run-1", SessionLimits(), NOW)
    assert new
    assert await store.find("k3", "run-1") is None
    assert await store.change("k3", "run-1", {"state": "killed"}, ANN, "session.killed") is None
    assert not {mine.money_scope, mine.calls_scope} & {theirs.money_scope, theirs.calls_scope}
    assert await store.states([("k1", "run-1"), ("k3", "run-1")]) == {("k1", "run-1"): "open"}


async def test_changes_are_audited_once_and_a_killed_session_stays_killed(store: Any) -> None:
    made, _ = await store.enter("k1", "run-1", LIMITS, NOW)
    raised = await store.change("k1", "run-1", {"limits": SessionLimits(9, None, 60)}, ANN, "session.changed")
    assert (raised.limits, raised.first) == (SessionLimits(9, None, 60), LIMITS)
    assert raised.money_scope == made.money_scope  # what it spent still counts
    assert await store.change("k1", "run-1", {"limits": raised.limits}, ANN, "session.changed") == raised
    await store.change("k1", "run-1", {"state": "frozen"}, ANN, "session.frozen")
    killed = await store.change("k1", "run-1", {"state": "killed"}, ANN, "session.killed")
    assert await store.change("k1", "run-1", {"state": "killed"}, ANN, "session.killed") == killed
    with pytest.raises(Conflict):
        await store.change("k1", "run-1", {"state": "open"}, ANN, "session.opened")
    with pytest.raises(Conflict):
        await store.change("k1", "run-1", {"limits": LIMITS}, ANN, "session.changed")
    done = ["session.changed", "session.frozen", "session.killed"]
    assert [act for act in await acts(store) if act[1] == "session:k1:run-1"] == [(d, "session:k1:run-1") for d in done]


async def test_pages_are_newest_first_and_old_ones_are_swept(store: Any) -> None:
    for number in range(5):
        await store.enter("k1" if number % 2 else "k2", f"run-{number}", LIMITS, NOW + timedelta(hours=number))

    async def ids(key: str | None, limit: int, last: Session | None = None) -> list[str]:
        before = None if last is None else (last.started_at, last.id)
        return [session.id for session in await store.page(key, limit, before)]

    assert await ids("k1", 9) == ["run-3", "run-1"]
    assert await ids(None, 2) == ["run-4", "run-3"]
    assert await ids(None, 2, (await store.page(None, 2, None))[-1]) == ["run-2", "run-1"]
    assert await store.sweep(NOW + timedelta(hours=2), 1) == 1
    assert await store.sweep(NOW + timedelta(hours=2), 9) == 1
    assert sorted(await ids(None, 9)) == ["run-2", "run-3", "run-4"]
