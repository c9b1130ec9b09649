"""The HTTP server under every scripted model: a handler takes a request and gives a reply, whole or in pieces.

It writes bytes itself, so a reply can also break HTTP on purpose, and a call costs little processor time. A caller that
hangs up cancels the handler and closes the pieces of its reply.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
import socket
import ssl
import traceback
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeAlias, cast

REQUESTS_KEPT = 10_000
BACKLOG = 2048
JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream"}


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it came. `path` includes the query; names of `headers` are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    content: bytes

    @property
    def body(self) -> Any:
        """The content, read as JSON."""
        return json.loads(self.content)


@dataclass(frozen=True, slots=True)
class Reply:
    """A handler's answer. `pieces` are sent as they come, in chunks unless `headers` hold a content length; without
    them `content` is sent. `raw`: they are the bytes on the wire, status line and headers included. `cut`: the
    connection closes behind the last byte."""

    content: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)
    pieces: AsyncGenerator[bytes, None] | None = None
    cut: bool = False
    raw: bool = False

    @property
    def chunked(self) -> bool:
        return self.pieces is not None and not self.raw and "content-length" not in self.headers

    def head(self) -> bytes:
        """The status line and the headers; nothing of a raw reply."""
        if self.raw:
            return b""
        framing = {"transfer-encoding": "chunked"} if self.chunked else {"content-length": str(len(self.content))}
        lines = [f"{name}: {value}" for name, value in {**framing, **self.headers}.items()]
        return "\r\n".join([f"HTTP/1.1 {self.status} X", *lines, "", ""]).encode()


Handler: TypeAlias = Callable[[Request], Reply | Awaitable[Reply]]


def json_reply(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    """A whole reply of a JSON value."""
    return Reply(json.dumps(body, ensure_ascii=False).encode(), status, {**JSON, **(headers or {})})


def raw_reply(*pieces: bytes, gap_s: float = 0.0) -> Reply:
    """These bytes on the wire, with a pause behind each; then the connection closes."""
    return Reply(pieces=_paced(pieces, gap_s), cut=True, raw=True)


def event(payload: object, name: str | None = None) -> bytes:
    """One server-sent event: a JSON value, or a text as it is."""
    text = payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def event_stream(pieces: Iterable[bytes], gap_s: float = 0.0, *, cut: bool = False) -> Reply:
    """A streamed reply of these bytes, with a pause behind each."""
    return Reply(headers=EVENTS, pieces=_paced(pieces, gap_s), cut=cut)


async def _paced(pieces: Iterable[bytes], gap_s: float) -> AsyncGenerator[bytes, None]:
    for piece in pieces:
        yield piece
        await asyncio.sleep(gap_s)


class Server:
    """Serves on loopback while its block lasts. `requests`: the last that came; `left`: set once a caller has hung up
    before its reply was complete; `open`: calls under way. What a handler raises is a 500, and raised again at the end.
    """

    def __init__(self, handler: Handler, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.handler = handler
        self.port = port
        self.tls = tls
        self.requests: deque[Request] = deque(maxlen=REQUESTS_KEPT)
        self.left = asyncio.Event()
        self.open = 0
        self.errors: list[Exception] = []
        self.connections: set[_Connection] = set()
        self._listener: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: _Connection(self), "127.0.0.1", self.port, backlog=BACKLOG, reuse_address=True, ssl=self.tls
        )
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        for connection in list(self.connections):
            connection.end()
        while self.connections or self.open:  # the loop closes sockets and ends tasks in its next turns
            await asyncio.sleep(0)
        if self.errors and kind is None:
            raise self.errors[0]

    def reset(self) -> None:
        """Break every connection: callers see a reset, not an end."""
        for connection in list(self.connections):
            connection.reset()


class _Connection(asyncio.Protocol):
    """One caller. It sends a request at a time, as HTTP clients do."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._data = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._writable.set()
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        if self._task is not None:
            self._server.left.set()
            self._task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def end(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def reset(self) -> None:
        """Close the connection with a TCP reset."""
        raw = self._transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._data += data
        self._serve()

    def _serve(self) -> None:
        while self._task is None and (request := self._next()) is not None:
            self._server.requests.append(request)
            try:
                reply = self._server.handler(request)
            except Exception as error:
                reply = self._failed(error)
            if isinstance(reply, Reply) and reply.pieces is None and not reply.cut:
                self._transport.write(reply.head() + reply.content)
                continue
            self._server.open += 1
            self._task = asyncio.get_running_loop().create_task(self._answer(reply))
            self._task.add_done_callback(self._answered)

    def _next(self) -> Request | None:
        """The first request that has come completely, taken from the data."""
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return None
        first, *lines = self._data[:end].decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        last = end + 4 + int(headers.get("content-length", 0))
        if len(self._data) < last:
            return None
        content = bytes(self._data[end + 4 : last])
        del self._data[:last]
        method, path, _ = first.split(" ", 2)
        return Request(method, path, headers, content)

    async def _answer(self, coming: Reply | Awaitable[Reply]) -> None:
        try:
            reply = await coming if inspect.isawaitable(coming) else coming
        except Exception as error:
            reply = self._failed(error)
        self._transport.write(reply.head() + reply.content)
        if reply.pieces is not None:
            async with aclosing(reply.pieces) as pieces:
                async for piece in pieces:
                    self._transport.write(b"%x\r\n%s\r\n" % (len(piece), piece) if reply.chunked else piece)
                    await self._writable.wait()
        if reply.cut:
            self._task = None
            self._transport.close()
        elif reply.chunked:
            self._transport.write(b"0\r\n\r\n")

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._server.open -= 1
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(cast(Exception, error))
            self._transport.abort()
        if not self._transport.is_closing():
            self._serve()

    def _failed(self, error: Exception) -> Reply:
        self._server.errors.append(error)
        trace = "".join(traceback.format_exception(error))
        return json_reply({"error": {"message": trace, "type": "test", "param": None, "code": None}}, 500)


async def serve(handler: Handler, port: int, port_file: Path) -> None:
    """Serve until SIGTERM or SIGINT. The port file appears once the socket listens, complete or not at all."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with Server(handler, port) as server:
        part = port_file.with_name(port_file.name + ".part")
        part.write_text(f"{server.port}\n")
        part.replace(port_file)
        await stop.wait()
