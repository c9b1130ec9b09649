"""The admin routes of the pool file: what they show, what they refuse, and what a key may name after a reload."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from gateway.api.edge import stack as edge
from gateway.api.edge.bodies import Operators, by_admin_key
from gateway.api.operator.pools import PoolsApi
from gateway.core.pool.revision import revision_of
from gateway.errors import ConfigError
from gateway.service.admin.keys import KeyAdmin
from gateway.service.admin.pools import Pools
from gateway.service.request.auth import Authenticator
from tests.fakes.admin import FakeAdmin
from tests.fakes.pools import FakePools, FakePoolWorkers, FakeSource, SpyPoolMetrics, loaded
from tests.fakes.store import FakeStore
from tests.kit import TestClock, model_worker, pool_file

FIRST = pool_file(model_worker("keyed", "quill", api_key="env:SOME_KEY"))
SECOND = pool_file(model_worker("delta", "dune"))


@dataclass
class Operator:
    http: httpx.AsyncClient
    source: FakeSource
    keys: KeyAdmin
    headers: dict[str, str]

    async def ask(self, method: str, path: str = "", body: Any = None) -> httpx.Response:
        return await self.http.request(method, f"/admin/pools{path}", json=body, headers=self.headers)


@pytest.fixture
async def operator() -> AsyncIterator[Operator]:
    store, clock, peppers = FakeStore(), TestClock(), {1: b"pepper-for-tests-0123456789"}
    admin, source = FakeAdmin(store), FakeSource(loaded(FIRST, keyed="provider-key-1"))
    first = loaded(FIRST, keyed="provider-key-1")
    pools = Pools(first, source, FakePools(admin), FakePoolWorkers(), clock, SpyPoolMetrics(), admin)
    keys = KeyAdmin(admin, peppers, clock, FIRST.pools)
    pools.tell(follow=lambda file: keys.adopt(file.pools))
    await pools.note_first()
    app = FastAPI()
    edge.install(app)
    app.include_router(PoolsApi(pools, Operators(by_admin_key(Authenticator(store, peppers, clock)), 10_000)).router())
    _, key = await keys.create_key("ops", "admin")
    transport = httpx.ASGITransport(app=edge.Edge(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        yield Operator(http, source, keys, {"authorization": f"Bearer {key}"})


async def test_the_pool_in_use_is_shown_with_its_hash_and_without_references(operator: Operator) -> None:
    shown = (await operator.ask("GET")).json()
    assert shown["default"] == "default"
    assert shown["hash"] == revision_of(FIRST)
    assert shown["loaded_at"].startswith("20")
    assert "keyed" in str(shown["workers"])
    assert "SOME_KEY" not in str(shown)


async def test_a_reload_counts_for_keys_that_are_made_afterwards(operator: Operator) -> None:
    operator.source.now = loaded(SECOND)
    dry = (await operator.ask("POST", "/reload", {"dry_run": True})).json()
    assert (dry["changed"], dry["applied"]) == (True, False)
    with pytest.raises(Exception, match="no worker `delta`"):
        await operator.keys.create_key("app", workers=["delta"])
    wet = (await operator.ask("POST", "/reload", {"why": "a trial"})).json()
    assert (wet["hash"], wet["before"], wet["applied"]) == (revision_of(SECOND), revision_of(FIRST), True)
    assert "worker delta: added" in wet["lines"]
    await operator.keys.create_key("app", workers=["delta"])
    listed = (await operator.ask("GET", "/revisions?limit=5")).json()["data"]
    assert [(one["hash"], one["in_use"], one["why"]) for one in listed] == [
        (revision_of(SECOND), True, "a trial"),
        (revision_of(FIRST), False, ""),
    ]
    one = (await operator.ask("GET", f"/revisions/{revision_of(FIRST)}")).json()
    assert "keyed" in one["pool"]["workers"]
    assert "SOME_KEY" not in str(one)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "/reload", {"dry_run": 1}, 400, "dry_run"),
        ("POST", "/reload", {"dry": True}, 400, "dry"),
        ("POST", "/reload", [], 400, None),
        ("GET", "/revisions?limit=0", None, 400, "limit"),
        ("GET", "/revisions/nope", None, 404, None),
    ],
)
async def test_mistakes_are_named(
    operator: Operator, method: str, path: str, body: Any, status: int, param: str | None
) -> None:
    reply = await operator.ask(method, path, body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)


async def test_a_bad_file_is_its_own_line(operator: Operator) -> None:
    operator.source.now = ConfigError("pool.yaml:7: workers[0].handle: is missing; add it (docs/pool.md)")
    reply = await operator.ask("POST", "/reload", {})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "bad_config")
    assert error["message"] == "pool.yaml:7: workers[0].handle: is missing; add it (docs/pool.md)"
    assert (await operator.ask("GET")).json()["hash"] == revision_of(FIRST)


async def test_only_admin_keys_may(operator: Operator) -> None:
    _, data_key = await operator.keys.create_key("app")
    operator.headers = {"authorization": f"Bearer {data_key}"}
    for method, path in (("GET", ""), ("POST", "/reload"), ("GET", "/revisions"), ("GET", "/revisions/x")):
        assert (await operator.ask(method, path, {})).status_code == 401
