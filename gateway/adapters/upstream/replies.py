"""Replies of HTTP upstreams, read within bounds, and the errors of reading them.

Sizes are counted after decoding, and this file decodes encodings itself with a bound, so that a gzip bomb stops at the
limit. What has come already is read without a wait, and so without a deadline's timer.
"""

from __future__ import annotations

import asyncio
import ssl
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

import aiohttp
import httpx

from gateway.adapters.upstream.http1.connection import HungUp
from gateway.adapters.upstream.http1.pool import Http1Reply, NotConnected
from gateway.adapters.upstream.sse import BOM, DONE, SseError, SseEvent, SseParser
from gateway.core.openai.vendors.usage import BYTES_PER_TOKEN
from gateway.errors import UpstreamError, UpstreamProtocol, UpstreamTimeout

DRAIN_S = 0.05
BLANK = b" \t\r\n" + BOM
JSON_BEGINS = (b"{", b"[")
FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")  # of an event stream
ERROR_BODY_BYTES_MAX = 65_536
_WBITS = {"gzip": 31, "x-gzip": 31, "deflate": 47}
T = TypeVar("T")
TRANSPORT = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, aiohttp.ClientError, OSError, zlib.error)
_NOT_CONNECTED = (NotConnected, aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, httpx.ConnectError)


class HttpxReply:
    """A response of httpx, with the methods of `Http1Reply` that the functions below need."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.status_code = response.status_code
        self._pieces = response.aiter_raw()

    def aiter_raw(self) -> AsyncIterator[bytes]:
        """Yield the body in the pieces that httpx gives."""
        return self._pieces

    async def next_raw(self, until_s: float) -> bytes:
        """The next piece of the body, as `Http1Reply.next_raw`."""
        async with asyncio.timeout_at(until_s):
            return await anext(self._pieces, b"")

    async def aclose(self) -> None:
        """Release the connection."""
        await self._response.aclose()


AnyReply = httpx.Response | Http1Reply


class _Bounded:
    """The decoding of one body, of at most `bytes_max` bytes in all. Raises UpstreamProtocol for a declared length
    beyond that, and for an encoding that nobody asked for."""

    def __init__(self, headers: Mapping[str, str], bytes_max: int) -> None:
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", *_WBITS):
            raise UpstreamProtocol(f"the worker answered in an encoding that Baton did not ask for: {encoding[:40]}")
        declared = headers.get("content-length", "")
        if declared.isdigit() and len(declared) < 20 and int(declared) > bytes_max:
            raise _too_large(bytes_max)
        self._bytes_max, self._left = bytes_max, bytes_max
        self._inflate = zlib.decompressobj(_WBITS[encoding]) if encoding in _WBITS else None

    def decode(self, raw: bytes) -> bytes:
        """The decoded piece. Raises UpstreamProtocol beyond the bound."""
        piece = self._inflate.decompress(raw, self._left + 1) if self._inflate else raw
        self._left -= len(piece)
        if self._left < 0:
            raise _too_large(self._bytes_max)
        return piece

    def end(self) -> None:
        """Raises UpstreamProtocol where the body ends in the middle of its encoding."""
        if self._inflate and not self._inflate.eof:
            raise UpstreamProtocol("the worker's compressed reply was cut short")


class Pieces:
    """The decoded body of a reply, piece by piece, of at most `bytes_max` bytes in all."""

    def __init__(self, reply: Http1Reply, bytes_max: int) -> None:
        self._reply = reply
        self._bounded = _Bounded(reply.headers, bytes_max)

    async def next(self, until_s: float) -> bytes | None:
        """The next piece; None at the end. A wait ends at `until_s` of the loop's clock. Raises UpstreamError."""
        try:
            while raw := await self._reply.next_raw(until_s):
                if piece := self._bounded.decode(raw):
                    return piece
        except TRANSPORT as error:
            raise reading_error(error) from error
        self._bounded.end()
        return None

    def rest(self) -> bytes:
        """What has come and was not read, as far as it can be decoded; without a wait."""
        try:
            return self._bounded.decode(self._reply.take_raw())
        except (UpstreamProtocol, zlib.error):
            return b""

    async def read_all(self, until_s: float) -> bytes:
        """Every piece, in one. Waits and raises as `next`."""
        first = await self.next(until_s)
        if first is None or (piece := await self.next(until_s)) is None:
            return first or b""
        body = bytearray(first)  # it grows in place: `bytes` would be copied with each piece
        while piece is not None:
            body += piece
            piece = await self.next(until_s)
        return bytes(body)

    async def drain(self, until_s: float) -> None:
        """Read what follows, until `until_s`: only a connection that was read to its end can be reused."""
        with suppress(UpstreamError):
            while await self.next(until_s) is not None:
                pass


