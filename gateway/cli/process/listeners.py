"""The public and the admin listener: two uvicorn servers in one process, without uvicorn's signal handlers.

They add what uvicorn's fast parser lacks: a bound on the bytes and on the seconds of a request's head.
"""

from __future__ import annotations

import asyncio
import errno
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import uvicorn
import uvloop
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.api.edge.exchange import Exchange
from gateway.api.edge.refusals import Refusals
from gateway.api.edge.stack import Edge
from gateway.cli.process.runtime import raise_files_limit
from gateway.config.settings import Settings
from gateway.errors import ConfigError

FILES_RESERVED = 512  # open files beside the connections of clients and of workers
CONNECTIONS_MIN = 64
PORTS_TRIED = 20
BACKLOG = 2048
ACCEPTORS = 32  # sockets: libuv accepts one connection a turn on each, and under load turns are long
HEADER_OVERHEAD = 4  # bytes: colon, space and the end of the line
IDLE_S = 75  # then a connection without a request is closed; load balancers close theirs after 60 s, so they go first
UNREAD_S = 0.1  # until the event loop has read what waits in a socket's buffer
HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
    b'{"error":{"message":"the request headers are too large","type":"invalid_request_error",'
    b'"param":null,"code":"headers_too_large"}}'
)
HOST_WRONG = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
    b'{"error":{"message":"send HTTP/1.1 with one Host header","type":"invalid_request_error",'
    b'"param":null,"code":"invalid_host"}}'
)
State = Literal["head", "body", "served", "idle"]  # what a connection waits for, or that a reply is being made


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A head over `head_bytes_max` is answered 431; one that takes longer than `head_s` is cut off. A
    body that goes on after its reply is read for `linger_s`, so that the client gets the reply.

    Of more than `connections_max` connections the one whose request has been on its way for longest is closed, else an
    idle one, else the new one.
    """

    head_bytes_max = 65_536
    head_s = 15.0
    linger_s = 5.0
    connections_max = 65_536
    refusals: Refusals | None = None  # of the edge, where it is the application
    _state: State = "head"
    _since_s = 0.0  # time of the event loop at which this state began
    _linger_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _header_bytes = 0
    _hosts = 0  # headers of that name in this head
    _in_head = False
    _refused = False
    _pieces: list[bytes]  # of a body, until all that one read received is parsed
    _head_timer: asyncio.TimerHandle | None = None
    _exchange: Exchange | None = None  # the one that is served, or was last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._pieces = []
        peer = transport.get_extra_info("socket")
        if peer is not None and peer.family in (socket.AF_INET, socket.AF_INET6):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # send each event of a stream at once
        self._expect_head()
        self._enter("head")
        if len(self.connections) > self.connections_max:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        if not self._head_bytes and self.refusals is not None and self._refuse_unread(data, self.refusals):
            return
        self._head_bytes += len(data)
        super().data_received(data)
        self._pass_on()
        if self._in_head and self._head_bytes > self.head_bytes_max and not self.transport.is_closing():
            self.transport.write(HEAD_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._expect_head()
        self._enter("head")

    def on_header(self, name: bytes, value: bytes) -> None:
        """As uvicorn's, which a call to it would double."""
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self._hosts += name == b"host"
        self.headers.append((name, value))
        self._header_bytes += len(name) + len(value) + HEADER_OVERHEAD

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._header_bytes + len(self.url) > self.head_bytes_max:  # it came in one piece, so it was parsed first
            self._refused = True
            self.transport.write(HEAD_TOO_LARGE)
            self.transport.close()
            return
        hosts, self._hosts = self._hosts, 0
        version = self.parser.get_http_version()
        if hosts > 1 or version == "0.9" or (version == "1.1" and not hosts):  # RFC 9112 §3.2: no cache may guess
            self._refused = True
            self.transport.write(HOST_WRONG)
            self.transport.close()
            return
        self._header_bytes = 0
        self._head_bytes = 0
        self._forget_head()
        self._enter("body")
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Serve a request; one of HTTP/1.0 without chunks, which that version does not know. What the edge refuses at
        once is answered here."""
        if self.refusals is not None and cycle.keep_alive:
            refusal = self.refusals.of_scope(cycle.scope, cycle.default_headers)  # type: ignore[arg-type]
            if refusal is not None:
                cycle.response_started = cycle.response_complete = True
                self.transport.write(refusal)
                self.on_response_complete()
                return
        if cycle.scope["http_version"] == "1.0":
            super()._start_asgi_task(cycle, _unchunked(cycle, app))
            return
        self._exchange = Exchange(cycle, app)
        super()._start_asgi_task(cycle, self._exchange)

    def _refuse_unread(self, data: bytes, refusals: Refusals) -> bool:
        """Refuse a whole request before the parser reads it, on a connection that nothing is under way on. False: the
        parser is to read it."""
        is_first = self._state == "head"
        rests = (is_first or self._state == "idle") and (self.cycle is None or self.cycle.response_complete)
        if not rests or self.flow.write_paused or self.transport.is_closing():
            return False
        refusal = refusals.of_bytes(data, self.server_state.default_headers, self.head_bytes_max)
        if refusal is None:
            return False
        self.transport.write(refusal)
        self.server_state.total_requests += 1
        if is_first:
            self._forget_head()
            self._await_next(self.timeout_keep_alive)
        self._enter("idle")
        return True

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            self._pieces.append(body)

    def _pass_on(self) -> None:
        """Pass the pieces on as one: uvicorn copies the body so far for each of them."""
        if self._pieces:
            body = b"".join(self._pieces)
            self._pieces.clear()
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._pass_on()
        if not self._refused:
            super().on_message_complete()
        self._head_bytes = 0
        self._forget_linger()
        answered = self.cycle is None or self.cycle.response_complete
        self._enter("idle" if answered else "served")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._state == "body":
            self._linger_timer = self.loop.call_later(self.linger_s, self.transport.close)
        elif self._state == "served":
            self._enter("idle")

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        self._forget_linger()
        super().connection_lost(exc)
        if self._exchange is not None:
            self._exchange.receiver.leave()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection. One that was refused meanwhile, unread, is idle only since then. One whose next
        request has come stays: the event loop fires timers before it reads, and its turn may have been long."""
        left_s = self._since_s + self.timeout_keep_alive - self.loop.time()
        if self._state == "idle" and left_s > 0:
            self._await_next(left_s)
        elif not self.transport.is_closing() and _has_unread(self.transport):
            self._await_next(UNREAD_S)
        else:
            super().timeout_keep_alive_handler()

    def _await_next(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _enter(self, state: State) -> None:
        self._state = state
        self._since_s = self.loop.time()

    def _make_room(self) -> None:
        """Close one connection that no reply is being made for."""
        others = [each for each in self.connections if isinstance(each, BoundedProtocol) and each is not self]
        for states in (("head", "body"), ("idle",)):
            if waiting := [each for each in others if each._state in states]:
                min(waiting, key=lambda each: each._since_s).transport.close()
                return
        self.transport.close()

    def _forget_linger(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None

    def _expect_head(self) -> None:
        self._forget_head()
        self._head_timer = self.loop.call_later(self.head_s, self.transport.close)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _has_unread(transport: asyncio.Transport) -> bool:
    """Whether bytes, or the end of the connection, wait in the socket's buffer."""
    unread = select.poll()
    unread.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(unread.poll(0))


def _unchunked(cycle: RequestResponseCycle, app: Any) -> Any:
    """The application, whose replies without a length end where the connection does."""
    open_ended = False

    async def send(message: ASGISendEvent) -> None:
        nonlocal open_ended
        if message["type"] == "http.response.start":
            open_ended = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = False if open_ended else None
        elif message["type"] == "http.response.body" and open_ended:
            length = len(message.get("body", b""))
            cycle.expected_content_length = length + message.get("more_body", False)  # 0 is left after the last piece
        await cycle.send(message)

    async def plain(scope: Any, receive: Any, _: Any) -> None:
        await app(scope, receive, send)

    return plain


class Listener(uvicorn.Server):
    """Serves one application on one socket, from `open` to `close`."""

    def __init__(
        self, app: Any, sock: socket.socket, *, drain_s: float, head_bytes_max: int, connections_max: int = 65_536
    ) -> None:
        refusals = app.refusals if isinstance(app, Edge) else None
        bounds = {"head_bytes_max": head_bytes_max, "connections_max": connections_max, "refusals": refusals}
        protocol = type("Protocol", (BoundedProtocol,), bounds)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=max(1, round(drain_s)),
            )
        )
        self.sock = sock
        self._opened = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals: `baton serve` handles them for both listeners."""
        yield

    async def open(self) -> None:
        """Return once connections are accepted."""
        doubled = isinstance(asyncio.get_running_loop(), uvloop.Loop)  # asyncio's own accepts many connections a turn
        sockets = [self.sock, *(self.sock.dup() for _ in range(ACCEPTORS - 1 if doubled else 0))]
        self._task = asyncio.create_task(self.serve(sockets=sockets), name="listener")
        opened = asyncio.create_task(self._opened.wait())
        await asyncio.wait((opened, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            opened.cancel()
            await self._task

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._opened.set()

    async def close(self) -> None:
        """Accept no more connections, let open requests finish within the drain time, then cut them off."""
        self.should_exit = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)


def listener(app: Any, sock: socket.socket, settings: Settings) -> Listener:
    """A listener with the bounds of the settings, and as many connections as this process may have files."""
    connections_max = max(CONNECTIONS_MIN, raise_files_limit() - settings.worker_connections_max - FILES_RESERVED)
    return Listener(
        app,
        sock,
        drain_s=settings.drain_s,
        head_bytes_max=settings.header_bytes_max,
        connections_max=connections_max,
    )


def reserve(host: str, port: int, *, strict: bool) -> socket.socket:
    """A socket that holds the port that `bind` would choose, for the sockets of `join`. It does not listen, so no
    connection comes to it. Raises ConfigError."""
    alone = bind(host, port, strict=strict)  # without SO_REUSEPORT, so that no other program shares the port
    address = alone.getsockname()
    alone.close()
    return _shared_socket(address, alone.family)


def join(host: str, port: int) -> socket.socket:
    """A listening socket of this process on a port that `reserve` holds; the kernel spreads connections over all of
    them. Raises ConfigError."""
    sock = _shared_socket((host, port), socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.listen(BACKLOG)
    return sock


def _shared_socket(address: tuple[Any, ...], family: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot share {address[0]}:{address[1]}: {error.strerror}; free the port") from None
    sock.setblocking(False)
    return sock


def bind(host: str, port: int, *, strict: bool) -> socket.socket:
    """A listening socket on that port. Where the port is taken: on one of the next PORTS_TRIED, else on any free one;
    with `strict`, on no other. Raises ConfigError naming the setting to change."""
    tries = [port] if strict else [*range(port, min(port + PORTS_TRIED, 65_536)), 0] if port else [0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in tries:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, candidate))
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"cannot listen on {host}:{candidate}: {error.strerror}; check the host") from None
            continue
        sock.setblocking(False)
        return sock
    raise ConfigError(f"{host}:{port} is taken; free it, set another port, or unset BATON_PORT_STRICT")


def url(sock: socket.socket) -> str:
    """`http://host:port` by which clients on this machine reach a bound socket."""
    host, port = sock.getsockname()[:2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"http://{reachable}:{port}"
