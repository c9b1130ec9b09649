"""Tokens of a worker that reports none: a real socket, the real adapter and a real vocabulary, down to the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.adapters.upstream.http import HttpWorkers
from gateway.adapters.upstream.tokens import Tokenizers, check
from gateway.core.money.amounts import TOKENS_PER_REQUEST
from gateway.core.openai.vendors.usage import TOKENS_PER_CHOICE, TOKENS_PER_TURN
from gateway.core.pool.workers import PoolFile
from gateway.service.ports.request import WorkerCall
from tests.integration.test_worker_failures import EVENTS, chunk, completion, replies, sends, status
from tests.kit import Kit, ask, model_worker
from tests.upstreams.server import Handler, Reply, Server
from tests.waiting import BOUND_S, until

QUESTION = "Wie viele Wörter hat der Satz „日本語もある“?"
REPLY = ["Sieben", " Wörter", ", darunter", " 日本語", "."]


COUNTED = {QUESTION: 19, "".join(REPLY): 13, "".join(REPLY[:3]): 8}  # by tiktoken


def piece(text: str) -> bytes:
    return chunk({"content": text})


@pytest.mark.parametrize(
    ("handler", "stream", "words", "error"),
    [
        (sends(EVENTS, *map(piece, REPLY[:3])), True, REPLY[:3], "upstream_protocol"),
        (sends(EVENTS, *map(piece, REPLY), chunk({}, "stop"), b"data: [DONE]\n\n"), True, REPLY, None),
        (replies(completion("".join(REPLY))), False, REPLY, None),
    ],
    ids=["cut short", "streamed without usage", "whole without usage"],
)  # fmt: skip
async def test_a_call_is_billed_by_the_tokenizer_that_its_worker_names(
    handler: Handler, stream: bool, words: list[str], error: str | None
) -> None:
    check("cl100k_base")
    tokens, workers = Tokenizers(), HttpWorkers({}, b"secret")
    async with Server(handler) as server:
        worker = model_worker("real", "atlas", url=f"{server.url}/v1", tokenizer="cl100k_base")
        kit = Kit(workers=workers, tokens=tokens, pools=PoolFile(workers=(worker,), pools={"default": ("real",)}))
        running = await kit.serve(ask(QUESTION, model="real", stream=stream))
    await workers.close()
    await tokens.close()
    assert (running.error.code if running.error else None) == error
    (step,) = running.record.steps
    assert step.attempts[-1].counted_by == "tokenizer"
    assert step.prompt_tokens == TOKENS_PER_REQUEST + TOKENS_PER_TURN + COUNTED[QUESTION]
    assert step.completion_tokens == COUNTED["".join(words)] + TOKENS_PER_CHOICE
    assert await kit.posted_nano() == step.cost_nano == step.prompt_tokens * 1000 + step.completion_tokens * 2000
    assert await kit.open_nano() == 0


@asynccontextmanager
async def open_workers() -> AsyncIterator[HttpWorkers]:
    workers = HttpWorkers({}, b"secret")
    yield workers
    await workers.close()


@pytest.mark.parametrize("ends_by", ["client", "deadline"])
async def test_a_whole_reply_that_nobody_waits_for_is_billed_for_what_came(ends_by: str) -> None:
    check("cl100k_base")
    tokens, workers = Tokenizers(), HttpWorkers({}, b"secret")

    async def pieces() -> AsyncGenerator[bytes, None]:
        for piece_of in (EVENTS, *map(piece, REPLY[:3])):
            yield piece_of
        await asyncio.Event().wait()

    async with Server(lambda request: Reply(pieces=pieces(), raw=True)) as server:
        worker = model_worker("real", "atlas", url=f"{server.url}/v1", tokenizer="cl100k_base", output_tokens_max=8192)
        kit = Kit(workers=workers, tokens=tokens, pools=PoolFile(workers=(worker,), pools={"default": ("real",)}))
        running = await kit.start(ask(QUESTION, model="real"), caps={"wall_s": BOUND_S if ends_by == "client" else 2.0})
        await until(lambda: server.requests)
        if ends_by == "client":
            await asyncio.sleep(0.5)  # until the pieces are here
            running.cancel()
        await running.finished.wait()
    await workers.close()
    await tokens.close()
    (step,) = running.record.steps
    assert step.completion_tokens == COUNTED["".join(REPLY[:3])] + TOKENS_PER_CHOICE
    assert step.attempts[-1].counted_by == "tokenizer"
    assert await kit.posted_nano() == step.cost_nano == step.prompt_tokens * 1000 + step.completion_tokens * 2000
    assert await kit.open_nano() == 0


@pytest.mark.parametrize(
    "answer",
    [
        replies(completion("whole")),
        lambda request: (
            status(400, b'{"error": {"message": "`stream` is not supported"}}', "connection: close")(request)
            if request.body.get("stream")
            else replies(completion("whole"))(request)
        ),
    ],
    ids=["ignores stream", "refuses stream"],
)
async def test_a_worker_that_does_not_stream_is_taken_at_its_word(answer: Handler) -> None:
    async with Server(answer) as server, open_workers() as workers:
        spec = model_worker("real", "atlas", url=f"{server.url}/v1")
        for _ in range(2):
            reply = await workers.complete(WorkerCall(spec, ask(), BOUND_S, "r", "s"))
            assert reply.body["choices"][0]["message"]["content"] == "whole"
        streamed = [request.body.get("stream", False) for request in server.requests]
        assert streamed in ([True, True], [True, False, False])


@pytest.mark.parametrize("more", [{"tools": [{"type": "function", "function": {"name": "f"}}]}, {}])
async def test_whole_replies_are_asked_for_where_a_stream_may_say_less(more: dict[str, Any]) -> None:
    async with Server(replies(completion("whole"))) as server, open_workers() as workers:
        cannot = () if more else ("stream",)
        spec = model_worker("real", "atlas", url=f"{server.url}/v1", cannot=cannot)
        call = WorkerCall(spec, ask(**more), BOUND_S, "r", "s")
        assert (await workers.complete(call)).body["choices"][0]["message"]["content"] == "whole"
        assert "stream" not in server.requests[0].body
        if cannot:  # a client's stream has the whole reply in its chunks
            chunks = [chunk async for chunk in workers.stream(call)]
            assert "stream" not in server.requests[1].body
            assert chunks[1]["choices"][0]["delta"]["content"] == "whole"
            assert chunks[-1]["usage"]["prompt_tokens"] > 0
