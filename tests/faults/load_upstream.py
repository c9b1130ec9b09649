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
import json
from collections import Counter
from typing import Any, cast

import uvloop

from tests.faults.upstream import PROMPT_TOKENS, REPLY_WORDS, chunk, completion

HEAD = "HTTP/1.1 200 OK\r\ncontent-type: {}\r\n{}\r\n"
JSON_TYPE, EVENTS_TYPE = "application/json", "text/event-stream"
USAGE = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": len(REPLY_WORDS)}
ANTHROPIC = {
    **{"id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "stop_reason": "end_turn"},
    "stop_sequence": None,
    "content": [{"type": "text", "text": " ".join(REPLY_WORDS)}],
    "usage": {"input_tokens": PROMPT_TOKENS, "output_tokens": len(REPLY_WORDS)},
}


def whole(body: dict[str, Any]) -> bytes:
    """A reply in one piece, made once."""
    content = json.dumps(body).encode()
    return HEAD.format(JSON_TYPE, f"content-length: {len(content)}\r\n").encode() + content


def piece(data: bytes) -> bytes:
    """One piece of a chunked reply."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(body: dict[str, Any] | None) -> bytes:
    """One event of a stream; None: its end."""
    said = b"[DONE]" if body is None else json.dumps(body).encode()
    return piece(b"data: " + said + b"\n\n")


REPLY, MESSAGE = whole(completion(" ".join(REPLY_WORDS), USAGE)), whole(ANTHROPIC)
NOBODY = whole({"object": "list", "data": []})
STREAM = HEAD.format(EVENTS_TYPE, "transfer-encoding: chunked\r\n").encode()


def ending(tokens: int) -> bytes:
    """The last events of a stream that said so many tokens."""
    used = {**chunk({}), "choices": [], "usage": {**USAGE, "completion_tokens": tokens}}
    return event(chunk({}, "stop")) + event(used) + event(None) + b"0\r\n\r\n"


class Bills:
    """What it would charge for, and the plan it replies."""

    def __init__(self, plan: str) -> None:
        self.rows: Counter[tuple[str, int]] = Counter()
        self.planned = STREAM + event(chunk({"content": plan})) + ending(1)

    def charge(self, model: str, tokens: int) -> None:
        self.rows[model, tokens] += 1

    def shown(self) -> bytes:
        return whole({"rows": [[model, tokens, calls] for (model, tokens), calls in self.rows.items()]})


class Connection(asyncio.Protocol):
    """One caller. It sends one request at a time, as every HTTP client does."""

    def __init__(self, bills: Bills) -> None:
        self._bills = bills
        self._data = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticks: tuple[str, int] | None = None  # of an open stream: the model, and the tokens said

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._ticks is not None:
            self._bills.charge(*self._ticks)  # the caller hung up

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._data) < end + 4 + length:
                return
            body, self._data = self._data[end + 4 : end + 4 + length], self._data[end + 4 + length :]
            self._answer(head.split(b" ", 2)[1], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        if not body:
            self._say(self._bills.shown() if path == b"/bill" else NOBODY)
            return
        asked = json.loads(body)
        model = str(asked["model"])
        kind, _, wait_ms = model.partition("-")
        if path.endswith(b"/messages"):
            self._reply("m", MESSAGE)
        elif kind == "ticks":
            self._say(STREAM)
            self._tick(model, int(wait_ms) / 1000, 0, int(asked["max_tokens"]))
        elif wait_ms:
            content = self._bills.planned if kind == "plan" else REPLY
            self._timer = asyncio.get_running_loop().call_later(int(wait_ms) / 1000, self._reply, model, content)
        else:
            self._reply(model, REPLY)

    def _reply(self, model: str, content: bytes) -> None:
        self._bills.charge(model, len(REPLY_WORDS))
        self._say(content)

    def _tick(self, model: str, wait_s: float, said: int, tokens_max: int) -> None:
        if said == tokens_max:
            self._ticks = None
            self._bills.charge(model, said)
            self._say(ending(said))
            return
        self._say(event(chunk({"content": f"{said} "})))
        self._ticks = (model, said + 1)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(wait_s, self._tick, model, wait_s, said + 1, tokens_max)

    def _say(self, content: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(content)


async def serve(plan: str) -> None:
    """Until the process is ended."""
    bills = Bills(plan)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(bills), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201 - its caller reads it
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="")
    uvloop.run(serve(parser.parse_args().plan))
