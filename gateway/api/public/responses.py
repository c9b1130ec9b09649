"""The routes of OpenAI's Responses API: make a response, read it, list its input, delete it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response

from gateway.api.edge.bodies import query_number
from gateway.api.edge.headers import OWN_HEADERS
from gateway.api.edge.spec import header_parameters
from gateway.api.edge.stack import Json, Router, read_json
from gateway.api.public.chat import OpenAIApi
from gateway.core.access.idempotency import IDEMPOTENCY_HEADER
from gateway.core.access.keys import Principal
from gateway.core.loop.caps import CAP_HEADERS
from gateway.core.openai.responses.reply import finished_response
from gateway.core.openai.responses.request import INCLUDABLE
from gateway.errors import BadRequest, NotFound
from gateway.service.request.counting import InputTokens
from gateway.service.request.frames import ResponseFrames
from gateway.service.request.responses import PAGE_ITEMS, PAGE_ITEMS_MAX, PreparedResponse, Responses


@dataclass(frozen=True, slots=True)
class ResponsesApi:
    """What the routes need. `chats` serves the chat request behind a response."""

    chats: OpenAIApi
    responses: Responses
    tokens: InputTokens

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
        return await self.chats.read(request, await self._who(request), self._create)

    async def _create(self, request: Request, principal: Principal, body: Any) -> Response:
        prepared = await self.responses.prepare(principal, body)
        try:
            return await self._served(request, principal, prepared)
        except BadRequest as error:  # it names the chat request, which the client did not write
            raise prepared.names.reword(error) from None

    async def _served(self, request: Request, principal: Principal, prepared: PreparedResponse) -> Response:
        running = await self.chats.begin(request, principal, prepared.chat, prepared.to_log)
        head = prepared.head(running.record)
        if prepared.chat.stream:
            return await self.chats.streamed(request, running, ResponseFrames(running, head, prepared.names))

        def shape(completion: dict[str, Any]) -> dict[str, Any]:
            return finished_response(head, completion, running.record.finished_us // 1_000_000)

        return await self.chats.complete(request, running, shape)

    async def get(self, request: Request, response_id: str) -> Response:
        """A stored response of this key."""
        _refuse_parts(request)
        return Json(await self.responses.get(await self._who(request), response_id))

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
        """Refuse: only a response made in the background can be cancelled, and Baton makes none."""
        return Json(await self.responses.cancel(await self._who(request), response_id))

    async def count(self, request: Request) -> Response:
        """The number of input tokens that the response would have. It costs nothing."""
        principal = await self._who(request)
        body = await read_json(request, self.chats.body_bytes_max, principal.public_id)
        prepared = await self.responses.prepare(principal, body)
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
        return await self.chats.authenticator.authenticate(request.headers.get("authorization"), "data")


def _refuse_parts(request: Request) -> None:
    """Raises BadRequest for parameters that only a response made in the background can have."""
    for name in ("stream", "starting_after"):
        if request.query_params.get(name) not in (None, "false"):
            raise BadRequest(f"`{name}`: a stored response is sent complete; leave it out", param=name)
    wanted = request.query_params.getlist("include") + request.query_params.getlist("include[]")
    unknown = [name for name in wanted if name not in INCLUDABLE]
    if unknown:
        raise BadRequest(f"`include` must be of: {', '.join(INCLUDABLE)}", param="include", code="invalid_value")
