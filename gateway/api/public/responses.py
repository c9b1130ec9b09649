"""The routes of OpenAI's Responses API: make a response, read it, list its input, delete it; and those in the
background, which survive their gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from gateway.api.edge.bodies import data_key, query_number
from gateway.api.edge.headers import OWN_HEADERS, options_in
from gateway.api.edge.spec import header_parameters
from gateway.api.edge.stack import Json, Router, never_gone, read_json
from gateway.api.public.chat import OpenAIApi
from gateway.core.access.idempotency import IDEMPOTENCY_HEADER
from gateway.core.access.keys import Principal
from gateway.core.loop.caps import CAP_HEADERS, caps_from_headers
from gateway.core.openai.responses.reply import finished_response
from gateway.core.openai.responses.request import INCLUDABLE
from gateway.errors import BadRequest, NotFound, Unavailable
from gateway.service.loop.resume.checkpoints import Checkpoints
from gateway.service.ports.background import BackgroundRequest
from gateway.service.request.counting import InputTokens
from gateway.service.request.frames import ResponseFrames, event_frame
from gateway.service.request.responses import PAGE_ITEMS, PAGE_ITEMS_MAX, PreparedResponse, Responses
from gateway.service.request.running import Running

LOOK_S = 0.5  # between two looks at a response in the background that a client waits for
SEQUENCE_MAX = 2**31


@dataclass(frozen=True, slots=True)
class ResponsesApi:
    """What the routes need. `chats` serves the chat request behind a response. `changed` is called after a response in
    the background was made or cancelled."""

    chats: OpenAIApi
    responses: Responses
    tokens: InputTokens
    changed: Callable[[], None] = lambda: None

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/v1/responses")
        router.add(
            "POST", "", self.create, openapi_extra=header_parameters(*OWN_HEADERS, IDEMPOTENCY_HEADER, *CAP_HEADERS)
        )
        for path, endpoint, method in (
            ("/compact", self.compact, "POST"),
            ("/input_tokens", self.count, "POST"),
            ("/{response_id}", self.get, "GET"),
            ("/{response_id}", self.delete, "DELETE"),
            ("/{response_id}/input_items", self.input_items, "GET"),
            ("/{response_id}/cancel", self.cancel, "POST"),
        ):
            router.add(method, path, endpoint)
        return router

    async def create(self, request: Request) -> Response:
        """Make a response: planned over the key's workers as a chat request is, and streamed with `stream`."""
        return await self.chats.read(request, await self._who(request), self.serve)

    async def serve(self, request: Request, principal: Principal, body: Any) -> Response:
        """Serve a request whose body was read."""
        body_bytes = request.scope["state"].get("body_bytes", 0)
        vendor = self.chats.catalog.vendor_params
        prepared = await self.responses.prepare(principal, body, vendor, body_bytes=body_bytes)
        try:
            if prepared.request.body.get("background"):
                return await self._queued(request, principal, prepared, body)
            return await self._served(request, principal, prepared)
        except BaseException as error:  # boundary: whatever stopped it, a turn without a reply adds nothing
            await self.responses.leave(prepared)
            if isinstance(error, BadRequest):  # it names the chat request, which the client did not write
                raise prepared.names.reword(error) from None
            raise

    async def _served(self, request: Request, principal: Principal, prepared: PreparedResponse) -> Response:
        running = await self.chats.begin(request, principal, prepared.chat, prepared.to_log)
        head = prepared.head(running.record)
        if prepared.chat.stream:
            return await self.chats.streamed(request, running, ResponseFrames(running, head, prepared.names))

        def shape(completion: dict[str, Any]) -> dict[str, Any]:
            return finished_response(head, completion, running.record.finished_us // 1_000_000)

        return await self.chats.complete(request, running, shape)

    async def _queued(
        self, request: Request, principal: Principal, prepared: PreparedResponse, body: Mapping[str, Any]
    ) -> Response:
        """Store a request for the background; its reply is the response as it is then, or its events as they come."""
        if getattr(request.state, "scopes", ()):
            raise BadRequest("`background` has no place in a batch", param="background", code="unsupported_parameter")
        options = options_in(request.headers)
        caps_from_headers(options)
        self.chats.catalog.resolve(principal, prepared.chat.model, options.get("x-baton-pool"))
        body_shown = await self.responses.queue(principal, prepared, body, options)
        if (entry := getattr(request.state, "entry", None)) is not None:
            entry.counts = True
        self.changed()
        return self._events(principal, body_shown["id"], -1) if prepared.chat.stream else Json(body_shown)

    async def begin(self, who: Principal, request: BackgroundRequest, checkpoints: Checkpoints) -> Running:
        """The port RequestServer: start a request in the background, or go on with it."""
        headers = [(name.encode(), value.encode()) for name, value in request.options.items()]
        scope = {"type": "http", "method": "POST", "path": "/v1/responses", "query_string": b"", "headers": headers}
        inner = Request({**scope, "state": {"kept": checkpoints}}, never_gone)
        vendor = self.chats.catalog.vendor_params
        prepared = await self.responses.prepare(who, dict(request.body), vendor, turn=request.id)
        return await self.chats.begin(inner, who, prepared.chat, prepared.to_log)

    async def get(self, request: Request, response_id: str) -> Response:
        """A stored response of this key. With `stream`, the events of one that was made in the background."""
        principal, query = await self._who(request), request.query_params
        include = query.getlist("include") + query.getlist("include[]")
        if [name for name in include if name not in INCLUDABLE]:
            raise BadRequest(f"`include` must be of: {', '.join(INCLUDABLE)}", param="include", code="invalid_value")
        if query.get("stream") != "true":
            if "starting_after" in query:
                raise BadRequest("`starting_after` needs `stream`", param="starting_after")
            return Json(await self.responses.get(principal, response_id))
        after = query_number(request, "starting_after", 0, 0, SEQUENCE_MAX) if query.get("starting_after") else -1
        await self.responses.events(principal, response_id)  # an error has its own status
        return self._events(principal, response_id, after)

    def _events(self, principal: Principal, response_id: str, after: int) -> Response:
        """The events of a response in the background behind that sequence number. They come from what is stored, so
        they are the same on every gateway, however often a client asks: the first two, and all others at its end."""

        async def frames() -> AsyncIterator[bytes]:
            last, ended, silent_s = after, False, 0.0
            while not ended:
                try:
                    events, ended = await self.responses.events(principal, response_id)
                except Unavailable:
                    events = []  # they come once the store is back
                new = [event for event in events if event["sequence_number"] > last]
                for event in new:
                    yield event_frame(event)
                last = new[-1]["sequence_number"] if new else last
                silent_s = 0.0 if new else silent_s + LOOK_S
                if silent_s >= self.chats.keepalive_s > 0:
                    silent_s = 0.0
                    yield b": keepalive\n\n"
                if not ended:
                    await asyncio.sleep(LOOK_S)

        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(frames(), media_type="text/event-stream", headers=headers)

    async def delete(self, request: Request, response_id: str) -> Response:
        """Delete every text of a stored response from the log. Its costs stay."""
        return Json(await self.responses.delete(await self._who(request), response_id))

    async def input_items(self, request: Request, response_id: str) -> Response:
        """The input of a stored response, including the conversation that it continued, newest first."""
        principal, query = await self._who(request), request.query_params
        limit, order = query_number(request, "limit", PAGE_ITEMS, 1, PAGE_ITEMS_MAX), query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise BadRequest("`order` must be asc or desc", param="order")
        page = self.responses.input_items(principal, response_id, limit=limit, order=order, after=query.get("after"))
        return Json(await page)

    async def cancel(self, request: Request, response_id: str) -> Response:
        """Cancel a response that is being made in the background."""
        response = await self.responses.cancel(await self._who(request), response_id)
        self.changed()
        return Json(response)

    async def count(self, request: Request) -> Response:
        """The number of input tokens that the response would have. It costs nothing."""
        principal = await self._who(request)
        body = await read_json(request, self.chats.body_bytes_max, principal.public_id)
        vendor = self.chats.catalog.vendor_params
        prepared = await self.responses.prepare(principal, body, vendor, reads_only=True)
        try:
            tokens = await self.tokens.count(principal, prepared.chat, request.headers.get("x-baton-pool"))
        except BadRequest as error:
            raise prepared.names.reword(error) from None
        return Json({"object": "response.input_tokens", "input_tokens": tokens})

    async def compact(self, request: Request) -> Response:
        """Refuse by name: Baton compacts no conversation."""
        await self._who(request)
        raise NotFound(
            "Baton does not compact conversations: send it whole, or shorten it in the client",
            code="unsupported_endpoint",
        )

    async def _who(self, request: Request) -> Principal:
        return await data_key(request, self.chats.authenticator)
