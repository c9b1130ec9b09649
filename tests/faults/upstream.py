"""A worker that keeps its own bill: what it charges is decided here, and never read from anything of Baton's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.faults.proxy import closed

PROMPT_TOKENS, REPLY_WORDS = 12, ("one", "two", "three", "four", "five", "six")
CANARY = "sk-canary-4f1d0c2b9a8e7d6c5b4a3f2e1d0c9b8a"  # the provider's key, to be found nowhere


@dataclass(slots=True)
class Bill:
    """One call as its provider bills it. `tokens` are those it has produced when the call ended, however it ended."""

    prompt_tokens: int
    body: dict[str, Any]
    completion_tokens: int = 0
    ended: str = "open"  # done | gone (the caller hung up) | broken (by us)
    began_s: float = 0.0
    ended_s: float = 0.0

    def nano(self, input_nano: int, output_nano: int) -> int:
        """By prices in nano-dollars a token."""
        return self.prompt_tokens * input_nano + self.completion_tokens * output_nano


Behaviour = Callable[["Upstream", Bill, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(slots=True)
class Upstream:
    """Serves OpenAI chat completions on loopback, whatever the path. `behave` answers; the default is a good worker."""

    delay_s: float = 0.0
    word_s: float = 0.0
    behave: Behaviour | None = None
    bills: list[Bill] = field(default_factory=list)
    in_flight: int = 0
    port: int = 0
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def __aenter__(self) -> Upstream:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0.01)  # transports close their sockets in the loop's next turns

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def total_nano(self, input_nano: int, output_nano: int) -> int:
        """The whole bill."""
        return sum(bill.nano(input_nano, output_nano) for bill in self.bills)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._one(reader, writer):
                    pass
        finally:
            self._writers.discard(writer)
            await closed(writer)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        if b"content-length" not in headers:  # somebody asks whether it is there
            await send(writer, 200, {"object": "list", "data": []})
            return True
        body = json.loads(await reader.readexactly(int(headers[b"content-length"])))
        now = asyncio.get_running_loop().time
        bill = Bill(PROMPT_TOKENS, body, began_s=now())
        self.bills.append(bill)
        self.in_flight += 1
        answering = asyncio.ensure_future((self.behave or good)(self, bill, reader, writer))
        hanging_up = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({answering, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
                bill.ended = bill.ended if bill.ended != "open" else "done"
                return bill.ended == "done" and not hanging_up.done()
            bill.ended = "gone"
            return False
        except ConnectionError:
            bill.ended = "gone"
            return False
        finally:
            bill.ended_s = now()
            self.in_flight -= 1
            for task in (answering, hanging_up):
                task.cancel()
            await asyncio.gather(answering, hanging_up, return_exceptions=True)


async def good(upstream: Upstream, bill: Bill, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers as a good worker does, whole or streamed, with its usage."""
    await asyncio.sleep(upstream.delay_s)
    words = REPLY_WORDS[: bill.body.get("max_tokens", bill.body.get("max_completion_tokens", len(REPLY_WORDS)))]
    if bill.body.get("stream"):
        await start_stream(writer)
        for word in words:
            bill.completion_tokens += 1
            await event(writer, chunk({"content": f"{word} "}))
            await asyncio.sleep(upstream.word_s)
        await event(writer, chunk({}, "stop"))
        await event(writer, {**chunk({}), "choices": [], "usage": usage(bill)})
        await event(writer, None)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return
    bill.completion_tokens = len(words)
    await send(writer, 200, completion(" ".join(words), usage(bill)))


def usage(bill: Bill) -> dict[str, int]:
    return {"prompt_tokens": bill.prompt_tokens, "completion_tokens": bill.completion_tokens}


def completion(text: str, used: dict[str, int] | None = None) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": []}
    return {**body, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": used}


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


async def send(
    writer: asyncio.StreamWriter, status: int, body: dict[str, Any] | bytes, headers: tuple[str, ...] = ()
) -> None:
    """A whole reply."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = [] if any(name.startswith("content-type") for name in headers) else ["content-type: application/json"]
    lines = (f"HTTP/1.1 {status} X", *kind, *headers, f"content-length: {len(content)}", "", "")
    writer.write("\r\n".join(lines).encode() + content)
    await writer.drain()


async def start_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    await writer.drain()


async def event(writer: asyncio.StreamWriter, body: dict[str, Any] | None) -> None:
    """One event of a stream; None: the [DONE]."""
    await raw(writer, b"data: " + (b"[DONE]" if body is None else json.dumps(body).encode()) + b"\n\n")


async def raw(writer: asyncio.StreamWriter, data: bytes) -> None:
    """One piece of a chunked reply."""
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    await writer.drain()
