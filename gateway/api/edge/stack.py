"""The edge: request ids, limits, JSON bodies, and the only place that turns errors into replies in OpenAI's shape.

It is pure ASGI, because Starlette's BaseHTTPMiddleware would hide the client's disconnect.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import FormData, Headers
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.edge.access import Accesses, note_error
from gateway.api.edge.exchange import ClientMessages
from gateway.api.edge.headers import header_map
from gateway.api.edge.places import BODIES_BYTES_MAX, RequestPlace, RequestPlaces, overloaded, spends
from gateway.api.edge.refusals import MESSAGES, OPENAI_VERSION, Refusals
from gateway.core.anthropic.reply import VERSION_HEADER, error_body, error_status
from gateway.core.log.events import random_hex
from gateway.core.log.redact import scrub
from gateway.core.openai.body import decode_json
from gateway.core.openai.reply import json_bytes
from gateway.errors import BadRequest, BatonError, BodyTooSlow, ClientLeft, NotFound, TooLarge
from gateway.service.ports.counts import Count
from gateway.threads import beside

log = logging.getLogger("baton")
BODILESS = ("GET", "HEAD", "OPTIONS", "DELETE")
PROBES = ("/livez", "/readyz", "/metrics")
PREFIX = "/v1"  # of the public API
MODELS = "/v1/models"  # the same for a request that names a version of it
FORM_S_MAX = 600.0  # for a whole form, which may be a large file
FIELDS_MAX = 16  # of a form
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
        self,
        app: ASGIApp,
        spending_max: int = 512,
        abandoned: Callable[[], int] = int,
        pace: BodyPace | None = None,
        accesses: Accesses | None = None,
        leaving: Callable[[], bool] = bool,
        shared: Count | None = None,
        bodies_bytes_max: int = BODIES_BYTES_MAX,
    ) -> None:
        """`leaving`: whether the gateway is about to stop; then each reply closes its connection. `shared`,
        `bodies_bytes_max`: see `RequestPlaces`."""
        self._app = app
        self._accesses = accesses or Accesses()
        self._leaving = leaving
        self._places = RequestPlaces(spending_max, abandoned, shared, bodies_bytes_max)
        self._pace = pace or BodyPace()
        self._refusal = reply(overloaded())  # made once
        self.refusals = Refusals(self._refusal, self._places, self._accesses, leaving)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{random_hex()}"
        began_s = time.monotonic()
        scope.setdefault("state", {}).update(request_id=request_id, began_s=began_s)
        begun: list[Message] = []

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                begun.append(message)
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                if scope["path"].startswith("/v1/"):
                    took_ms = int((time.monotonic() - began_s) * 1000)
                    headers += [(b"openai-processing-ms", b"%d" % took_ms), (b"openai-version", OPENAI_VERSION)]
                if scope["path"].startswith(MESSAGES):
                    headers.append((b"request-id", request_id.encode()))
                if b"access-control-expose-headers" not in dict(headers):
                    headers.append((b"access-control-expose-headers", b"X-Request-ID"))
                if self._leaving():
                    headers.append((b"connection", b"close"))
                message["headers"] = headers
            await send(message)

        if scope["path"] in PROBES:
            await self._app(scope, receive, stamped)
            return
        try:
            await self._serve(scope, receive, stamped)
        finally:
            self._accesses.ended(scope, began_s, begun[0] if begun else None)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        may_spend = spends(scope["method"], scope["path"])
        if self._places.full(spends=may_spend):
            refusal = reply(overloaded(), scope) if scope["path"].startswith(MESSAGES) else self._refusal
            note_error(scope, overloaded())
            await refusal(scope, receive, send)
            return
        place = RequestPlace(self._places, spends=may_spend)
        scope["state"] |= {"place": place, "pace": self._pace}
        try:
            if scope["method"] in BODILESS:
                await place.take()
            await self._app(scope, receive, send)
        finally:
            place.leave()


@dataclass(frozen=True, slots=True)
class DirectRoute:
    """A route that is served without FastAPI's layers. FastAPI has it too, for its description."""

    path: str
    endpoint: Callable[[Request], Awaitable[Response]]


class Direct:
    """Serves POST on some paths itself and passes the rest on: a request through FastAPI takes twelve calls more."""

    def __init__(self, app: ASGIApp, *routes: DirectRoute) -> None:
        self._app = app
        self._routes = {route.path: route for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive)
        try:
            response = await route.endpoint(request)
        except BatonError as error:
            response = reply(error, scope)
        except Exception as error:  # boundary: a bug is a 500, and a traceback in the log
            await unexpected(request, error)(scope, receive, send)
            raise
        await response(scope, receive, send)


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
    if scope is not None:
        note_error(scope, error)
    if scope is not None and _is_anthropics(scope):
        body, status = error_body(error, scope.get("state", {}).get("request_id")), error_status(error)
        return Json(scrub(body), status_code=status, headers=error.reply_headers())
    return Json(scrub(error.body()), status_code=error.status, headers=error.reply_headers())


def _is_anthropics(scope: Scope) -> bool:
    """Whether a request is one of Anthropic's API."""
    path = scope["path"]
    return path.startswith(MESSAGES) or (path.startswith(MODELS) and VERSION_HEADER in Headers(scope=scope))


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
        place = PREFIX + request.url.path
        scope = {**request.scope, "path": place}
        known = any(route.matches(scope)[0] is Match.FULL for route in app.routes)
        hint = f": its path is {place}; let the client's base URL end in {PREFIX}" if known else ""
        lost = NotFound(f"Invalid URL ({request.method} {request.url.path}){hint}", code="unknown_url")
        return reply(lost, request.scope)

    async def unknown(request: Request, error: Exception) -> JSONResponse:
        return unexpected(request, error)

    app.add_exception_handler(BatonError, baton)
    app.add_exception_handler(HTTPException, framework)
    app.add_exception_handler(Exception, unknown)


