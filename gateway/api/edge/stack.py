"""The edge: request ids, limits, JSON bodies, and the only place that turns errors into replies in OpenAI's shape.

It is pure ASGI, because Starlette's BaseHTTPMiddleware would hide the client's disconnect.

As many requests run at the same time as this process can serve now; the others wait in order. Requests that wait for a
worker cost no processor time, so hundreds of them are no load; a few dozen that all need the processor are one. The
turn of the event loop tells the two apart: in one turn everything that is ready runs once, so a turn is the least that
anything here waits, a call to Redis and its deadline included. While turns are longer than `TURN_S`, fewer requests run
at the same time; once turns are shorter, more do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.core.anthropic.reply import error_body, error_status
from gateway.core.log.events import random_hex
from gateway.core.log.redact import scrub
from gateway.core.openai.body import decode_json
from gateway.core.openai.reply import json_bytes
from gateway.errors import BadRequest, BatonError, NotFound, TooLarge, Unavailable

log = logging.getLogger("baton")
RESERVED = 0.2  # share of the open requests that is kept for those that spend nothing
FREE_POSTS = ("/outcomes",)
CLIENT_CLOSED_REQUEST = 499  # the client left before its reply
MESSAGES = "/v1/messages"  # Anthropic's API: its errors have Anthropic's shape
OPENAI_VERSION = b"2020-10-01"  # the only one so far; clients compare it
T = TypeVar("T")
TURN_EVERY_S = 0.02  # interval of measurements, while any request runs
TURN_S = 0.03
TURN_SMOOTHING = 0.3  # weight of the newest turn, so that one long turn changes nothing
RUNNING_MIN = 32  # requests that always may run: another process of this machine may make turns long
CUT, GROWTH = 0.8, 1.15  # of one measurement: from RUNNING_MIN to 512 in less than half a second
WAIT_S_MAX = 3.0  # then a request runs anyway: the others may be streams, which take minutes and no processor


class Edge:
    """The outermost layer: gives every reply its `x-request-id`, and refuses at once what cannot be served now.

    It accepts or refuses a request before the body is read. `spending_max` bounds the requests that may spend money,
    including those whose clients have left while their work goes on (`abandoned` counts them). `WorkSlots` says how
    many of the accepted ones run at the same time. The share RESERVED comes on top, for all other requests, so that
    outcomes, health and rollouts work under any load.
    """

    def __init__(self, app: ASGIApp, spending_max: int = 512, abandoned: Callable[[], int] = int) -> None:
        self._app = app
        self._spending_max = spending_max
        self._abandoned = abandoned
        self._slots = WorkSlots(spending_max)
        self._open_max = round(spending_max / (1 - RESERVED))
        self._open = self._spending = 0
        self._refusal = reply(overloaded())  # made once: under load it is the most frequent reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{random_hex()}"
        began_s = time.monotonic()
        scope.setdefault("state", {})["request_id"] = request_id

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                if scope["path"].startswith("/v1/"):
                    took_ms = int((time.monotonic() - began_s) * 1000)
                    headers += [(b"openai-processing-ms", b"%d" % took_ms), (b"openai-version", OPENAI_VERSION)]
                if scope["path"].startswith(MESSAGES):
                    headers.append((b"request-id", request_id.encode()))
                if not any(name == b"access-control-expose-headers" for name, _ in headers):
                    headers.append((b"access-control-expose-headers", b"X-Request-ID"))
                message["headers"] = headers
            await send(message)

        spends = scope["method"] == "POST" and not scope["path"].endswith(FREE_POSTS)
        full = spends and self._spending + self._abandoned() >= self._spending_max
        if full or self._open >= self._open_max:
            refusal = reply(overloaded(), scope) if scope["path"].startswith(MESSAGES) else self._refusal
            await refusal(scope, receive, stamped)
            return
        self._open += 1
        self._spending += spends
        try:
            if spends:
                await self._in_turn(scope, receive, stamped)
            else:
                await self._app(scope, receive, stamped)
        finally:
            self._open -= 1
            self._spending -= spends

    async def _in_turn(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for a free slot, then run the application."""
        await self._slots.take()
        try:
            await self._app(scope, receive, send)
        finally:
            self._slots.give()


def overloaded() -> Unavailable:
    """The error of a request that cannot be served now."""
    return Unavailable("too many requests are being served", code="overloaded", headers={"retry-after": "1"})


class Router(APIRouter):
    """Routes whose endpoints build their own replies, so that FastAPI looks for no model of them."""

    def add(self, method: str, path: str, endpoint: Callable[..., Any], **described: Any) -> None:
        """One route; `described` goes to OpenAPI."""
        self.add_api_route(path, endpoint, methods=[method], response_model=None, **described)


class Json(JSONResponse):
    """JSON that may hold anything a worker sent, such as NaN or half of a surrogate pair."""

    def render(self, content: Any) -> bytes:
        """The body as bytes."""
        return json_bytes(content)


