"""One suite for everything that implements `ports.Workers`: the fake, and the adapters on three vendors' wires."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol, cast

import pytest

from gateway.adapters.upstream.http import HttpWorkers
from gateway.core.money.amounts import Usage
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import (
    UpstreamError,
    UpstreamProtocol,
    UpstreamRateLimited,
    UpstreamRefused,
    UpstreamTimeout,
)
from gateway.service.ports.request import WorkerCall, Workers
from tests.fakes.workers import FakeWorkers, Says
from tests.upstreams.anthropic import Anthropic
from tests.upstreams.gemini import Gemini
from tests.upstreams.openai import OpenAI
from tests.upstreams.responses import OpenAIResponses
from tests.upstreams.vendor import Script, ToolCall, Vendor
from tests.waiting import BOUND_S, until

KEY = "sk-test-0123456789abcdef"
PRICE = {"input_usd_per_mtok": "1", "output_usd_per_mtok": "5"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


class Stage(Protocol):
    """An implementation with something behind it that follows a script."""

    workers: Workers
    call: WorkerCall

    def plays(self, script: Script) -> None:
        """From now on the worker behaves like this."""

    def calls(self) -> int:
        """How many calls have come to the worker."""

    async def saw_leaving(self) -> None:
        """Return once the worker has noticed that the caller left."""


class FakeStage:
    """The scripted fake."""

    def __init__(self) -> None:
        self._fake = FakeWorkers()
        self.workers: Workers = self._fake
        self.call = a_call(a_spec("openai", "m", "http://fake/v1"))

    def plays(self, script: Script) -> None:
        tool_calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": '{"a": 1}'}}
            for call in script.tool_calls
        ]
        says: Says | Exception = Says(
            script.text or None,
            tool_calls,
            script.reason,
            Usage(script.prompt_tokens, script.completion_tokens),
            script.hang_s,
            script.gap_s,
            script.cut_after if script.cut_after is not None else script.ends_early,
        )
        errors: dict[int, Exception] = {
            400: UpstreamRefused(script.message, upstream_status=400),
            401: UpstreamError("the worker refused Baton's key (401)", upstream_status=401),
            429: UpstreamRateLimited(script.message, upstream_status=429, retry_after_s=3.0),
            500: UpstreamError(script.message, upstream_status=500, retryable=True),
        }
        if script.hang_s > self.call.timeout_s:
            says = UpstreamTimeout("the worker did not answer in time")
        self._fake = FakeWorkers({"w": errors.get(script.status, says)})
        self.workers = self._fake

    def calls(self) -> int:
        return len(self._fake.calls)

    async def saw_leaving(self) -> None:
        assert self._fake.cancelled == ["w"]


class ServerStage:
    """A real adapter against a vendor's server."""

    def __init__(self, workers: Workers, upstream: Vendor, call: WorkerCall) -> None:
        self.workers = workers
        self.call = call
        self._upstream = upstream

    def plays(self, script: Script) -> None:
        self._upstream.script = script

    def calls(self) -> int:
        return len(self._upstream.requests)

    async def saw_leaving(self) -> None:
        await asyncio.wait_for(self._upstream.left.wait(), BOUND_S)


def a_spec(kind: str, model: str, url: str) -> WorkerSpec:
    spec = {"name": "w", "handle": "atlas", "kind": kind, "model": model, "url": url, "price": PRICE}
    return WorkerSpec.model_validate(spec)


def a_call(spec: WorkerSpec) -> WorkerCall:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say something."}]
    return WorkerCall(spec, {"messages": messages, "max_tokens": 64}, BOUND_S, "rollout", "step")


@asynccontextmanager
async def a_stage(name: str) -> AsyncIterator[Stage]:
    if name == "fake":
        yield FakeStage()
        return
    if name == "openai":
        async with OpenAI(KEY) as upstream:
            http = HttpWorkers({"w": KEY}, b"depth secret")
            yield ServerStage(http, upstream, a_call(a_spec("openai", "m", f"{upstream.url}/v1")))
            await http.close()
        return
    if name == "responses":
        async with OpenAIResponses(KEY) as upstream:
            http = HttpWorkers({"w": KEY}, b"depth secret")
            spec = a_spec("openai", "m", f"{upstream.url}/v1").model_copy(update={"api": "responses"})
            yield ServerStage(http, upstream, a_call(spec))
            await http.close()
        return
    if name == "anthropic":
        async with Anthropic(KEY) as upstream:
            http = HttpWorkers({"w": KEY}, b"depth secret")
            yield ServerStage(http, upstream, a_call(a_spec("litellm", "anthropic/claude-haiku-4-5", upstream.url)))
            await http.close()
        return
    from gateway.adapters.upstream.litellm import LiteLLMWorkers

    async with Gemini(KEY) as upstream:
        litellm = LiteLLMWorkers({"w": KEY})
        spec = a_spec("litellm", "gemini/gemini-2.5-flash", f"{upstream.url}/v1beta")
        yield ServerStage(litellm, upstream, a_call(spec))
        await litellm.close()


@pytest.fixture(
    params=[
        "fake",
        "openai",
        "responses",
        "anthropic",
        pytest.param("gemini", marks=pytest.mark.litellm),
    ]
)
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    if request.node.get_closest_marker("litellm"):
        pytest.importorskip("litellm", reason="needs the litellm extra")
    async with a_stage(request.param) as stage:
        yield stage


async def streamed(stage: Stage, call: WorkerCall | None = None) -> list[Mapping[str, Any]]:
    return [chunk async for chunk in stage.workers.stream(call or stage.call)]


