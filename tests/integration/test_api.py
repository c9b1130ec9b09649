"""The HTTP API over real sockets: the OpenAI SDK in front, the shipped fakes behind."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from gateway.api.edge import stack as edge
from gateway.api.edge.bodies import Operators, by_admin_key
from gateway.api.edge.health import HealthApi
from gateway.api.edge.idempotency import Idempotency
from gateway.api.operator.keys import Balances, KeysApi
from gateway.api.operator.sessions import SessionLimitsApi
from gateway.api.public.chat import OpenAIApi, TextsApi
from gateway.api.public.conversations import ConversationsApi
from gateway.api.public.messages import MessagesApi
from gateway.api.public.outcomes import OutcomesApi
from gateway.api.public.responses import ResponsesApi
from gateway.api.public.sessions import SessionsApi
from gateway.api.public.tasks import TasksApi
from gateway.cli.process.listeners import Listener
from gateway.core.log.redact import Redactor
from gateway.core.money.amounts import Usage
from gateway.errors import BudgetExceeded, UpstreamError, UpstreamRateLimited
from gateway.service.admin.explain import Explain
from gateway.service.admin.keys import KeyAdmin
from gateway.service.batches.conversations import StoredConversations
from gateway.service.request.auth import Authenticator
from gateway.service.request.counting import InputTokens
from gateway.service.request.outcomes import Outcomes
from gateway.service.request.responses import Responses
from tests.fakes.admin import FakeAdmin
from tests.fakes.pools import FakePools
from tests.fakes.reports import FakeReports
from tests.fakes.responses import FakeResponses
from tests.fakes.workers import Says
from tests.kit import Kit, TestClock, ask, plan, pool_file
from tests.sizes import SLACK
from tests.waiting import until

PEPPER = b"pepper-for-tests-0123456789"


class Served:
    """A gateway on a loopback port, with a data key and an admin key."""

    def __init__(
        self,
        kit: Kit,
        url: str,
        data_key: str,
        admin_key: str,
        keys: KeyAdmin,
        idempotency: Idempotency,
        responses: ResponsesApi,
    ) -> None:
        self.kit = kit
        self.url = url
        self.data_key = data_key
        self.admin_key = admin_key
        self.keys = keys
        self.idempotency = idempotency
        self.responses = responses
        self.sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=data_key, max_retries=0)
        self.http = httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {data_key}"}, timeout=120)


@asynccontextmanager
async def served(
    kit: Kit,
    *,
    keepalive_s: float = 0.0,
    body_bytes_max: int = 100_000,
    edges: Mapping[str, Any] | None = None,
    **key: Any,
) -> AsyncIterator[Served]:
    await kit.budgets.load({})
    clock, peppers = TestClock(), {1: PEPPER}
    keys = KeyAdmin(FakeAdmin(kit.store), peppers, clock, pool_file().pools)
    auth = Authenticator(kit.store, peppers, clock, cache_s=0.0)
    app = FastAPI()
    edge.install(app)
    idempotency = Idempotency(kit.replies, 60.0, 3600.0, body_bytes_max)
    api = OpenAIApi(kit.completer, kit.catalog, auth, b"depth", body_bytes_max, 100, keepalive_s, False, 0, idempotency)
    reports = FakeReports(kit.store)
    admin_store = FakeAdmin(kit.store)
    explaining = Explain(reports, FakePools(admin_store), admin_store)
    outcomes = OutcomesApi(Outcomes(kit.store, kit.journal, clock), auth, reports, explaining, body_bytes_max)
    health = HealthApi(
        {"money": kit.budgets.ready}, {"conductor": kit.conductor.ready}, lambda: (b"m 1\n", "text/plain")
    )
    admin = KeysApi(keys, Balances(kit.budgets, clock), Operators(by_admin_key(auth), body_bytes_max))
    stored = StoredConversations(
        kit.stored_conversations,
        kit.journal,
        clock,
        Redactor(["provider-secret-value"]),
        bytes_max=body_bytes_max,
        media_bytes_max=api.media_bytes_max,
        strict=api.strict_fields,
        turn_s=60.0,
    )
    responses = ResponsesApi(
        api,
        Responses(
            FakeResponses(kit.store),
            kit.journal,
            clock,
            messages_max=100,
            body_bytes_max=body_bytes_max,
            strict=api.strict_fields,
            media_bytes_max=api.media_bytes_max,
            background=kit.background,
            background_s=60.0,
            conversations=stored,
        ),
        InputTokens(kit.catalog, kit.tokens),
    )
    for router in (
        api.router(),
        responses.router(),
        ConversationsApi(api, stored).router(),
        MessagesApi(api, InputTokens(kit.catalog, kit.tokens)).router(),
        TextsApi(api).router(),
        TasksApi(api).router(),
        outcomes.router(),
        SessionsApi(api, kit.sessions, kit.budgets, clock).router(),
        SessionLimitsApi(kit.sessions, Operators(by_admin_key(auth), body_bytes_max)).router(),
        health.router(),
        admin.router(),
    ):
        app.include_router(router)
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    listener = Listener(edge.Edge(app, **(edges or {})), sock, drain_s=1.0, head_bytes_max=65_536)
    await listener.open()
    _, data_key = await keys.create_key("app", **key)
    _, admin_key = await keys.create_key("ops", "admin")
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    gateway = Served(kit, url, data_key, admin_key, keys, idempotency, responses)
    try:
        yield gateway
    finally:
        await gateway.http.aclose()
        await gateway.sdk.close()
        await listener.close()


async def test_the_openai_sdk_gets_a_completion_with_the_whole_trees_usage() -> None:
    script = plan(("atlas", None, []), ("birch", None, [0]))
    kit = Kit((script,), {"alpha": Says("draft", usage=Usage(10, 5)), "beta": Says("42", usage=Usage(20, 7))})
    async with served(kit) as gateway:
        raw = await gateway.sdk.chat.completions.with_raw_response.create(**ask())
        reply = raw.parse()
        assert reply.choices[0].message.content == "42"
        assert reply.usage is not None
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (30, 12)
        headers = raw.headers
        assert headers["x-baton-workers"] == "alpha,beta"
        assert headers["x-baton-steps"] == "2"
        assert headers["x-baton-policy"] == "conductor (conductor@1)"
        assert headers["x-request-id"].startswith("req_")
        assert float(headers["x-baton-cost-usd"]) > 0
        assert float(headers["x-baton-overhead-ms"]) >= 0
        assert reply.id == f"chatcmpl-{headers['x-baton-rollout-id'].replace('-', '')}"


async def test_a_stream_has_openais_exact_order() -> None:
    kit = Kit(workers={"alpha": Says("one two", piece_delay_s=0.005)})
    async with served(kit) as gateway:
        stream = await gateway.sdk.chat.completions.create(**ask(stream=True, stream_options={"include_usage": True}))
        chunks = [chunk async for chunk in stream]
    first, *middle, finish, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == "one two"
    assert finish.choices[0].finish_reason == "stop"
    assert finish.choices[0].delta.content is None
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.total_tokens == 15
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


async def test_comments_keep_a_planning_stream_alive_and_can_be_switched_off() -> None:
    kit = Kit(workers={"alpha": Says("late", delay_s=0.3)})
    async with served(kit, keepalive_s=0.05) as gateway:
        alive = await gateway.http.post("/v1/chat/completions", json=ask(stream=True))
        off = {"x-baton-keepalive": "off"}
        silent = await gateway.http.post("/v1/chat/completions", json=ask(stream=True), headers=off)
    assert alive.text.startswith(": baton is working\n\n")
    assert ": baton is working" not in silent.text
    for reply in (alive, silent):
        assert reply.text.endswith("data: [DONE]\n\n")


async def test_an_upstream_that_dies_midway_is_an_error_event_and_never_done() -> None:
    kit = Kit(workers={"alpha": Says("one two three", dies_after=2)})
    async with served(kit) as gateway:
        reply = await gateway.http.post("/v1/chat/completions", json=ask(model="alpha", stream=True))
        assert reply.status_code == 200
        assert "[DONE]" not in reply.text
        assert (
            json.loads(reply.text.strip().splitlines()[-1].removeprefix("data: "))["error"]["code"]
            == "upstream_protocol"
        )
        with pytest.raises(openai.APIError):
            async for _ in await gateway.sdk.chat.completions.create(**ask(model="alpha", stream=True)):
                pass


async def test_an_error_before_the_first_byte_of_a_stream_has_its_own_status() -> None:
    kit = Kit(workers={"alpha": UpstreamRateLimited("slow down", retryable=False, upstream_status=429)})
    async with served(kit) as gateway:
        reply = await gateway.http.post("/v1/chat/completions", json=ask(model="alpha", stream=True))
        assert reply.status_code == 429
        assert reply.json()["error"]["code"] == "upstream_rate_limited"
        assert "x-baton-rollout-id" in reply.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_everything_within_a_second(stream: bool) -> None:
    kit = Kit((plan(("atlas", None, []), ("birch", None, [])),), {"alpha": Says(delay_s=60), "beta": Says(delay_s=60)})
    async with served(kit, keepalive_s=0.05) as gateway:
        call = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=ask(stream=stream)))
        await until(lambda: kit.workers.in_flight == 2)
        call.cancel()
        await until(lambda: not kit.completer.in_flight, 1.0 * SLACK)
        assert sorted(kit.workers.cancelled) == ["alpha", "beta"]
        assert kit.metrics.records[-1].status == "aborted"


BAD = [
    (b"{", 400, "invalid_json", None),
    (b'{"model": "baton", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, "invalid_json", None),
    (b'{"tools":' + b'[{"a":' * 40 + b"1" + b"}]" * 40 + b"}", 400, "invalid_json", None),
    (b"[" * 100_000, 400, "body_above_max_values", None),
    (b'{"model": NaN}', 400, "invalid_json", None),
    (b"\xff\xfe", 400, "invalid_json", None),
    (b"[]", 400, "invalid_type", None),
    (b'{"messages": [{"role": "user", "content": "x"}]}', 400, "missing_required_parameter", "model"),
    (b'{"model": "baton"}', 400, "missing_required_parameter", "messages"),
    (b'{"model": "baton", "messages": []}', 400, "empty_array", "messages"),
    (b'{"model": "baton", "messages": "hi"}', 400, "invalid_type", "messages"),
    (json.dumps(ask(temperature="hot")).encode(), 400, "invalid_type", "temperature"),
    (json.dumps(ask(api_base="http://evil")).encode(), 400, "refused_field", "api_base"),
    (json.dumps(ask(model="gpt-9")).encode(), 404, "model_not_found", "model"),
    (json.dumps(ask("x" * 200_000)).encode(), 413, "request_too_large", None),
]


@pytest.mark.parametrize(("body", "status", "code", "param"), BAD)
async def test_bad_input_has_its_named_error_and_reaches_no_worker(
    body: bytes, status: int, code: str, param: str | None
) -> None:
    kit = Kit()
    async with served(kit) as gateway:
        reply = await gateway.http.post("/v1/chat/completions", content=body)
        assert reply.status_code == status
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["code"], error["param"]) == (code, param)
    assert kit.workers.calls == []
    assert kit.journal.events == []


async def test_keys_are_needed_and_of_the_right_class() -> None:
    async with served(Kit()) as gateway:
        for header in (
            "",
            "Bearer",
            "Bearer nonsense",
            f"Bearer {gateway.data_key[:-1]}{'y' if gateway.data_key.endswith('x') else 'x'}",
            f"Bearer {gateway.admin_key}",
        ):
            reply = await gateway.http.post("/v1/chat/completions", json=ask(), headers={"authorization": header})
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
        wrong = await gateway.http.get("/admin/keys")
        assert wrong.status_code == 401


async def test_an_exhausted_budget_tells_sdks_not_to_retry() -> None:
    async with served(Kit(), budget_usd="0.000001") as gateway:
        reply = await gateway.http.post("/v1/chat/completions", json=ask(model="alpha"))
        assert reply.status_code == 429
        assert reply.headers["x-should-retry"] == "false"
        assert reply.json()["error"]["type"] == BudgetExceeded.type
        patient = gateway.sdk.with_options(max_retries=5)
        with pytest.raises(openai.RateLimitError) as caught:
            await patient.chat.completions.create(**ask(model="alpha"))
        assert caught.value.request.headers["x-stainless-retry-count"] == "0"


async def test_models_are_what_the_key_may_use() -> None:
    async with served(Kit(), workers=["alpha"]) as gateway:
        names = [model.id async for model in gateway.sdk.models.list()]
        assert "baton" in names
        assert "baton/fixed:alpha" in names
        assert "alpha" in names
        assert "beta" not in names
        assert (await gateway.sdk.models.retrieve("baton/fixed:alpha")).id == "baton/fixed:alpha"
        with pytest.raises(openai.NotFoundError):
            await gateway.sdk.models.retrieve("beta")


async def test_outcomes_and_rollouts_belong_to_their_owner() -> None:
    async with served(Kit(workers={"alpha": Says("42")})) as gateway:
        made = await gateway.sdk.chat.completions.create(**ask(metadata={"task_type": "sums"}))
        judged = {"completion_id": made.id, "value": True, "source": "unit-test", "metadata": {"page": "7"}}
        keyed = {"idempotency-key": "k" * 255}
        first = await gateway.http.post("/v1/outcomes", json=judged, headers=keyed)
        again = await gateway.http.post("/v1/outcomes", json=judged, headers=keyed)
        assert (first.status_code, again.status_code) == (201, 200)
        assert first.json()["id"] == again.json()["id"]
        rollout_id = first.json()["rollout_id"]
        rollout = (await gateway.http.get(f"/v1/rollouts/{rollout_id}")).json()
        assert rollout["status"] == "done"
        assert len(rollout["steps"]) == 1
        (outcome,) = rollout["outcomes"]
        assert (outcome["metadata"], outcome["idempotency_key"]) == ({"page": "7"}, "k" * 255)
        of_step = {"rollout_id": rollout_id, "step": 0, "value": 0}
        assert (await gateway.http.post("/v1/outcomes", json=of_step)).status_code == 201
        missing = await gateway.http.post("/v1/outcomes", json=of_step | {"step": 5})
        assert (missing.status_code, missing.json()["error"]["code"]) == (400, "step_not_found")
        why = (await gateway.http.get(f"/v1/rollouts/{made.id}/explain")).json()
        assert (why["rollout_id"], [one["planner"] for one in why["decisions"]]) == (rollout_id, ["conductor"])
        _, stranger = await gateway.keys.create_key("stranger")
        other = {"authorization": f"Bearer {stranger}"}
        for reply in (
            await gateway.http.get(f"/v1/rollouts/{rollout_id}", headers=other),
            await gateway.http.get(f"/v1/rollouts/{rollout_id}/explain", headers=other),
            await gateway.http.post("/v1/outcomes", json=judged, headers=other),
        ):
            assert reply.status_code == 404


async def test_an_outcome_says_whether_it_counts() -> None:
    async with served(Kit()) as gateway:
        reply = await gateway.http.post("/v1/chat/completions", json=ask(model="alpha"))
        rollout = {"rollout_id": reply.headers["x-baton-rollout-id"]}
        known = (await gateway.http.post("/v1/outcomes", json={**rollout, "label": "👍"})).json()
        assert (known["counts"], known["value"]) == (True, 1.0)
        unknown = (await gateway.http.post("/v1/outcomes", json={**rollout, "label": "polite"})).json()
        assert unknown["counts"] is False
        assert "`polite` has no value" in unknown["note"]
        tree = (await gateway.http.get(f"/v1/rollouts/{rollout['rollout_id']}")).json()
    stored = [(one["kind"], one["value"], one["label"], one["source"]) for one in tree["outcomes"]]
    assert stored == [("number", 1.0, "👍", "label"), ("label", None, "polite", "client")]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([], None),
        ({"value": 1}, "rollout_id"),
        ({"rollout_id": "x"}, "value"),
        ({"rollout_id": "x", "value": 2}, "value"),
        ({"rollout_id": "x", "value": True, "label": "good"}, "label"),
        ({"rollout_id": "x", "label": ""}, "label"),
        ({"rollout_id": "x", "value": 1, "reward": 3}, "reward"),
        ({"rollout_id": "x", "value": 1, "source": 5}, "source"),
    ],
)
async def test_a_bad_outcome_names_its_field(body: Any, param: str | None) -> None:
    async with served(Kit()) as gateway:
        reply = await gateway.http.post("/v1/outcomes", json=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param


async def test_caps_by_header_are_held_and_bad_ones_named() -> None:
    async with served(Kit((plan(("atlas", None, []), ("birch", None, [0])),))) as gateway:
        capped = await gateway.http.post("/v1/chat/completions", json=ask(), headers={"x-baton-max-calls": "1"})
        assert capped.headers["x-baton-capped"] == "calls"
        for name, value in (
            ("x-baton-max-cost-usd", "lots"),
            ("x-baton-max-steps", "0"),
            ("x-baton-rounds", "99"),
            ("x-baton-quality", "10"),
        ):
            reply = await gateway.http.post("/v1/chat/completions", json=ask(), headers={name: value})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
        dialled = await gateway.http.post("/v1/chat/completions", json=ask(), headers={"x-baton-quality": "0"})
        assert dialled.status_code == 200
        pool = await gateway.http.post("/v1/chat/completions", json=ask(), headers={"x-baton-pool": "secret"})
        assert pool.status_code == 403


async def test_a_request_from_another_gateway_counts_its_depth_on() -> None:
    from gateway.core.access.depth import sign

    async with served(Kit()) as gateway:
        deep = await gateway.http.post("/v1/chat/completions", json=ask(), headers={"x-baton-depth": sign(2, b"depth")})
        assert deep.json()["error"]["code"] == "cap_reached"
        forged = await gateway.http.post(
            "/v1/chat/completions", json=ask(), headers={"x-baton-depth": sign(2, b"other")}
        )
        assert forged.status_code == 200


async def test_unknown_fields_are_dropped_and_named_in_a_header() -> None:
    async with served(Kit()) as gateway:
        reply = await gateway.http.post("/v1/chat/completions", json=ask(made_up=1))
        assert reply.headers["x-baton-dropped-fields"] == "made_up"


async def test_unknown_paths_methods_and_bugs_are_openai_shaped() -> None:
    kit = Kit(workers={"alpha": RuntimeError("a bug")})
    async with served(kit) as gateway:
        lost = await gateway.http.get("/v1/nothing")
        wrong = await gateway.http.get("/v1/chat/completions")
        bug = await gateway.http.post("/v1/chat/completions", json=ask(model="alpha"))
        assert (lost.status_code, wrong.status_code, bug.status_code) == (404, 405, 500)
        for reply in (lost, wrong, bug):
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        assert "a bug" not in bug.text
    assert len(kit.metrics.bugs) == 1
    assert await kit.open_nano() == 0


async def test_health_and_metrics() -> None:
    async with served(Kit()) as gateway:
        assert (await gateway.http.get("/livez")).json() == {"status": "ok"}
        assert (await gateway.http.get("/readyz")).status_code == 200
        assert (await gateway.http.get("/metrics")).text == "m 1\n"
        gateway.kit.budget_store.flush()  # Redis came back empty
        away = await gateway.http.get("/readyz")
        assert (away.status_code, away.json()["parts"]["money"]) == (503, "away")
        refused = await gateway.http.post("/v1/chat/completions", json=ask())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "money_unavailable")


async def test_admin_creates_lists_and_revokes_keys() -> None:
    kit = Kit(workers={"alpha": UpstreamError("x", upstream_status=500), "beta": Says("ok")})
    async with served(kit) as gateway:
        admin = {"authorization": f"Bearer {gateway.admin_key}"}
        made = await gateway.http.post("/admin/keys", json={"name": "new", "budget_usd": "1.5"}, headers=admin)
        assert made.status_code == 201
        bearer = {"authorization": f"Bearer {made.json()['key']}"}
        used = await gateway.http.post("/v1/chat/completions", json=ask(model="beta"), headers=bearer)
        assert used.status_code == 200
        listed = (await gateway.http.get("/admin/keys", headers=admin)).json()["data"]
        row = next(row for row in listed if row["name"] == "new")
        assert row["budget_usd"] == "1.5"
        assert float(row["spent_usd"]) > 0
        assert "digest" not in row
        assert (await gateway.http.delete(f"/admin/keys/{row['id']}", headers=admin)).status_code == 200
        gone = await gateway.http.post("/v1/chat/completions", json=ask(model="beta"), headers=bearer)
        assert gone.status_code == 401
        for body, param in (
            ({}, "name"),
            ({"name": "x", "root": True}, "root"),
            ({"name": "x", "pools": ["no"]}, "pools"),
        ):
            bad = await gateway.http.post("/admin/keys", json=body, headers=admin)
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, param)