class ReplyEvents(Generic[T]):
    """The events of a reply, those that came together in one list, as `SseParser.feed_to` gives them with `read`. A
    reply in one piece, from a server that does not stream, is one event. Each wait ends at the call's deadline, and
    after the longest gap; and at `first_until`, until who reads sets `begun`."""

    def __init__(
        self,
        response: Http1Reply,
        pieces: Pieces,
        parser: SseParser,
        read: Callable[[bytes], T] | None,
        deadline: float,
        gap_s_max: float,
        first_until: float | None = None,
    ) -> None:
        self.begun = first_until is None
        self._first_until = deadline if first_until is None else first_until
        self._read = read
        self._response, self._pieces, self._parser = response, pieces, parser
        self._deadline, self._gap_s_max = deadline, gap_s_max
        self._gap_until = deadline
        self._now = asyncio.get_running_loop().time
        self._is_done = self._is_over = self._has_begun = False

    async def next(self) -> list[SseEvent | T] | None:
        """The next events; None at the end. Raises UpstreamError."""
        if self._is_done:
            await self._pieces.drain(self._now() + DRAIN_S)
        if self._is_done or self._is_over:
            return None
        piece = await self._pieces.next(min(self._deadline if self.begun else self._first_until, self._gap_until))
        self._gap_until = self._now() + self._gap_s_max
        self._is_over = piece is None
        if piece and not self._has_begun and (begin := piece.lstrip(BLANK)):
            self._has_begun = True
            if begin.startswith(JSON_BEGINS) or not (self._says_stream() or is_event_stream(begin)):
                return await self._read_whole(begin)
        return self._events(piece)

    def _says_stream(self) -> bool:
        return "event-stream" in self._response.headers.get("content-type", "")

    async def _read_whole(self, begin: bytes) -> list[SseEvent | T]:
        """The reply in one piece, and its end."""
        body, self._is_over = begin + await self._pieces.read_all(self._deadline), True
        try:
            return [SseEvent(body.decode()), SseEvent(DONE)]
        except UnicodeDecodeError:
            raise UpstreamProtocol("the worker's reply is not JSON") from None

    def rest(self) -> list[SseEvent | T]:
        """The events that have come and were not read, as far as they can be; without a wait."""
        with suppress(UpstreamError):
            return [] if self._is_done or self._is_over else self._events(self._pieces.rest())
        return []

    def _events(self, piece: bytes | None) -> list[SseEvent | T]:
        try:
            if piece is None:
                events: list[SseEvent | T] = [*self._parser.end()]
            else:
                events = self._parser.feed_to(self._read, piece)
        except SseError as error:
            raise UpstreamProtocol(f"the worker's stream is not an event stream: {error}") from None
        for at, event in enumerate(events, 1):
            if isinstance(event, SseEvent) and event.data == DONE:
                self._is_done = True
                return events[:at]
        return events

    async def aclose(self) -> None:
        """Release the connection."""
        await self._response.aclose()


class ReadEvents(Generic[T]):
    """The events of a reply that was read to its end, as `ReplyEvents` gives them. Raises UpstreamProtocol."""

    begun = True

    def __init__(self, raw: bytes, parser: SseParser, read: Callable[[bytes], T] | None) -> None:
        try:
            self._events: list[SseEvent | T] | None = [*parser.feed_to(read, raw), *parser.end()]
        except SseError as error:
            raise UpstreamProtocol(f"the worker's stream is not an event stream: {error}") from None

    async def next(self) -> list[SseEvent | T] | None:
        """All events; then None."""
        events, self._events = self._events, None
        return events

    def rest(self) -> list[SseEvent | T]:
        """Nothing: all came together."""
        return []

    async def aclose(self) -> None:
        """Nothing is open."""


