"""F9: a client leaves at forty points of its request: the worker's call ends within a second, what was said is billed,
and there is one row. A slow reader and a half-closed one are served."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.faults.checker import check
from tests.faults.client import QUESTION, Client
from tests.faults.proxy import closed
from tests.faults.site import Gateway, Site
from tests.sizes import SLACK, report_row

pytestmark = pytest.mark.long

CANCELLED_S = 1.0
WORD_S = 0.05
BYTES_SENT = (1, 20, 60, 100, 150, 200)  # leaves while it still sends
WAITS_S = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)  # leaves having read nothing
BYTES_READ = (1, 50, 120, 200, 300, 400, 500, 600, 700, 800, 1000, 1200, 1400, 1600)  # leaves within the stream


def request(key: str, *, stream: bool) -> bytes:
    body = json.dumps({**QUESTION, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def connect(one: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", urlsplit(one.facts["base_url"]).port)


async def leave(one: Gateway, content: bytes, *, sent: int | None = None, wait_s: float = 0, read: int = 0) -> float:
    """Send so many bytes, wait, read so many, and hang up; when that was."""
    reader, writer = await connect(one)
    writer.write(content if sent is None else content[:sent])
    await writer.drain()
    await asyncio.sleep(wait_s)
    if read:
        await reader.readexactly(read)
    writer.transport.abort()
    await closed(writer)
    return time.monotonic()


@pytest.mark.timeout(200)
async def test_f9_a_client_leaves_at_forty_points(here: Site) -> None:
    here.upstream.word_s = here.upstream.delay_s = WORD_S
    one = await here.gateway(BATON_KEEPALIVE_S="0")
    await here.new_key()
    streamed = request(here.key, stream=True)
    ways: list[tuple[bytes, dict[str, Any]]] = [(streamed, {"sent": sent}) for sent in BYTES_SENT]
    for stream in (True, False):
        content = request(here.key, stream=stream)
        ways += [(content, {"wait_s": wait_s}) for wait_s in WAITS_S]
    ways += [(request(here.key, stream=True), {"read": read}) for read in BYTES_READ]
    ways += [(request(here.key, stream=False), {"sent": sent}) for sent in BYTES_SENT]
    longest_s = 0.0
    for content, way in ways:
        await leave(one, content, **way)
        began_s = time.monotonic()
        while here.upstream.open or await here.metric(one, "baton_in_flight"):
            await asyncio.sleep(0.01)
            assert time.monotonic() - began_s < 60 * CANCELLED_S, way
        longest_s = max(longest_s, time.monotonic() - began_s)
    gone = sum(bill.ended == "gone" for bill in here.upstream.bills)
    assert gone >= len(BYTES_READ)
    assert longest_s <= (CANCELLED_S + WORD_S * 8) * SLACK
    client = Client(here)
    assert (await client.ask(stream=True)).whole
    slow = await _slowly(one, request(here.key, stream=True))
    half = await _half_closed(one, request(here.key, stream=False))
    assert slow.rstrip().endswith(b"[DONE]\n\n0") or b"[DONE]" in slow
    evidence = await check(here, [client])
    statuses = {rollout["status"] for rollout in evidence.rollouts}
    assert statuses <= {"done", "aborted"}
    assert len(evidence.rollouts) == len(evidence.of_kind("hold"))
    report_row("F9", points=len(ways), cancelled_s_max=round(longest_s, 2), calls_cut=gone, half_close=half)


async def _slowly(one: Gateway, content: bytes) -> bytes:
    """Read a reply a hundred bytes at a time."""
    reader, writer = await connect(one)
    writer.write(content)
    said = b""
    while b"[DONE]" not in said:
        said += await asyncio.wait_for(reader.read(100), 10)
        await asyncio.sleep(0.02)
    await closed(writer)
    return said


async def _half_closed(one: Gateway, content: bytes) -> str:
    """Send, close the sending side only, and see what comes."""
    reader, writer = await connect(one)
    writer.write(content)
    writer.write_eof()
    said = await asyncio.wait_for(reader.read(), 10)
    await closed(writer)
    return said.split(b"\r\n")[0].decode() or "closed"
