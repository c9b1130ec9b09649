"""The admin routes and the command of workers that changed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from gateway.api.edge import stack as edge
from gateway.api.edge.bodies import Operators, by_admin_key
from gateway.api.operator.workers import WorkersApi
from gateway.cli.pool import workers as command
from gateway.service.admin.keys import KeyAdmin
from gateway.service.request.auth import Authenticator
from tests.fakes.admin import FakeAdmin
from tests.fakes.store import FakeStore
from tests.kit import TestClock, pool_file
from tests.service.test_quarantine import FLAG, Ward


@dataclass
class Operator:
    http: httpx.AsyncClient
    ward: Ward
    headers: dict[str, str]

    async def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return await self.http.request(method, f"/admin/{path}", json=body, headers=self.headers)


@pytest.fixture
async def operator() -> AsyncIterator[Operator]:
    store, clock, peppers = FakeStore(), TestClock(), {1: b"pepper-for-tests-0123456789"}
    ward, keys = Ward(), KeyAdmin(FakeAdmin(store), peppers, clock, pool_file().pools)
    operators = Operators(by_admin_key(Authenticator(store, peppers, clock)), 10_000)
    app = FastAPI()
    edge.install(app)
    app.include_router(WorkersApi(ward.quarantines, operators).router())
    _, key = await keys.create_key("ops", "admin")
    transport = httpx.ASGITransport(app=edge.Edge(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        yield Operator(http, ward, {"authorization": f"Bearer {key}"})


async def test_what_happened_is_listed_and_a_worker_is_released(operator: Operator) -> None:
    await operator.ward.flag()
    shown = (await operator.ask("GET", "drift?limit=5")).json()
    assert shown["rule"] == {"signals": ["failed", "outcome", "refused"]}
    assert [fact["what"] for fact in shown["facts"]] == ["quarantined", "flagged"]
    (held,) = shown["quarantines"]
    assert (held["worker"], held["by"], held["flags"][0]["usual"]) == ("alpha", "rule:drift", FLAG.usual)
    ended = (await operator.ask("POST", "workers/alpha/release", {"why": "rolled back", "anew": True})).json()
    assert (ended["ended_by"][:4], ended["ended_why"]) == ("key:", "rolled back")
    assert (await operator.ask("GET", "drift")).json()["quarantines"] == []


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("workers/alpha/release", {}, 409),
        ("workers/nobody/release", {}, 404),
        ("workers/nobody/quarantine", {}, 404),
        ("workers/vote/quarantine", {}, 400),
        ("workers/alpha/quarantine", {"anew": True}, 400),
        ("workers/alpha/release", {"anew": "yes"}, 400),
    ],
)
async def test_what_cannot_be_is_refused(operator: Operator, path: str, body: Any, status: int) -> None:
    reply = await operator.ask("POST", path, body)
    assert reply.status_code == status, reply.text
    assert operator.ward.quarantines.standing() == []


async def test_by_hand_with_a_reason(operator: Operator) -> None:
    made = (await operator.ask("POST", "workers/beta/quarantine", {"why": "invents sources"})).json()
    assert (made["worker"], made["why"], made["ended_at"]) == ("beta", "invents sources", None)
    assert await operator.ward.served() == ["alpha"]
    await operator.ask("POST", "workers/alpha/quarantine", {})
    assert await operator.ward.served() == ["gamma"]


async def test_the_command_prints_tables_and_lines(operator: Operator) -> None:
    await operator.ward.flag()
    shown = (await operator.ask("GET", "drift")).json()
    text = command._report(shown)
    assert "in quarantine:" in text
    assert "who they say they are:\nnothing" in text
    assert "rule:drift" in text
    assert json.loads(json.dumps(shown)) == shown
    ended = (await operator.ask("POST", "workers/alpha/release", {})).json()
    assert command._line(ended) == "worker alpha (version 1) is planned with again"
