"""Tool workers, and the pool that picks an adapter by kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, cast

import pytest

from gateway.adapters.upstream.pooled import PooledWorkers, ToolWorkers, pooled_workers, task_text
from gateway.core.loop.depth import verify
from gateway.core.money.amounts import Usage
from gateway.core.pool.workers import PoolFile, WorkerSpec
from gateway.errors import UpstreamError, UpstreamProtocol, UpstreamRateLimited, UpstreamRefused, UpstreamTimeout
from gateway.service.ports.request import WorkerCall
from tests.fakes.workers import FakeWorkers, Says
from tests.upstreams.server import Request, Server, json_reply
from tests.waiting import BOUND_S, at_some_pace, until

KEY = "tool-key-123456"
SAW = [("atlas", "solve", "It is 4.\nAnswer: 4"), ("quill", "solve", "Answer: 5"), ("ember", "solve", "So\nAnswer: 4")]


def a_tool(url: str, **more: Any) -> WorkerSpec:
    fields = {"name": "w", "handle": "anvil", "kind": "tool", "url": url, "price": {"call_usd": "0.001"}}
    return WorkerSpec.model_validate(fields | more)


def a_call(spec: WorkerSpec, saw: list[tuple[str, str, str]] | None = None, timeout_s: float = 5.0) -> WorkerCall:
    body = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "do it"}]}
    return WorkerCall(spec, body, timeout_s, "rollout", "0.1", 2, SAW if saw is None else saw)


@asynccontextmanager
async def a_server(answer: Mapping[str, Any] | None, status: int = 200) -> AsyncIterator[tuple[str, Sequence[Request]]]:
    async with Server(lambda request: json_reply(answer, status)) as server:
        yield f"{server.url}/run", server.requests


@pytest.fixture
async def tools() -> AsyncIterator[ToolWorkers]:
    tools = ToolWorkers({"w": KEY}, b"secret")
    yield tools
    await tools.close()


async def test_vote_gives_the_whole_winning_reply(tools: ToolWorkers) -> None:
    reply = await tools.complete(a_call(a_tool("builtin:vote")))
    assert reply.body["choices"][0]["message"]["content"] == "It is 4.\nAnswer: 4"
    assert reply.body["choices"][0]["finish_reason"] == "stop"
    assert reply.usage == Usage()


async def test_vote_breaks_a_tie_for_the_earliest(tools: ToolWorkers) -> None:
    reply = await tools.complete(a_call(a_tool("builtin:vote"), SAW[:2]))
    assert reply.body["choices"][0]["message"]["content"] == SAW[0][2]


async def test_vote_over_nothing_is_refused(tools: ToolWorkers) -> None:
    with pytest.raises(UpstreamRefused, match="sees no replies"):
        await tools.complete(a_call(a_tool("builtin:vote"), []))


async def test_a_tool_streams_its_reply_as_one_chunk(tools: ToolWorkers) -> None:
    chunks = [chunk async for chunk in tools.stream(a_call(a_tool("builtin:vote")))]
    assert [choice["delta"]["content"] for chunk in chunks for choice in chunk["choices"]] == [SAW[0][2]]
    assert chunks[0]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 0


async def test_an_http_tool_gets_the_task_and_what_its_step_sees(tools: ToolWorkers) -> None:
    async with a_server({"content": "42", "usage": {"prompt_tokens": 3, "completion_tokens": 1}}) as (url, requests):
        reply = await tools.complete(a_call(a_tool(url, params={"lang": "py"})))
    assert reply.body["choices"][0]["message"]["content"] == "42"
    assert reply.usage == Usage(3, 1)
    [request] = requests
    headers, body = request.headers, request.body
    assert body["task"] == "do it"
    assert body["lang"] == "py"
    assert body["seen"] == [{"handle": h, "task": t, "reply": r} for h, t, r in SAW]
    assert headers["authorization"] == f"Bearer {KEY}"
    assert verify(headers["x-baton-depth"], b"secret") == 2


@pytest.mark.parametrize("answer", [{"content": 5}, {}, None, [1], {"content": None}])
async def test_an_answer_without_text_is_a_protocol_error(tools: ToolWorkers, answer: Any) -> None:
    async with a_server(answer) as (url, _):
        with pytest.raises(UpstreamProtocol):
            await tools.complete(a_call(a_tool(url)))


@pytest.mark.parametrize(("status", "retryable"), [(400, False), (401, False), (429, True), (503, True)])
async def test_a_tools_statuses_map_as_a_models_do(tools: ToolWorkers, status: int, retryable: bool) -> None:
    async with a_server({"error": {"message": f"no {KEY}"}}, status) as (url, _):
        with pytest.raises(UpstreamError) as caught:
            await tools.complete(a_call(a_tool(url)))
    assert caught.value.upstream_status == status
    assert caught.value.retryable is retryable
    assert KEY not in caught.value.message


async def test_an_answer_over_the_bound_is_refused() -> None:
    tools = ToolWorkers({}, b"secret", reply_bytes_max=100)
    async with a_server({"content": "x" * 200}) as (url, _):
        with pytest.raises(UpstreamProtocol, match="larger than"):
            await tools.complete(a_call(a_tool(url)))
    await tools.close()


def test_the_task_is_the_last_user_message() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}, {"type": "text", "text": "b"}]
    assert task_text({"messages": [{"role": "user", "content": "old"}, {"role": "user", "content": parts}]}) == "a\nb"
    assert task_text({"messages": [{"role": "assistant", "content": "x"}]}) == ""
    assert task_text({}) == ""


class Closing(FakeWorkers):
    """The fake, with something to close."""

    closed = False

    async def close(self) -> None:
        self.closed = True


def a_model(concurrency: int) -> WorkerSpec:
    fields = {"name": "w", "handle": "atlas", "kind": "openai", "model": "m", "url": "http://w/v1"}
    return WorkerSpec.model_validate(fields | {"concurrency_max": concurrency})


async def test_a_worker_never_runs_more_calls_than_it_may() -> None:
    fake = Closing({"w": Says("fine", delay_s=0.02)})
    pool = PooledWorkers({"openai": fake})
    call = a_call(a_model(3))
    await asyncio.gather(*(pool.complete(call) for _ in range(10)))
    assert fake.in_flight_peak == 3
    await pool.close()
    assert fake.closed


async def test_waiting_for_a_place_counts_into_the_call() -> None:
    async def story(pace: int) -> None:
        fake = Closing({"w": Says("fine", delay_s=0.3 * pace)})
        pool = PooledWorkers({"openai": fake})
        first = asyncio.create_task(pool.complete(a_call(a_model(1))))
        await asyncio.sleep(0)
        with pytest.raises(UpstreamTimeout, match="no free place") as caught:
            await pool.complete(a_call(a_model(1), timeout_s=0.05 * pace))
        assert not caught.value.dispatched
        second = asyncio.create_task(pool.complete(a_call(a_model(1), timeout_s=60.0)))
        await asyncio.gather(first, second)
        assert fake.calls[-1].timeout_s < 60.0 - 0.05 * pace

    await at_some_pace(story)


async def test_the_queue_for_a_worker_is_bounded() -> None:
    fake = Closing({"w": Says("fine", delay_s=5)})
    pool = PooledWorkers({"openai": fake})
    tasks = [asyncio.create_task(pool.complete(a_call(a_model(1)))) for _ in range(17)]
    await until(lambda: fake.in_flight)
    with pytest.raises(UpstreamRateLimited, match="too many"):
        await pool.complete(a_call(a_model(1)))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_leaving_a_stream_frees_its_place() -> None:
    fake = Closing({"w": Says("one two three")})
    pool = PooledWorkers({"openai": fake})
    async with aclosing(cast(Any, pool.stream(a_call(a_model(1))))) as chunks:
        await anext(chunks)
    assert fake.cancelled == ["w"]
    await pool.complete(a_call(a_model(1), timeout_s=BOUND_S))


async def test_self_is_no_worker_call() -> None:
    spec = WorkerSpec.model_validate({"name": "again", "handle": "echo", "kind": "self"})
    pool = PooledWorkers({})
    with pytest.raises(UpstreamError, match="kind self") as caught:
        await pool.complete(a_call(spec))
    assert not caught.value.dispatched


async def test_a_pool_is_wired_from_its_file() -> None:
    pool = PoolFile.model_validate({"workers": [a_tool("builtin:vote")], "pools": {"default": ["w"]}})
    workers = pooled_workers(pool, {}, b"secret")
    reply = await workers.complete(a_call(pool.worker("w")))
    assert reply.body["choices"][0]["message"]["content"] == SAW[0][2]
    await workers.close()
