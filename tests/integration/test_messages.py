"""Anthropic's Messages API over real sockets, driven by Anthropic's SDK."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, MessageParam, RawMessageStreamEvent, ToolParam
from pydantic import TypeAdapter

from gateway.core.money.amounts import Usage
from gateway.core.pool.workers import PoolFile
from gateway.errors import BudgetExceeded, UpstreamOverloaded, UpstreamRateLimited
from tests.fakes.tokens import WordCounter
from tests.fakes.workers import Says
from tests.integration.test_api import Served, served
from tests.kit import Kit, model_worker, plan
from tests.service.test_vendor_state import TWO, Vendor

SUM: ToolParam = {
    "name": "sum",
    "description": "adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "sum", "arguments": '{"a":1}'}}
ASKS = Says(None, tool_calls=[CALL], finish_reason="tool_calls")
HI: list[MessageParam] = [{"role": "user", "content": "What is 6 times 7?"}]
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def ask(messages: Any = None, **fields: Any) -> dict[str, Any]:
    return {"model": "baton", "max_tokens": 50, "messages": messages or HI, **fields}


@asynccontextmanager
async def messages_of(kit: Kit, **key: Any) -> AsyncIterator[tuple[Served, anthropic.AsyncAnthropic]]:
    async with served(kit, **key) as gateway:
        sdk = anthropic.AsyncAnthropic(base_url=gateway.url, api_key=gateway.data_key, max_retries=0)
        try:
            yield gateway, sdk
        finally:
            await sdk.close()


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; each is announced under its own name."""
    found = []
    for frame in reply.text.strip().split("\n\n"):
        if not frame.startswith(":"):
            name, data = frame.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            found.append(event)
    return found


async def test_a_message_is_planned_billed_and_logged_as_a_chat_is() -> None:
    kit = Kit((plan(("atlas", None, []), ("birch", None, [0])),), {"alpha": Says("draft"), "beta": Says("42")})
    async with messages_of(kit) as (gateway, sdk):
        raw = await sdk.messages.with_raw_response.create(**ask(system="be brief"))
        message = await raw.parse()
        assert [block.model_dump() for block in message.content] == [{"citations": None, "text": "42", "type": "text"}]
        assert (message.role, message.type, message.model) == ("assistant", "message", "baton")
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        assert (message.usage.input_tokens, message.usage.output_tokens) == (20, 10)
        assert raw.headers["x-baton-workers"] == "alpha,beta"
        assert message.id == f"msg_{raw.headers['x-baton-rollout-id'].replace('-', '')}"
        assert raw.headers["request-id"] == raw.headers["x-request-id"] == message._request_id
        plain = await gateway.http.post("/v1/messages", json=ask())
        Message.model_validate(plain.json(), strict=True)
    assert await kit.open_nano() == 0
    record = kit.metrics.records[0]
    assert record.cost_nano > 0
    assert record.completion_id == message.id
    assert record.request["messages"][0] == {"role": "system", "content": "be brief"}


async def test_the_sdks_stream_helper_sees_every_event_and_the_same_message() -> None:
    kit = Kit(workers={"alpha": Says("one two three", usage=Usage(11, 7))})
    async with messages_of(kit) as (gateway, sdk):
        async with sdk.messages.stream(**ask()) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        assert "".join(texts) == "one two three"
        assert len(texts) == 3
        assert (final.stop_reason, final.usage.input_tokens, final.usage.output_tokens) == ("end_turn", 11, 7)
        reply = await gateway.http.post("/v1/messages", json=ask(stream=True))
        kinds = [event["type"] for event in events(reply)]
        assert kinds == [
            "message_start", "content_block_start", *["content_block_delta"] * 3, "content_block_stop",
            "message_delta", "message_stop",
        ]  # fmt: skip
        for event in events(reply):
            EVENT.validate_python(event, strict=True)
        assert reply.text.rindex(": baton {") < reply.text.rindex("event: message_stop")
    assert await kit.open_nano() == 0