def unexpected(request: Request, error: Exception) -> JSONResponse:
    """The reply to a request that met a bug, which is logged."""
    log.error("unhandled error in %s", request.state.request_id, exc_info=error)
    broken = BatonError("internal error; quote the x-request-id header when you report it")
    return reply(broken, request.scope)


async def read_json(request: Request, bytes_max: int, key: str) -> Any:
    """The decoded body, which this key sends. On return the request has its place among those that are served.

    Raises TooLarge (413) at the first byte over `bytes_max`, BodyTooSlow (408), RateLimited for a key that sends too
    many bodies at the same time, Unavailable where no place or memory is left, BadRequest for a body that is no JSON or
    holds too many values, ClientLeft.
    """
    declared = header_map(request.scope).get("content-length", "")
    if declared.isdigit() and int(declared) > bytes_max:
        raise TooLarge(f"the body is over {bytes_max} bytes")
    state, data = request.scope["state"], bytearray()
    place: RequestPlace = state["place"]
    place.places.begin_sending(key)
    try:
        receive = request.receive
        if isinstance(receive, ClientMessages) and (whole := receive.whole_body()) is not None:
            data = whole
            if len(data) > bytes_max:
                raise TooLarge(f"the body is over {bytes_max} bytes")
            place.hold(len(data))
        else:
            body = _Body(receive, bytes_max, state["pace"])
            while not body.is_over:
                data += await body.next()
                place.hold(len(data))
    finally:
        place.places.end_sending(key)
    await place.take()
    state["body_bytes"] = len(data)
    return await beside(len(data), decode_json, data)


async def parsed(request: Request, parse: Callable[[], T]) -> T:
    """What `parse` makes of the body, beside the event loop if the body is large."""
    return await beside(request.scope["state"].get("body_bytes", 0), parse)


class _Body:
    """The body of a request as it comes."""

    def __init__(self, receive: Receive, bytes_max: int, pace: BodyPace) -> None:
        self.is_over = False
        self._receive, self._bytes_max, self._pace = receive, bytes_max, pace
        self._received = 0
        self._began_s = asyncio.get_running_loop().time()

    async def next(self) -> bytes:
        """The next piece, which may be empty. Raises TooLarge, BodyTooSlow, ClientLeft."""
        pace = self._pace
        if isinstance(self._receive, ClientMessages) and self._receive.is_whole:
            message = await self._receive()
        else:
            message = await self._within(pace)
        if message["type"] == "http.disconnect":
            raise ClientLeft
        piece: bytes = message.get("body", b"")
        self.is_over = not message.get("more_body", False)
        self._received += len(piece)
        if self._received > self._bytes_max:
            raise TooLarge(f"the body is over {self._bytes_max} bytes")
        return piece

    async def _within(self, pace: BodyPace) -> Message:
        try:
            async with asyncio.timeout_at(self._began_s + pace.until_s(self._received)):
                return await self._receive()
        except TimeoutError:
            raise BodyTooSlow(self._received, pace.bytes_per_s_min, pace.s_max) from None


async def _pieces(request: Request, bytes_max: int, pace: BodyPace) -> AsyncGenerator[bytes, None]:
    """Yield the body as it comes. Raises as `_Body.next`."""
    body = _Body(request.receive, bytes_max, pace)
    while not body.is_over:
        if piece := await body.next():
            yield piece


async def read_form(request: Request, bytes_max: int, key: str) -> FormData:
    """The fields of a multipart form with at most one file, which lies on disk; close it. Raises as `read_json`, and
    BadRequest for a body that is no such form."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > bytes_max:
        raise TooLarge(f"the body is over {bytes_max} bytes")
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise BadRequest("send the file as multipart/form-data", code="invalid_content_type")
    place: RequestPlace = request.state.place
    pace = replace(request.state.pace, s_max=max(FORM_S_MAX, request.state.pace.s_max))
    with place.places.sending(key):
        parser = MultiPartParser(request.headers, _pieces(request, bytes_max, pace), max_files=1, max_fields=FIELDS_MAX)
        try:
            form = await parser.parse()
        except MultiPartException as error:
            raise BadRequest(f"The form cannot be read: {error.message}", code="invalid_form") from None
    await place.take()
    return form


async def gone(receive: Receive) -> None:
    """Return when the client has left. Call it only after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def never_gone() -> Message:
    """An ASGI `receive` of a client that never leaves."""
    await asyncio.Event().wait()
    raise AssertionError("this event is never set")


async def unless_gone(receive: Receive, work: Awaitable[T], leave: Callable[[], None]) -> T | None:
    """The result of `work`; None where the client left first: then `leave` is called and `work` is cancelled."""
    working = asyncio.ensure_future(work)
    leaving: asyncio.Task[None] | None = None
    if isinstance(receive, ClientMessages):
        either = receive.departure()
    else:
        leaving, either = asyncio.ensure_future(gone(receive)), asyncio.get_running_loop().create_future()

    def wake(_: object) -> None:
        if not either.done():
            either.set_result(None)

    working.add_done_callback(wake)
    if leaving is not None:
        leaving.add_done_callback(wake)
    try:
        await either
        if working.done():
            return working.result()
        leave()
        return None
    finally:
        if leaving is not None:
            leaving.cancel()  # ends by itself, in the next turn of the loop
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
