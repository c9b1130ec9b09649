"""`LoginStore`: the fake and PostgreSQL give the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gateway.adapters.postgres.audit import PostgresAudit
from gateway.adapters.postgres.database import async_engine
from gateway.adapters.postgres.operators.logins import PostgresLogins
from gateway.core.access.login import Person
from gateway.errors import Unavailable
from gateway.service.ports.login import LoginStore, PendingLogin
from tests.fakes.logins import FakeLogins

NOW = datetime.now(UTC)  # `sweep` goes by the database's clock
SOON = NOW + timedelta(hours=1)
LOGIN = PendingLogin(b"\x00browser\xff", "nonce", "verifier")
ANN = Person("issuer|ann", "ann@example.org", "operator")
BOB = Person("issuer|bob", "bob@example.org", "admin")


class AuditedLogins(PostgresLogins):
    """With the acts of its audit, as the fake has them."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.audit = PostgresAudit(engine)


@pytest.fixture(params=["fake", "postgres"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    if request.param == "fake":
        yield FakeLogins()
        return
    engine = async_engine(request.getfixturevalue("database_url"), statement_timeout_s=20.0)
    yield AuditedLogins(engine)
    await engine.dispose()


@pytest.fixture(params=["fake", "postgres"])
async def dead_store(request: pytest.FixtureRequest) -> AsyncIterator[LoginStore]:
    if request.param == "fake":
        fake = FakeLogins()
        fake.away = True
        yield fake
        return
    engine = async_engine("postgresql+psycopg://nobody@127.0.0.1:1/none", statement_timeout_s=20.0)
    yield PostgresLogins(engine)
    await engine.dispose()


async def acts(store: Any) -> list[tuple[str, str]]:
    if isinstance(store, FakeLogins):
        return store.acts
    return [(one.entry.actor, one.entry.act) for one in await store.audit.walk(0, 100)]


async def test_a_login_is_taken_once_and_with_its_own_state(store: Any) -> None:
    await store.begin(b"state", LOGIN, SOON)
    assert await store.take(b"other", NOW) is None
    results = await asyncio.gather(*(store.take(b"state", NOW) for _ in range(8)))
    assert [login for login in results if login is not None] == [LOGIN]


async def test_an_old_login_is_not_taken_and_is_spent_by_the_attempt(store: Any) -> None:
    await store.begin(b"state", LOGIN, SOON)
    assert await store.take(b"state", SOON) is None  # its last moment is over
    assert await store.take(b"state", NOW) is None


async def test_the_oldest_of_too_many_logins_are_dropped(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.adapters.postgres.operators.logins.PENDING_MAX", 3)
    for number in range(5):
        await store.begin(b"%d" % number, LOGIN, SOON + timedelta(seconds=number))
    assert [await store.take(b"%d" % number, NOW) for number in range(5)] == [None, None, LOGIN, LOGIN, LOGIN]


async def test_a_session_is_found_until_it_is_old(store: Any) -> None:
    await store.open(b"token", ANN, NOW, SOON)
    await store.open(b"other", BOB, NOW, SOON)
    assert await store.find(b"token", SOON - timedelta(seconds=1)) == ANN
    assert await store.find(b"other", NOW) == BOB
    assert await store.find(b"token", SOON) is None
    assert await store.find(b"none", NOW) is None
    assert await acts(store) == [(ANN.actor, "console.login"), (BOB.actor, "console.login")]


async def test_a_login_is_no_session_and_a_session_no_login(store: Any) -> None:
    await store.begin(b"state", LOGIN, SOON)
    await store.open(b"token", ANN, NOW, SOON)
    assert await store.find(b"state", NOW) is None
    assert await store.close(b"state") is None
    assert await store.take(b"token", NOW) is None
    assert await store.take(b"state", NOW) == LOGIN
    assert await store.find(b"token", NOW) == ANN


async def test_a_session_is_closed_and_audited_once(store: Any) -> None:
    await store.open(b"token", ANN, NOW, SOON)
    results = await asyncio.gather(*(store.close(b"token") for _ in range(8)))
    assert [person for person in results if person is not None] == [ANN]
    assert await store.find(b"token", NOW) is None
    assert await acts(store) == [(ANN.actor, "console.login"), (ANN.actor, "console.logout")]


async def test_names_lose_what_the_database_cannot_hold(store: Any) -> None:
    await store.open(b"token", Person("a\x00b", "A\x00 B", "auditor"), NOW, SOON)
    person = await store.find(b"token", NOW)
    assert person is not None
    assert "\x00" not in person.subject + person.name
    assert await store.close(b"token") == person


async def test_a_sweep_takes_what_is_over_and_no_more_than_its_limit(store: Any) -> None:
    past = NOW - timedelta(hours=1)
    for number in range(3):
        await store.begin(b"old-%d" % number, LOGIN, past)
        await store.open(b"old-session-%d" % number, ANN, past, past)
    await store.begin(b"state", LOGIN, SOON)
    await store.open(b"token", ANN, NOW, SOON)
    assert [await store.sweep(4), await store.sweep(4), await store.sweep(4)] == [4, 2, 0]
    assert await store.find(b"token", NOW) == ANN
    assert await store.take(b"state", NOW) == LOGIN


async def test_a_store_that_is_away_says_so(dead_store: LoginStore) -> None:
    calls = (
        dead_store.begin(b"state", LOGIN, SOON),
        dead_store.take(b"state", NOW),
        dead_store.open(b"token", ANN, NOW, SOON),
        dead_store.find(b"token", NOW),
        dead_store.close(b"token"),
        dead_store.sweep(10),
    )
    for call in calls:
        with pytest.raises(Unavailable) as error:
            await call
        assert error.value.code == "store_unavailable"
