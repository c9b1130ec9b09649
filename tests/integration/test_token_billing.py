"""Tokens of a worker that reports none: a real socket, the real adapter and a real vocabulary, down to the ledger."""

from __future__ import annotations

import pytest

from gateway.adapters.upstream.http import HttpWorkers
from gateway.adapters.upstream.tokens import Tokenizers, check
from gateway.core.money.amounts import TOKENS_PER_REQUEST
from gateway.core.openai.usage import TOKENS_PER_CHOICE, TOKENS_PER_TURN
from gateway.core.pool.workers import PoolFile
from tests.integration.test_worker_failures import EVENTS, chunk, completion, replies, sends
from tests.kit import Kit, ask, model_worker
from tests.upstreams.server import Handler, Server

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
