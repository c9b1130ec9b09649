"""Issuing keys: what is stored, and what is said about a field that is wrong."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from gateway.core.access import keys
from gateway.core.access.audit import Act
from gateway.core.pool.workers import EVERY_POOL
from gateway.errors import BadRequest, Forbidden, NotFound
from gateway.service.admin.keys import KeyAdmin, describe
from gateway.service.ports.request import Clock
from tests.fakes.admin import FakeAdmin
from tests.fakes.store import FakeStore

POOLS = {"default": ["atlas", "quill"], "cheap": ["quill"]}
PEPPER = b"p" * 32
NOW = datetime(2026, 1, 1, tzinfo=UTC)


class StoppedClock(Clock):
    def now(self) -> datetime:
        return NOW

    def monotonic_s(self) -> float:
        return 0.0


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def admin(store: FakeStore) -> KeyAdmin:
    return KeyAdmin(FakeAdmin(store), {7: PEPPER}, StoppedClock(), POOLS)


async def test_the_secret_is_returned_and_only_its_digest_stored(admin: KeyAdmin, store: FakeStore) -> None:
    row, secret = await admin.create_key("app", pools=["cheap", "cheap"], workers=["quill"], budget_usd="0.5", tpm=10)
    assert keys.parse(secret).public_id == row.public_id
    assert store.keys == {row.public_id: row}
    assert keys.matches(secret, PEPPER, row.digest)
    assert secret not in repr(row)
    assert (row.pepper_version, row.pools, row.workers, row.created_at) == (7, ("cheap",), ("quill",), NOW)


async def test_an_admin_key_has_a_role_that_only_admins_give(admin: KeyAdmin) -> None:
    ops, _ = await admin.create_key("ops", "admin", role="operator")
    root, _ = await admin.create_key("root", "admin")
    assert [describe(row)["role"] for row in (ops, root)] == ["operator", "admin"]
    eyes = await admin.update_key(ops.public_id, {"role": "auditor"})
    assert describe(eyes)["role"] == "auditor"
    for role in ("operator", "auditor"):
        with pytest.raises(Forbidden, match=f"role `{role}` may not manage keys of class `admin`"):
            await admin.update_key(ops.public_id, {"role": "admin"}, Act("key:x", role=role))
    with pytest.raises(BadRequest, match="only keys of class `admin` have a role"):
        await admin.create_key("app", role="operator")
    app, _ = await admin.create_key("app", act=Act("key:x", role="operator"))
    assert describe(app)["role"] is None
    with pytest.raises(BadRequest, match="not one of admin, operator, auditor"):
        await admin.update_key(ops.public_id, {"role": "king"})


async def test_keys_are_listed_and_revoked_once(admin: KeyAdmin) -> None:
    row, _ = await admin.create_key("app")
    revoked = await admin.revoke_key(row.public_id)
    assert revoked.revoked_at == NOW
    assert await admin.revoke_key(row.public_id) == revoked
    assert await admin.list_keys(10) == ([revoked], None)
    with pytest.raises(NotFound, match="baton keys list"):
        await admin.revoke_key("nobody")


async def test_a_page_of_keys_names_where_the_next_one_begins(admin: KeyAdmin) -> None:
    made = sorted([(await admin.create_key(f"app {n}"))[0].public_id for n in range(3)])  # all at one time
    first, before = await admin.list_keys(2)
    assert ([row.public_id for row in first], before) == (made[:2], made[1])
    rest, end = await admin.list_keys(2, before)
    assert ([row.public_id for row in rest], end) == (made[2:], None)
    assert [row.name for row in (await admin.list_keys(2, text="PP 1"))[0]] == ["app 1"]


async def test_describe_gives_json_without_the_digest(admin: KeyAdmin) -> None:
    row, _ = await admin.create_key("app", budget_usd=25, caps={"steps": 3})
    shown = json.loads(json.dumps(describe(row)))
    assert (shown["id"], shown["budget_usd"], shown["caps"]) == (row.public_id, "25", {"steps": 3})
    assert (shown["created_at"], shown["revoked_at"]) == ("2026-01-01T00:00:00+00:00", None)
    assert "digest" not in shown
    assert describe(await admin.revoke_key(row.public_id))["revoked_at"] == "2026-01-01T00:00:00+00:00"
    assert describe((await admin.create_key("free"))[0])["budget_usd"] is None


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("key_class", "root", "`root` is not one of data, admin"),
        ("log_mode", "none", "`none` is not one of full, redacted, metadata"),
        ("name", "", "1 to 128 printable characters"),
        ("name", "x" * 129, "1 to 128 printable characters"),
        ("org", "a\nb", "1 to 128 printable characters"),
        ("budget_usd", "lots", "`lots` is not an amount in dollars; write dollars such as 25"),
        ("budget_usd", "-1", "is not an amount in dollars"),
        ("budget_usd", "1e12", "over the largest amount"),
        ("rpm", 0, "not a whole number from 1"),
        ("tpm", -5, "not a whole number from 1"),
        ("concurrency", 1.5, "leave it out for no limit"),
        ("rpm", True, "not a whole number from 1"),
        ("pools", ["nope"], "no pool `nope`; known are cheap, default"),
        ("workers", ["nope"], "no worker `nope` in any pool; known are atlas, quill"),
    ],
)
async def test_a_wrong_field_is_named_with_its_fix(
    admin: KeyAdmin, store: FakeStore, field: str, value: Any, told: str
) -> None:
    with pytest.raises(BadRequest, match=told) as caught:
        await admin.create_key(**{"name": "app", field: value})
    assert caught.value.param == field
    assert store.keys == {}


async def test_a_worker_must_be_in_one_of_the_keys_pools(admin: KeyAdmin) -> None:
    with pytest.raises(BadRequest, match="no worker `atlas` in cheap; known are quill"):
        await admin.create_key("app", pools=["cheap"], workers=["atlas"])


async def test_a_key_may_have_every_pool_whatever_they_are(admin: KeyAdmin) -> None:
    row, _ = await admin.create_key("app", pools=[EVERY_POOL], workers=["quill"])
    assert (row.pools, row.workers) == (("*",), ("quill",))
    with pytest.raises(BadRequest, match=r"no pool `\*`"):
        await admin.create_key("app", pools=[EVERY_POOL, "cheap"])
    with pytest.raises(BadRequest, match="no worker `nobody`"):
        await admin.create_key("app", pools=[EVERY_POOL], workers=["nobody"])


@pytest.mark.parametrize("caps", [{"speed": 1}, {"steps": 0}, {"wall_s": "long"}])
async def test_caps_are_checked(admin: KeyAdmin, caps: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        await admin.create_key("app", caps=caps)
    assert caught.value.param == f"caps.{next(iter(caps))}"