def test_the_blocking_sdk_gets_a_message_and_a_stream() -> None:
    """The synchronous client, in a thread beside the gateway's loop."""
    import asyncio

    async def run() -> None:
        kit = Kit(workers={"alpha": Says("one two")})
        async with served(kit) as gateway:
            await asyncio.to_thread(ask_blocking, gateway.url, gateway.data_key)

    def ask_blocking(url: str, key: str) -> None:
        with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as sdk:
            made = sdk.messages.create(**ask())
            assert made.content[0].type == "text"
            assert made.content[0].text == "one two"
            with sdk.messages.stream(**ask()) as stream:
                assert "".join(stream.text_stream) == "one two"

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tools_round_trip_goes_back_to_the_worker_that_asked(stream: bool) -> None:
    kit = Kit((plan(("birch", None, [])), plan(("atlas", None, []))), {"beta": [ASKS, Says("it is 2")]})
    async with messages_of(kit) as (_, sdk):
        if stream:
            async with sdk.messages.stream(**ask(tools=[SUM])) as asked:
                first: Any = await asked.get_final_message()
        else:
            first = await sdk.messages.create(**ask(tools=[SUM]))
        (call,) = first.content
        assert (call.type, call.id, call.name, call.input) == ("tool_use", "call_1", "sum", {"a": 1})
        assert first.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
        turns = [*HI, first.to_param(), {"role": "user", "content": [result]}]
        second = await sdk.messages.create(**ask(turns, tools=[SUM]))
        assert second.content[0].text == "it is 2"
    sent: Mapping[str, Any] = kit.workers.calls[-1].body
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "tool"]
    assert sent["messages"][1]["tool_calls"] == [CALL | {"function": {"name": "sum", "arguments": '{"a": 1}'}}]
    assert sent["messages"][2] == {"role": "tool", "tool_call_id": "call_1", "content": "2"}
    assert sent["tools"][0]["function"]["parameters"] == SUM["input_schema"]
    assert [record.policy_used for record in kit.metrics.records][-1] == "sticky"


async def test_either_header_carries_the_key_and_another_version_is_refused() -> None:
    async with served(Kit(workers={"alpha": Says("42")})) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url) as bare:
            by_header = {"x-api-key": gateway.data_key, "anthropic-version": "2023-06-01"}
            assert (await bare.post("/v1/messages", json=ask(), headers=by_header)).status_code == 200
            lost = await bare.post("/v1/messages", json=ask(), headers={"x-api-key": "sk-ant-1"})
            assert (lost.status_code, lost.json()["error"]["type"]) == (401, "authentication_error")
            assert lost.json()["type"] == "error"
            assert lost.json()["request_id"] == lost.headers["request-id"]
            older = await bare.post("/v1/messages", json=ask(), headers=by_header | {"anthropic-version": "2023-01-01"})
            assert (older.status_code, older.json()["error"]["type"]) == (400, "invalid_request_error")
        assert (await gateway.http.post("/v1/messages", json=ask())).status_code == 200  # a bearer token


