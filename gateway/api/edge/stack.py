"""The edge: request ids, limits, JSON bodies, and the only place that turns errors into replies in OpenAI's shape.

It is pure ASGI, because Starlette's BaseHTTPMiddleware would hide the client's disconnect.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.edge.pressure import WorkSlots
from gateway.core.log.events import random_hex
from gateway.core.log.redact import scrub
from gateway.core.openai.body import decode_json
from gateway.core.openai.reply import json_bytes
from gateway.errors import BadRequest, BatonError, NotFound, TooLarge, Unavailable

log = logging.getLogger("baton")
RESERVED = 0.2  # share of the open requests that is kept for those that spend nothing
FREE_POSTS = ("/outcomes",)
CLIENT_CLOSED_REQUEST = 499  # the client left before its reply
OPENAI_VERSION = b"2020-10-01"  # the only one so far; clients compare it
T = TypeVar("T")


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
                if not any(name == b"access-control-expose-headers" for name, _ in headers):
                    headers.append((b"access-control-expose-headers", b"X-Request-ID"))
                message["headers"] = headers
            await send(message)

        spends = scope["method"] == "POST" and not scope["path"].endswith(FREE_POSTS)
        full = spends and self._spending + self._abandoned() >= self._spending_max
        if full or self._open >= self._open_max:
            await self._refusal(scope, receive, stamped)
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


def reply(error: BatonError) -> JSONResponse:
    """An error in OpenAI's shape. Secrets are removed: it may quote a key that the client put in the wrong place, and
    clients log the bodies of errors."""
    return Json(scrub(error.body()), status_code=error.status, headers=error.reply_headers())


def install(app: FastAPI) -> None:
    """Register the handlers of Baton's errors, of the framework's, and of all others."""

    async def baton(request: Request, error: Exception) -> JSONResponse:
        return reply(error if isinstance(error, BatonError) else BatonError("internal error"))

    async def framework(request: Request, error: Exception) -> JSONResponse:
        status = error.status_code if isinstance(error, HTTPException) else 500
        if status == 405:
            wrong = BadRequest(f"{request.method} is not allowed on {request.url.path}", code="method_not_allowed")
            wrong.status = 405
            return reply(wrong)
        return reply(NotFound(f"Invalid URL ({request.method} {request.url.path})", code="unknown_url"))

    async def unknown(request: Request, error: Exception) -> JSONResponse:
        log.error("unhandled error in %s", request.state.request_id, exc_info=error)
        return reply(BatonError("internal error; quote the x-request-id header when you report it"))

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
