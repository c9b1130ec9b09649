"""The OpenAI-compatible routes: chat completions, models, and the two that go to one worker without planning: text
completions and embeddings.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from gateway.api.edge.access import CLIENT_CLOSED_REQUEST
from gateway.api.edge.bodies import data_key, number, query_number
from gateway.api.edge.headers import OWN_HEADERS, header_map, headers_of, own_headers, take_options
from gateway.api.edge.idempotency import Idempotency
from gateway.api.edge.spec import header_parameters
from gateway.api.edge.stack import Json, Router, parsed, read_json, unless_gone
from gateway.core.access.depth import DEPTH_HEADER, verify
from gateway.core.access.idempotency import IDEMPOTENCY_HEADER
from gateway.core.access.keys import Principal
from gateway.core.anthropic.reply import KEY_HEADER, VERSION_HEADER, model_info, page_of
from gateway.core.loop.caps import CAP_HEADERS, caps_from_headers
from gateway.core.loop.prompt import QUALITY_MAX
from gateway.core.money.sessions import SESSION_HEADERS, session_from_headers
from gateway.core.openai.chat import MEDIA_BYTES_MAX, ChatRequest, parse_request
from gateway.core.openai.structured import chat_reply
from gateway.core.openai.texts import (
    parse_completion,
    parse_embedding,
)
from gateway.errors import BadRequest, ClientLeft, NotFound, Unavailable
from gateway.service.request.admit import RequestContext
from gateway.service.request.auth import Authenticator
from gateway.service.request.catalog import Catalog
from gateway.service.request.complete import Completer
from gateway.service.request.frames import ChatFrames, Frames, TextFrames, events
from gateway.service.request.running import Progress, Running

ROUNDS_MAX = 16
ANTHROPIC_PAGE, ANTHROPIC_PAGE_MAX = 20, 1000  # models of a page, as Anthropic has them
ON = ("on", "1", "true")
Serve = Callable[[Request, Principal, Any], Awaitable[Response]]  # of a body that was read
TEXT_HEADERS = ("x-baton-pool", "x-baton-keepalive", *SESSION_HEADERS)


@dataclass(frozen=True, slots=True)
class OpenAIApi:
    """What the routes need."""

    completer: Completer
    catalog: Catalog
    authenticator: Authenticator
    depth_secret: bytes
    body_bytes_max: int
    messages_max: int
    keepalive_s: float
    strict_fields: bool
    models_created_s: int
    idempotency: Idempotency
    media_bytes_max: int = MEDIA_BYTES_MAX
    progress: Progress = "off"  # of requests that do not say

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/v1")
        router.add("POST", "/chat/completions", self.chat, openapi_extra=header_parameters(*OWN_HEADERS, *CAP_HEADERS))
        router.add("GET", "/models", self.models)
        router.add("GET", "/models/{model:path}", self.model)
        return router

    async def chat(self, request: Request) -> Response:
        """Plan the request over the key's workers and answer it; with `stream`, as the reply is produced."""
        return await self.read(request, await self._who(request), self.serve)

    async def read(self, request: Request, principal: Principal, serve: Serve) -> Response:
        """Count a request against the limits of its key, read its body, and serve it once for its Idempotency-Key."""
        async with self.completer.entered(principal) as entry:
            try:
                body = await read_json(request, self.body_bytes_max, principal.public_id)
            except (BadRequest, Unavailable) as error:
                entry.counts = isinstance(error, ClientLeft)
                raise
            entry.counts = False  # until it is known what it asks for
            request.state.entry = entry
            if take_options(request, body):
                request = Request(request.scope, request.receive)  # with the headers that the options became
            return await self.idempotency.answer(request, principal, body, lambda r: serve(r, principal, body))

    async def serve(self, request: Request, principal: Principal, body: Any) -> Response:
        """Serve a chat request whose body was read."""
        parse = partial(
            parse_request,
            body,
            messages_max=self.messages_max,
            strict=self.strict_fields,
            media_bytes_max=self.media_bytes_max,
            vendor=self.catalog.vendor_params,
        )
        chat = await parsed(request, parse)
        running = await self.begin(request, principal, chat)
        if chat.stream:
            return await self.streamed(request, running, ChatFrames(running))
        return await self.complete(request, running, partial(chat_reply, chat.params))

    async def begin(
        self,
        request: Request,
        principal: Principal,
        chat: ChatRequest,
        response: Mapping[str, Any] | None = None,
        prefix: str | None = None,
    ) -> Running:
        """Admit a chat request under the headers it came with, and start it. `response`, `prefix`: see
        `RequestContext`."""
        headers, state = header_map(request.scope), request.scope["state"]
        own = own_headers(headers)
        context = RequestContext(
            principal=principal,
            chat=chat,
            caps=caps_from_headers(own) if own else {},
            pool=own.get("x-baton-pool"),
            rounds=_whole_number(own, "x-baton-rounds", 1, ROUNDS_MAX),
            quality=_whole_number(own, "x-baton-quality", 0, QUALITY_MAX),
            depth=_depth(own.get(DEPTH_HEADER), self.depth_secret),
            sticky=_wanted(own, "x-baton-sticky", default=True),
            response=response,
            prefix=prefix,
            entry=state.get("entry"),
            scopes=state.get("scopes", ()),
            request_id=state.get("request_id"),
            traceparent=headers.get("traceparent"),
            arrived_s=state.get("began_s"),
            progress=_progress(own, self.progress),
            session=session_from_headers(own) if own else None,
            kept=state.get("kept"),
            body_bytes=state.get("body_bytes", 0),
        )
        return await self.completer.start(context)

    async def complete(self, request: Request, running: Running, shape: Callable[[dict[str, Any]], Any]) -> Response:
        """The complete reply, which `shape` turns into the shape of its API."""
        await unless_gone(request.receive, running.end(), running.cancel)
        if not running.finished.is_set():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        if running.error is not None:
            running.error.headers |= running.headers()
            raise running.error
        shaped = shape(await running.result())
        if "content_type" in shaped:  # a reply in bytes or text (core/openai/tasks/replies.py)
            return Response(shaped["content"], headers=headers_of(running), media_type=shaped["content_type"])
        return Json(shaped, headers=headers_of(running))

    async def streamed(self, request: Request, running: Running, frames: Frames) -> Response:
        """The reply as it is produced, in the frames of its API."""
        keepalive_s = self.keepalive_s if _wanted(request.headers, "x-baton-keepalive", default=True) else 0
        stream = cast(Any, events(running, keepalive_s, frames))
        first = await unless_gone(request.receive, anext(stream), running.cancel)
        if first is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        if running.error is not None and not frames.begun:
            running.error.headers |= running.headers()
            raise running.error  # nothing has been sent yet: a plain error with its own status
        return StreamedReply(first, stream, running)

    async def models(self, request: Request) -> dict[str, Any]:
        """Every name this key may send as `model`; in Anthropic's shape for a request with `anthropic-version`."""
        principal, pool = await self._reader(request), request.headers.get("x-baton-pool")
        names = self.catalog.models(principal, pool)
        if VERSION_HEADER not in request.headers:
            return {"object": "list", "data": [self._model(name) for name in names]}
        query = request.query_params
        limit = query_number(request, "limit", ANTHROPIC_PAGE, 1, ANTHROPIC_PAGE_MAX)
        page, has_more = page_of(names, limit, after=query.get("after_id"), before=query.get("before_id"))
        ends = {"first_id": page[0], "last_id": page[-1]} if page else {"first_id": None, "last_id": None}
        models = [self._model_info(name, principal, pool) for name in page]
        return {"data": models, "has_more": has_more, **ends}

    async def model(self, request: Request, model: str) -> dict[str, Any]:
        """One of these models, with the context, the prices and the abilities of the workers behind it."""
        principal, pool = await self._reader(request), request.headers.get("x-baton-pool")
        if model not in self.catalog.models(principal, pool):
            raise NotFound(f"The model `{model[:128]}` does not exist", param="model", code="model_not_found")
        if VERSION_HEADER in request.headers:
            return self._model_info(model, principal, pool)
        return self._model(model) | {"baton": self.catalog.describe(principal, model, pool)}

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.models_created_s, "owned_by": "baton"}

    def _model_info(self, name: str, principal: Principal, pool: str | None) -> dict[str, Any]:
        return model_info(name, self.models_created_s, self.catalog.describe(principal, name, pool))

    async def _who(self, request: Request) -> Principal:
        return await data_key(request, self.authenticator)

    async def _reader(self, request: Request) -> Principal:
        """The key of a request that either API has; Anthropic's SDKs send it in `x-api-key`."""
        key = request.headers.get(KEY_HEADER) if VERSION_HEADER in request.headers else None
        return await data_key(request, self.authenticator, None if key is None else f"Bearer {key}")


