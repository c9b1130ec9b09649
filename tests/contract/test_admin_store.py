"""`AdminStore`: the fake and PostgreSQL give the same answers, and write the same audit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.admin import PostgresAdmin
from gateway.adapters.postgres.audit import PostgresAudit
from gateway.adapters.postgres.database import async_engine
from gateway.adapters.postgres.inserts import insert_rows
from gateway.adapters.postgres.store import PostgresStore
from gateway.core.access.audit import Act, Verifier
from gateway.core.log.events import Event
from gateway.errors import BadRequest, Conflict, NotFound
from gateway.service.ports.admin import CreditRequest, KeyRow, OrgRow
from tests.fakes.admin import FakeAdmin
from tests.fakes.store import FakeStore
from tests.records import hold_event, new_id, settle_event
from tests.stores import NOW

ANN = Act("local:ann", "as asked for")
KEY = KeyRow(
    public_id="abc123",
    key_class="data",
    name="ann",
    digest=b"\x00\xff" * 16,
    pepper_version=1,
    org="acme",
    pools=("default", "fast"),
    workers=(),
    budget_nano=2**53 - 1,
    rpm=60,
    tpm=None,
    concurrency=4,
    caps={"depth": 1, "wall_s": 0.1},
    log_mode="full",
    train=True,
    created_at=NOW,
    budget_month_nano=7,
    user_budget_day_nano=3,
    retention_days=30,
)
ACME = OrgRow("acme", NOW, budget_nano=5, budget_day_nano=2, user_budget_month_nano=1, rpm=9, retention_days=10)


@dataclass(slots=True)
class Office:
    """A store of administration, its audit, the store of requests beside it, and what ships events there."""

    admin: Any
    entries: Any
    store: Any
    ingest: Callable[[Event], Awaitable[None]]

    async def acts(self) -> list[tuple[str, str]]:
        """(act, target) of every entry, oldest first; the chain is whole."""
        links = await self.entries.walk(0, 1_000)
        verifier = Verifier([])
        assert [*verifier.walk(links), *verifier.end()] == []
        assert await self.entries.head() == verifier.head
        return [(one.entry.act, one.entry.target) for one in links]


@pytest.fixture(params=["fake", "postgres"])
async def office(request: pytest.FixtureRequest) -> AsyncIterator[Office]:
    if request.param == "fake":
        fake = FakeStore()
        admin = FakeAdmin(fake)

        async def ingest_fake(one: Event) -> None:
            fake.ingest(one)

        yield Office(admin, admin, fake, ingest_fake)
        return
    engine = async_engine(request.getfixturevalue("database_url"), statement_timeout_s=20.0)

    async def ingest_real(one: Event) -> None:
        async with engine.begin() as connection:
            await connection.run_sync(insert_rows, rows.event_rows(one))

    yield Office(PostgresAdmin(engine), PostgresAudit(engine), PostgresStore(engine), ingest_real)
    await engine.dispose()


@pytest.fixture
async def acme(office: Office) -> Office:
    await office.admin.org_insert(ACME, ANN)
    return office


async def test_a_key_comes_back_as_it_went_in_and_requests_find_its_organisation_with_it(acme: Office) -> None:
    await acme.admin.key_insert(KEY, ANN)
    assert await acme.admin.key_find("abc123") == KEY
    assert await acme.store.key_get("abc123") == replace(KEY, organisation=ACME)
    assert await acme.store.key_get("abc124") is None
    assert await acme.admin.key_find("abc\x00") is None
    assert await acme.acts() == [("org.created", "org:acme"), ("key.created", "key:abc123")]


async def test_a_public_id_is_taken_once_and_a_refusal_is_no_act(acme: Office) -> None:
    await acme.admin.key_insert(KEY, ANN)
    with pytest.raises(Conflict):
        await acme.admin.key_insert(replace(KEY, name="eve"), ANN)
    assert (await acme.store.key_get("abc123")).name == "ann"
    assert len(await acme.acts()) == 2


async def test_a_key_needs_an_organisation_that_is_open(acme: Office) -> None:
    with pytest.raises(BadRequest) as caught:
        await acme.admin.key_insert(replace(KEY, org="nowhere"), ANN)
    assert caught.value.param == "org"
    await acme.admin.org_change("acme", {"closed_at": NOW}, ANN, "org.closed")
    with pytest.raises(BadRequest):
        await acme.admin.key_insert(KEY, ANN)


async def test_keys_are_listed_newest_first(acme: Office) -> None:
    for n, name in enumerate("abc"):
        key = replace(KEY, public_id=name, created_at=NOW + timedelta(microseconds=n))
        await acme.admin.key_insert(key, ANN)
    assert ids(await acme.admin.key_list(9)) == ["c", "b", "a"]
    assert ids(await acme.admin.key_list(2)) == ["c", "b"]


def ids(rows: Sequence[KeyRow]) -> list[str]:
    return [row.public_id for row in rows]


async def test_the_next_page_of_keys_begins_after_the_last_one_shown(acme: Office) -> None:
    for name in "cadb":  # two of them made at the same time
        at = NOW + timedelta(microseconds=int(name in "ad"))
        await acme.admin.key_insert(replace(KEY, public_id=name, created_at=at), ANN)
    assert ids(await acme.admin.key_list(9)) == ["a", "d", "b", "c"]
    assert [ids(await acme.admin.key_list(9, before)) for before in "adbc"] == [["d", "b", "c"], ["b", "c"], ["c"], []]
    assert ids(await acme.admin.key_list(9, "nobody")) == []


async def test_keys_are_searched_by_a_part_of_id_name_or_organisation(acme: Office) -> None:
    for name in ("Ann", "an%n", "bob"):
        await acme.admin.key_insert(replace(KEY, public_id=f"id-{name}", name=name), ANN)
    searches = {text: ids(await acme.admin.key_list(9, None, text)) for text in ("ANN", "%", "id-b", "CM", "_")}
    everyone = ["id-Ann", "id-an%n", "id-bob"]
    assert searches == {"ANN": ["id-Ann"], "%": ["id-an%n"], "id-b": ["id-bob"], "CM": everyone, "_": []}
    assert ids(await acme.admin.key_list(9, "id-Ann", "an")) == ["id-an%n"]


async def test_keys_in_use_that_have_a_budget(acme: Office) -> None:
    none: dict[str, Any] = {"budget_nano": None, "budget_month_nano": None, "budget_day_nano": None}
    for name, budget in {"d": "budget_day_nano", "m": "budget_month_nano", "a": "budget_nano"}.items():
        await acme.admin.key_insert(replace(KEY, public_id=name, **{**none, budget: 5}), ANN)
    await acme.admin.key_insert(replace(KEY, public_id="free", **none), ANN)
    await acme.admin.key_insert(replace(KEY, public_id="ended"), ANN)
    await acme.admin.key_revoke("ended", NOW, ANN)
    assert ids(await acme.admin.key_budgets(9)) == ["a", "d", "m"]
    assert ids(await acme.admin.key_budgets(2)) == ["a", "d"]
    assert ids(await acme.admin.key_budgets(2, "d")) == ["m"]
    assert ids(await acme.admin.key_budgets(9, among=["m", "free", "ended", "nobody\x00"])) == ["m"]


async def test_keys_in_use_that_name_a_pool_or_a_worker(acme: Office) -> None:
    named = {"a": (("fast",), ()), "b": ((), ("atlas", "quill")), "c": (("slow",), ("quill",)), "d": ((), ())}
    for n, (name, (pools, workers)) in enumerate(named.items()):
        at = NOW + timedelta(microseconds=n)
        key = replace(KEY, public_id=name, pools=pools, workers=workers, created_at=at)
        await acme.admin.key_insert(key, ANN)
    await acme.admin.key_insert(replace(KEY, public_id="ended"), ANN)
    await acme.admin.key_revoke("ended", NOW, ANN)
    assert ids(await acme.admin.key_naming(["fast"], ["quill"], 9)) == ["c", "b", "a"]
    assert ids(await acme.admin.key_naming([], ["atlas"], 9)) == ["b"]
    assert ids(await acme.admin.key_naming(["fast"], ["quill"], 1)) == ["c"]
    assert ids(await acme.admin.key_naming([], [], 9)) == []


async def test_whether_a_key_is_in_use(acme: Office) -> None:
    assert not await acme.admin.key_exists()
    await acme.admin.key_insert(KEY, ANN)
    assert await acme.admin.key_exists()
    await acme.admin.key_revoke("abc123", NOW, ANN)
    assert not await acme.admin.key_exists()


async def test_a_key_is_revoked_once(acme: Office) -> None:
    await acme.admin.key_insert(KEY, ANN)
    assert (await acme.admin.key_revoke("abc123", NOW, ANN)).revoked_at == NOW
    assert (await acme.admin.key_revoke("abc123", NOW + timedelta(days=1), ANN)).revoked_at == NOW
    assert await acme.admin.key_revoke("nobody", NOW, ANN) is None
    assert (await acme.acts())[2:] == [("key.revoked", "key:abc123")]
    with pytest.raises(Conflict, match="was revoked"):
        await acme.admin.key_change("abc123", {"rpm": 1}, ANN, "key.changed")


async def test_a_change_is_audited_with_what_was_before_and_without_secrets(acme: Office) -> None:
    await acme.admin.key_insert(KEY, ANN)
    changes = {"rpm": 61, "name": "ann", "tpm": 5, "pools": ("fast",), "digest": b"new" * 8}
    changed = await acme.admin.key_change("abc123", changes, Act("key:op"), "key.changed")
    assert (changed.rpm, changed.tpm, changed.pools, changed.digest) == (61, 5, ("fast",), b"new" * 8)
    assert await acme.admin.key_find("abc123") == changed
    (last,) = await acme.entries.latest(1)
    assert last.entry.before == {"rpm": 60, "tpm": None, "pools": ["default", "fast"]}
    assert last.entry.after == {"rpm": 61, "tpm": 5, "pools": ["fast"]}
    assert (last.entry.actor, last.entry.why) == ("key:op", "")
    await acme.admin.key_change("abc123", {"rpm": 61}, ANN, "key.changed")
    assert len(await acme.acts()) == 3  # nothing changed: nothing was done


async def test_organisations_have_unique_names_and_are_closed_for_good(acme: Office) -> None:
    with pytest.raises(Conflict):
        await acme.admin.org_insert(replace(ACME, rpm=1), ANN)
    assert [org.name for org in await acme.admin.org_list()] == ["acme", "default"]
    assert (await acme.admin.org_change("acme", {"rpm": None}, ANN, "org.changed")).rpm is None
    assert (await acme.admin.org_change("acme", {"closed_at": NOW}, ANN, "org.closed")).closed_at == NOW
    with pytest.raises(Conflict, match="was closed"):
        await acme.admin.org_change("acme", {"rpm": 1}, ANN, "org.changed")
    assert await acme.admin.org_get("nowhere") is None
    assert await acme.admin.org_change("nowhere", {"rpm": 1}, ANN, "org.changed") is None


async def test_the_audit_is_read_by_page_and_by_target(acme: Office) -> None:
    for n in range(5):
        await acme.admin.org_change("acme", {"rpm": n + 1}, ANN, "org.changed")
    await acme.admin.org_change("default", {"rpm": 1}, ANN, "org.changed")
    assert [one.entry.seq for one in await acme.entries.latest(2)] == [7, 6]
    assert [one.entry.seq for one in await acme.entries.latest(2, before=6)] == [5, 4]
    assert [one.entry.seq for one in await acme.entries.latest(9, target="org:default")] == [7]
    seventh = (await acme.entries.latest(1))[0].entry
    mine = [one.entry for one in await acme.entries.latest(9, actor=seventh.actor, act=seventh.act)]
    assert mine[0].seq == 7
    assert {(entry.actor, entry.act) for entry in mine} == {(seventh.actor, seventh.act)}
    assert await acme.entries.latest(9, actor="nobody") == []
    assert [one.entry.seq for one in await acme.entries.walk(5, 9)] == [6, 7]


# ---------------------------------------------------------------- credits


async def charged(office: Office, hold: str, nano: int, *scopes: str) -> str:
    rollout = new_id()
    await office.ingest(hold_event(hold, rollout, nano, *((name, None) for name in scopes)))
    await office.ingest(settle_event(hold, rollout, "uncertain", nano, *scopes))
    return rollout


async def test_a_charge_is_given_back_in_each_of_its_scopes_and_never_twice(office: Office) -> None:
    rollout = await charged(office, "h1", 100, "org:a", "key:k", "key:k:2026-03")
    part = CreditRequest(new_id(), 30, charge=rollout)
    credit, new = await office.admin.credit(part, NOW, ANN)
    assert (credit.hold_id, credit.amount_nano, credit.scopes, new) == (
        "h1",
        30,
        ("org:a", "key:k", "key:k:2026-03"),
        True,
    )
    assert await office.admin.credit(part, NOW, ANN) == (credit, False)
    assert (await office.store.books(0)).posted == {"org:a": 70, "key:k": 70, "key:k:2026-03": 70}
    with pytest.raises(Conflict):
        await office.admin.credit(CreditRequest(new_id(), 71, charge="h1"), NOW, ANN)
    rest, _ = await office.admin.credit(CreditRequest(new_id(), None, charge="h1"), NOW + timedelta(seconds=1), ANN)
    assert rest.amount_nano == 70
    with pytest.raises(Conflict):
        await office.admin.credit(CreditRequest(new_id(), None, charge="h1"), NOW, ANN)
    assert set((await office.store.books(0)).posted.values()) == {0}
    assert [one.id for one in await office.admin.credits(10)] == [rest.id, credit.id]
    assert [act for act, _ in await office.acts()] == ["credit.given", "credit.given"]


async def test_uncertain_charges_are_listed_with_what_was_given_back(office: Office) -> None:
    rollout = await charged(office, "h1", 100, "org:a", "key:k")
    await charged(office, "h2", 7, "key:k")
    await office.admin.credit(CreditRequest(new_id(), 30, charge="h1"), NOW, ANN)
    assert {one.hold_id for one in await office.admin.uncertain(10)} == {"h1", "h2"}
    (one,) = await office.admin.uncertain(1, "h1")
    assert (one.rollout_id, one.amount_nano, one.credited_nano, one.scopes) == (rollout, 100, 30, ("org:a", "key:k"))
    await office.ingest(hold_event("h3", new_id(), 5, ("key:k", None)))
    assert await office.admin.uncertain(10, "h3") == []


async def test_a_top_up_brings_a_scope_below_zero(office: Office) -> None:
    await charged(office, "h1", 100, "key:k")
    asked = CreditRequest(new_id(), 130, scope="key:k")
    credit, _ = await office.admin.credit(asked, NOW, ANN)
    assert (credit.hold_id, credit.by, credit.why) == (None, "local:ann", "as asked for")
    assert (await office.store.books(0)).posted == {"key:k": -30}
    with pytest.raises(Conflict):
        await office.admin.credit(replace(asked, amount_nano=131), NOW, ANN)


async def test_only_a_settled_charge_can_be_credited(office: Office) -> None:
    with pytest.raises(NotFound):
        await office.admin.credit(CreditRequest(new_id(), 1, charge="h9"), NOW, ANN)
    rollout = new_id()
    await office.ingest(hold_event("h2", rollout, 5, ("key:k", None)))
    with pytest.raises(Conflict, match="not settled"):
        await office.admin.credit(CreditRequest(new_id(), 1, charge=rollout), NOW, ANN)
    assert await office.acts() == []


async def test_many_who_give_the_same_charge_back_give_it_back_once(office: Office) -> None:
    await charged(office, "h1", 100, "key:k")
    asked = [CreditRequest(new_id(), 40, charge="h1") for _ in range(8)]
    made = await asyncio.gather(*(office.admin.credit(one, NOW, ANN) for one in asked), return_exceptions=True)
    assert sum(isinstance(one, tuple) for one in made) == 2
    assert sum(isinstance(one, Conflict) for one in made) == 6
    assert (await office.store.books(0)).posted == {"key:k": 20}
    assert len(await office.acts()) == 2
