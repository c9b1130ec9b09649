"""Connections to workers, kept open between requests: a request takes the one that was used last, or opens one."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import aiohttp
import yarl
from aiohappyeyeballs import start_connection

from gateway.adapters.upstream.http1.connection import Connection

HEAD_START_S = 0.25  # of an address before the next is tried beside it, as in aiohttp


class NotConnected(OSError):
    """No connection could be made: nothing was sent."""


class Origin(NamedTuple):
    """Where a connection leads."""

    host: str
    port: int
    is_secure: bool


class PostTarget(NamedTuple):
    """An origin, and how each request to one of its URLs begins."""

    origin: Origin
    begin: str


@lru_cache(maxsize=1024)
def post_target(url: yarl.URL) -> PostTarget:
    """The endpoint of a URL. Raises aiohttp.InvalidURL for one without a host, or of another scheme than HTTP's."""
    if not url.host or url.scheme not in ("http", "https") or url.port is None:
        raise aiohttp.InvalidURL(url)
    host = f"[{url.host}]" if ":" in url.host else url.raw_host or url.host
    where = host if url.is_default_port() else f"{host}:{url.port}"
    begin = f"POST {url.raw_path_qs} HTTP/1.1\r\nhost: {where}\r\naccept: */*\r\n"
    if url.user is not None:
        begin += f"authorization: {aiohttp.BasicAuth(url.user, url.password or '').encode()}\r\n"
    return PostTarget(Origin(url.host, url.port, url.scheme == "https"), begin)


class Http1Reply:
    """A reply whose head is there. Its body comes as it was sent."""

    def __init__(self, pool: ConnectionPool, origin: Origin, connection: Connection, until_s: float) -> None:
        self._pool, self._origin, self._connection, self._until_s = pool, origin, connection, until_s
        self._is_open = True
        self.status_code = connection.status
        self.headers: Mapping[str, str] = connection.headers

    async def next_raw(self, until_s: float) -> bytes:
        """What has come of the body, or comes next; empty at its end. Raises TimeoutError for a wait beyond `until_s`
        of the loop's clock, and HungUp."""
        return await self._connection.next(until_s)

    def gather(self) -> None:
        """`Connection.gather`."""
        self._connection.gather()

    def take_raw(self) -> bytes:
        """What has come of the body and was not read, without a wait."""
        return self._connection.take() if self._is_open else b""

    async def aiter_raw(self) -> AsyncIterator[bytes]:
        """Yield the body in the pieces that come, until the deadline of the call."""
        while piece := await self._connection.next(self._until_s):
            yield piece

    async def aclose(self) -> None:
        """`release`, for `aclosing`."""
        self.release()

    def release(self) -> None:
        """Release the connection; one whose reply was not read to its end is closed. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._pool.release(self._origin, self._connection)


class ConnectionPool:
    """At most `connections_max` requests at a time; more wait. An idle connection is kept for `idle_s`."""

    def __init__(self, connections_max: int, tls: ssl.SSLContext, *, idle_s: float, connect_s: float) -> None:
        self._places = asyncio.Semaphore(connections_max)
        self._tls, self._idle_s, self._connect_s = tls, idle_s, connect_s
        self._idle: dict[Origin, deque[Connection]] = {}
        self._open: set[Connection] = set()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    async def post(self, url: yarl.URL, headers: Mapping[str, str], content: bytes, until_s: float) -> Http1Reply:
        """Send a request; the reply whose head has come. Raises NotConnected, HungUp, ssl.SSLError, and TimeoutError
        beyond `until_s` of the loop's clock."""
        origin, begin = post_target(url)
        own = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if own.count("\r") + own.count("\n") != 2 * len(headers) or "\0" in own:
            raise ValueError("a header of the request has a line break in it")
        head = f"{begin}{own}content-length: {len(content)}\r\n\r\n".encode()
        connection = await self._taken(origin, until_s)
        try:
            await connection.send(head, content, until_s)
        except BaseException:  # boundary: whatever ended the wait, the connection is of no use
            self.release(origin, connection)
            raise
        return Http1Reply(self, origin, connection, until_s)

    def release(self, origin: Origin, connection: Connection) -> None:
        """Give a connection back. It is closed unless another request may use it."""
        self._places.release()
        if not connection.is_reusable:
            connection.close()
            return
        connection.rest()
        self._idle.setdefault(origin, deque()).append(connection)
        if self._timer is None:
            self._timer = self._loop.call_later(self._idle_s, self._sweep)

    def close(self) -> None:
        """Close every connection."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for connection in list(self._open):
            connection.close()

    async def _taken(self, origin: Origin, until_s: float) -> Connection:
        """A connection with a place among those that may be busy."""
        if self._places.locked():
            async with asyncio.timeout_at(until_s):
                await self._places.acquire()
        else:
            await self._places.acquire()
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if not connection.is_closed and self._loop.time() - connection.idle_since_s < self._idle_s:
                return connection
            connection.close()
        try:
            async with asyncio.timeout_at(until_s):
                return await self._connected(origin)
        except BaseException:  # boundary: whatever kept it from being made, its place is free again
            self._places.release()
            raise

    async def _connected(self, origin: Origin) -> Connection:
        connection = Connection(self._open.discard)
        tls = self._tls if origin.is_secure else None
        name = origin.host if origin.is_secure else None
        try:
            async with asyncio.timeout(self._connect_s):
                sock = await self._socket(origin)
                await self._loop.create_connection(lambda: connection, sock=sock, ssl=tls, server_hostname=name)
        except ssl.SSLError:
            raise
        except TimeoutError:
            raise NotConnected("no connection in time") from None
        except OSError as error:
            raise NotConnected(str(error)) from error
        if not connection.is_closed:
            self._open.add(connection)
        return connection

    async def _socket(self, origin: Origin) -> socket.socket:
        """A connected socket: of several addresses that which answers first, a head start apart (RFC 8305). Raises
        OSError."""
        addresses = await self._loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
        if not addresses:
            raise OSError("the name has no address")
        sock = await start_connection(addresses, happy_eyeballs_delay=HEAD_START_S, interleave=1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _sweep(self) -> None:
        """Close what has been idle for long."""
        self._timer, now_s = None, self._loop.time()
        for origin, idle in list(self._idle.items()):
            while idle and (idle[0].is_closed or now_s - idle[0].idle_since_s >= self._idle_s):
                idle.popleft().close()
            if not idle:
                del self._idle[origin]
        if self._idle:
            self._timer = self._loop.call_later(self._idle_s, self._sweep)
