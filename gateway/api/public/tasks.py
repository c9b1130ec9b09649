"""The routes of requests that are no conversation: moderations, rerank, images, speech, transcriptions, translations.

Each goes to the worker that `model` names, whose `task` must be that of the route. A model without it is refused by
name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from starlette.datastructures import FormData, UploadFile

from gateway.api.edge.bodies import data_key
from gateway.api.edge.headers import take_options
from gateway.api.edge.spec import header_parameters
from gateway.api.edge.stack import Router, read_form
from gateway.api.public.chat import TEXT_HEADERS, OpenAIApi, Serve
from gateway.core.access.idempotency import IDEMPOTENCY_HEADER
from gateway.core.access.keys import Principal
from gateway.core.loop.caps import CAP_HEADERS
from gateway.core.openai.chat import ChatRequest, Endpoint
from gateway.core.openai.tasks.fields import SOUND_BYTES_MAX, Sound, parse_task
from gateway.errors import BadRequest, ClientLeft, TooLarge, Unavailable

FORM_BYTES = 64 * 2**10  # of a form beside its recording


@dataclass(frozen=True, slots=True)
class TasksApi:
    """What the routes need. `chats` admits and serves."""

    chats: OpenAIApi

    def router(self) -> Router:
        """The routes."""
        router = Router()
        described = header_parameters(*TEXT_HEADERS, *CAP_HEADERS, IDEMPOTENCY_HEADER)
        for path, endpoint in (
            ("/v1/moderations", self.moderations),
            ("/v1/rerank", self.rerank),
            ("/v1/images/generations", self.images),
            ("/v1/audio/speech", self.speech),
            ("/v1/audio/transcriptions", self.transcriptions),
            ("/v1/audio/translations", self.translations),
        ):
            router.add("POST", path, endpoint, openapi_extra=described)
        return router

    async def moderations(self, request: Request) -> Response:
        """Classify texts and images by the worker that `model` names, whose `task` must be moderation."""
        return await self._read(request, "moderations")

    async def rerank(self, request: Request) -> Response:
        """Order documents by a query, by the worker that `model` names, whose `task` must be rerank."""
        return await self._read(request, "rerank")

    async def images(self, request: Request) -> Response:
        """Images by the worker that `model` names, whose `task` must be images."""
        return await self._read(request, "images")

    async def speech(self, request: Request) -> Response:
        """Speech by the worker that `model` names, whose `task` must be speech: the bytes of a sound."""
        return await self._read(request, "speech")

    async def transcriptions(self, request: Request) -> Response:
        """The text of a recording, a form, by the worker that `model` names, whose `task` must be transcription."""
        return await self._form(request, "transcriptions")

    async def translations(self, request: Request) -> Response:
        """The text of a recording in English, by the worker that `model` names, whose `task` must be transcription."""
        return await self._form(request, "translations")

    def serving(self, endpoint: Endpoint) -> Serve:
        """The function that serves a request of this API whose body was read."""

        async def serve(request: Request, principal: Principal, body: Any) -> Response:
            return await self._served(request, principal, parse_task(endpoint, body, strict=self.chats.strict_fields))

        return serve

    async def _read(self, request: Request, endpoint: Endpoint) -> Response:
        return await self.chats.read(request, await self._who(request), self.serving(endpoint))

    async def _form(self, request: Request, endpoint: Endpoint) -> Response:
        """`OpenAIApi.read` of a form."""
        chats, principal = self.chats, await self._who(request)
        async with chats.completer.entered(principal) as entry:
            try:
                form = await read_form(request, SOUND_BYTES_MAX + FORM_BYTES, principal.public_id)
            except (BadRequest, TooLarge, Unavailable) as error:
                entry.counts = isinstance(error, ClientLeft)
                raise
            try:
                body = await _fields(form)
            finally:
                await form.close()
            entry.counts = False
            request.state.entry = entry
            take_options(request, body)
            inner = Request(request.scope, request.receive)
            serve = self.serving(endpoint)
            return await chats.idempotency.answer(
                inner, principal, _print_of(body), lambda r: serve(r, principal, body)
            )

    async def _served(self, request: Request, principal: Principal, chat: ChatRequest) -> Response:
        running = await self.chats.begin(request, principal, chat)
        return await self.chats.complete(request, running, lambda body: body)

    async def _who(self, request: Request) -> Principal:
        return await data_key(request, self.chats.authenticator)


async def _fields(form: FormData) -> dict[str, Any]:
    """The body that a form stands for: numbers as numbers, `name[]` as lists, the recording as a Sound. Raises
    BadRequest."""
    body: dict[str, Any] = {}
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            data = await value.read()
            body[name] = Sound(value.filename or "sound", value.content_type or "application/octet-stream", data)
        elif name.endswith("[]"):
            values = body.setdefault(name[:-2], [])
            if not isinstance(values, list):
                raise BadRequest(f"`{name[:-2]}` is in the form with and without `[]`", param=name[:-2])
            values.append(value)
        else:
            body[name] = _NUMBERS.get(name, str)(value)
    return body


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _flag(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


_NUMBERS: Mapping[str, Callable[[str], Any]] = {"temperature": _number, "stream": _flag}


def _print_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """What tells one form from another, for an Idempotency-Key."""
    return {
        name: hashlib.sha256(value.data).hexdigest() if isinstance(value, Sound) else value
        for name, value in body.items()
    }
