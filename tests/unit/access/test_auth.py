"""Authentication: who gets in, what the others are told, and how often the store is asked."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from gateway.core.access import keys
from gateway.errors import Unauthorized, Unavailable
from gateway.service.admin.keys import KeyAdmin
from gateway.service.admin.orgs import OrgAdmin
from gateway.service.ports.admin import KeyRow
from gateway.service.ports.request import Clock
from gateway.service.request.auth import Authenticator
from tests.fakes.admin import FakeAdmin
from tests.fakes.store import FakeStore
from tests.waiting import until

PEPPERS = {1: b"1" * 32, 2: b"2" * 32}


class HandClock(Clock):
    def __init__(self) -> None:
        self.at_s = 0.0

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.at_s)

    def monotonic_s(self) -> float:
        return self.at_s


LOOKUP_S = 60.0


class CountingStore(FakeStore):
    """Counts look-ups; `delay_s` makes them slow."""

    def __init__(self) -> None:
        super().__init__()
        self.lookups = 0
        self.delay_s = 0.0

    async def key_get(self, public_id: str) -> KeyRow | None:
        self.lookups += 1
        await asyncio.sleep(self.delay_s)
        return await super().key_get(public_id)


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.fixture
def auth(store: CountingStore, clock: HandClock) -> Authenticator:
    return Authenticator(store, PEPPERS, clock, lookup_s=LOOKUP_S, cached_keys_max=3)


@pytest.fixture
def admin(store: CountingStore, clock: HandClock) -> KeyAdmin:
    return KeyAdmin(FakeAdmin(store), PEPPERS, clock, {"default": ["atlas"]})


async def test_a_key_becomes_its_principal(auth: Authenticator, admin: KeyAdmin) -> None:
    row, secret = await admin.create_key("app", budget_usd="2.5", rpm=60, train=False, caps={"depth": 1})
    who = await auth.authenticate(f"Bearer {secret}", "data")
    assert (who.public_id, who.key_class, who.name, who.org) == (row.public_id, "data", "app", "default")
    assert (who.budget_nano, who.rpm, who.tpm, who.caps, who.train) == (2_500_000_000, 60, None, {"depth": 1}, False)
    assert await auth.authenticate(f"  bearer   {secret} ", "data") == who


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (None, "didn't provide an API key"),
        ("", "didn't provide an API key"),
        ("Basic abc", "must read `Bearer bt_data_"),
        ("Bearer", "must read `Bearer bt_data_"),
        ("Bearer sk-abc", "not of the form"),
        ("Bearer bt_data_" + "0" * 12 + "_" + "0" * 38, "checksum is wrong"),
    ],
)
async def test_a_key_that_cannot_be_one_is_refused_without_a_lookup(
    auth: Authenticator, store: CountingStore, header: str | None, told: str
) -> None:
    with pytest.raises(Unauthorized, match=told) as caught:
        await auth.authenticate(header, "data")
    assert caught.value.headers == {"www-authenticate": "Bearer"}
    assert store.lookups == 0


async def test_classes_do_not_cross_listeners(auth: Authenticator, admin: KeyAdmin, store: CountingStore) -> None:
    _, data = await admin.create_key("app")
    _, root = await admin.create_key("ops", "admin")
    with pytest.raises(Unauthorized, match="takes `admin` keys only"):
        await auth.authenticate(f"Bearer {data}", "admin")
    with pytest.raises(Unauthorized, match="takes `data` keys only"):
        await auth.authenticate(f"Bearer {root}", "data")
    assert store.lookups == 0
    assert (await auth.authenticate(f"Bearer {root}", "admin")).key_class == "admin"


async def test_an_unknown_id_and_a_wrong_secret_are_told_the_same(auth: Authenticator, admin: KeyAdmin) -> None:
    row, secret = await admin.create_key("app")
    stranger, _ = keys.mint("data")
    body = f"bt_data_{row.public_id}_" + "x" * 32
    for text in (stranger, body + keys.checksum(body)):
        with pytest.raises(Unauthorized, match="does not know this API key") as caught:
            await auth.authenticate(f"Bearer {text}", "data")
        assert text not in str(caught.value)
    assert (await auth.authenticate(f"Bearer {secret}", "data")).public_id == row.public_id


async def test_a_row_of_the_other_class_does_not_vouch(
    auth: Authenticator, admin: KeyAdmin, store: CountingStore
) -> None:
    row, secret = await admin.create_key("app")
    store.keys[row.public_id] = replace(row, key_class="admin")
    with pytest.raises(Unauthorized, match="does not know this API key"):
        await auth.authenticate(f"Bearer {secret}", "data")


async def test_revocation_counts_within_a_second(
    auth: Authenticator, admin: KeyAdmin, store: CountingStore, clock: HandClock
) -> None:
    row, secret = await admin.create_key("app")
    await auth.authenticate(f"Bearer {secret}", "data")
    await admin.revoke_key(row.public_id)
    clock.at_s = 1.0
    with pytest.raises(Unauthorized, match=f"`{row.public_id}`.* was revoked"):
        await auth.authenticate(f"Bearer {secret}", "data")


async def test_the_store_is_asked_once_a_second_a_key(
    auth: Authenticator, admin: KeyAdmin, store: CountingStore, clock: HandClock
) -> None:
    _, secret = await admin.create_key("app")
    store.delay_s = 0.01
    await asyncio.gather(*(auth.authenticate(f"Bearer {secret}", "data") for _ in range(50)))
    clock.at_s = 0.99
    await auth.authenticate(f"Bearer {secret}", "data")
    assert store.lookups == 1
    clock.at_s = 1.0
    await auth.authenticate(f"Bearer {secret}", "data")
    assert store.lookups == 2


async def test_unknown_keys_are_remembered_and_the_memory_is_bounded(auth: Authenticator, store: CountingStore) -> None:
    strangers = [keys.mint("data")[0] for _ in range(5)]
    for text in [*strangers, strangers[-1], strangers[0]]:
        with pytest.raises(Unauthorized):
            await auth.authenticate(f"Bearer {text}", "data")
    assert store.lookups == 6  # the last was remembered, the first had been dropped
    assert len(auth._cache) == 3


async def test_an_outage_of_the_store_is_bridged_for_a_minute(
    auth: Authenticator, admin: KeyAdmin, store: CountingStore, clock: HandClock
) -> None:
    _, secret = await admin.create_key("app")
    await auth.authenticate(f"Bearer {secret}", "data")
    store.away = True
    clock.at_s = 30.0
    assert (await auth.authenticate(f"Bearer {secret}", "data")).name == "app"
    asked = store.lookups
    clock.at_s = 30.5
    await auth.authenticate(f"Bearer {secret}", "data")
    assert store.lookups == asked  # a failing store is asked once a second too
    clock.at_s = 60.5
    with pytest.raises(Unavailable) as caught:
        await auth.authenticate(f"Bearer {secret}", "data")
    assert caught.value.code == "keys_unavailable"
    store.away = False
    assert (await auth.authenticate(f"Bearer {secret}", "data")).name == "app"


async def test_a_store_that_hangs_is_given_up_in_time(admin: KeyAdmin, store: CountingStore, clock: HandClock) -> None:
    auth = Authenticator(store, PEPPERS, clock, lookup_s=0.05)
    _, secret = await admin.create_key("app")
    store.delay_s = 2 * LOOKUP_S
    with pytest.raises(Unavailable):
        await auth.authenticate(f"Bearer {secret}", "data")


async def test_a_caller_that_leaves_does_not_stop_the_others(
    auth: Authenticator, admin: KeyAdmin, store: CountingStore
) -> None:
    _, secret = await admin.create_key("app")
    store.delay_s = 0.05
    first = asyncio.create_task(auth.authenticate(f"Bearer {secret}", "data"))
    second = asyncio.create_task(auth.authenticate(f"Bearer {secret}", "data"))
    await until(lambda: store.lookups)
    first.cancel()
    assert (await second).name == "app"
    assert store.lookups == 1


async def test_keys_outlive_a_change_of_pepper(store: CountingStore, clock: HandClock) -> None:
    _, old = await KeyAdmin(FakeAdmin(store), {1: PEPPERS[1]}, clock, {}).create_key("old")
    row, new = await KeyAdmin(FakeAdmin(store), PEPPERS, clock, {}).create_key("new")
    assert row.pepper_version == 2
    both, latest = Authenticator(store, PEPPERS, clock), Authenticator(store, {2: PEPPERS[2]}, clock)
    assert [(await both.authenticate(f"Bearer {text}", "data")).name for text in (old, new)] == ["old", "new"]
    with pytest.raises(Unavailable, match="pepper version 1, which is not configured"):
        await latest.authenticate(f"Bearer {old}", "data")


async def test_a_rotated_key_has_two_secrets_until_its_grace_is_over(
    auth: Authenticator, admin: KeyAdmin, clock: HandClock
) -> None:
    row, first = await admin.create_key("app")
    _, second = await admin.rotate_key(row.public_id, 60)
    clock.at_s = 2
    for secret in (first, second):
        assert (await auth.authenticate(f"Bearer {secret}", "data")).public_id == row.public_id
    clock.at_s = 60
    assert (await auth.authenticate(f"Bearer {second}", "data")).public_id == row.public_id
    with pytest.raises(Unauthorized, match="does not know this API key"):
        await auth.authenticate(f"Bearer {first}", "data")


async def test_the_secret_before_the_last_ends_with_a_second_rotation(
    auth: Authenticator, admin: KeyAdmin, clock: HandClock
) -> None:
    row, first = await admin.create_key("app")
    _, second = await admin.rotate_key(row.public_id, 600)
    _, third = await admin.rotate_key(row.public_id, 0)
    with pytest.raises(Unauthorized):
        await auth.authenticate(f"Bearer {first}", "data")
    with pytest.raises(Unauthorized):
        await auth.authenticate(f"Bearer {second}", "data")
    assert await auth.authenticate(f"Bearer {third}", "data")


async def test_an_organisation_brings_its_limits_and_closing_it_ends_its_keys_within_a_second(
    auth: Authenticator, store: CountingStore, clock: HandClock
) -> None:
    office = FakeAdmin(store)
    orgs, admin = OrgAdmin(office, clock), KeyAdmin(office, PEPPERS, clock, {"default": ["atlas"]})
    await orgs.create("acme", {"budget_month_usd": "10", "user_budget_day_usd": "1", "rpm": 7})
    _, secret = await admin.create_key("app", org="acme")
    who = await auth.authenticate(f"Bearer {secret}", "data")
    assert (who.organisation.allowance.month_nano, who.organisation.per_user.day_nano) == (10**10, 10**9)
    assert (who.organisation.rpm, who.organisation.has_rate_limits, who.organisation.tpm) == (7, True, None)
    await orgs.close("acme")
    clock.at_s = 1
    with pytest.raises(Unauthorized, match="organisation of this API key was closed"):
        await auth.authenticate(f"Bearer {secret}", "data")
