"""One connection to a worker over HTTP/1.1: a request leaves in one write, and its reply is read as it comes.

What has come of a body waits in a buffer; beyond BUFFER_BYTES nothing more is read from the socket until it is taken.
A reply that nobody watches is gathered: its reader wakes four times a second and at the end, not with each piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import httptools

BUFFER_BYTES = 128 << 10
HEAD_BYTES_MAX = 64 << 10
GATHER_BYTES = 32 << 10
GATHER_S = 0.25
LAST_EVENT = b"[DONE]"  # of a stream: some servers leave the body open after it


class HungUp(OSError):
    """The connection ended, or what came over it is no HTTP, before the reply was complete."""


class Connection(asyncio.Protocol):
    """One request at a time: `send`, then `next` until it is empty. `ended`: what to call once it is closed."""

    def __init__(self, ended: Callable[[Connection], None]) -> None:
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None  # of the head, or of the next piece
        self._is_paused = False
        self.is_closed = self._is_busy = False
        self.idle_since_s = 0.0
        self._begin()

    def _begin(self) -> None:
        """Forget the reply before."""
        self.status = 0
        self.headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._size = self._head_bytes = 0
        self._error: Exception | None = None
        self._has_head = self._is_whole = self._is_dirty = self._is_gathering = False

    # ---------------------------------------------------------------- the caller

    async def send(self, head: bytes, content: bytes, until_s: float) -> None:
        """Send a request, and return once the head of its reply is there: `status` and `headers`, their names in lower
        case, of equal names the first. Raises HungUp, and TimeoutError beyond `until_s` of the loop's clock."""
        self._begin()
        self._is_busy = True
        if self._transport is None or self.is_closed:
            raise HungUp("the connection is closed")
        if len(content) < BUFFER_BYTES:
            self._transport.write(head + content)
        else:
            self._transport.writelines((head, content))
        while not self._has_head:
            await self._wait(until_s)

    async def next(self, until_s: float) -> bytes:
        """What has come of the body, or comes next; empty at its end. Raises as `send`."""
        while not self._pieces:
            if self._is_whole:
                return b""
            await (self._gather(until_s) if self._is_gathering else self._wait(until_s))
        return self.take()

    def gather(self) -> None:
        """Until the reply is whole, let `next` wait for pieces that come within GATHER_S, up to GATHER_BYTES."""
        self._is_gathering = True

    def take(self) -> bytes:
        """What has come of the body and was not taken, without a wait."""
        piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return piece

    @property
    def is_reusable(self) -> bool:
        """Whether another request may be sent: the reply was read to its end."""
        return self._is_whole and not (self._pieces or self._is_dirty or self.is_closed) and self._keeps_alive

    def rest(self) -> None:
        """Note that nothing is expected now."""
        self._is_busy, self.idle_since_s = False, self._loop.time()

    def close(self) -> None:
        """Close it at once. Idempotent."""
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self, until_s: float) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = waiter = self._loop.create_future()
        timer = self._loop.call_at(until_s, _expire, waiter)
        try:
            await waiter
        finally:
            self._waiter = None
            timer.cancel()

    async def _gather(self, until_s: float) -> None:
        """Wait for what ends a gathering. What came before the connection failed or the time was over is there then."""
        try:
            await self._wait(min(until_s, self._loop.time() + GATHER_S))
        except (TimeoutError, HungUp):
            if not self._pieces and (self._error is not None or self._loop.time() >= until_s):
                raise

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, why: str) -> None:
        if self._error is None and not self._is_whole:
            self._error = HungUp(why)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(self._error)

    # ---------------------------------------------------------------- the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._is_busy:  # nothing was asked
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._is_dirty = True
            self._fail(f"no reply in HTTP: {error}")
            self._wake()  # where the reply was whole before, the bytes behind it do not matter
            self.close()
            return
        if not self._has_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._fail(f"a head of more than {HEAD_BYTES_MAX} bytes")
                self.close()
            return
        if self._size > BUFFER_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        if self._is_gathering and not self._is_whole and self._size < GATHER_BYTES and LAST_EVENT not in data:
            return
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        until_close = self._has_head and not {"content-length", "transfer-encoding"} & self.headers.keys()
        if until_close and exc is None and not self.is_closed:
            self._is_whole = self._is_dirty = True
            self._wake()
        else:
            self._fail("the worker closed the connection")
        self.is_closed = True
        self._ended(self)

    # ---------------------------------------------------------------- the parser

    def on_message_begin(self) -> None:
        """A second reply to one request makes the connection unusable."""
        self._is_dirty = self._is_dirty or self._is_whole

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        if not self._is_whole:
            self.headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        """Take the head, unless it is one of those that come before the reply."""
        if self._is_whole:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self.headers.clear()
            return
        self.status, self._has_head = status, True
        self._keeps_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        if not self._is_whole:
            self._pieces.append(body)
            self._size += len(body)

    def on_message_complete(self) -> None:
        """Note the end of the reply."""
        self._is_whole = self._has_head

    _keeps_alive = False


def _expire(waiter: asyncio.Future[Any]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())
