"""The admin routes of policy versions, and `baton policy` on top of them."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from gateway.api.edge import stack as edge
from gateway.api.edge.bodies import Operators, by_admin_key
from gateway.api.operator.policies import PoliciesApi
from gateway.cli import main
from gateway.cli.admin import policy
from gateway.service.admin.keys import KeyAdmin
from gateway.service.request.auth import Authenticator
from tests.fakes.admin import FakeAdmin
from tests.fakes.store import FakeStore
from tests.kit import TestClock
from tests.policies import write_policy
from tests.service.versions_kit import LIVE, Following

GATE = {"passed": True, "refusals": []}
REFUSED = {"passed": False, "refusals": [{"name": "price", "said": "dearer"}]}


@dataclass
class Operator:
    """The routes over a follower with fakes, and a key of each class."""

    http: httpx.AsyncClient
    kit: Following
    admin_id: str
    admin_key: str
    data_key: str

    async def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {key or self.admin_key}"}
        return await self.http.request(method, f"/admin/policies{path}", json=body, headers=headers)


async def operator_of(kit: Following | None, place: Path) -> tuple[FastAPI, KeyAdmin]:
    store, clock, peppers = FakeStore(), TestClock(), {1: b"pepper-for-tests-0123456789"}
    app = FastAPI()
    edge.install(app)
    policies = kit.policies if kit else None
    app.include_router(
        PoliciesApi(policies, Operators(by_admin_key(Authenticator(store, peppers, clock)), 1_000_000)).router()
    )
    return app, KeyAdmin(FakeAdmin(store), peppers, clock, {"default": ["atlas"]})


@pytest.fixture
async def operator(tmp_path: Path) -> AsyncIterator[Operator]:
    kit = Following(tmp_path)
    await kit.add(1, *LIVE)
    await kit.settle()
    app, keys = await operator_of(kit, tmp_path)
    row, admin_key = await keys.create_key("ops", "admin")
    _, data_key = await keys.create_key("app")
    transport = httpx.ASGITransport(app=edge.Edge(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        yield Operator(http, kit, row.public_id, admin_key, data_key)


async def test_every_route_wants_an_admin_key(operator: Operator) -> None:
    for method, path in (("GET", ""), ("GET", "/conductor@1"), ("POST", ""), ("POST", "/conductor@1/rollback")):
        assert (await operator.ask(method, path, {}, key=operator.data_key)).status_code == 401
        assert (await operator.http.request(method, f"/admin/policies{path}")).status_code == 401


async def test_the_whole_way_and_who_went_it(operator: Operator, tmp_path: Path) -> None:
    source = write_policy(tmp_path / "policies" / "conductor@2", "2", (4.0,))
    made = await operator.ask("POST", "", {"directory": str(source), "gate": GATE})
    assert (made.status_code, made.json()["version"]) == (201, "conductor@2")
    for action, body, state in (
        ("shadow", {"why": "try it"}, "shadow"),
        ("canary", {"percent": 25}, "canary"),
        ("canary", {"percent": 100}, "canary"),
        ("promote", {}, "live"),
        ("rollback", {"why": "worse"}, "retired"),
    ):
        reply = await operator.ask("POST", f"/conductor@2/{action}", body)
        assert (reply.status_code, reply.json()["state"]) == (200, state), reply.text
    shown = (await operator.ask("GET", "/conductor@2")).json()
    assert {event["who"] for event in shown["events"]} == {f"key:{operator.admin_id}"}
    assert [event["why"] for event in shown["events"]] == ["worse", "", "", "", "try it", ""]
    listed = (await operator.ask("GET", "")).json()
    assert [(one["version"], one["state"]) for one in listed["data"]] == [
        ("conductor@2", "retired"),
        ("conductor@1", "live"),
    ]


async def test_a_refused_gate_is_a_409_and_force_is_recorded(operator: Operator, tmp_path: Path) -> None:
    source = write_policy(tmp_path / "policies" / "conductor@2", "2", (4.0,))
    body = {"directory": str(source), "gate": REFUSED}
    refused = await operator.ask("POST", "", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "gate_refused")
    assert "the gate refused it (price)" in refused.json()["error"]["message"]
    assert (await operator.ask("POST", "", {**body, "force": True})).status_code == 400
    assert (await operator.ask("POST", "", {**body, "force": True, "why": "a demo"})).status_code == 201
    (event,) = (await operator.ask("GET", "/conductor@2")).json()["events"]
    assert (event["forced"], event["why"], event["detail"]["refusals"]) == (True, "a demo", REFUSED["refusals"])


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("", {}, 400, "directory"),
        ("", {"directory": "here", "gate": GATE}, 400, "absolute path"),
        ("", {"directory": 5}, 400, "`directory` must be a string"),
        ("", {"directory": "/x", "speed": 1}, 400, "Unknown parameter: 'speed'"),
        ("", [], 400, "must be a JSON object"),
        ("/conductor@1/canary", {}, 400, "Missing required parameter: 'percent'"),
        ("/conductor@1/canary", {"percent": True}, 400, "`percent` must be a whole number"),
        ("/conductor@1/canary", {"percent": 7}, 400, "1, 5, 25, 100"),
        ("/conductor@1/canary", {"percent": 5}, 409, "is live"),
        ("/conductor@9/shadow", {}, 404, "no policy version conductor@9"),
        ("/conductor/shadow", {}, 400, "write NAME@NUMBER"),
        ("/conductor/rollback", {}, 409, "conductor@1 replaced no other version"),
        ("/conductor@1/retire", {"why": 3}, 400, "`why` must be a string"),
    ],
)
async def test_bad_input_has_its_named_error(operator: Operator, path: str, body: Any, status: int, told: str) -> None:
    reply = await operator.ask("POST", path, body)
    assert reply.status_code == status, reply.text
    assert told in reply.json()["error"]["message"]


async def test_a_conductor_without_versions_has_none_and_says_so(tmp_path: Path) -> None:
    app, keys = await operator_of(None, tmp_path)
    _, key = await keys.create_key("ops", "admin")
    headers = {"authorization": f"Bearer {key}"}
    transport = httpx.ASGITransport(app=edge.Edge(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as http:
        assert (await http.get("/admin/policies")).json()["data"] == []
        reply = await http.post("/admin/policies/conductor/rollback", json={})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "no_versions")


# ---------------------------------------------------------------- the command line


class Recorder(BaseHTTPRequestHandler):
    """Answers as `answer` says, and keeps what it was asked."""

    asked: list[tuple[str, str, Any, str | None]]
    answer: tuple[int, Any]

    def _reply(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        bearer = self.headers.get("authorization")
        type(self).asked.append((self.command, self.path, json.loads(body) if body else None, bearer))
        status, content = type(self).answer
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = _reply

    def log_message(self, format: str, *arguments: Any) -> None:
        """Quiet."""


@pytest.fixture
def admin_api(tmp_path: Path) -> Iterator[tuple[type[Recorder], list[str]]]:
    handler = type("Handler", (Recorder,), {"asked": [], "answer": (200, {})})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "key").write_text("bt_admin_x\n")
    where = ["--url", f"http://127.0.0.1:{server.server_port}/", "--key-file", str(tmp_path / "key")]
    yield handler, where
    server.shutdown()
    server.server_close()


LINE = {"version": "conductor@2", "state": "canary", "percent": 5}


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["shadow", "conductor@2"], ("POST", "/admin/policies/conductor@2/shadow", {"why": ""})),
        (
            ["canary", "conductor@2", "5", "--why", "x"],
            ("POST", "/admin/policies/conductor@2/canary", {"why": "x", "percent": 5}),
        ),
        (["promote", "conductor@2"], ("POST", "/admin/policies/conductor@2/promote", {"why": ""})),
        (["retire", "conductor@2"], ("POST", "/admin/policies/conductor@2/retire", {"why": ""})),
        (["rollback"], ("POST", "/admin/policies/conductor/rollback", {"why": ""})),
        (["rollback", "conductor@2"], ("POST", "/admin/policies/conductor@2/rollback", {"why": ""})),
        (["show", "conductor@2"], ("GET", "/admin/policies/conductor@2", None)),
    ],
)
def test_each_command_asks_for_its_own(
    admin_api: Any, arguments: list[str], asked: tuple[Any, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    handler, where = admin_api
    handler.answer = (200, LINE)
    assert main(["policy", *arguments, *where]) == 0
    assert handler.asked == [(*asked, "Bearer bt_admin_x")]
    assert "conductor@2" in capsys.readouterr().out


def test_publish_sends_the_whole_report(admin_api: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler, where = admin_api
    (tmp_path / "gate.json").write_text(json.dumps(REFUSED))
    handler.answer = (409, {"error": {"message": "the gate refused it (price)", "code": "gate_refused"}})
    arguments = ["policy", "publish", str(tmp_path), "--gate", str(tmp_path / "gate.json"), *where]
    assert main(arguments) == 4
    assert handler.asked[0][2] == {"directory": str(tmp_path), "force": False, "why": "", "gate": REFUSED}
    assert capsys.readouterr().err == "the gate refused it (price)\n"
    (tmp_path / "gate.json").write_text("no json")
    assert main(arguments) == 2
    assert "not a gate's report" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "exit_status"), [(400, 2), (404, 1), (409, 1), (503, 1)])
def test_a_refusal_of_the_gateway_is_one_line(
    admin_api: Any, status: int, exit_status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    handler, where = admin_api
    handler.answer = (status, {"error": {"message": "no, because", "code": None}})
    assert main(["policy", "list", *where]) == exit_status
    assert capsys.readouterr().err == "no, because\n"


def test_a_gateway_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text("k")
    where = ["--url", "http://127.0.0.1:9", "--key-file", str(tmp_path / "key")]
    assert main(["policy", "list", *where]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert main(["policy", "list", "--url", "http://127.0.0.1:9"]) == 2
    assert main(["policy", "list", *where[:3], str(tmp_path / "none")]) == 2


async def test_the_list_is_a_table_a_person_reads(operator: Operator) -> None:
    await operator.kit.add(2, "shadow", "canary", percent=5)
    await operator.kit.settle()
    text = policy._text("list", (await operator.ask("GET", "")).json())
    lines = text.splitlines()
    assert lines[0].split() == ["version", "state", "percent", "parent", "rollouts", "gated", "held", "changed_at"]
    assert lines[1].split()[:7] == ["conductor@2", "canary", "5", "-", "0", "yes", "yes"]
    assert any("conductor@1: 0 requests, 0 judged; nothing yet" in line for line in lines)
    assert any("canary" in line and "test" in line for line in lines[-6:])


def test_the_commands_are_named() -> None:
    parser = argparse.ArgumentParser()
    policy.add(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["canary", "conductor@2", "50"])
