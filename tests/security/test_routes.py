"""S5: every route that OpenAPI names, asked by whoever may not: other keys, other organisations, the other class."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.security.gateway import Gateway, ask
from tests.security.report import measured
from tests.waiting import wait_until

OPEN = {"/livez", "/readyz", "/metrics"}  # need no key, hold no id
METHODS = ("get", "post", "put", "patch", "delete")


def operations(spec: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(method, path) of every route that needs a key."""
    for path, of in spec["paths"].items():
        for method in METHODS:
            if method in of and path not in OPEN:
                yield method, path


def filled(path: str, ids: dict[str, str]) -> str:
    """The path with an id of another key in each place; a name that is not in `ids` fails the test."""
    return re.sub(r"\{([^}:]+)[^}]*\}", lambda match: ids[match[1]], path)


def body_of(method: str) -> dict[str, Any]:
    return {"json": {}} if method in ("post", "put", "patch") else {}


@pytest.fixture
def foreign(gateway: Gateway) -> dict[str, str]:
    """Ids of things that belong to a key of another organisation."""
    _, admin = gateway.key("admin")
    with gateway.client(admin, admin=True) as http:
        http.post("/admin/orgs", json={"name": "victim"})
        made = http.post("/admin/keys", json={"name": "victim", "org": "victim"}).json()
    with gateway.client(made["key"]) as http:
        reply = http.post("/v1/chat/completions", json=ask("a secret of mine") | {"baton": {"session": "mine"}})
        assert reply.status_code == 200, reply.text
        rollout = reply.headers["x-baton-rollout-id"]
        assert http.get(f"/v1/rollouts/{rollout}").status_code == 200
        response = http.post("/v1/responses", json={"model": "baton/conductor", "input": "also mine"})
        assert response.status_code == 200, response.text
        form: dict[str, Any] = {"files": {"file": ("in.jsonl", b"a secret of mine")}, "data": {"purpose": "batch"}}
        file = http.post("/v1/files", **form).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = http.post("/v1/batches", json=asked).json()["id"]
        message = {"type": "message", "role": "user", "content": "a secret of mine"}
        conversation = http.post("/v1/conversations", json={"items": [message]}).json()["id"]
        item = http.get(f"/v1/conversations/{conversation}/items").json()["data"][0]["id"]
    return {
        **{"conversation_id": conversation, "item_id": item},
        **{"file_id": file, "batch_id": batch},
        **{"rollout_id": rollout, "completion_id": reply.json()["id"], "response_id": response.json()["id"]},
        **{"public_id": made["id"], "name": "victim", "version": "conductor@1"},
        **{"job_id": "018f0000-0000-7000-8000-000000000000", "model": "alpha", "model_id": "alpha"},
        **{"revision": "0" * 64, "session_id": "mine", "charge": "hold-of-nobody", "worker": "nobody"},
    }


def test_no_route_serves_an_id_of_another_key_or_organisation(gateway: Gateway, foreign: dict[str, str]) -> None:
    spec = gateway.openapi(admin=False)
    bearing = [(method, path) for method, path in operations(spec) if "{" in path and "model" not in path]
    assert ("get", "/v1/rollouts/{rollout_id}") in bearing
    for fields in ({}, {"org": "default", "log_mode": "metadata"}):
        _, eve = gateway.key(**fields)
        with gateway.client(eve) as http:
            for method, path in bearing:
                reply = http.request(method, filled(path, foreign), **body_of(method))
                assert reply.status_code == 404, (method, path, reply.text)
                assert "a secret of mine" not in reply.text
    measured("S5", f"{len(bearing)} id-bearing public routes × 2 other keys: 404")


def test_ids_in_bodies_are_those_of_the_key_too(gateway: Gateway, foreign: dict[str, str]) -> None:
    _, eve = gateway.key()
    with gateway.client(eve) as http:
        for name in ("rollout_id", "completion_id"):
            reply = http.post("/v1/outcomes", json={name: foreign[name], "value": True})
            assert reply.status_code == 404
        later = {"model": "baton/conductor", "input": "go on", "previous_response_id": foreign["response_id"]}
        reply = http.post("/v1/responses", json=later)
        assert reply.status_code in (400, 404)
        assert "also mine" not in reply.text
        turn = {"model": "baton/conductor", "input": "go on", "conversation": foreign["conversation_id"]}
        assert http.post("/v1/responses", json=turn).status_code == 404
        listed = http.get("/v1/rollouts").json()
        assert foreign["rollout_id"] not in str(listed)


@pytest.mark.parametrize("admin", [False, True])
def test_the_other_class_of_key_opens_no_route(gateway: Gateway, foreign: dict[str, str], admin: bool) -> None:
    _, wrong = gateway.key("data" if admin else "admin")
    found = list(operations(gateway.openapi(admin=admin)))
    assert len(found) >= (20 if admin else 5)
    for secret in (wrong, None):
        with gateway.client(secret, admin=admin) as http:
            for method, path in found:
                reply = http.request(method, filled(path, foreign), **body_of(method))
                assert reply.status_code == 401, (method, path, reply.text)
    measured(
        "S5", f"{len(found)} routes of the {'admin' if admin else 'public'} listener × wrong class and no key: 401"
    )