def is_event_stream(raw: bytes) -> bool:
    """Whether a body, or its beginning, is a stream of events, whatever its media type says."""
    begin = raw.lstrip(BLANK)[:8]
    return any(begin.startswith(name) or name.startswith(begin) for name in FIELDS)


async def bounded_bytes(response: AnyReply, bytes_max: int) -> AsyncIterator[bytes]:
    """Yield the decoded body in pieces of at most `bytes_max` bytes in all. Raises UpstreamProtocol beyond that."""
    bounded = _Bounded(response.headers, bytes_max)
    async for raw in response.aiter_raw():
        if piece := bounded.decode(raw):
            yield piece
    bounded.end()


async def bounded_body(response: AnyReply, bytes_max: int) -> bytes:
    """The complete decoded body. Raises UpstreamProtocol if it has more than `bytes_max` bytes."""
    return b"".join([piece async for piece in bounded_bytes(response, bytes_max)])


async def error_body(response: AnyReply) -> bytes:
    """The body of an error reply, cut at ERROR_BODY_BYTES_MAX. Never raises for its content."""
    pieces: list[bytes] = []
    with suppress(UpstreamProtocol, zlib.error, httpx.HTTPError, aiohttp.ClientError, HungUp):
        async for piece in bounded_bytes(response, ERROR_BODY_BYTES_MAX):
            pieces.append(piece)
    return b"".join(pieces)


@contextmanager
def transport_errors() -> Iterator[None]:
    """Convert exceptions of the HTTP clients to UpstreamTimeout, UpstreamError or UpstreamProtocol."""
    try:
        yield
    except TRANSPORT as error:
        raise reading_error(error) from error


def reading_error(error: Exception) -> UpstreamError:
    """`transport_error`, and UpstreamTimeout for a deadline that has passed."""
    if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
        return UpstreamTimeout("the worker did not answer in time")
    return transport_error(error)  # to connect timed out: nothing was sent


def transport_error(error: Exception) -> UpstreamError:
    """Convert an exception of an HTTP client. `dispatched` of the result says whether the request may have left."""
    cause = error.__cause__ if isinstance(error.__cause__, aiohttp.ClientError) else error
    if isinstance(cause, aiohttp.ClientSSLError | ssl.SSLError):
        return UpstreamError("the worker cannot be reached securely (TLS)", retryable=True, dispatched=False)
    if isinstance(cause, aiohttp.ClientHttpProxyError):
        what = f"the worker cannot be reached: its proxy answered {cause.status}"
        return UpstreamError(what, retryable=cause.status != 407, dispatched=False)
    if isinstance(cause, aiohttp.ClientProxyConnectionError):
        what = "the worker cannot be reached: its proxy does not answer"
        return UpstreamError(what, retryable=True, dispatched=False)
    if isinstance(cause, _NOT_CONNECTED):
        return UpstreamError("the worker cannot be reached", retryable=True, dispatched=False)
    if isinstance(cause, aiohttp.InvalidURL | httpx.InvalidURL | httpx.UnsupportedProtocol):
        return UpstreamError("the worker's URL is not usable", dispatched=False)
    if isinstance(cause, zlib.error):
        return UpstreamProtocol("the worker's compressed reply is broken")
    return UpstreamProtocol("the worker hung up before its reply was complete")


@contextmanager
def fault_counted(request_bytes: int, reply_bytes: int) -> Iterator[None]:
    """Gives an error inside the tokens that its call cost at most: the worker has ended it, and no reply was in it."""
    try:
        yield
    except UpstreamError as error:
        count_fault(error, request_bytes, reply_bytes)
        raise


def count_fault(error: UpstreamError, request_bytes: int, reply_bytes: int) -> None:
    """Give an error the tokens that its call cost at most."""
    error.tokens = -(-request_bytes // BYTES_PER_TOKEN), -(-reply_bytes // BYTES_PER_TOKEN)


def _too_large(bytes_max: int) -> UpstreamProtocol:
    return UpstreamProtocol(f"the worker's reply is larger than {bytes_max} bytes", retryable=False)