def deltas(chunks: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


async def test_a_whole_reply(stage: Stage) -> None:
    stage.plays(Script(text="hello there friend", prompt_tokens=21, completion_tokens=9))
    reply = await stage.workers.complete(stage.call)
    choice = reply.body["choices"][0]
    assert choice["message"]["content"] == "hello there friend"
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "stop"
    assert reply.body["object"] == "chat.completion"
    assert reply.usage == Usage(21, 9)


async def test_a_streamed_reply(stage: Stage) -> None:
    stage.plays(Script(text="hello there friend", prompt_tokens=21, completion_tokens=9))
    chunks = await streamed(stage)
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert sum(1 for delta in deltas(chunks) if delta.get("content")) == 3, "it is streamed, not sent at once"
    assert "".join(delta.get("content") or "" for delta in deltas(chunks)) == "hello there friend"
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert reasons == ["stop"]


async def test_usage_comes_last_and_once(stage: Stage) -> None:
    stage.plays(Script(text="hello", prompt_tokens=21, completion_tokens=9))
    chunks = await streamed(stage)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == 21
    assert chunks[-1]["usage"]["completion_tokens"] == 9
    assert "estimated" not in chunks[-1]["usage"]
    assert not any(chunk.get("usage") for chunk in chunks[:-1])


async def test_tool_calls_whole_and_streamed(stage: Stage) -> None:
    stage.plays(Script(tool_calls=[ToolCall("call_1", "add", {"a": 1})], reason="tool_calls"))
    call = replace(stage.call, body={**stage.call.body, "tools": [TOOL]})
    reply = await stage.workers.complete(call)
    [tool_call] = reply.body["choices"][0]["message"]["tool_calls"]
    assert tool_call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert reply.body["choices"][0]["finish_reason"] == "tool_calls"
    pieces = [piece for delta in deltas(await streamed(stage, call)) for piece in delta.get("tool_calls") or ()]
    assert "".join(piece["function"].get("name") or "" for piece in pieces) == "add"
    assert "".join(piece["function"].get("arguments") or "" for piece in pieces) == '{"a": 1}'
    assert {piece["index"] for piece in pieces} == {0}


async def test_a_reply_cut_by_its_token_bound_says_so(stage: Stage) -> None:
    stage.plays(Script(text="hello", reason="length"))
    reply = await stage.workers.complete(stage.call)
    assert reply.body["choices"][0]["finish_reason"] == "length"
    chunks = await streamed(stage)
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]][-1] == "length"


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        (400, UpstreamRefused, False),
        (401, UpstreamError, False),
        (429, UpstreamRateLimited, True),
        (500, UpstreamError, True),
    ],
)
@pytest.mark.parametrize("how", ["complete", "stream"])
async def test_a_status_has_its_error(
    stage: Stage, how: str, status: int, kind: type[UpstreamError], retryable: bool
) -> None:
    stage.plays(Script(status=status, message="the vendor says no", headers={"retry-after": "3"}))
    with pytest.raises(kind) as caught:
        await (stage.workers.complete(stage.call) if how == "complete" else streamed(stage))
    assert caught.value.retryable is retryable
    assert caught.value.upstream_status == status
    assert ("the vendor says no" in caught.value.message) is (status != 401)
    assert "litellm" not in caught.value.message.lower()
    assert KEY not in caught.value.message
    if status == 429:
        assert caught.value.retry_after_s == pytest.approx(3.0)


@pytest.mark.parametrize("how", ["complete", "stream"])
async def test_a_worker_that_hangs_is_left_in_time(stage: Stage, how: str) -> None:
    stage.call = replace(stage.call, timeout_s=0.3)
    stage.plays(Script(text="late", hang_s=2 * BOUND_S))
    with pytest.raises(UpstreamTimeout):
        async with asyncio.timeout(BOUND_S):
            await (stage.workers.complete(stage.call) if how == "complete" else streamed(stage))


@pytest.mark.parametrize("end", [{"cut_after": 2}, {"ends_early": 2}])
async def test_a_stream_that_dies_is_never_taken_for_whole(stage: Stage, end: dict[str, int]) -> None:
    stage.plays(Script(text="one two three four five six", gap_s=0.01, **cast(dict[str, Any], end)))
    with pytest.raises(UpstreamProtocol):
        await streamed(stage)


async def test_cancelling_a_call_closes_its_connection(stage: Stage) -> None:
    stage.plays(Script(text="late", hang_s=BOUND_S / 2))
    task = asyncio.create_task(cast(Any, stage.workers.complete(stage.call)))
    await until(stage.calls)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await stage.saw_leaving()


async def test_closing_a_stream_closes_its_connection(stage: Stage) -> None:
    stage.plays(Script(text="one two three four five six", gap_s=0.2))
    async with aclosing(cast(Any, stage.workers.stream(stage.call))) as chunks:
        await anext(chunks)
    await stage.saw_leaving()


async def test_cancelling_a_stream_closes_its_connection(stage: Stage) -> None:
    stage.plays(Script(text="one two three four five six", gap_s=BOUND_S / 8))
    read: list[Mapping[str, Any]] = []

    async def reading() -> None:
        async for chunk in stage.workers.stream(stage.call):
            read.append(chunk)

    task = asyncio.create_task(reading())
    await until(lambda: read)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await stage.saw_leaving()


async def test_calls_run_side_by_side(stage: Stage) -> None:
    stage.plays(Script(text="hello", hang_s=BOUND_S / 2))
    tasks = [asyncio.create_task(cast(Any, stage.workers.complete(stage.call))) for _ in range(8)]
    await until(lambda: stage.calls() == 8)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