def test_an_auditor_reads_every_admin_route_and_changes_nothing(gateway: Gateway, foreign: dict[str, str]) -> None:
    _, secret = gateway.key("admin", role="auditor")
    found = list(operations(gateway.openapi(admin=True)))
    with gateway.client(secret, admin=True) as http:
        for method, path in found:
            reply = http.request(method, filled(path, foreign), **body_of(method))
            if method == "get":
                assert reply.status_code in (200, 404), (method, path, reply.text)
            else:
                assert (reply.status_code, reply.json()["error"]["code"]) == (403, "role_forbids"), (method, path)
    measured("S5", f"{len(found)} admin routes × an auditor: reads 200, changes 403")


def test_an_operator_does_everything_but_manage_admin_keys(gateway: Gateway, foreign: dict[str, str]) -> None:
    _, secret = gateway.key("admin", role="operator")
    other, _ = gateway.key("admin", role="auditor")
    admins_only = {
        ("post", "/admin/keys"): {"name": "mine", "key_class": "admin"},
        ("patch", "/admin/keys/{public_id}"): {"rpm": 1},
        ("delete", "/admin/keys/{public_id}"): None,
        ("post", "/admin/keys/{public_id}/rotate"): {},
    }
    ids = foreign | {"public_id": other}
    with gateway.client(secret, admin=True) as http:
        for (method, path), body in admins_only.items():
            reply = http.request(method, filled(path, ids), json=body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "role_forbids"), (method, path)
        for method, path in operations(gateway.openapi(admin=True)):
            if (method, path) != ("delete", "/admin/keys/{public_id}"):
                reply = http.request(method, filled(path, foreign | {"name": "nowhere"}), **body_of(method))
                assert reply.status_code not in (401, 403), (method, path, reply.text)
        made = http.post("/admin/keys", json={"name": "mine"}).json()
        assert http.delete(f"/admin/keys/{made['id']}").json()["revoked_at"]
        assert next(key["role"] for key in http.get("/admin/keys").json()["data"] if key["id"] == other) == "auditor"


def test_a_playgrounds_request_is_one_of_the_key_it_names(gateway: Gateway) -> None:
    _, admin = gateway.key("admin")
    app, _ = gateway.key(budget_usd="1")
    with gateway.client(admin, admin=True) as http:
        reply = http.post("/admin/playground", json={"key": app} | ask("what is 6 x 7?"))
        assert reply.json()["choices"][0]["message"]["content"] == "42"
        wait_until(lambda: http.get(f"/admin/rollouts/{reply.headers['x-baton-rollout-id']}").is_success)
        assert http.get(f"/admin/rollouts/{reply.headers['x-baton-rollout-id']}").json()["key_id"] == app
        assert float(http.get(f"/admin/keys/{app}").json()["balances"]["life"]["spent_usd"]) > 0
        for body, param in (({"key": "nobody"}, "key"), ({"key": gateway.key("admin")[0]}, "key"), ({}, "key")):
            refused = http.post("/admin/playground", json=body | ask("hi"))
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        refused = http.post("/admin/playground", json={"key": app, "stream": True} | ask("hi"))
        assert refused.json()["error"]["param"] == "stream"


def test_admin_routes_are_not_on_the_public_listener_nor_the_reverse(gateway: Gateway, foreign: dict[str, str]) -> None:
    _, data = gateway.key()
    _, admin = gateway.key("admin")
    for secret, on_admin in ((data, True), (admin, False)):
        mine = {path for _, path in operations(gateway.openapi(admin=on_admin))}
        for method, path in operations(gateway.openapi(admin=not on_admin)):
            if path in mine:
                continue
            with gateway.client(secret, admin=on_admin) as http:
                assert http.request(method, filled(path, foreign), **body_of(method)).status_code == 404


def test_a_revoked_key_and_one_of_a_closed_organisation_open_nothing(gateway: Gateway) -> None:
    _, admin = gateway.key("admin")
    with gateway.client(admin, admin=True) as http:
        http.post("/admin/orgs", json={"name": "closing"})
        one = http.post("/admin/keys", json={"name": "one", "org": "closing"}).json()
        two = http.post("/admin/keys", json={"name": "two"}).json()
        assert http.post("/admin/orgs/closing/close", json={}).status_code == 200
        assert http.delete(f"/admin/keys/{two['id']}").status_code == 200
    for made in (one, two):
        with gateway.client(made["key"]) as http:
            assert _status(http) == 401


def _status(http: httpx.Client) -> int:
    return http.get("/v1/models").status_code
