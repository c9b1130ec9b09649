"""The routes that go to one worker without planning: text completions and embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import Request, Response

from gateway.api.edge.spec import header_parameters
from gateway.api.edge.stack import Router, read_json
from gateway.api.public.chat import OpenAIApi
from gateway.core.access.idempotency import HEADER
from gateway.core.access.keys import Principal
from gateway.core.loop.caps import CAP_HEADERS
from gateway.core.openai.chat import ChatRequest
from gateway.core.openai.texts import (
    parse_completion,
    parse_embedding,
)
from gateway.service.request.frames import TextFrames

OWN_HEADERS = ("x-baton-pool", "x-baton-keepalive")


@dataclass(frozen=True, slots=True)
class TextsApi:
    """What the routes need. `chats` admits, serves and streams."""

    chats: OpenAIApi

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/v1")
        headers = header_parameters(*OWN_HEADERS, *CAP_HEADERS, HEADER)
        router.add("POST", "/completions", self.completions, openapi_extra=headers)
        router.add("POST", "/embeddings", self.embeddings, openapi_extra=headers)
        return router

    async def completions(self, request: Request) -> Response:
        """A text completion by the worker that `model` names; with `stream`, as it is produced."""
        return await self._serve(request, parse_completion)

    async def embeddings(self, request: Request) -> Response:
        """Embeddings by the worker that `model` names, whose `task` must be embeddings."""
        return await self._serve(request, parse_embedding)

    async def _serve(self, request: Request, parse: Callable[..., ChatRequest]) -> Response:
        chats = self.chats
        principal = await chats.authenticator.authenticate(request.headers.get("authorization"), "data")
        body = await read_json(request, chats.body_bytes_max)
        return await chats.idempotency.answer(
            request, principal, body, lambda r: self._served(r, principal, parse(body, strict=chats.strict_fields))
        )

    async def _served(self, request: Request, principal: Principal, chat: ChatRequest) -> Response:
        running = await self.chats.begin(request, principal, chat)
        if chat.stream:
            return await self.chats.streamed(request, running, TextFrames(running))
        return await self.chats.complete(request, running, lambda body: body)
