"""Workers that are asked by OpenAI's Responses API, over real sockets: what they are sent, and what clients get."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai.types.responses import ResponseInputItemParam
from pydantic import TypeAdapter, ValidationError

from gateway.adapters.upstream.http import HttpWorkers
from gateway.core.pool.workers import PoolFile, WorkerSpec
from gateway.errors import UpstreamError
from gateway.service.ports.request import WorkerCall
from tests.integration.test_api import Served, served
from tests.integration.test_responses import SUM, ask
from tests.kit import Kit
from tests.upstreams.responses import OpenAIResponses
from tests.upstreams.vendor import Script, ToolCall
from tests.waiting import BOUND_S

KEY = "sk-test-0123456789abcdef"
PRICE = {"input_usd_per_mtok": "1", "output_usd_per_mtok": "5", "cache_read_usd_per_mtok": "0.1"}
THOUGHT = {"id": "rs_1", "type": "reasoning", "encrypted_content": "gAAAAsealed"}
SUMMARY = [{"type": "summary_text", "text": "first"}, {"type": "summary_text", "text": "then"}]
ACTION = {"type": "search", "query": "primes", "queries": ["primes"]}
SEARCH = {"id": "ws_1", "type": "web_search_call", "status": "completed", "action": ACTION}
WEB = {"type": "web_search", "search_context_size": "low"}
INPUT: TypeAdapter[Any] = TypeAdapter(list[ResponseInputItemParam])


def a_worker(url: str, name: str = "thinker", handle: str = "atlas", **more: Any) -> WorkerSpec:
    named = {"name": name, "handle": handle, "kind": "openai", "model": "gpt-5.5", "url": url, "price": PRICE}
    return WorkerSpec.model_validate(named | {"api": "responses", "output_tokens_max": 400} | more)


@asynccontextmanager
async def thinking(
    *, hosted: tuple[str, ...] = ("web_search",), **more: Any
) -> AsyncIterator[tuple[Served, OpenAIResponses]]:
    """A gateway over two workers on one server: one with hosted tools, and one without."""
    async with OpenAIResponses(KEY) as upstream:
        url = f"{upstream.url}/v1"
        workers = (a_worker(url, hosted=hosted, **more), a_worker(url, "plain", "birch", version="2"))
        pools = PoolFile(workers=workers, pools={"default": ("thinker", "plain")})
        http = HttpWorkers({"thinker": KEY, "plain": KEY}, b"depth secret")
        async with served(Kit(workers=http, pools=pools)) as gateway:
            yield gateway, upstream
        await http.close()


def body_of(upstream: OpenAIResponses, at: int = -1) -> dict[str, Any]:
    body: dict[str, Any] = upstream.requests[at].body
    INPUT.validate_python(body["input"])
    return body


CHAT: Mapping[str, Any] = {
    "model": "thinker",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [
            {"type": "text", "text": "What is it?"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo=", "detail": "low"}},
        ]},
        {"role": "assistant", "content": "A sum.", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "sum", "arguments": '{"a":1}'}},
            {"id": "call_2", "type": "custom", "custom": {"name": "run", "input": "ls"}},
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        {"role": "tool", "tool_call_id": "call_2", "content": "a.txt"},
    ],
    "tools": [
        {"type": "function", "function": {"name": "sum", "parameters": SUM["parameters"], "strict": True}},
        {"type": "function", "function": {"name": "now"}},
        {"type": "custom", "custom": {"name": "run", "format": {"type": "grammar", "grammar": {
            "syntax": "lark", "definition": "start: /.+/"}}}},
    ],
    "tool_choice": {"type": "function", "function": {"name": "sum"}},
    "parallel_tool_calls": False,
    "max_completion_tokens": 99,
    "reasoning_effort": "high",
    "verbosity": "low",
    "response_format": {"type": "json_schema", "json_schema": {
        "name": "a", "schema": {"type": "object"}, "strict": False}},
    "prompt_cache_key": "k",
}  # fmt: skip


async def test_a_chat_request_is_asked_in_the_words_of_the_responses_api() -> None:
    async with thinking() as (gateway, upstream):
        upstream.script = Script(text="{}")
        reply = await gateway.http.post("/v1/chat/completions", json=CHAT)
        assert reply.status_code == 200, reply.text
        body = body_of(upstream)
    assert body["input"] == [
        {"type": "message", "role": "system", "status": "completed",
         "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "status": "completed", "content": [
            {"type": "input_text", "text": "What is it?"},
            {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "low"}]},
        {"type": "message", "role": "assistant", "content": "A sum."},
        {"type": "function_call", "call_id": "call_1", "name": "sum", "arguments": '{"a":1}', "status": "completed"},
        {"type": "custom_tool_call", "call_id": "call_2", "name": "run", "input": "ls"},
        {"type": "function_call_output", "call_id": "call_1", "output": "2", "status": "completed"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "a.txt"},
    ]  # fmt: skip
    assert body["tools"] == [
        {"type": "function", "name": "sum", "parameters": SUM["parameters"], "strict": True},
        {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}, "strict": False},
        {
            "type": "custom",
            "name": "run",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
        },
    ]
    assert body["tool_choice"] == {"type": "function", "name": "sum"}
    assert (body["max_output_tokens"], body["reasoning"], body["parallel_tool_calls"]) == (
        99,
        {"effort": "high"},
        False,
    )
    assert body["text"] == {
        "verbosity": "low",
        "format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": False},
    }
    assert (body["store"], body["include"], body["prompt_cache_key"], body["model"]) == (
        *(False, ["reasoning.encrypted_content"], "k"),
        "gpt-5.5",
    )


async def test_images_in_the_result_of_a_tool_stay_there() -> None:
    call = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"}
    seen = [{"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "auto"}]
    result = {"type": "function_call_output", "call_id": "call_1", "output": seen}
    async with thinking() as (gateway, upstream):
        upstream.script = Script(text="a heart")
        asked = ask([{"role": "user", "content": "Look."}, call, result], model="thinker")
        reply = await gateway.http.post("/v1/responses", json=asked)
        assert reply.status_code == 200, reply.text
        assert body_of(upstream)["input"][-1]["output"] == seen


@pytest.mark.parametrize("stream", [False, True])
async def test_text_reasoning_sources_and_usage_reach_a_chat_client(stream: bool) -> None:
    cited = {"type": "url_citation", "url": "https://example.org", "title": "x", "start_index": 0, "end_index": 3}
    part = {"type": "output_text", "text": "one two", "annotations": [cited], "logprobs": []}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    async with thinking() as (gateway, upstream):
        upstream.before = [THOUGHT | {"summary": SUMMARY}, SEARCH, message]
        asked: Any = {"model": "thinker", "messages": [{"role": "user", "content": "hi"}]}
        if stream:
            chunks = [chunk async for chunk in await gateway.sdk.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True})]  # fmt: skip
            deltas: list[Any] = [choice.delta for chunk in chunks for choice in chunk.choices]
            text = "".join(delta.content or "" for delta in deltas)
            reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
            sources = [one for delta in deltas for one in getattr(delta, "annotations", None) or ()]
            usage: Any = chunks[-1].usage
        else:
            made: Any = await gateway.sdk.chat.completions.create(**asked)
            reply = made.choices[0].message
            text, reasoning, usage = reply.content, reply.reasoning_content, made.usage
            sources = [one.model_dump() for one in reply.annotations]
        assert (text, reasoning) == ("one two", "first\n\nthen")
        assert [one["url_citation"]["url"] for one in sources] == ["https://example.org"]
        assert (usage.prompt_tokens, usage.completion_tokens) == (12, 7)
        assert usage.prompt_tokens_details.cached_tokens == 4
        assert usage.completion_tokens_details.reasoning_tokens == 3
        rollout_id = gateway.kit.metrics.records[-1].id
        cost_nano = gateway.kit.metrics.records[-1].cost_nano
    assert rollout_id
    assert cost_nano == 8 * 1_000 + 4 * 100 + 7 * 5_000  # cached tokens at their own price


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_and_hosted_items_go_back_to_their_vendor(stream: bool) -> None:
    async with thinking() as (gateway, upstream):
        upstream.before = [THOUGHT | {"summary": []}, SEARCH]
        upstream.script = Script(tool_calls=[ToolCall("call_1", "sum", {"a": 1})], reason="tool_calls")
        where: dict[str, Any] = {"model": "thinker", "tools": [SUM, WEB]}
        first = await responded(gateway, ask("Think.", **where), stream=stream)
        assert [item["type"] for item in first["output"]] == ["reasoning", "web_search_call", "function_call"]
        assert first["output"][1]["action"] == ACTION
        assert first["output"][2]["arguments"] == '{"a": 1}'
        upstream.before, upstream.script = [], Script(text="2")
        result = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "2"}
        again = ask([result], previous_response_id=first["id"], **where)
        assert (await responded(gateway, again, stream=stream))["status"] == "completed"
        kinds = [item["type"] for item in body_of(upstream)["input"]]
        assert kinds == ["message", "reasoning", "web_search_call", "function_call", "function_call_output"]
        thought = body_of(upstream)["input"][1]
        assert (thought["encrypted_content"], thought["id"]) == ("gAAAAsealed", "rs_1")
        assert body_of(upstream)["input"][3]["call_id"] == "call_1"


async def responded(gateway: Served, body: Mapping[str, Any], *, stream: bool) -> dict[str, Any]:
    """The response, in a stream that of its last event, whose items are those that its events ended."""
    reply = await gateway.http.post("/v1/responses", json={**body, "stream": stream})
    assert reply.status_code == 200, reply.text
    if not stream:
        return dict(reply.json())
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    done = {one["output_index"]: one["item"] for one in events if one["type"] == "response.output_item.done"}
    response = dict(events[-1]["response"])
    assert [done[at] for at in sorted(done)] == response["output"]
    return response


async def test_hosted_tools_go_to_workers_that_have_them_and_others_are_named() -> None:
    async with thinking() as (gateway, upstream):
        upstream.script = Script(text="ok")
        files = {"type": "file_search", "vector_store_ids": ["vs_1"]}
        for model, sent, named in (
            ("thinker", [WEB], "file_search"),
            ("plain", None, "web_search, file_search"),
        ):
            reply = await gateway.http.post("/v1/responses", json=ask(model=model, tools=[WEB, files]))
            assert reply.status_code == 200, reply.text
            assert set(reply.headers["x-baton-left-out"].split(", ")) == set(named.split(", "))
            assert body_of(upstream).get("tools") == sent
        chosen = {"type": "web_search"}
        for model, lacking in (("thinker", None), ("plain", "web_search, tool_choice")):
            asked = ask(model=model, tools=[WEB], tool_choice=chosen)
            reply = await gateway.http.post("/v1/responses", json=asked)
            assert (reply.status_code, reply.headers.get("x-baton-left-out")) == (200, lacking)
            assert body_of(upstream).get("tool_choice") == (None if lacking else chosen)
        asked = ask(model="thinker", tools=[WEB], tool_choice={"type": "file_search"})
        refused = await gateway.http.post("/v1/responses", json=asked)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice.type")
        shown = (await gateway.http.get("/v1/models/thinker")).json()["baton"]["workers"]
        assert [worker["hosted_tools"] for worker in shown] == [["web_search"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("code", "status"), [("rate_limit_exceeded", 429), ("server_error", 502)])
async def test_a_response_that_fails_is_an_error_of_its_own_status(stream: bool, code: str, status: int) -> None:
    async with thinking() as (gateway, upstream):
        upstream.fails = {"code": code, "message": "the vendor says no"}
        asked = {"model": "thinker", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
        reply = await gateway.http.post("/v1/chat/completions", json=asked)
        assert (reply.status_code, "the vendor says no" in reply.text) == (status, True), reply.text


async def test_a_model_that_does_not_reason_is_not_asked_for_its_state() -> None:
    async with OpenAIResponses(KEY) as upstream:
        http = HttpWorkers({"w": KEY}, b"depth secret")
        spec = a_worker(f"{upstream.url}/v1", "w", model="gpt-4.1", params={"reasoning": {"summary": "auto"}})
        upstream.script = Script(text="hello")
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "reasoning_effort": "low"}
        await http.complete(WorkerCall(spec, body, BOUND_S, "rollout", "step"))
        sent = body_of(upstream)
        assert "include" not in sent
        assert sent["reasoning"] == {"summary": "auto", "effort": "low"}
        upstream.fails = {"code": "server_error", "message": f"key {KEY}"}
        with pytest.raises(UpstreamError) as failed:
            await http.complete(WorkerCall(spec, body, BOUND_S, "rollout", "step"))
        assert KEY not in failed.value.message
        await http.close()


def test_what_the_responses_api_lacks_such_a_worker_cannot() -> None:
    spec = a_worker("http://127.0.0.1:1/v1", cannot=("image",))
    assert {"image", "n", "stop", "seed", "modalities"} <= set(spec.cannot)
    assert WorkerSpec.model_validate(spec.model_dump()) == spec
    for wrong in ({"kind": "litellm"}, {"kind": "tool", "api": "chat", "hosted": ("web_search",)}):
        with pytest.raises(ValidationError, match=r"`api`|`hosted`"):
            a_worker("http://127.0.0.1:1/v1", **wrong)
