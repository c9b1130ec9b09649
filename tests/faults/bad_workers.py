"""The ways in which a worker is bad."""

from __future__ import annotations

import asyncio
import gzip
from typing import TypeAlias

from tests.faults.upstream import (
    Behaviour,
    Bill,
    Upstream,
    chunk,
    completion,
    event,
    raw,
    send,
    start_stream,
    usage,
)

MIB = 2**20
Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter


async def hang(upstream: Upstream, bill: Bill, reader: Reader, writer: Writer) -> None:
    await asyncio.sleep(60)


def status(code: int, *headers: str) -> Behaviour:
    async def behave(upstream: Upstream, bill: Bill, reader: Reader, writer: Writer) -> None:
        bill.prompt_tokens = 0  # an error is not billed
        await send(writer, code, {"error": {"message": "no", "type": "x", "param": None, "code": None}}, headers)

    return behave


async def reset_midway(upstream: Upstream, bill: Bill, reader: Reader, writer: Writer) -> None:
    await start_stream(writer)
    for word in ("one ", "two "):
        bill.completion_tokens += 1
        await event(writer, chunk({"content": word}))
    await asyncio.sleep(0.05)
    bill.ended = "broken"
    writer.transport.abort()


async def dribble(upstream: Upstream, bill: Bill, reader: Reader, writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n\r\n")
    for _ in range(60):
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(1)


async def bad_events(upstream: Upstream, bill: Bill, reader: Reader, writer: Writer) -> None:
    await start_stream(writer)
    await raw(writer, b"data: {not json\n\n")
    bill.ended = "broken"
    writer.transport.abort()


async def no_usage(upstream: Upstream, bill: Bill, reader: Reader, writer: Writer) -> None:
    bill.completion_tokens = 2
    body = completion("one two")
    del body["usage"]
    await send(writer, 200, body)


async def over_the_bound(upstream: Upstream, bill: Bill, reader: Reader, writer: Writer) -> None:
    """It bills more than `max_tokens`: charged in full, and seen."""
    bill.completion_tokens = 500
    await send(writer, 200, completion("one two", usage(bill)))


async def huge(upstream: Upstream, bill: Bill, reader: Reader, writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(100):
        await raw(writer, b"x" * MIB)


async def gzip_bomb(upstream: Upstream, bill: Bill, reader: Reader, writer: Writer) -> None:
    await send(writer, 200, gzip.compress(b" " * (200 * MIB), 1), ("content-encoding: gzip",))


async def bad_utf8(upstream: Upstream, bill: Bill, reader: Reader, writer: Writer) -> None:
    await send(writer, 200, b'{"choices": [{"message": {"content": "\xff\xfe"}}]}')


async def early_end(upstream: Upstream, bill: Bill, reader: Reader, writer: Writer) -> None:
    writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{"choices": [')
    await writer.drain()
    bill.ended = "broken"
    writer.close()


WAYS: dict[str, tuple[Behaviour | None, bool]] = {  # how it behaves (None: it refuses connections), streamed
    "refuses connections": (None, False),
    "hangs": (hang, False),
    "429": (status(429, "retry-after: 0"), False),
    "500": (status(500), False),
    "reset in the stream": (reset_midway, True),
    "a byte a second": (dribble, False),
    "bad events": (bad_events, True),
    "no usage": (no_usage, False),
    "bills over the bound": (over_the_bound, False),
    "100 MiB": (huge, False),
    "gzip bomb": (gzip_bomb, False),
    "redirect to link-local": (status(302, "location: http://169.254.169.254/latest"), False),
    "bad UTF-8": (bad_utf8, False),
    "early end": (early_end, False),
}
