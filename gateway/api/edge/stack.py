"""The edge: request ids, limits, JSON bodies, and the only place that turns errors into replies in OpenAI's shape.

It is pure ASGI, because Starlette's BaseHTTPMiddleware would hide the client's disconnect.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.edge.places import RequestPlace, RequestPlaces, overloaded
from gateway.core.anthropic.reply import error_body, error_status
from gateway.core.log.events import random_hex
from gateway.core.log.redact import scrub
from gateway.core.openai.body import decode_json
from gateway.core.openai.reply import json_bytes
from gateway.errors import BadRequest, BatonError, BodyTooSlow, ClientLeft, NotFound, TooLarge

log = logging.getLogger("baton")
FREE_POSTS = ("/outcomes",)
BODILESS = ("GET", "HEAD", "OPTIONS", "DELETE")
PROBES = ("/livez", "/readyz", "/metrics")
CLIENT_CLOSED_REQUEST = 499  # the client left before its reply
MESSAGES = "/v1/messages"  # Anthropic's API: its errors have Anthropic's shape
OPENAI_VERSION = b"2020-10-01"  # the only one so far; clients compare it
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BodyPace:
    """How fast a body must come: after `grace_s`, `bytes_per_s_min` on the average; and all of it within `s_max`."""

    s_max: float = 120.0
    bytes_per_s_min: int = 1024
    grace_s: float = 5.0

    def until_s(self, received_bytes: int) -> float:
        """Seconds after its first read within which a body of which so much has come must go on."""
        return min(self.s_max, self.grace_s + received_bytes / self.bytes_per_s_min)


class Edge:
    """The outermost layer: gives every reply its `x-request-id`, and refuses at once what cannot be served now.

    It refuses a request before the body is read. A request that it lets in takes its place once its body is there
    (`read_json`), or at once where it has none. Probes are always served.
    """

    def __init__(
        self, app: ASGIApp, spending_max: int = 512, abandoned: Callable[[], int] = int, pace: BodyPace | None = None
    ) -> None:
        self._app = app
        self._places = RequestPlaces(spending_max, abandoned)
        self._pace = pace or BodyPace()
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

        if scope["path"] in PROBES:
            await self._app(scope, receive, stamped)
        else:
            await self._serve(scope, receive, stamped)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        spends = scope["method"] == "POST" and not scope["path"].endswith(FREE_POSTS)
        if self._places.full(spends=spends):
            refusal = reply(overloaded(), scope) if scope["path"].startswith(MESSAGES) else self._refusal
            await refusal(scope, receive, send)
            return
        place = RequestPlace(self._places, spends=spends)
        scope["state"] |= {"place": place, "pace": self._pace}
        try:
            if scope["method"] in BODILESS:
                await place.take()
            await self._app(scope, receive, send)
        finally:
            place.leave()


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


async def read_json(request: Request, bytes_max: int, key: str) -> Any:
    """The decoded body, which this key sends. On return the request has its place among those that are served.

    Raises TooLarge (413) at the first byte over `bytes_max`, BodyTooSlow (408), RateLimited for a key that sends too
    many bodies at the same time, Unavailable where no place is left, BadRequest for a body that is no JSON or holds too
    many values, ClientLeft.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > bytes_max:
        raise TooLarge(f"the body is over {bytes_max} bytes")
    place: RequestPlace = request.state.place
    with place.places.sending(key):
        data = await _body(request, bytes_max, request.state.pace)
    await place.take()
    return decode_json(data)


async def _body(request: Request, bytes_max: int, pace: BodyPace) -> bytearray:
    data = bytearray()
    began_s = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(pace.until_s(0)) as limit:
            async for piece in request.stream():
                data += piece
                if len(data) > bytes_max:
                    raise TooLarge(f"the body is over {bytes_max} bytes")
                limit.reschedule(began_s + pace.until_s(len(data)))
    except ClientDisconnect:
        raise ClientLeft from None
    except TimeoutError:
        raise BodyTooSlow(len(data), pace.bytes_per_s_min, pace.s_max) from None
    return data


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
