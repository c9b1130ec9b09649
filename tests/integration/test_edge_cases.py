"""What clients and workers send beside what they should: refused by name, or served as if it were not there."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.adapters.upstream.http import HttpWorkers
from gateway.core.loop.caps import Caps
from gateway.errors import CapReached
from tests.fakes.workers import Says
from tests.integration.test_api import Served, served
from tests.integration.test_worker_failures import replies
from tests.kit import Kit, ask, model_worker, plan
from tests.kit import pool_file as kit_pool
from tests.upstreams.server import Server
from tests.waiting import BOUND_S

# ---------------------------------------------------------------- headers


@pytest.mark.parametrize(
    ("header", "nearest"),
    [
        ("x-baton-max-cost", "x-baton-max-cost-usd"),
        ("x-baton-max-call", "x-baton-max-calls"),
        ("X-Baton-Timeout", "x-baton-timeout-s"),
        ("x-baton-keep-alive", "x-baton-keepalive"),
        ("x-baton-pools", "x-baton-pool"),
    ],
)
async def test_a_misspelt_header_is_refused_with_the_nearest_right_one(header: str, nearest: str) -> None:
    async with served(Kit()) as gateway:
        for path, body in (
            ("/v1/chat/completions", ask()),
            ("/v1/responses", {"model": "baton", "input": "a"}),
            ("/v1/completions", {"model": "alpha", "prompt": "a"}),
        ):
            refused = await gateway.http.post(path, json=body, headers={header: "0.01"})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"], error["code"]) == (400, header.lower(), "unknown_header")
            assert f"did you mean `{nearest}`?" in error["message"]
        assert gateway.kit.workers.calls == []


NAMES = ("a\x01b", "a\nb", "a\r\nx-injected: 1", "\x7f", "ü")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_propertys_name_may_hold_anything(stream: bool) -> None:
    async with served(Kit()) as gateway:
        for name in NAMES:
            body = json.dumps({**ask(stream=stream), name: 1})
            reply = await gateway.http.post("/v1/chat/completions", content=body)
            assert reply.status_code == 200, (name, reply.text)
            assert reply.headers["x-baton-dropped-fields"].isprintable()
            assert "x-injected" not in reply.headers


async def test_a_plans_reason_may_hold_anything() -> None:
    steps: list[dict[str, Any]] = [{"worker": "atlas", "task": None, "see": []}]
    script = json.dumps({"why": "first\nthen \x01 ü", "steps": steps})
    async with served(Kit((script,))) as gateway:
        reply = await gateway.http.post("/v1/chat/completions", json=ask())
        assert reply.status_code == 200, reply.text
        assert reply.headers.get("x-baton-why", "").isprintable()


# ---------------------------------------------------------------- paths


async def test_compacting_a_conversation_is_refused_by_name() -> None:
    async with served(Kit()) as gateway:
        refused = await gateway.http.post("/v1/responses/compact", json={"model": "baton", "input": "a"})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (404, "unsupported_endpoint")
        assert error["type"] == "invalid_request_error"
        unknown = await gateway.http.post("/v1/responses/compact", headers={"authorization": "Bearer nobody"})
        assert unknown.status_code == 401


async def test_the_tokens_of_a_responses_input_are_counted_without_a_call() -> None:
    async with served(Kit()) as gateway:
        counts = []
        for text in ("a", "a" * 400):
            counted = await gateway.sdk.responses.input_tokens.count(model="alpha", input=text)
            assert counted.object == "response.input_tokens"
            counts.append(counted.input_tokens)
        assert counts[1] - counts[0] == pytest.approx(100, abs=1)
        wrong = await gateway.http.post("/v1/responses/input_tokens", json={"model": "nobody", "input": "a"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
        assert gateway.kit.workers.calls == []


# ---------------------------------------------------------------- replies


async def test_embeddings_with_choices_beside_them_are_embeddings() -> None:
    body: dict[str, Any] = {"object": "list", "data": [{"index": 0, "embedding": [0.5, 1.0]}], "model": "m"}
    wrong: list[Any] = [[{}], [{"message": {"content": "a"}}], "a", 7, None]
    for choices in wrong:
        async with Server(replies(json.dumps(body | {"choices": choices}).encode())) as server:
            vectors = model_worker("vectors", "vault", task="embeddings", url=f"http://127.0.0.1:{server.port}/v1")
            workers = HttpWorkers({}, b"secret")
            async with served(Kit(workers=workers, pools=kit_pool(vectors))) as gateway:
                reply = await gateway.http.post("/v1/embeddings", json={"model": "vectors", "input": "a"})
                assert reply.status_code == 200, reply.text
                assert reply.json()["data"][0]["embedding"] == [0.5, 1.0]
            await workers.close()


async def test_at_a_cap_the_text_of_a_sub_task_is_no_answer() -> None:
    script = plan(("atlas", "List three facts.", []), ("birch", "Combine them.", [0]))
    kit = Kit((script,), {"alpha": Says("three facts")}, caps=Caps(calls=1, wall_s=60.0))
    running = await kit.serve()
    assert isinstance(running.error, CapReached)
    assert running.error.cap == "calls"


async def test_at_a_cap_the_answer_of_an_earlier_round_is_shipped() -> None:
    first = plan(("atlas", "List three facts.", []), ("birch", "Combine them.", [0]))
    second = plan(("grove", "Check it.", []), ("birch", "Improve it.", [0]))
    says = {"alpha": Says("facts"), "beta": Says("answer"), "gamma": Says("checked")}
    kit = Kit((first, second), says, rounds=2, caps=Caps(calls=3, wall_s=60.0))
    running = await kit.serve()
    assert await kit.text(running) == "answer"
    assert running.record.capped == "calls"


# ---------------------------------------------------------------- HTTP/1.0


async def ask_http_1_0(gateway: Served, body: dict[str, Any]) -> tuple[str, bytes]:
    """The head and the body of the reply, as they came."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.0\r\nauthorization: Bearer {gateway.data_key}\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content)
    said = await asyncio.wait_for(reader.read(), BOUND_S)
    writer.close()
    head_bytes, _, rest = said.partition(b"\r\n\r\n")
    return head_bytes.decode().lower(), rest


