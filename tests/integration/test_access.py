"""Refusals are seen: each moves a series and writes one line, which the reply's request id finds."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence

import pytest

from gateway.adapters.host.metrics import PrometheusMetrics
from gateway.api.edge.access import LINES_PER_S_MAX, Accesses
from gateway.core.money.ledger import Balance
from tests.integration.test_api import Served, served
from tests.kit import Kit, ask


@pytest.fixture
def metrics() -> PrometheusMetrics:
    return PrometheusMetrics()


@pytest.fixture
async def api(metrics: PrometheusMetrics) -> AsyncIterator[Served]:
    async with served(Kit(), edges={"accesses": Accesses(metrics, "errors")}, rpm=2) as running:
        yield running


def refused(metrics: PrometheusMetrics, status: int, code: str) -> float | None:
    return metrics.registry.get_sample_value("baton_refusals_total", {"status": str(status), "code": code})


async def test_a_base_url_without_its_version_is_told_where_it_goes(api: Served) -> None:
    for method, path in (("POST", "/chat/completions"), ("GET", "/models"), ("POST", "/embeddings")):
        lost = (await api.http.request(method, path, json={})).json()["error"]
        wanted = f"Invalid URL ({method} {path}): its path is /v1{path}; let the client's base URL end in /v1"
        assert (lost["message"], lost["code"]) == (wanted, "unknown_url")
    assert (await api.http.get("/nowhere")).json()["error"]["message"] == "Invalid URL (GET /nowhere)"


async def test_a_model_that_is_not_there_is_told_where_they_are_listed(api: Served) -> None:
    lost = (await api.http.post("/v1/chat/completions", json=ask(model="nobody"))).json()["error"]
    assert lost["message"].endswith("GET /v1/models lists what this key may use.")


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status", "code"),
    [
        ("GET", "/v1/models", {"authorization": "Bearer bt_data_wrong"}, None, 401, "invalid_api_key"),
        ("GET", "/v1/nowhere?key=secret", {}, None, 404, "unknown_url"),
        ("PUT", "/v1/chat/completions", {}, None, 405, "method_not_allowed"),
        ("POST", "/v1/chat/completions", {}, ask(model="nobody"), 404, "model_not_found"),
        ("POST", "/v1/chat/completions", {"x-baton-wrong": "1"}, ask(), 400, "unknown_header"),
    ],
)
async def test_a_refusal_moves_a_series_and_writes_a_line(
    api: Served,
    metrics: PrometheusMetrics,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
    headers: dict[str, str],
    body: dict[str, object] | None,
    status: int,
    code: str,
) -> None:
    with caplog.at_level(logging.INFO, "baton.access"):
        reply = await api.http.request(method, path, headers=headers, json=body)
    assert reply.status_code == status
    assert refused(metrics, status, code) == 1
    (line,) = [record.getMessage() for record in caplog.records if record.name == "baton.access"]
    assert line.startswith(f"{method} {path.partition('?')[0]} {status} {code} ")
    assert reply.headers["x-request-id"] in line
    assert "secret" not in line
    assert api.data_key not in line


async def test_rate_limits_are_counted_and_a_line_names_the_key(
    api: Served, metrics: PrometheusMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert (await api.http.post("/v1/chat/completions", json=ask())).status_code == 200
    assert (await api.http.post("/v1/chat/completions", json=ask())).status_code == 429
    assert refused(metrics, 429, "rate_limit_exceeded") == 1
    labels = {"route": "/v1/chat/completions", "status": "200"}
    assert metrics.registry.get_sample_value("baton_http_replies_total", labels) == 2
    with caplog.at_level(logging.INFO, "baton.access"):
        await api.http.post("/v1/chat/completions", json=ask())
    (key,) = [row for row in (await api.keys.list_keys(10))[0] if row.key_class == "data"]
    assert f"key={key.public_id} rollout=-" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/v1/rollouts/nothing", {}),
        ("GET", "/v1/sessions/nothing", {}),
        ("POST", "/v1/responses/nothing/cancel", {}),
        ("POST", "/v1/messages", {"anthropic-version": "1999-01-01"}),
        ("POST", "/v1/audio/transcriptions", {}),
    ],
)
async def test_the_line_of_any_route_names_the_key(
    api: Served, caplog: pytest.LogCaptureFixture, method: str, path: str, headers: dict[str, str]
) -> None:
    with caplog.at_level(logging.INFO, "baton.access"):
        reply = await api.http.request(method, path, headers=headers)
    assert reply.status_code in (400, 404)
    (key,) = [row for row in (await api.keys.list_keys(10))[0] if row.key_class == "data"]
    assert f"key={key.public_id} " in caplog.records[-1].getMessage()


async def test_the_balances_of_all_keys_are_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit()
    questions: list[int] = []
    balances = kit.budgets.balances

    async def counted(scopes: Sequence[str]) -> Mapping[str, Balance]:
        questions.append(len(scopes))
        return await balances(scopes)

    monkeypatch.setattr(kit.budgets, "balances", counted)
    async with served(kit) as running:
        for name in ("one", "two"):
            await running.keys.create_key(name)
        reply = await running.http.get("/admin/keys", headers={"authorization": f"Bearer {running.admin_key}"})
    assert [row["spent_usd"] for row in reply.json()["data"]] == ["0"] * 4
    assert questions == [4]


async def test_a_request_id_is_stored_with_its_rollout(api: Served) -> None:
    reply = await api.http.post("/v1/chat/completions", json=ask())
    rollout = await api.http.get(f"/v1/rollouts/{reply.headers['x-baton-rollout-id']}")
    assert rollout.json()["request_id"] == reply.headers["x-request-id"]


async def test_a_gateway_without_a_place_left_counts_what_it_refuses(metrics: PrometheusMetrics) -> None:
    edges = {"accesses": Accesses(metrics, "errors"), "spending_max": 1, "abandoned": lambda: 1}
    async with served(Kit(), edges=edges) as running:
        assert (await running.http.post("/v1/chat/completions", json=ask())).status_code == 503
    assert refused(metrics, 503, "overloaded") == 1


async def test_every_reply_has_a_line_where_that_is_wanted(
    metrics: PrometheusMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "baton.access"):
        async with served(Kit(), edges={"accesses": Accesses(metrics, "all")}) as running:
            reply = await running.http.post("/v1/chat/completions", json=ask())
            await running.http.get("/readyz")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "baton.access"]
    assert f"rollout={reply.headers['x-baton-rollout-id']}" in line


async def test_a_flood_of_refusals_does_not_fill_the_log(
    api: Served, metrics: PrometheusMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    accesses = Accesses(metrics, "errors")
    scope = {"method": "GET", "path": "/x\n401", "state": {"request_id": "req_1"}}
    start = {"status": 401, "headers": []}
    with caplog.at_level(logging.INFO, "baton.access"):
        for _ in range(10 * LINES_PER_S_MAX):
            accesses.ended(scope, 0.0, start)
    assert len(caplog.records) <= 3 * LINES_PER_S_MAX
    assert all("\n" not in record.getMessage() for record in caplog.records)


async def test_a_field_in_the_form_with_and_without_brackets_is_named(api: Served) -> None:
    form = {"model": "alpha", "include": "logprobs", "include[]": "logprobs"}
    file = {"file": ("a.wav", b"RIFF")}
    reply = await api.http.post("/v1/audio/transcriptions", data=form, files=file)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "include")
