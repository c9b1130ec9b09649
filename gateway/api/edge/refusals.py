"""Refusals because of the load, for a server that writes them itself.

Under a flood they are most of what a gateway does, and what they cost is taken from the requests that are served. So
the reply is made once, and a request of the usual shape is refused by its first bytes, before anything parses it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence

from fastapi.responses import JSONResponse
from starlette.types import Scope

from gateway.api.edge.access import Accesses
from gateway.api.edge.places import RequestPlaces, overloaded, spends
from gateway.core.log.events import random_hex

STATUS = 503
LINE = b"HTTP/1.1 503 Service Unavailable\r\n"
START = {"type": "http.response.start", "status": STATUS, "headers": []}
CODE = overloaded().code
MESSAGES = "/v1/messages"  # Anthropic's API: its errors have Anthropic's shape
OPENAI_VERSION = b"2020-10-01"  # the only one so far; clients compare it
USUAL = frozenset((b"/v1/chat/completions", b"/v1/completions", b"/v1/embeddings", b"/v1/responses"))
METHOD, VERSION, LENGTH = b"POST ", b" HTTP/1.1\r\n", b"\r\ncontent-length:"
UNUSUAL = (b"transfer-encoding", b"expect", b"upgrade", b"close")  # anywhere in a head: the parser reads it
ID_DIGITS = 16
Headers = Sequence[tuple[bytes, bytes]]


class Refusals:
    """Answers what cannot be served now. `refusal` is the reply; `leaving`: see `Edge`."""

    def __init__(
        self, refusal: JSONResponse, places: RequestPlaces, accesses: Accesses, leaving: Callable[[], bool]
    ) -> None:
        self._places, self._accesses, self._leaving = places, accesses, leaving
        self._fields = _lines([*refusal.raw_headers, (b"access-control-expose-headers", b"X-Request-ID")])
        self._stamps = _lines([(b"openai-processing-ms", b"0"), (b"openai-version", OPENAI_VERSION)])
        self._body = bytes(refusal.body)
        self._ids = itertools.count(1)
        self._id_prefix = f"req_{random_hex()[:ID_DIGITS]}".encode()
        self._server: Headers = ()  # headers of the server, and the replies that begin with them
        self._before = self._after = b""
        self._uncounted = 0

    def of_scope(self, scope: Scope, server: Headers) -> bytes | None:
        """The reply to a request that is refused; None: the application answers. `server`: the server's own headers."""
        path = scope["path"]
        if scope["method"] != "POST" or path.startswith(MESSAGES) or self._leaving():
            return None
        may_spend = spends(scope["method"], path)
        if not self._places.full(spends=may_spend):
            if may_spend:
                self._places.promise()
            return None
        request_id = self._next_id()
        scope.setdefault("state", {}).update(request_id=request_id.decode(), error_code=CODE)
        self._accesses.ended(scope, time.monotonic(), START)
        stamps = self._stamps if path.startswith("/v1/") else b""
        own = _lines([*server, (b"x-request-id", request_id)])
        return b"".join((LINE, own, stamps, self._fields, b"\r\n", self._body))

    def of_bytes(self, data: bytes, server: Headers, head_bytes_max: int) -> bytes | None:
        """The same for one whole request that nothing has parsed yet. None also where it is not of the usual shape, and
        where its line belongs in the log."""
        if not self._places.full(spends=True) or not is_usual(data, head_bytes_max) or self._leaving():
            return None
        if self._accesses.writes_errors():
            return None
        self._count()
        if server is not self._server:
            self._server = server
            self._before = LINE + _lines(server) + b"x-request-id: "
            self._after = b"\r\n" + self._stamps + self._fields + b"\r\n" + self._body
        return self._before + self._next_id() + self._after

    def _next_id(self) -> bytes:
        """A request's id: that of no other gateway and no other request."""
        return b"%b%016x" % (self._id_prefix, next(self._ids))

    def _count(self) -> None:
        """Count one refusal: all of a turn of the event loop together."""
        if not self._uncounted:
            asyncio.get_running_loop().call_soon(self._add_up)
        self._uncounted += 1

    def _add_up(self) -> None:
        number, self._uncounted = self._uncounted, 0
        self._accesses.refused(STATUS, CODE, number)


def is_usual(data: bytes, head_bytes_max: int) -> bool:
    """Whether these bytes are exactly one request that may spend money, with a body whose length its head says in the
    plainest way. Of anything that could be read in two ways: False."""
    end_of_path = data.find(b" ", len(METHOD))
    if not data.startswith(METHOD) or data[len(METHOD) : end_of_path] not in USUAL:
        return False
    end = data.find(b"\r\n\r\n", end_of_path)
    if not data.startswith(VERSION, end_of_path) or not 0 < end <= head_bytes_max:
        return False
    head = data[:end].lower()
    at = head.find(LENGTH)
    if at < 0 or head.count(b"content-length") != 1 or any(word in head for word in UNUSUAL):
        return False
    at += len(LENGTH)
    line_end = head.find(b"\r", at)
    length = head[at : line_end if line_end >= 0 else end].strip()
    return length.isdigit() and len(data) == end + 4 + int(length)


def _lines(headers: Headers) -> bytes:
    return b"".join(b"%b: %b\r\n" % pair for pair in headers)