async def test_a_stream_over_http_1_0_is_not_chunked() -> None:
    async with served(Kit(workers={"alpha": Says("one two three")})) as gateway:
        head, said = await ask_http_1_0(gateway, ask(stream=True))
        assert "transfer-encoding" not in head
        assert "connection: close" in head
        assert said.startswith(b"data: {")
        assert b"data: [DONE]" in said
        assert all(line.startswith((b"data: ", b": ", b"event: ")) for line in said.splitlines() if line)


async def test_a_whole_reply_over_http_1_0_has_its_length() -> None:
    async with served(Kit(workers={"alpha": Says("forty-two")})) as gateway:
        head, said = await ask_http_1_0(gateway, ask())
        assert f"content-length: {len(said)}" in head
        assert json.loads(said)["choices"][0]["message"]["content"] == "forty-two"


# ---------------------------------------------------------------- numbers that no double holds

HUGE = 10**399
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "maxProperties": HUGE}}}
CHAT = {
    **ask(),
    "tools": [TOOL],
    "metadata": {"a": "b"},
    "logit_bias": {"1": 1},
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"maximum": HUGE}}},
}
NUMBERS = (
    *(
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "n",
        "seed",
        "top_logprobs",
        "dimensions",
        "top_k",
    ),
    *("max_output_tokens", "max_tool_calls", "presence_penalty", "truncation", "value", "unknown"),
)
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "alpha", "prompt": "a", "logit_bias": {"1": 1}},
    "/v1/embeddings": {"model": "alpha", "input": ["a"]},
    "/v1/responses": {"model": "baton", "input": "a", "metadata": {"a": "b"}, "reasoning": {"effort": "low"}},
    "/v1/messages": {"model": "baton", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]},
    "/v1/outcomes": {"rollout_id": "r1", "value": 1},
}


def _with_each_leaf(value: Any, new: Any) -> list[Any]:
    """The value once for each of its leaves, which is replaced."""
    if isinstance(value, dict):
        return [{**value, name: each} for name, inner in value.items() for each in _with_each_leaf(inner, new)]
    if isinstance(value, list):
        return [
            [*value[:at], each, *value[at + 1 :]] for at, one in enumerate(value) for each in _with_each_leaf(one, new)
        ]
    return [new]


@pytest.mark.parametrize("path", ROUTES)
async def test_a_number_that_no_double_holds_is_no_fault_of_the_gateway(path: str) -> None:
    body = ROUTES[path]
    async with served(Kit()) as gateway:
        for new in (HUGE, -HUGE, [HUGE], {"a": HUGE}):
            bodies = [*({**body, name: new} for name in NUMBERS), *_with_each_leaf(body, new)]
            for each in bodies:
                headers = {"anthropic-version": "2023-06-01"}
                reply = await gateway.http.post(path, content=json.dumps(each), headers=headers)
                assert reply.status_code < 500, (each, reply.text)
        for name in ("seed", "temperature") if path == "/v1/chat/completions" else ():
            error = (await gateway.http.post(path, content=json.dumps({**ask(), name: HUGE}))).json()["error"]
            assert (error["param"], error["type"]) == (name, "invalid_request_error")
        for number in ("1e999", "-1e999", "NaN", "Infinity", "1" * 5000, "[" * 70 + "]" * 70):
            text = json.dumps({**body, "unknown": "@"}).replace('"@"', number)
            reply = await gateway.http.post(path, content=text)
            assert reply.status_code == 400, (number[:9], reply.text)