def reply(error: BatonError, scope: Scope | None = None) -> JSONResponse:
    """An error in OpenAI's shape, or in Anthropic's where the request is one of its API. Secrets are removed: it may
    quote a key that the client put in the wrong place, and clients log the bodies of errors."""
    if scope is not None and scope["path"].startswith(MESSAGES):
        body, status = error_body(error, scope.get("state", {}).get("request_id")), error_status(error)
        return Json(scrub(body), status_code=status, headers=error.reply_headers())
    return Json(scrub(error.body()), status_code=error.status, headers=error.reply_headers())


def install(app: FastAPI) -> None:
    """Register the handlers of Baton's errors, of the framework's, and of all others."""

    async def baton(request: Request, error: Exception) -> JSONResponse:
        return reply(error if isinstance(error, BatonError) else BatonError("internal error"), request.scope)

    async def framework(request: Request, error: Exception) -> JSONResponse:
        status = error.status_code if isinstance(error, HTTPException) else 500
        if status == 405:
            wrong = BadRequest(f"{request.method} is not allowed on {request.url.path}", code="method_not_allowed")
            wrong.status = 405
            return reply(wrong, request.scope)
        lost = NotFound(f"Invalid URL ({request.method} {request.url.path})", code="unknown_url")
        return reply(lost, request.scope)

    async def unknown(request: Request, error: Exception) -> JSONResponse:
        log.error("unhandled error in %s", request.state.request_id, exc_info=error)
        broken = BatonError("internal error; quote the x-request-id header when you report it")
        return reply(broken, request.scope)

    app.add_exception_handler(BatonError, baton)
    app.add_exception_handler(HTTPException, framework)
    app.add_exception_handler(Exception, unknown)


async def read_json(request: Request, bytes_max: int) -> Any:
    """The decoded body. Raises TooLarge (413) at the first byte over `bytes_max`, BadRequest for a body that is no JSON
    or holds too many values."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > bytes_max:
        raise TooLarge(f"the body is over {bytes_max} bytes")
    data = bytearray()
    try:
        async for piece in request.stream():
            data += piece
            if len(data) > bytes_max:
                raise TooLarge(f"the body is over {bytes_max} bytes")
    except ClientDisconnect:
        raise BadRequest("the client left before it had sent the body", code="invalid_json") from None
    return decode_json(data)


async def gone(receive: Receive) -> None:
    """Return when the client has left. Call it only after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[T], leave: Callable[[], None]) -> T | None:
    """The result of `work`; None where the client left first: then `leave` is called and `work` is cancelled."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        leave()
        return None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class WorkSlots:
    """At most `most` requests run at the same time, and as few as RUNNING_MIN while turns are long. After a rest the
    limit is RUNNING_MIN, so that a burst is measured before all of it runs."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.limit = min(RUNNING_MIN, most)
        self.turn_s = 0.0  # smoothed
        self.running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._watching = False

    async def take(self) -> None:
        """Wait for a free slot, first come first served, at most WAIT_S_MAX."""
        if self.running < self.limit and not self._waiting:
            self.running += 1
        else:
            await self._wait()
        self._watch()

    def give(self) -> None:
        """Release the slot that take() returned."""
        self.running -= 1
        self._admit()

    def measure(self, turn_s: float) -> None:
        """Adapt the limit to one measured turn."""
        self.turn_s += TURN_SMOOTHING * (turn_s - self.turn_s)
        if self.turn_s <= TURN_S:
            self.limit = min(self._most, max(self.limit + 1, int(self.limit * GROWTH)))
            self._admit()
        elif self.running <= self.limit:  # else the last cut has had no effect yet
            self.limit = min(self._most, max(RUNNING_MIN, int(self.running * CUT)))

    async def _wait(self) -> None:
        """Wait for a slot. Whoever frees one for us counts it as running."""
        slot = asyncio.get_running_loop().create_future()
        self._waiting.append(slot)
        try:
            await asyncio.wait((slot,), timeout=WAIT_S_MAX)
        except asyncio.CancelledError:
            if not slot.cancel():  # it was freed for us at this moment
                self.give()
            raise
        if slot.cancel():
            self.running += 1

    def _admit(self) -> None:
        while self._waiting and self.running < self.limit:
            slot = self._waiting.popleft()
            if not slot.done():
                self.running += 1
                slot.set_result(None)

    def _watch(self) -> None:
        """Measure turns from now on, as long as any request runs."""
        if self._watching:
            return
        self._watching = True
        self.limit, self.turn_s = max(self.running, min(RUNNING_MIN, self._most)), 0.0
        loop = asyncio.get_running_loop()

        def again() -> None:
            loop.call_later(TURN_EVERY_S, loop.call_soon, begin)

        def begin() -> None:
            loop.call_soon(end, time.monotonic())

        def end(began_s: float) -> None:
            self.measure(time.monotonic() - began_s)
            self._watching = self.running > 0
            if self._watching:
                again()

        again()
