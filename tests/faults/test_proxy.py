"""The proxy does to bytes what its toxics say, and nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from tests.faults.proxy import FaultProxy, Toxics, closed, reset
from tests.waiting import BOUND_S


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Everything comes back; the end too."""
    while piece := await reader.read(1000):
        writer.write(piece)
        await writer.drain()
    await closed(writer)


@pytest.fixture
async def proxy() -> AsyncIterator[FaultProxy]:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with FaultProxy(server.sockets[0].getsockname()[:2]) as through:
        yield through
    server.close()
    await asyncio.sleep(0.01)


async def read(proxy: FaultProxy, content: bytes, *, limit_s: float = BOUND_S) -> tuple[bytes, str]:
    """Send `content`; return the reply and its end: whole, reset or silent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    data = b""
    try:
        async with asyncio.timeout(limit_s):
            writer.write(content)
            writer.write_eof()
            while piece := await reader.read(1000):
                data += piece
        return data, "whole"
    except TimeoutError:
        return data, "silent"
    except ConnectionError:
        return data, "reset"
    finally:
        writer.transport.abort()
        await closed(writer)


async def test_without_toxics_it_is_not_there(proxy: FaultProxy) -> None:
    assert await read(proxy, b"x" * 5_000) == (b"x" * 5_000, "whole")


async def test_latency_and_bandwidth_take_their_time(proxy: FaultProxy) -> None:
    for toxics in (Toxics(latency_s=0.2), Toxics(latency_s=0.1, jitter_s=0.1), Toxics(bytes_per_s=500, slice_bytes=20)):
        proxy.up = toxics
        began_s = time.monotonic()
        assert await read(proxy, b"x" * 100) == (b"x" * 100, "whole")
        assert time.monotonic() - began_s > 0.09


async def test_slices_arrive_whole_in_the_end(proxy: FaultProxy) -> None:
    proxy.set(slice_bytes=7)
    assert await read(proxy, bytes(range(256))) == (bytes(range(256)), "whole")


async def test_a_reset_comes_after_so_many_bytes_or_on_a_word(proxy: FaultProxy) -> None:
    proxy.down = Toxics(reset_after=10)
    data, how = await read(proxy, b"x" * 100)
    assert how == "reset"
    assert len(data) <= 10
    proxy.heal()
    proxy.up = Toxics(reset_on=b"COMMIT")
    assert await read(proxy, b"begin; COMMIT") == (b"", "reset")
    assert await read(proxy, b"begin") == (b"begin", "whole")


async def test_a_black_hole_is_silent_and_healing_resets_what_fell_in(proxy: FaultProxy) -> None:
    proxy.up = Toxics(black_hole=True)
    asking = asyncio.create_task(read(proxy, b"hello"))
    await asyncio.sleep(0.1)
    assert not asking.done()
    proxy.heal()
    assert await asking == (b"", "reset")
    assert await read(proxy, b"hello") == (b"hello", "whole")


async def test_half_closed_and_refused(proxy: FaultProxy) -> None:
    proxy.up = Toxics(half_close=True)
    assert await read(proxy, b"hello") == (b"", "whole")
    proxy.heal()
    proxy.refuse = True
    assert (await read(proxy, b"hello"))[1] == "reset"


async def test_a_reset_of_the_client_reaches_the_server() -> None:
    """Else a server holds what a process that was killed has left: PostgreSQL its transactions and their locks."""
    came, ended = asyncio.Event(), asyncio.Event()

    async def wait_for_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(1000):
                came.set()
        except ConnectionError:
            pass
        finally:
            ended.set()
            await closed(writer)

    server = await asyncio.start_server(wait_for_the_end, "127.0.0.1", 0)
    async with FaultProxy(server.sockets[0].getsockname()[:2]) as proxy:
        _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"begin")
        await asyncio.wait_for(came.wait(), BOUND_S)
        reset(writer)
        await asyncio.wait_for(ended.wait(), BOUND_S)
    server.close()
