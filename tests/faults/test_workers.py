"""F8: a worker in fourteen bad ways, through a whole gateway: memory stays bounded, holds end, what came is billed."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.faults.checker import check
from tests.faults.client import Client
from tests.faults.proxy import FaultProxy
from tests.faults.site import Site
from tests.faults.sizes import held
from tests.faults.upstream import (
    Behaviour,
    Bill,
    Upstream,
    chunk,
    completion,
    event,
    good,
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
ANSWERED = {"no usage", "bills over the bound"}
CALLS = 6
RETRIES_TO_BEGIN_WITH, RETRIES_SHARE_MAX = 2, 0.2  # so that the first calls of a gateway may be tried again too
RSS_MIB_MAX = CALLS * 16 + 64  # each reply is read up to 16 MiB (BATON_WORKER_REPLY_BYTES_MAX)


@pytest.fixture
async def proxied(here: Site) -> AsyncIterator[tuple[Site, FaultProxy]]:
    async with FaultProxy(("127.0.0.1", here.upstream.port)) as proxy:
        here.worker_url = f"http://127.0.0.1:{proxy.port}/v1"
        here.worker_timeout_s = 1.0
        yield here, proxy


def rss_mib(pid: int) -> float:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


@pytest.mark.timeout(300)
async def test_f8_a_worker_in_fourteen_bad_ways(proxied: tuple[Site, FaultProxy]) -> None:
    here, proxy = proxied
    gateway = await here.gateway()
    await here.new_key()
    client = Client(here)
    await client.many(4, at_once=2)
    calls_before, before_mib, most_mib = len(here.upstream.bills), rss_mib(gateway.pid), 0.0
    for name, (behave, stream) in WAYS.items():
        here.upstream.behave, proxy.refuse = behave or good, behave is None
        proxy.cut()  # a connection that is kept alive would go on
        replies = await client.many(CALLS, at_once=CALLS, stream=stream)
        most_mib = max(most_mib, rss_mib(gateway.pid))
        whole = [reply for reply in replies if reply.whole]
        assert len(whole) == (CALLS if name in ANSWERED else 0), (name, client.statuses(replies))
        assert all(reply.status for reply in replies), (name, client.statuses(replies))
    here.upstream.behave, proxy.refuse = None, False
    assert all(reply.whole for reply in await client.many(4, at_once=2))
    found = await check(here, [client], bounded=False)
    calls, asked = len(here.upstream.bills) - calls_before, len(client.history)
    retries = len(found.of_kind("dispatched")) - asked
    beyond_two = round((retries - RETRIES_TO_BEGIN_WITH) / asked, 3)
    assert beyond_two <= RETRIES_SHARE_MAX
    assert most_mib - before_mib <= RSS_MIB_MAX
    grown = round(most_mib - before_mib)
    spread = {"calls": calls, "asked": asked, "retries": retries, "retries_beyond_two_per_asked": beyond_two}
    held("F8", ways=len(WAYS), **spread, rss_grown_mib=grown)
