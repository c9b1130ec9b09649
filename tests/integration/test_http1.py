"""Connections to workers over HTTP/1.1: what is a reply, what is none, and which connection is used again."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import aiohttp
import pytest
import yarl

from gateway.adapters.upstream.http1 import connection
from gateway.adapters.upstream.http1.connection import BUFFER_BYTES, GATHER_BYTES, HEAD_BYTES_MAX, HungUp
from gateway.adapters.upstream.http1.pool import ConnectionPool, Http1Reply, NotConnected
from gateway.adapters.upstream.replies import Pieces
from gateway.errors import UpstreamProtocol
from tests.waiting import BOUND_S

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


class Worker:
    """A server that gives its answers in order, one a request, on any connection; None: it closes the connection."""

    def __init__(self, answers: Sequence[bytes | None]) -> None:
        self.answers = list(answers)
        self.heads: list[bytes] = []
        self.connections = 0
        self.writers: list[asyncio.StreamWriter] = []
        self.url = yarl.URL()

    def send(self, piece: bytes) -> None:
        """Send a chunk of the reply that is under way; an empty one ends it."""
        self.writers[-1].write(b"%x\r\n%s\r\n" % (len(piece), piece))

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.connections += 1
        self.writers.append(writer)
        try:
            while head := await _request(reader):
                self.heads.append(head)
                if b"x: nothing" in head:  # is what it gets
                    continue
                answer = self.answers.pop(0)
                writer.write((answer or b"").removesuffix(b"<close>"))
                if answer is None or answer.endswith(b"<close>"):
                    break
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


async def _request(reader: asyncio.StreamReader) -> bytes:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return head + await reader.readexactly(length)


@asynccontextmanager
async def worker(*answers: bytes | None) -> AsyncIterator[Worker]:
    made = Worker(answers)
    server = await asyncio.start_server(made, "127.0.0.1", 0)
    made.url = yarl.URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/x")
    try:
        yield made
    finally:
        server.close()
        for writer in made.writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)  # until the connections have ended


@pytest.fixture
async def pool() -> AsyncIterator[ConnectionPool]:
    pool = ConnectionPool(2, ssl.create_default_context(), idle_s=60.0, connect_s=5.0)
    yield pool
    pool.close()
    await asyncio.sleep(0)


def until() -> float:
    return asyncio.get_running_loop().time() + BOUND_S


async def post(pool: ConnectionPool, of: Worker, content: bytes = b"{}") -> Http1Reply:
    return await pool.post(of.url, {"x": "y"}, content, until())


async def read(reply: Http1Reply) -> bytes:
    body = b""
    while piece := await reply.next_raw(until()):
        body += piece
    await reply.aclose()
    return body


async def test_a_connection_whose_reply_was_read_is_used_again(pool: ConnectionPool) -> None:
    chunked = (
        b"HTTP/1.1 200 OK\r\nX-Id: a\r\nx-id: b\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"
    )
    async with worker(OK, chunked, b"HTTP/1.1 204 No Content\r\n\r\n", OK) as served:
        assert await read(await post(pool, served)) == b"hi"
        reply = await post(pool, served)
        assert (reply.status_code, reply.headers["x-id"]) == (200, "a")
        assert await read(reply) == b"abc"
        assert await read(await post(pool, served)) == b""
        assert await read(await post(pool, served, b"z" * (2 * BUFFER_BYTES))) == b"hi"
    assert served.connections == 1
    assert served.heads[0].startswith(b"POST /v1/x HTTP/1.1\r\nhost: 127.0.0.1:")
    assert served.heads[0].endswith(b"x: y\r\ncontent-length: 2\r\n\r\n{}")


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nmore",
        OK + b"and more than its length says",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\nand more than its end says",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nhi",
        b"HTTP/1.0 200 OK\r\n\r\nhi<close>",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\n\r\nhi<close>",
    ],
)
async def test_a_connection_with_more_on_it_or_at_its_end_is_not_used_again(
    pool: ConnectionPool, answer: bytes
) -> None:
    async with worker(answer, OK) as served:
        reply = await post(pool, served)
        assert (reply.status_code, reply.headers.get("link")) == (200, None)
        assert await read(reply) == b"hi"
        assert await read(await post(pool, served)) == b"hi"
    assert served.connections == 2


async def test_a_reply_that_nobody_reads_to_its_end_closes_its_connection(pool: ConnectionPool) -> None:
    async with worker(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi", OK) as served:
        reply = await post(pool, served)
        assert await reply.next_raw(until()) == b"hi"
        await reply.aclose()
        await reply.aclose()
        assert await read(await post(pool, served)) == b"hi"
    assert served.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * (2 * HEAD_BYTES_MAX),
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    ],
)
async def test_what_is_no_reply(pool: ConnectionPool, answer: bytes | None) -> None:
    async with worker(answer, OK) as served:
        with pytest.raises(HungUp):
            await post(pool, served)
        assert await read(await post(pool, served)) == b"hi"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi<close>",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n<close>",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\nzz",
    ],
)
async def test_a_body_that_is_cut(pool: ConnectionPool, answer: bytes) -> None:
    async with worker(answer) as served:
        with pytest.raises(HungUp):
            await read(await post(pool, served))


async def test_nothing_is_sent_without_a_connection_or_with_a_broken_header(pool: ConnectionPool) -> None:
    async with worker() as served:
        pass
    with pytest.raises(NotConnected):
        await post(pool, served)
    with pytest.raises(ValueError, match="line break"):
        await pool.post(served.url, {"x": "a\r\nb: c"}, b"", until())
    with pytest.raises(aiohttp.InvalidURL):
        await pool.post(yarl.URL("ftp://host/x"), {}, b"", until())


async def test_a_wait_ends_at_its_deadline_and_frees_its_place(pool: ConnectionPool) -> None:
    async with worker(OK) as served:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await pool.post(served.url, {"x": "nothing"}, b"", asyncio.get_running_loop().time() + 0.01)
        assert await read(await post(pool, served)) == b"hi"


async def test_more_requests_than_places_wait(pool: ConnectionPool) -> None:
    async with worker(OK, OK, OK) as served:
        first, second = await post(pool, served), await post(pool, served)
        third = asyncio.create_task(post(pool, served))
        await asyncio.sleep(0.01)
        assert not third.done()
        await read(first)
        assert await read(await third) == b"hi"
        await read(second)
    assert served.connections == 2


async def test_a_body_that_nobody_takes_is_not_read_without_bound(pool: ConnectionPool) -> None:
    size = 64 * BUFFER_BYTES
    async with worker(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + b"z" * size) as served:
        reply = await post(pool, served)
        await asyncio.sleep(0.05)
        first = await reply.next_raw(until())
        assert len(first) < 16 * BUFFER_BYTES
        assert len(first) + len(await read(reply)) == size


async def test_a_body_in_many_pieces_is_read_whole_within_its_bound(pool: ConnectionPool) -> None:
    size = 5 * BUFFER_BYTES
    body = bytes(range(256)) * (size // 256)
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + body
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n" % size + body + b"\r\n0\r\n\r\n"
    async with worker(answer, b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", chunked) as served:
        async with aclosing(await post(pool, served)) as full:
            assert await Pieces(full, size).read_all(until()) == body
        async with aclosing(await post(pool, served)) as empty:
            assert await Pieces(empty, size).read_all(until()) == b""
        with pytest.raises(UpstreamProtocol, match="larger"):
            await Pieces(await post(pool, served), size - 1).read_all(until())


@asynccontextmanager
async def gathered(pool: ConnectionPool) -> AsyncIterator[tuple[Worker, Http1Reply]]:
    """A chunked reply that is gathered, and who sends it."""
    async with worker(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n") as slow:
        reply = await post(pool, slow)
        reply.gather()
        yield slow, reply


async def test_a_gathered_reply_wakes_its_reader_at_its_end(
    pool: ConnectionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "GATHER_S", BOUND_S)
    async with gathered(pool) as (slow, reply):
        reading = asyncio.create_task(reply.next_raw(until()))
        for piece in (b"a", b"b", b"c"):
            slow.send(piece)
            await asyncio.sleep(0.01)
        assert not reading.done()
        slow.send(b"")
        assert await reading == b"abc"
        assert await reply.next_raw(until()) == b""


@pytest.mark.parametrize("last", [b"data: [DONE]\n\n", b"z" * GATHER_BYTES])
async def test_a_gathered_reply_wakes_its_reader_before_its_end(
    pool: ConnectionPool, monkeypatch: pytest.MonkeyPatch, last: bytes
) -> None:
    monkeypatch.setattr(connection, "GATHER_S", BOUND_S)
    async with gathered(pool) as (slow, reply):
        reading = asyncio.create_task(reply.next_raw(until()))
        slow.send(b"a")
        await asyncio.sleep(0.01)
        assert not reading.done()
        slow.send(last)
        assert (await reading).startswith(b"a" + last[:1])


async def test_a_gathered_reply_is_read_some_times_a_second(
    pool: ConnectionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "GATHER_S", 0.02)
    async with gathered(pool) as (slow, reply):
        reading = asyncio.create_task(reply.next_raw(until()))
        await asyncio.sleep(0.1)  # nothing has come: it goes on waiting
        assert not reading.done()
        slow.send(b"a")
        assert await reading == b"a"


async def test_what_came_of_a_gathered_reply_that_breaks_off_is_there(
    pool: ConnectionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "GATHER_S", BOUND_S)
    async with gathered(pool) as (slow, reply):
        slow.send(b"a")
        assert await reply.next_raw(asyncio.get_running_loop().time() + 0.05) == b"a"
        with pytest.raises(TimeoutError):
            await reply.next_raw(asyncio.get_running_loop().time() + 0.01)
        reading = asyncio.create_task(reply.next_raw(until()))
        slow.send(b"b")
        await asyncio.sleep(0.01)
        reading.cancel()
        await asyncio.wait([reading])
        assert reply.take_raw() == b"b"
        slow.send(b"c")
        await asyncio.sleep(0.01)
        slow.writers[-1].close()
        assert await reply.next_raw(until()) == b"c"
        with pytest.raises(HungUp):
            await reply.next_raw(until())


async def test_an_idle_connection_is_closed_after_its_time() -> None:
    pool = ConnectionPool(2, ssl.create_default_context(), idle_s=0.02, connect_s=5.0)
    async with worker(OK, OK) as served:
        await read(await post(pool, served))
        await asyncio.sleep(0.1)
        await read(await post(pool, served))
        assert served.connections == 2
        pool.close()
        await asyncio.sleep(0)
