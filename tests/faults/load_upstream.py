"""A worker for load: its own process, little processor time a call, and its own bill.

    python -m tests.faults.load_upstream [--plan JSON]   →   first line of standard output: its port

The model's name says how it behaves: `m` answers at once, `wait-150` after 150 ms, `plan-100` replies the plan it was
started with after 100 ms, `ticks-500` streams the numbers from 0 on, one each 500 ms, `max_tokens` of them. Anthropic's
`/v1/messages` is answered at once. `GET /bill` gives what it would charge for, `[model, completion tokens, calls]`
a row; it counts a call's tokens as it sends them, as `tests/faults/upstream.py` does.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable

import uvloop

from tests.faults.upstream import PROMPT_TOKENS, REPLY_WORDS, chunk, completion
from tests.upstreams.server import EVENTS, Reply, Request, Server, event, json_reply

USAGE = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": len(REPLY_WORDS)}
ANTHROPIC = {
    **{"id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "stop_reason": "end_turn"},
    "stop_sequence": None,
    "content": [{"type": "text", "text": " ".join(REPLY_WORDS)}],
    "usage": {"input_tokens": PROMPT_TOKENS, "output_tokens": len(REPLY_WORDS)},
}


def on_the_wire(reply: Reply) -> Reply:
    """The same reply, its head made once for all calls."""
    return Reply(reply.head() + reply.content, raw=True)


def ending(tokens: int) -> bytes:
    """The last events of a stream of so many tokens."""
    used = {**chunk({}), "choices": [], "usage": {**USAGE, "completion_tokens": tokens}}
    return event(chunk({}, "stop")) + event(used) + event("[DONE]")


REPLY, MESSAGE = (on_the_wire(json_reply(body)) for body in (completion(" ".join(REPLY_WORDS), USAGE), ANTHROPIC))
MODELS = json_reply({"object": "list", "data": []})


class Worker:
    """Answers calls and counts what it would charge for. `plan`: the text that planning calls get."""

    def __init__(self, plan: str) -> None:
        self.rows: Counter[tuple[str, int]] = Counter()
        planned = event(chunk({"content": plan})) + ending(1)
        self.planned = on_the_wire(Reply(planned, headers=EVENTS))

    def answer(self, request: Request) -> Reply | Awaitable[Reply]:
        if not request.content:
            rows = [[model, tokens, calls] for (model, tokens), calls in self.rows.items()]
            return json_reply({"rows": rows}) if request.path == "/bill" else MODELS
        body = request.body
        model = str(body["model"])
        kind, _, wait_ms = model.partition("-")
        if request.path.endswith("/messages"):
            return self._charge("m", MESSAGE)
        if kind == "ticks":
            return Reply(headers=EVENTS, pieces=self._ticks(model, int(wait_ms) / 1000, int(body["max_tokens"])))
        if wait_ms:
            return self._later(model, int(wait_ms) / 1000, self.planned if kind == "plan" else REPLY)
        return self._charge(model, REPLY)

    def _charge(self, model: str, reply: Reply) -> Reply:
        self.rows[model, len(REPLY_WORDS)] += 1
        return reply

    async def _later(self, model: str, wait_s: float, reply: Reply) -> Reply:
        await asyncio.sleep(wait_s)
        return self._charge(model, reply)

    async def _ticks(self, model: str, wait_s: float, tokens_max: int) -> AsyncGenerator[bytes, None]:
        tokens = 0
        try:
            for tokens in range(1, tokens_max + 1):
                yield event(chunk({"content": f"{tokens - 1} "}))
                await asyncio.sleep(wait_s)
        finally:
            self.rows[model, tokens] += 1  # a caller that hangs up pays what it got
        yield ending(tokens)


async def serve(plan: str) -> None:
    """Serve until the process is killed."""
    async with Server(Worker(plan).answer) as server:
        print(server.port, flush=True)  # noqa: T201 - its caller reads it
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="")
    uvloop.run(serve(parser.parse_args().plan))
