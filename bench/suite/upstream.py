"""The model behind every gateway of the suite: one process, little processor time a call.

The model's name says how it behaves: `wait-150` answers after 150 ms, `ticks-500` streams the numbers from 0 on, one
each 500 ms, `max_tokens` of them; any other name is answered at once, with `"stream": true` in CHUNKS chunks that are
written one by one without a pause.

    python -m bench.suite.upstream --port 0 --port-file FILE
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import AsyncGenerator, Awaitable
from pathlib import Path
from typing import Any

import uvloop

from tests.upstreams.server import EVENTS, Reply, Request, event, json_reply, serve

CHUNKS = 23
PROMPT_TOKENS = 20
TEXT = "There are 51000 grams in 51 kilograms. "
MODEL = re.compile(rb'"model"\s*:\s*"([^"]*)"')
STREAMED = re.compile(rb'"stream"\s*:\s*true')


def usage(tokens: int) -> dict[str, int]:
    """What a reply of so many tokens reports."""
    return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": PROMPT_TOKENS + tokens}


def chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
    """One event of a stream."""
    return event({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more})


def word(text: str) -> bytes:
    """The event of a piece of text."""
    return chunk([{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}])


def ending(tokens: int) -> bytes:
    """The last events of a stream: the reason of its end, the usage, the mark."""
    stop = chunk([{"index": 0, "delta": {}, "finish_reason": "stop"}])
    return stop + chunk([], usage=usage(tokens)) + event("[DONE]")


def on_the_wire(body: dict[str, Any]) -> Reply:
    """A whole reply whose bytes are made once for all calls."""
    reply = json_reply(body)
    return Reply(reply.head() + reply.content, raw=True)


_MESSAGE = {"index": 0, "message": {"role": "assistant", "content": TEXT * 3}, "finish_reason": "stop"}
COMPLETION = on_the_wire(
    {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [_MESSAGE], "usage": usage(24)}
)
MODELS = json_reply({"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "bench"}]})
PIECES = [*(word(TEXT[:5]) for _ in range(CHUNKS - 1)), ending(CHUNKS)]


def answer(request: Request) -> Reply | Awaitable[Reply]:
    """Answer a request by the name of its model. Whatever is no chat completion gets the list of models."""
    if not request.path.endswith("/chat/completions"):
        return MODELS
    named = MODEL.search(request.content)
    kind, _, ms = (named[1].decode() if named else "m").partition("-")
    if kind == "ticks":
        tokens_max = int(json.loads(request.content)["max_tokens"])
        return Reply(headers=EVENTS, pieces=_ticks(int(ms) / 1000, tokens_max))
    if kind == "wait":
        return _later(int(ms) / 1000, _stream() if STREAMED.search(request.content) else COMPLETION)
    return _stream() if STREAMED.search(request.content) else COMPLETION


def _stream() -> Reply:
    return Reply(headers=EVENTS, pieces=_each())


async def _later(wait_s: float, reply: Reply) -> Reply:
    await asyncio.sleep(wait_s)
    return reply


async def _each() -> AsyncGenerator[bytes, None]:
    for piece in PIECES:
        yield piece


async def _ticks(gap_s: float, tokens_max: int) -> AsyncGenerator[bytes, None]:
    for number in range(tokens_max):
        yield word(f"{number} ")
        await asyncio.sleep(gap_s)
    yield ending(tokens_max)


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--port-file", type=Path, required=True, help="written once the socket listens")
    options = parser.parse_args()
    uvloop.run(serve(answer, options.port, options.port_file))


if __name__ == "__main__":
    main()
