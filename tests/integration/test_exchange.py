"""Replies on real connections: in how many writes they leave, and how the application learns that the client left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from gateway.api.edge.exchange import ClientMessages
from gateway.api.edge.stack import unless_gone
from gateway.cli.process.listeners import BoundedProtocol, Listener, bind
from tests.waiting import BOUND_S

REQUEST = b"%s / HTTP/1.1\r\nhost: x\r\n\r\n"
TEXT = (b"content-type", b"text/plain")


class Counted:
    """A transport that counts its writes."""

    def __init__(self, transport: asyncio.Transport, writes: list[bytes]) -> None:
        self._transport, self._writes = transport, writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._writes.append(data)
        self._transport.write(data)


class App:
    """An application that answers with the messages it is given."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.was_whole: list[bool] = []
        self.left = asyncio.Event()
        self.holds = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert isinstance(receive, ClientMessages)
        self.was_whole.append(receive.is_whole)
        if self.holds:
            await unless_gone(receive, asyncio.Event().wait(), self.left.set)
            return
        for message in self.messages:
            await send(message)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    found: list[bytes] = []
    made = BoundedProtocol.connection_made

    def connection_made(self: BoundedProtocol, transport: asyncio.Transport) -> None:
        made(self, Counted(transport, found))  # type: ignore[arg-type]

    monkeypatch.setattr(BoundedProtocol, "connection_made", connection_made)
    return found


@pytest.fixture
async def app() -> App:
    return App()


@pytest.fixture
async def listener(app: App, writes: list[bytes]) -> AsyncIterator[Listener]:
    made = Listener(app, bind("127.0.0.1", 0, strict=True), drain_s=1, head_bytes_max=4096)
    await made.open()
    yield made
    await made.close()


async def _answered(listener: Listener, request: bytes, end: bytes, times: int = 1) -> bytes:
    """What is written until so many replies have ended so, on a connection that stays open."""
    reader, writer = await asyncio.open_connection(*listener.sock.getsockname())
    writer.write(request)
    try:
        return b"".join([await asyncio.wait_for(reader.readuntil(end), BOUND_S) for _ in range(times)])
    finally:
        writer.close()


def _start(status: int, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": [TEXT, *headers]}


def _piece(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def test_a_whole_reply_leaves_in_one_write(app: App, listener: Listener, writes: list[bytes]) -> None:
    app.messages = [_start(200, (b"content-length", b"5")), _piece(b"hello")]
    answer = await _answered(listener, REQUEST % b"GET", b"hello")
    assert writes == [answer]
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"content-length: 5\r\n" in answer
    assert app.was_whole == [True]


async def test_the_head_of_a_stream_leaves_with_its_first_piece(
    app: App, listener: Listener, writes: list[bytes]
) -> None:
    app.messages = [_start(200), _piece(b"one", more=True), _piece(b"two", more=True), _piece(b"")]
    answer = await _answered(listener, REQUEST % b"GET", b"0\r\n\r\n")
    assert b"".join(writes) == answer
    assert writes[0].endswith(b"transfer-encoding: chunked\r\n\r\n3\r\none\r\n")
    assert answer.endswith(b"3\r\ntwo\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("method", "messages", "answer"),
    [
        (b"HEAD", [_start(200, (b"content-length", b"5")), _piece(b"hello")], b"content-length: 5\r\n\r\n"),
        (b"GET", [_start(204), _piece(b"")], b"content-type: text/plain\r\n\r\n"),
        (b"GET", [_start(200, (b"connection", b"close"), (b"content-length", b"2")), _piece(b"ok")], b"\r\n\r\nok"),
        (
            b"GET",
            [_start(200, (b"content-length", b"4")), _piece(b"o", more=True), _piece(b"kay")],
            b"\r\n\r\nokay",
        ),
        (b"GET", [_start(200), _piece(b"whole")], b"chunked\r\n\r\n5\r\nwhole\r\n0\r\n\r\n"),
    ],
)
async def test_unusual_replies_are_what_uvicorn_makes_of_them(
    app: App, listener: Listener, method: bytes, messages: list[dict[str, Any]], answer: bytes
) -> None:
    app.messages = messages
    assert (await _answered(listener, REQUEST % method, answer)).startswith(b"HTTP/1.1 20")


async def test_a_header_cannot_hold_another_one(app: App, listener: Listener) -> None:
    app.messages = [_start(200, (b"x-note", b"a\r\nset-cookie: b"), (b"content-length", b"2")), _piece(b"ok")]
    answer = await _answered(listener, REQUEST % b"GET", b"Error")
    assert b"set-cookie" not in answer
    assert answer.startswith(b"HTTP/1.1 500")


async def test_two_requests_in_one_packet_are_answered_in_order(app: App, listener: Listener) -> None:
    app.messages = [_start(200, (b"content-length", b"5")), _piece(b"hello")]
    answer = await _answered(listener, 3 * (REQUEST % b"GET"), b"hello", times=3)
    assert answer.count(b"HTTP/1.1 200 OK") == 3


async def test_a_body_that_is_on_its_way_is_not_whole(app: App, listener: Listener) -> None:
    app.messages = [_start(200, (b"content-length", b"2")), _piece(b"ok")]
    await _answered(listener, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nhalf", b"ok")
    assert app.was_whole == [False]


async def test_a_client_that_leaves_is_noticed_at_once(app: App, listener: Listener) -> None:
    app.holds = True
    _, writer = await asyncio.open_connection(*listener.sock.getsockname())
    writer.write(REQUEST % b"GET")
    await writer.drain()
    writer.close()
    await asyncio.wait_for(app.left.wait(), BOUND_S)
