"""The routes of Anthropic's Messages API: make a message, and count the tokens of one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request, Response

from gateway.api.edge.bodies import data_key
from gateway.api.edge.headers import OWN_HEADERS
from gateway.api.edge.refusals import MESSAGES
from gateway.api.edge.spec import header_parameters
from gateway.api.edge.stack import Json, Router, parsed, read_json
from gateway.api.public.chat import OpenAIApi
from gateway.core.access.idempotency import IDEMPOTENCY_HEADER
from gateway.core.access.keys import Principal
from gateway.core.anthropic.reply import BETA_HEADER, KEY_HEADER, VERSION_HEADER, MessageHead, finished_message
from gateway.core.anthropic.request import COUNTED, REQUIRED, VERSIONS, MessageRequest, parse_message_request
from gateway.core.loop.caps import CAP_HEADERS
from gateway.errors import BadRequest
from gateway.service.request.counting import InputTokens
from gateway.service.request.frames import MessageFrames


@dataclass(frozen=True, slots=True)
class MessagesApi:
    """What the routes need. `chats` serves the chat request behind a message."""

    chats: OpenAIApi
    tokens: InputTokens

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix=MESSAGES)
        names = (KEY_HEADER, VERSION_HEADER)
        headers = header_parameters(*names, *OWN_HEADERS, IDEMPOTENCY_HEADER, *CAP_HEADERS)
        router.add("POST", "", self.create, openapi_extra=headers)
        router.add("POST", "/count_tokens", self.count, openapi_extra=header_parameters(*names, "x-baton-pool"))
        return router

    async def create(self, request: Request) -> Response:
        """Make a message: planned over the key's workers as a chat request is, and streamed with `stream`."""
        return await self.chats.read(request, await self._who(request), self._create)

    async def count(self, request: Request) -> Response:
        """The number of input tokens that the message would have. It costs nothing."""
        principal = await self._who(request)
        body = await read_json(request, self.chats.body_bytes_max, principal.public_id)
        message_request = self._parsed(request, body, *COUNTED)
        try:
            tokens = await self.tokens.count(principal, message_request.chat, request.headers.get("x-baton-pool"))
        except BadRequest as error:
            raise message_request.names.reword(error) from None
        return Json({"input_tokens": tokens})

    async def _create(self, request: Request, principal: Principal, body: Any) -> Response:
        message_request = await parsed(request, partial(self._parsed, request, body, *REQUIRED))
        try:
            return await self._served(request, principal, message_request)
        except BadRequest as error:  # it names the chat request, which the client did not write
            raise message_request.names.reword(error) from None

    async def _served(self, request: Request, principal: Principal, message_request: MessageRequest) -> Response:
        running = await self.chats.begin(request, principal, message_request.chat, prefix="msg_")
        facts = message_request.chat.model, message_request.thinking, message_request.stops
        head = MessageHead(running.record.completion_id, *facts, running.input_tokens)
        if message_request.chat.stream:
            return await self.chats.streamed(request, running, MessageFrames(running, head, message_request.names))
        return await self.chats.complete(request, running, lambda completion: finished_message(head, completion))

    def _parsed(self, request: Request, body: Any, *required: str) -> MessageRequest:
        chats = self.chats
        return parse_message_request(
            body,
            messages_max=chats.messages_max,
            strict=chats.strict_fields,
            media_bytes_max=chats.media_bytes_max,
            required=required,
            vendor=chats.catalog.vendor_params,
            betas=request.headers.get(BETA_HEADER, ""),
        )

    async def _who(self, request: Request) -> Principal:
        """The key of `x-api-key`, else of the bearer token, as Anthropic's SDKs send either. Raises Unauthorized, and
        BadRequest for a version of the API with another wire format."""
        key = request.headers.get(KEY_HEADER)
        bearer = None if key is None else f"Bearer {key}"
        principal = await data_key(request, self.chats.authenticator, bearer)
        version = request.headers.get(VERSION_HEADER)
        if version is not None and version not in VERSIONS:
            problem = f"`{VERSION_HEADER}`: '{version[:64]}' is not supported; send {' or '.join(VERSIONS)}"
            raise BadRequest(problem, param=VERSION_HEADER, code="invalid_value")
        return principal
