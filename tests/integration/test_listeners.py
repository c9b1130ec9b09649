"""The listeners over real sockets: ports, bounds on a request's head, and draining."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack

import httpx
import pytest
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.edge.stack import Edge, read_json
from gateway.cli.process.listeners import BoundedProtocol, Listener, bind, url
from gateway.errors import ConfigError
from tests.waiting import BOUND_S, until

HEAD_BYTES_MAX = 4096
NEWCOMERS = 40


async def _answer(request: Request) -> PlainTextResponse:
    """Say how long the body is; with `held`, only once the app is let go."""
    body = await request.body()
    if "held" in request.query_params:
        request.app.state.held.set()
        await request.app.state.go.wait()
    return PlainTextResponse(str(len(body)))


async def _open(drain_s: float) -> tuple[Listener, Starlette]:
    app = Starlette(routes=[Route("/", _answer, methods=["GET", "POST"])])
    app.state.held, app.state.go = asyncio.Event(), asyncio.Event()
    made = Listener(app, bind("127.0.0.1", 0, strict=True), drain_s=drain_s, head_bytes_max=HEAD_BYTES_MAX)
    await made.open()
    return made, app


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    made, _ = await _open(drain_s=1)
    yield made
    await made.close()


async def _raw(listener: Listener, *chunks: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*listener.sock.getsockname())
    try:
        for chunk in chunks:
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(0.01)
        return await asyncio.wait_for(reader.read(), BOUND_S)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_a_taken_port_moves_on_unless_strict() -> None:
    first = bind("127.0.0.1", 0, strict=True)
    port = first.getsockname()[1]
    second = bind("127.0.0.1", port, strict=False)
    assert second.getsockname()[1] != port
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is taken; free it"):
        bind("127.0.0.1", port, strict=True)
    first.close()
    second.close()


async def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        bind("192.0.2.1", 0, strict=False)


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]")])  # noqa: S104
async def test_the_url_is_one_that_works_here(host: str, shown: str) -> None:
    with bind(host, 0, strict=True) as sock:
        assert url(sock) == f"http://{shown}:{sock.getsockname()[1]}"


def test_many_newcomers_are_let_in_by_one_turn_of_the_loop() -> None:
    async def turns() -> int:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            """Never asked."""

        one = Listener(app, bind("127.0.0.1", 0, strict=True), drain_s=1, head_bytes_max=HEAD_BYTES_MAX)
        await one.open()
        with ExitStack() as stack:
            for _ in range(NEWCOMERS):
                stack.enter_context(socket.create_connection(one.sock.getsockname()))
            counted = 0
            while len(one.server_state.connections) < NEWCOMERS:
                await asyncio.sleep(0)
                counted += 1
        await one.close()
        await asyncio.sleep(0.01)  # sockets are closed in the loop's next turns
        return counted

    assert uvloop.run(turns()) < NEWCOMERS // 2  # one a turn is what the loop does by itself


async def test_a_request_is_answered_and_the_head_of_the_next_is_counted_anew(listener: Listener) -> None:
    headers = {"x-long": "y" * (HEAD_BYTES_MAX // 2)}
    async with httpx.AsyncClient(base_url=url(listener.sock), headers=headers) as client:
        for _ in range(5):
            assert (await client.post("/", content=b"z" * 100_000)).text == "100000"


async def test_a_head_too_large_is_431(listener: Listener) -> None:
    flood = [b"GET / HTTP/1.1\r\nhost: x\r\n", *(b"a: " + b"b" * 1000 + b"\r\n" for _ in range(6))]
    assert (await _raw(listener, *flood)).startswith(b"HTTP/1.1 431 ")


async def test_one_endless_header_is_431(listener: Listener) -> None:
    flood = [b"GET / HTTP/1.1\r\nhost: x\r\na: ", *(b"b" * 1000 for _ in range(6))]
    assert (await _raw(listener, *flood)).startswith(b"HTTP/1.1 431 ")


async def test_a_body_in_many_pieces_is_no_head(listener: Listener) -> None:
    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 20000\r\n"
    answer = await _raw(listener, head, b"\r\n", *(b"z" * 2000 for _ in range(10)))
    assert answer.endswith(b"20000")


@pytest.mark.parametrize("sent", [b"", b"GET / HT"])
async def test_a_head_that_never_comes_is_cut(listener: Listener, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "head_s", 0.1)
    assert await _raw(listener, sent) == b""


async def test_closing_lets_an_open_request_finish_and_accepts_no_new_one() -> None:
    listener, app = await _open(drain_s=BOUND_S)
    address = url(listener.sock)

    async def refused() -> bool:
        async with httpx.AsyncClient(base_url=address) as late:
            try:
                await late.get("/")
            except httpx.ConnectError:
                return True
            except httpx.TransportError:  # the kernel had connected it when the listener closed
                return False
        return False

    async with httpx.AsyncClient(base_url=address, timeout=BOUND_S) as client:
        open_request = asyncio.create_task(client.get("/?held"))
        await app.state.held.wait()
        closing = asyncio.create_task(listener.close())
        await until(refused)
        app.state.go.set()
        assert (await open_request).text == "0"
        await closing


async def test_a_request_longer_than_the_drain_time_is_cut() -> None:
    listener, app = await _open(drain_s=1)
    async with httpx.AsyncClient(base_url=url(listener.sock)) as client:
        slow = asyncio.create_task(client.get("/?held", timeout=2 * BOUND_S))
        await app.state.held.wait()
        await asyncio.wait_for(listener.close(), BOUND_S)
        with pytest.raises(httpx.HTTPError):
            (await slow).raise_for_status()


async def test_a_server_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Listener, sockets: list[socket.socket] | None = None) -> None:
        raise OSError("no more files")

    monkeypatch.setattr(uvicorn.Server, "startup", fail)
    made = Listener(Starlette(), bind("127.0.0.1", 0, strict=True), drain_s=1, head_bytes_max=HEAD_BYTES_MAX)
    with pytest.raises(OSError, match="no more files"):
        await made.open()
    made.sock.close()


async def test_over_the_bound_the_slowest_sender_makes_room() -> None:
    app = Starlette(routes=[Route("/", _answer, methods=["GET", "POST"])])
    listener = Listener(
        app, bind("127.0.0.1", 0, strict=True), drain_s=1, head_bytes_max=HEAD_BYTES_MAX, connections_max=3
    )
    await listener.open()
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
    senders = [await asyncio.open_connection(*listener.sock.getsockname()) for _ in range(3)]
    for _, writer in senders:
        writer.write(head)
        await asyncio.sleep(0.01)
    async with httpx.AsyncClient(base_url=url(listener.sock)) as client:
        assert (await client.get("/")).text == "0"
    assert await asyncio.wait_for(senders[0][0].read(), BOUND_S) == b""
    senders[1][1].write(b"x" * 100)
    assert (await asyncio.wait_for(senders[1][0].readline(), BOUND_S)).startswith(b"HTTP/1.1 200")
    for _, writer in senders:
        writer.close()
    await listener.close()


async def test_a_refusal_needs_no_application_and_says_the_same() -> None:
    go, held = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_json(Request(scope, receive), HEAD_BYTES_MAX, "k")
        held.set()
        await go.wait()
        await PlainTextResponse("done")(scope, receive, send)

    replies = []
    for raw in (True, False):
        edge = Edge(app, 1)
        served = Listener(
            edge if raw else _hidden(edge), bind("127.0.0.1", 0, strict=True), drain_s=1, head_bytes_max=4096
        )
        await served.open()
        go.clear()
        held.clear()
        async with httpx.AsyncClient(base_url=url(served.sock)) as http:
            first = asyncio.create_task(http.post("/v1/chat/completions", json={}))
            await held.wait()
            refused = [await http.post("/v1/chat/completions", json={"n": "x" * 2000}) for _ in range(3)]
            go.set()
            assert (await first).text == "done"
            assert (await http.post("/v1/chat/completions", json={})).text == "done"
        await served.close()
        changing = ("x-request-id", "date", "openai-processing-ms")
        same = [{n: v for n, v in one.headers.items() if n not in changing} for one in refused]
        assert len({one.headers["x-request-id"] for one in refused}) == 3
        replies.append([(one.status_code, one.json(), headers) for one, headers in zip(refused, same, strict=True)])
    assert replies[0] == replies[1]
    assert replies[0][0][0] == 503


def _hidden(edge: Edge) -> ASGIApp:
    """The edge as an application of which a listener knows nothing."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await edge(scope, receive, send)

    return app


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nx: y\r\nHOST: a\r\n\r\n",
        b"GET / HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET /\r\n\r\n",
    ],
)
async def test_a_request_without_one_host_is_refused_and_its_connection_closed(listener: Listener, head: bytes) -> None:
    reply = await _raw(listener, head)
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert reply.count(b"HTTP/1.1 400") == 1


async def test_http_1_0_needs_no_host_and_requests_in_one_connection_are_counted_apart(listener: Listener) -> None:
    assert b" 200 " in await _raw(listener, b"GET / HTTP/1.0\r\n\r\n")
    two = b"GET / HTTP/1.1\r\nhost: a\r\n\r\nGET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    assert (await _raw(listener, two)).count(b" 200 ") == 2