class StreamedReply(Response):
    """Sends frames as they come. A client that leaves cancels the work of its request at once."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, frames: AsyncIterator[bytes], running: Running) -> None:
        super().__init__(headers={**headers_of(running), "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._frames = frames
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await unless_gone(receive, self._send(send), self._running.cancel)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async with aclosing(cast(Any, self._frames)) as frames:
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _wanted(headers: Mapping[str, str], header: str, *, default: bool) -> bool:
    """Whether a header switches something on."""
    text = headers.get(header, "").lower()
    return text not in ("off", "0", "false") if default else text in ON


def _progress(headers: Mapping[str, str], default: Progress) -> Progress:
    text = headers.get("x-baton-progress", "").lower()
    if not text:
        return default
    return "reasoning" if text == "reasoning" else "on" if text in ON else "off"


def _depth(header: str | None, secret: bytes) -> int:
    """0 for a client; for another gateway, one more than the depth that its signature proves."""
    depth = None if header is None else verify(header, secret)
    return 0 if depth is None else depth + 1


def _whole_number(headers: Mapping[str, str], header: str, least: int, most: int) -> int | None:
    text = headers.get(header)
    return None if text is None else number(text, header, least, most)


@dataclass(frozen=True, slots=True)
class TextsApi:
    """What the routes need. `chats` admits, serves and streams."""

    chats: OpenAIApi

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/v1")
        headers = header_parameters(*TEXT_HEADERS, *CAP_HEADERS, IDEMPOTENCY_HEADER)
        router.add("POST", "/completions", self.completions, openapi_extra=headers)
        router.add("POST", "/embeddings", self.embeddings, openapi_extra=headers)
        return router

    async def completions(self, request: Request) -> Response:
        """A text completion by the worker that `model` names; with `stream`, as it is produced."""
        return await self._read(request, parse_completion)

    async def embeddings(self, request: Request) -> Response:
        """Embeddings by the worker that `model` names, whose `task` must be embeddings."""
        return await self._read(request, parse_embedding)

    def serving(self, parse: Callable[..., ChatRequest]) -> Serve:
        """The function that serves a request whose body was read, and that `parse` understands."""

        async def serve(request: Request, principal: Principal, body: Any) -> Response:
            chat = await parsed(request, partial(parse, body, strict=self.chats.strict_fields))
            return await self._served(request, principal, chat)

        return serve

    async def _read(self, request: Request, parse: Callable[..., ChatRequest]) -> Response:
        principal = await data_key(request, self.chats.authenticator)
        return await self.chats.read(request, principal, self.serving(parse))

    async def _served(self, request: Request, principal: Principal, chat: ChatRequest) -> Response:
        running = await self.chats.begin(request, principal, chat)
        if chat.stream:
            return await self.chats.streamed(request, running, TextFrames(running))
        return await self.chats.complete(request, running, lambda body: body)