@pytest.mark.parametrize(
    ("worker", "error", "kind"),
    [
        (UpstreamRateLimited("slow down", retry_after_s=2.0), anthropic.RateLimitError, "rate_limit_error"),
        (UpstreamOverloaded("too busy"), anthropic.OverloadedError, "overloaded_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_workers_error_is_the_sdks_own(worker: Exception, error: Any, kind: str, stream: bool) -> None:
    async with messages_of(Kit(workers={"alpha": worker, "beta": worker})) as (_, sdk):
        with pytest.raises(error) as refused:
            await sdk.messages.create(**ask(model="alpha", stream=stream))
    assert refused.value.body["error"]["type"] == kind


async def test_an_error_behind_the_first_byte_is_an_event_that_the_sdk_raises() -> None:
    kit = Kit(workers={"alpha": Says("one two three", dies_after=2)})
    async with messages_of(kit) as (gateway, sdk):
        with pytest.raises(anthropic.APIStatusError) as broken:
            async with sdk.messages.stream(**ask(model="alpha")) as stream:
                await stream.until_done()
        assert broken.value.body["error"]["type"] == "api_error"  # type: ignore[index]
        reply = await gateway.http.post("/v1/messages", json=ask(model="alpha", stream=True))
        assert [event["type"] for event in events(reply)][-1] == "error"
        assert "message_stop" not in reply.text
    assert await kit.open_nano() == 0


async def test_spent_money_and_bad_requests_are_the_sdks_own_errors() -> None:
    kit = Kit(workers={"alpha": Says("42")})
    async with messages_of(kit, budget_usd="0.0000001") as (_, sdk):
        with pytest.raises(anthropic.APIStatusError) as spent:
            await sdk.messages.create(**ask())
        assert (spent.value.status_code, spent.value.body["error"]["type"]) == (402, "billing_error")  # type: ignore[index]
        assert spent.value.response.headers["x-should-retry"] == "false"
        with pytest.raises(anthropic.NotFoundError):
            await sdk.messages.create(**ask(model="claude-none"))
        with pytest.raises(anthropic.BadRequestError) as bad:
            await sdk.messages.create(**ask([{"role": "user", "content": [{"type": "video"}]}]))
        assert "messages[0].content[0].type" in bad.value.message
    assert kit.workers.calls == []
    assert BudgetExceeded("", scope="key").status == 429  # on OpenAI's wire


async def test_an_unknown_path_and_a_wrong_method_have_the_shape_of_the_api() -> None:
    async with served(Kit()) as gateway:
        for reply in (await gateway.http.get("/v1/messages"), await gateway.http.post("/v1/messages/batches")):
            assert reply.json()["type"] == "error"
        assert (await gateway.http.get("/v1/responses/x/y")).json()["error"]["param"] is None  # OpenAI's


async def test_count_tokens_costs_nothing_and_reaches_no_worker() -> None:
    kit = Kit(tokens=WordCounter(without=["beta"]))
    async with messages_of(kit) as (_, sdk):
        few = await sdk.messages.count_tokens(model="alpha", messages=HI)
        more = await sdk.messages.count_tokens(model="alpha", messages=HI, tools=[SUM], system="be brief")
        planned = await sdk.messages.count_tokens(model="baton", messages=HI)
        assert few.input_tokens >= 6
        assert more.input_tokens > few.input_tokens + 2
        assert planned.input_tokens >= few.input_tokens
        with pytest.raises(anthropic.BadRequestError):
            await sdk.messages.count_tokens(model="alpha", messages=[])
        with pytest.raises(anthropic.NotFoundError):
            await sdk.messages.count_tokens(model="none", messages=HI)
    assert kit.workers.calls == []
    assert kit.metrics.records == []


async def test_an_idempotency_key_gets_the_first_message_again() -> None:
    kit = Kit(workers={"alpha": [Says("42"), Says("43")]})
    async with messages_of(kit) as (_, sdk):
        twice = [await sdk.messages.create(**ask(), extra_headers={"idempotency-key": "k1"}) for _ in range(2)]
        assert twice[0] == twice[1]
    assert len(kit.workers.calls) == 1


async def test_what_is_left_out_is_named_by_its_path() -> None:
    kit = Kit(workers={"alpha": Says("42")})
    async with messages_of(kit) as (_, sdk):
        hosted = {"type": "web_search_20250305", "name": "web_search"}
        raw = await sdk.messages.with_raw_response.create(
            **ask(tools=[hosted, SUM], extra_body={"context_management": {"edits": []}, "odd": 1})
        )
        assert raw.headers["x-baton-dropped-fields"] == "odd"
        assert raw.headers["x-baton-left-out"] == "web_search_20250305, context_management"
    assert [tool["function"]["name"] for tool in kit.workers.calls[0].body["tools"]] == ["sum"]


async def test_pings_keep_a_stream_alive() -> None:
    kit = Kit(workers={"alpha": Says("one two", delay_s=0.3)})
    async with served(kit, keepalive_s=0.05) as gateway:
        reply = await gateway.http.post("/v1/messages", json=ask(model="alpha", stream=True))
        kinds = [event["type"] for event in events(reply)]
        assert kinds[0] == "message_start"
        assert "ping" in kinds
        assert kinds[-1] == "message_stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_vendors_thinking_comes_back_to_it_with_the_tool_result(stream: bool) -> None:
    block = {"type": "thinking", "thinking": "hm", "signature": "sig"}
    message = {"role": "assistant", "content": None, "thinking_blocks": [block], "tool_calls": [CALL]}
    vendor = Vendor(message, ({"thinking_blocks": [block]}, {"tool_calls": [{"index": 0, **CALL}]}))
    kit = Kit(workers=vendor)
    think = {"thinking": {"type": "adaptive"}, "tools": [SUM], "model": "alpha"}
    async with messages_of(kit) as (_, sdk):
        if stream:
            async with sdk.messages.stream(**ask() | think) as asked:
                first: Any = await asked.get_final_message()
        else:
            first = await sdk.messages.create(**ask() | think)
        thought, call = first.content
        assert (thought.type, thought.thinking) == ("thinking", "hm")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
        turns = [*HI, first.to_param(), {"role": "user", "content": [result]}]
        raw = await sdk.messages.with_raw_response.create(**ask(turns) | think)
        assert "x-baton-dropped-fields" not in raw.headers
    sent = vendor.sent()
    assert sent[0]["thinking_blocks"] == [block]
    assert sent[0]["tool_calls"][0]["id"] == sent[1]["tool_call_id"] == CALL["id"]


async def test_a_vendors_thinking_comes_back_to_it_alone() -> None:
    block = {"type": "thinking", "thinking": "hm", "signature": "sig"}
    vendor = Vendor({"role": "assistant", "content": "yes", "thinking_blocks": [block]})
    kit = Kit(workers=vendor, pools=TWO)
    async with messages_of(kit) as (_, sdk):
        think = {"thinking": {"type": "adaptive"}}
        first = await sdk.messages.create(**ask(model="claude") | think)
        turns = [*HI, first.to_param(), {"role": "user", "content": "why?"}]
        for model, blocks in (("claude", [block]), ("gemini", None)):
            await sdk.messages.create(**ask(turns, model=model) | think)
            assert vendor.sent()[0].get("thinking_blocks") == blocks


def worker_of(kind: str, model: str, **more: Any) -> PoolFile:
    return PoolFile(
        workers=(model_worker("alpha", "atlas", kind=kind, model=model, **more),), pools={"default": ("alpha",)}
    )


@pytest.mark.parametrize(("kind", "passes"), [("litellm", True), ("openai", False)])
async def test_cache_control_reaches_the_vendors_that_know_it(kind: str, passes: bool) -> None:
    kit = Kit(workers={"alpha": [ASKS, Says("42")]}, pools=worker_of(kind, "anthropic/claude-sonnet-4-5"))
    cache = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    system = [{"type": "text", "text": "be brief", **cache}]
    async with messages_of(kit) as (_, sdk):
        first = await sdk.messages.create(**ask(system=system, tools=[{**SUM, **cache}]))
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": "2", **cache}
        turns = [*HI, first.to_param(), {"role": "user", "content": [result]}]
        raw = await sdk.messages.with_raw_response.create(**ask(turns, system=system, tools=[{**SUM, **cache}]))
        assert "x-baton-dropped-fields" not in raw.headers
    sent = kit.workers.calls[-1].body
    marked = {"type": "text", "text": "be brief", **cache}
    assert sent["messages"][0]["content"] == ([marked] if passes else "be brief")
    assert sent["messages"][-1]["content"] == "2"
    assert sent["messages"][-1].get("cache_control") == (cache["cache_control"] if passes else None)
    assert sent["tools"][0].get("cache_control") == (cache["cache_control"] if passes else None)
    assert kit.metrics.records[-1].policy_used == "sticky"


async def test_top_k_reaches_a_worker_that_takes_it() -> None:
    async with messages_of(kit := Kit()) as (_, sdk):
        raw = await sdk.messages.with_raw_response.create(**ask(extra_body={"top_k": 5}))
        assert "x-baton-dropped-fields" not in raw.headers
        assert kit.workers.calls[-1].body["top_k"] == 5


async def test_models_have_anthropics_shape_where_it_is_asked_for() -> None:
    async with messages_of(Kit()) as (gateway, sdk):
        models = [model async for model in sdk.models.list(limit=2)]
        bearer = {"authorization": f"Bearer {gateway.data_key}"}
        names = [model["id"] for model in (await gateway.http.get("/v1/models", headers=bearer)).json()["data"]]
        assert [model.id for model in models] == names
        alpha = await sdk.models.retrieve("alpha")
        assert (alpha.type, alpha.lifecycle, alpha.max_tokens) == ("model", "active", 64)
        assert [model.id for model in (await sdk.models.list(before_id=names[2], limit=1)).data] == [names[1]]
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await sdk.models.retrieve("nobody")
        assert unknown.value.body == {
            "type": "error",
            "error": {"type": "not_found_error", "message": "The model `nobody` does not exist"},
            "request_id": unknown.value.response.headers["x-request-id"],
        }
        with pytest.raises(anthropic.BadRequestError):
            await sdk.models.list(after_id="nobody")
