"""How long a worker may say nothing: to its first token, and between tokens. Over real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from gateway.adapters.upstream.http import HttpWorkers
from gateway.adapters.upstream.pooled import PooledWorkers
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import UpstreamTimeout
from gateway.service.ports.request import WorkerCall
from tests.integration.test_worker_failures import a_call, chunk
from tests.upstreams.server import EVENTS, Reply, Request, Server, event
from tests.waiting import BOUND_S

FIRST_S, LONG_S = 0.2, 60.0
ROLE = chunk({"role": "assistant", "content": ""})
Pieces = Callable[[], AsyncGenerator[bytes, None]]


@asynccontextmanager
async def behind(pieces: Pieces | None, **limits: Any) -> AsyncIterator[tuple[PooledWorkers, WorkerCall]]:
    """Workers, and a call of one that answers so; None: with no head even."""

    async def answer(request: Request) -> Reply:
        if pieces is None:
            await asyncio.sleep(LONG_S)
        return Reply(headers=EVENTS, pieces=pieces() if pieces else None)

    async with Server(answer) as server:
        workers = PooledWorkers({"openai": HttpWorkers({}, b"secret")})
        call = a_call(server.port)
        spec = WorkerSpec.model_validate({**call.worker.model_dump(), **limits})
        try:
            yield workers, WorkerCall(spec, call.body, LONG_S, "rollout", "step")
        finally:
            await workers.close()


async def read(workers: PooledWorkers, call: WorkerCall, *, stream: bool) -> str:
    """The text of a reply."""
    if not stream:
        reply = await workers.complete(call)
        return str(reply.body["choices"][0]["message"]["content"])
    text = ""
    async for one in cast(AsyncGenerator[Any, None], workers.stream(call)):
        for choice in one.choices if hasattr(one, "choices") else one.get("choices") or ():
            delta = choice.delta if hasattr(choice, "delta") else choice["delta"]
            text += (delta.content if hasattr(delta, "content") else delta.get("content")) or ""
    return text


async def role_alone() -> AsyncGenerator[bytes, None]:
    yield ROLE
    await asyncio.sleep(LONG_S)


async def keep_alive() -> AsyncGenerator[bytes, None]:
    yield ROLE
    while True:
        yield b": still here\n\n"
        await asyncio.sleep(FIRST_S / 10)


async def slow_after_first() -> AsyncGenerator[bytes, None]:
    yield ROLE + chunk({"content": "one"})
    await asyncio.sleep(3 * FIRST_S)
    yield chunk({"content": " two"}) + chunk({}, "stop") + event("[DONE]")


async def thinks_first() -> AsyncGenerator[bytes, None]:
    yield ROLE + chunk({"reasoning_content": "hm"})
    await asyncio.sleep(3 * FIRST_S)
    yield chunk({"content": "two"}) + chunk({}, "stop") + event("[DONE]")


async def stops_midway() -> AsyncGenerator[bytes, None]:
    yield chunk({"content": "one"})
    await asyncio.sleep(LONG_S)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pieces", [None, role_alone, keep_alive])
async def test_a_worker_without_a_first_token_is_left_in_time(pieces: Pieces | None, stream: bool) -> None:
    async with behind(pieces, first_token_timeout_s=FIRST_S) as (workers, call):
        began_s = time.monotonic()
        with pytest.raises(UpstreamTimeout) as late:
            await read(workers, call, stream=stream)
        assert time.monotonic() - began_s < BOUND_S
        assert not late.value.hasty


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("pieces", "text"), [(slow_after_first, "one two"), (thinks_first, "two")])
async def test_after_its_first_token_a_worker_has_its_whole_time(pieces: Pieces, text: str, stream: bool) -> None:
    async with behind(pieces, first_token_timeout_s=FIRST_S) as (workers, call):
        assert await read(workers, call, stream=stream) == text


@pytest.mark.parametrize("stream", [False, True])
async def test_the_silence_between_tokens_is_the_workers_own(stream: bool) -> None:
    async with behind(stops_midway, chunk_gap_s=FIRST_S) as (workers, call):
        with pytest.raises(UpstreamTimeout):
            await read(workers, call, stream=stream)


@pytest.mark.parametrize(("first_s", "given_s", "hasty"), [(None, 0.1, True), (5.0, 0.1, True), (0.1, 0.2, False)])
async def test_a_time_out_says_whether_the_worker_had_its_own_time(
    first_s: float | None, given_s: float, hasty: bool
) -> None:
    async with behind(None, first_token_timeout_s=first_s) as (workers, call):
        short = WorkerCall(call.worker, call.body, given_s, "rollout", "step")
        with pytest.raises(UpstreamTimeout) as late:
            await workers.complete(short)
        assert late.value.hasty == hasty
