"""The edge: request ids, body limits, JSON, and the one place that turns errors into OpenAI-shaped replies.

Pure ASGI: Starlette's BaseHTTPMiddleware would hide the client's disconnect.
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

from gateway.api.edge.pressure import Places
from gateway.core.log.ids import random_hex
from gateway.core.log.redact import scrub
from gateway.core.openai.body import decode_json
from gateway.core.openai.reply import json_bytes
from gateway.errors import BadRequest, BatonError, NotFound, TooLarge, Unavailable

log = logging.getLogger("baton")
RESERVED = 0.2  # of the requests being served: for those that spend nothing
FREE_POSTS = ("/outcomes",)
CLIENT_CLOSED_REQUEST = 499  # the status of a reply that nobody receives
OPENAI_VERSION = b"2020-10-01"  # the only one there has been; clients compare it, nobody reads it
T = TypeVar("T")


class Edge:
    """Outermost layer: gives every reply its `x-request-id`, and refuses at once what cannot be served now.

    A request is taken, or told when to come back, before its body is read. `spending_max` bounds the requests that may
    spend money, those included whose clients have left while their work goes on (`abandoned` counts them); of those
    taken, `Places` says how many are worked on at once. On top of them a share of `RESERVED` is kept for all others, so
    that outcomes, health and rollouts go on under any load.
    """

    def __init__(self, app: ASGIApp, spending_max: int = 512, abandoned: Callable[[], int] = int) -> None:
        self._app = app
        self._spending_max = spending_max
        self._abandoned = abandoned
        self._places = Places(spending_max)
        self._open_max = round(spending_max / (1 - RESERVED))
        self._open = self._spending = 0
        self._refusal = reply(overloaded())  # made once: under load it is what is said most

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
        """Once there is a place for it."""
        await self._places.take()
        try:
            await self._app(scope, receive, send)
        finally:
            self._places.give()


def overloaded() -> Unavailable:
    """The refusal of what could only wait."""
    return Unavailable("too many requests are being served", code="overloaded", headers={"retry-after": "1"})


class Router(APIRouter):
    """Routes whose endpoints build their own replies, so that FastAPI looks for no model of them."""

    def add(self, method: str, path: str, endpoint: Callable[..., Any], **described: Any) -> None:
        """One route; `described` goes to OpenAPI."""
        self.add_api_route(path, endpoint, methods=[method], response_model=None, **described)


class Json(JSONResponse):
    """JSON of whatever a worker sent: numbers and halves of characters that have no encoding do not stop it."""

    def render(self, content: Any) -> bytes:
        """The bytes."""
        return json_bytes(content)


def reply(error: BatonError) -> JSONResponse:
    """An error as OpenAI's clients expect it. What it quotes of the request may be a key in the wrong place: bodies of
    errors end in other people's logs."""
    return Json(scrub(error.body()), status_code=error.status, headers=error.reply_headers())


def install(app: FastAPI) -> None:
    """Register the error handlers: ours, the framework's, and the last resort."""

    async def known(request: Request, error: Exception) -> JSONResponse:
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

    app.add_exception_handler(BatonError, known)
    app.add_exception_handler(HTTPException, framework)
    app.add_exception_handler(Exception, unknown)


async def read_json(request: Request, bytes_max: int) -> Any:
    """The decoded body. Raises TooLarge (413) without reading further, BadRequest where it is not JSON, or too much."""
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
        raise BadRequest("the client left before the body was whole", code="invalid_json") from None
    return decode_json(data)


async def gone(receive: Receive) -> None:
    """Returns when the client has left. Only for use once the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[T], leave: Callable[[], None]) -> T | None:
    """The result of `work`, or None when the client left first; then `leave` was called and `work` is abandoned."""
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
