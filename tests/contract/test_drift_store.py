"""`DriftStore`: the fake and PostgreSQL know the same of workers that changed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from gateway.adapters.postgres.audit import PostgresAudit
from gateway.adapters.postgres.database import async_engine
from gateway.adapters.postgres.operators.drift import PostgresDrift
from gateway.core.access.audit import Act
from gateway.core.pool.drift import Drift
from gateway.core.pool.identity import IDENTITIES_MAX, Identity
from gateway.core.pool.release import ReleaseTest
from gateway.errors import Unavailable
from tests.fakes.drift import FakeDrift
from tests.stores import NOW

ANN = Act("local:ann", "too many wrong answers")
FLAG = Drift("alpha", "1", "code", "outcome", 0.1, 0.5, 80)
MINUTE = timedelta(minutes=1)


@dataclass
class Shelf:
    drift: Any
    away: Any  # the same store, whose database does not answer
    audit: Any

    async def acts(self) -> list[tuple[str, str, str]]:
        if self.audit is None:
            return list(self.drift.audit)
        entries = [link.entry for link in await self.audit.walk(0, 100)]
        return [(entry.actor, entry.act, entry.target) for entry in entries]


@pytest.fixture(params=["fake", "postgres"])
async def shelf(request: pytest.FixtureRequest) -> AsyncIterator[Shelf]:
    if request.param == "fake":
        away = FakeDrift()
        away.away = True
        yield Shelf(FakeDrift(), away, None)
        return
    engine = async_engine(request.getfixturevalue("database_url"), statement_timeout_s=20.0)
    nowhere = async_engine("postgresql://nobody@127.0.0.1:1/none", connect_timeout_s=5.0)
    yield Shelf(PostgresDrift(engine), PostgresDrift(nowhere), PostgresAudit(engine))
    await engine.dispose()
    await nowhere.dispose()


async def test_an_identity_is_a_change_where_another_was_known(shelf: Shelf) -> None:
    first, second = Identity("alpha", "1", "", "fp_1"), Identity("alpha", "1", "m-2026-08", "fp_2")
    elsewhere = Identity("beta", "1", "", "fp_9")
    assert await shelf.drift.meet([first, elsewhere], NOW) == []
    assert await shelf.drift.meet([second], NOW + MINUTE) == [second]
    assert await shelf.drift.meet([first, second], NOW + 2 * MINUTE) == []  # back, and nothing new
    rows = await shelf.drift.identities(["alpha"])
    assert [(row["fingerprint"], row["first_at"][:16], row["last_at"][:16]) for row in rows] == [
        ("fp_2", "2026-03-04T05:07", "2026-03-04T05:08"),
        ("fp_1", "2026-03-04T05:06", "2026-03-04T05:08"),
    ]
    (fact,) = await shelf.drift.facts(10)
    assert (fact["what"], fact["worker"]) == ("identity", "alpha")
    assert fact["data"] == {"model": "m-2026-08", "fingerprint": "fp_2"}
    other_version = Identity("alpha", "2", "", "fp_3")
    assert await shelf.drift.meet([other_version], NOW) == []


async def test_a_worker_with_a_fingerprint_a_call_fills_no_table(shelf: Shelf) -> None:
    many = [Identity("alpha", "1", "", f"fp_{n}") for n in range(IDENTITIES_MAX + 20)]
    assert len(await shelf.drift.meet(many, NOW)) == IDENTITIES_MAX - 1
    assert len(await shelf.drift.identities(["alpha"])) == IDENTITIES_MAX


async def test_a_flag_is_a_fact_once_a_month(shelf: Shelf) -> None:
    for at in (NOW, NOW + MINUTE, NOW + timedelta(days=40)):
        await shelf.drift.flagged(FLAG, at)
    facts = await shelf.drift.facts(10)
    assert [fact["at"][:7] for fact in facts] == ["2026-04", "2026-03"]
    rates = {"usual": 0.1, "now": 0.5, "results": 80}
    assert facts[0]["data"] == {"task_type": "code", "signal": "outcome", **rates}
    assert len(await shelf.drift.facts(1)) == 1


async def test_a_quarantine_lasts_until_its_release_and_both_are_audited(shelf: Shelf) -> None:
    assert await shelf.drift.put("alpha", "1", ReleaseTest.of(FLAG), NOW, ANN)
    assert not await shelf.drift.put("alpha", "1", ReleaseTest.of(FLAG), NOW, ANN)
    slow = ReleaseTest("code", "slow", 0.1, 0.4, 2.5)
    assert not await shelf.drift.put("alpha", "1", slow, NOW, ANN)
    (one,) = await shelf.drift.standing(NOW)
    assert (one.worker, one.version, one.by, one.why, one.ended_at) == ("alpha", "1", ANN.actor, ANN.why, None)
    assert [(test.signal, test.bound) for test in one.tests] == [("outcome", None), ("slow", 2.5)]
    assert await shelf.drift.release("alpha", "2", NOW, ANN, anew=False) is None
    ended = await shelf.drift.release("alpha", "1", NOW + MINUTE, Act("key:k", "well again"), anew=True)
    assert (ended.ended_by, ended.ended_why, ended.anew) == ("key:k", "well again", True)
    assert await shelf.drift.release("alpha", "1", NOW, ANN, anew=False) is None
    assert await shelf.drift.standing(NOW + MINUTE) == []
    assert [each.id for each in await shelf.drift.standing(NOW)] == [one.id]
    assert [fact["what"] for fact in await shelf.drift.facts(10)] == ["released", "quarantined"]
    assert await shelf.acts() == [
        ("local:ann", "worker.quarantined", "worker:alpha"),
        ("key:k", "worker.released", "worker:alpha"),
    ]


async def test_a_flag_from_before_a_release_puts_nobody_back(shelf: Shelf) -> None:
    await shelf.drift.put("alpha", "1", None, NOW, ANN)
    await shelf.drift.release("alpha", "1", NOW + 2 * MINUTE, ANN, anew=False)
    assert not await shelf.drift.put("alpha", "1", ReleaseTest.of(FLAG), NOW + MINUTE, ANN)
    assert await shelf.drift.put("alpha", "1", ReleaseTest.of(FLAG), NOW + 3 * MINUTE, ANN)


async def test_a_probe_is_lent_to_one_gateway_and_its_result_stays(shelf: Shelf) -> None:
    await shelf.drift.put("alpha", "1", ReleaseTest.of(FLAG), NOW, ANN)
    (one,) = await shelf.drift.standing(NOW)
    lent = await shelf.drift.lend(one.id, 60.0)
    assert lent is not None
    assert await shelf.drift.lend(one.id, 60.0) is None
    lent.tests[0].add(1.0)
    lent.tests[0].add(0.0)
    await shelf.drift.put("alpha", "1", ReleaseTest("", "failed", 0.0, 0.3), NOW, ANN)  # flagged meanwhile
    await shelf.drift.probed(one.id, lent.tests, 250, 0.0)
    again = await shelf.drift.lend(one.id, 0.0)
    assert again is not None
    assert (again.probes, again.nano) == (1, 250)
    assert [test.as_json() for test in again.tests] == [
        lent.tests[0].as_json(),
        ReleaseTest("", "failed", 0.0, 0.3).as_json(),
    ]
    await shelf.drift.rest(one.id, 60.0)
    assert await shelf.drift.lend(one.id, 60.0) is None
    await shelf.drift.release("alpha", "1", NOW, ANN, anew=False)
    await shelf.drift.probed(one.id, lent.tests, 250, 0.0)  # too late
    assert (await shelf.drift.lend(one.id, 60.0)) is None


async def test_what_is_old_is_swept(shelf: Shelf) -> None:
    old = NOW - timedelta(days=4_000)
    await shelf.drift.put("alpha", "1", None, old, ANN)
    await shelf.drift.put("beta", "1", None, old, ANN)
    await shelf.drift.release("beta", "1", old, ANN, anew=False)
    assert await shelf.drift.sweep(100) == 4  # three facts and the quarantine that ended
    assert [one.worker for one in await shelf.drift.standing(old)] == ["alpha"]
    assert await shelf.drift.facts(10) == []


async def test_a_store_that_is_away_says_so(shelf: Shelf) -> None:
    for asked in (
        shelf.away.meet([Identity("alpha", "1")], NOW),
        shelf.away.standing(NOW),
        shelf.away.put("alpha", "1", None, NOW, ANN),
        shelf.away.lend("018f0000-0000-7000-8000-000000000000", 1.0),
    ):
        with pytest.raises(Unavailable):
            await asked
