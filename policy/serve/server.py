"""The conductor's HTTP server: what vLLM's OpenAI server answers, for small models on CPU, each under its own name.

POST /v1/chat/completions · /v1/completions (scores token ids) · GET /v1/models · /health · /version · /metrics
With an admin key: POST /v1/load_policy · /v1/unload_policy
"""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

from gateway.core.openai.reply import DONE, sse
from gateway.errors import VersionRefused
from policy.serve.engine import Busy, DecodeRequest
from policy.serve.protocol import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    LoadRequest,
    Replies,
    TextPiece,
    UnloadRequest,
    masked_body,
    scored_body,
)
from policy.serve.tokens import BadSchema, StopText, TextStream
from policy.serve.versions import LoadedVersion, Versions

VERSION = "baton-conductor 1"
BODY_BYTES_MAX = 1 << 20
Pieces = AsyncGenerator[TextPiece, None]
Body = TypeVar("Body", bound=BaseModel)
DECODE_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "baton_conductor_requests", "Chat completions by HTTP status", ["status"], registry=self.registry
        )
        self.tokens = Counter("baton_conductor_tokens", "Tokens read and decoded", ["kind"], registry=self.registry)
        self.seconds = Histogram(
            "baton_conductor_decode_seconds", "A whole decode", buckets=DECODE_BUCKETS_S, registry=self.registry
        )
        self.in_flight = Gauge("baton_conductor_in_flight", "Sequences decoding or waiting", registry=self.registry)
        self.versions = Gauge("baton_conductor_versions", "Policy versions served", registry=self.registry)


@dataclass(frozen=True, slots=True)
class ServerState:
    """What the routes work on. Without an admin key nothing can be loaded or unloaded."""

    versions: Versions
    metrics: Metrics
    admin_key: str | None

    def version(self, name: str) -> LoadedVersion:
        """The version served under that name. Raises ApiError as vLLM does."""
        version = self.versions.get(name)
        if version is None:
            raise ApiError(404, f"The model `{name}` does not exist.", code="model_not_found", param="model")
        return version


@dataclass(frozen=True, slots=True)
class Completion:
    """One admitted completion, on the version it was admitted with."""

    metrics: Metrics
    version: LoadedVersion
    request: ChatCompletionRequest
    jobs: tuple[DecodeRequest, ...]  # one a reply
    replies: Replies

    async def pieces(self) -> Pieces:
        """Text and tokens of all replies as they are decoded. Raises Busy."""
        self.metrics.tokens.labels("prompt").inc(len(self.jobs[0].prompt_ids))
        if len(self.jobs) == 1:
            async with aclosing(self._reply(0)) as only:
                async for piece in only:
                    yield piece
            return
        ready: asyncio.Queue[TextPiece | None] = asyncio.Queue(sum(job.tokens_max + 1 for job in self.jobs))

        async def pump(index: int) -> None:
            try:
                async with aclosing(self._reply(index)) as reply:
                    async for piece in reply:
                        ready.put_nowait(piece)
            finally:
                ready.put_nowait(None)

        pumps = [asyncio.create_task(pump(index)) for index in range(len(self.jobs))]
        try:
            open_replies = len(pumps)
            while open_replies:
                next_piece = await ready.get()
                open_replies -= next_piece is None
                if next_piece is not None:
                    yield next_piece
            for done in pumps:
                await done
        finally:
            for running in pumps:
                running.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _reply(self, index: int) -> Pieces:
        """One reply, up to its end or the first stop text."""
        text, stop, count, start = TextStream(), StopText(self.request.stops), 0, time.perf_counter()
        engine = self.version.engine
        try:
            async with aclosing(engine.stream(self.jobs[index])) as stream:
                async for batch in stream:
                    shown, sampled = "", []
                    for one in batch:
                        count += 1
                        final = one.finish is not None
                        shown += stop.feed(text.feed(engine.tokens.token_bytes(one.token), final), final)
                        sampled.append(replace(one, finish="stop") if stop.stopped else one)
                        if stop.stopped:
                            break
                    yield TextPiece(index, shown, sampled)
                    if stop.stopped:
                        return
        finally:
            self.metrics.tokens.labels("completion").inc(count)
            self.metrics.seconds.observe(time.perf_counter() - start)


def create_app(versions: Versions, admin_key: str | None = None) -> FastAPI:
    """The application serving `versions`."""
    served = ServerState(versions, Metrics(), admin_key)
    served.metrics.in_flight.set_function(lambda: versions.slots.in_flight)
    served.metrics.versions.set_function(lambda: len(versions.all()))
    app = FastAPI(title="Baton conductor", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.served = served
    app.add_api_route("/v1/chat/completions", _chat, methods=["POST"])
    app.add_api_route("/v1/completions", _completion, methods=["POST"])
    if admin_key:
        app.add_api_route("/v1/load_policy", _load, methods=["POST"])
        app.add_api_route("/v1/unload_policy", _unload, methods=["POST"])
    app.add_api_route("/v1/models", _models, methods=["GET"])
    app.add_api_route("/health", _health, methods=["GET"])
    app.add_api_route("/version", _version, methods=["GET"])
    app.add_api_route("/metrics", _metrics, methods=["GET"])
    return app


def _served(request: Request) -> ServerState:
    served: ServerState = request.app.state.served
    return served


async def _health() -> Response:
    return Response()


async def _version() -> dict[str, str]:
    return {"version": VERSION}


async def _metrics(request: Request) -> Response:
    return Response(generate_latest(_served(request).metrics.registry), media_type="text/plain; version=0.0.4")


async def _models(request: Request) -> dict[str, Any]:
    entries = [
        {
            "id": version.name,
            "object": "model",
            "created": version.loaded_s,
            "owned_by": "baton",
            "root": str(version.policy.directory),
            "max_model_len": version.engine.runtime.shape.context,
            "baton": version.about,
        }
        for version in _served(request).versions.all()
    ]
    return {"object": "list", "data": entries}


async def _completion(request: Request) -> Response:
    try:
        body = await _body(request, CompletionRequest)
        engine = _served(request).version(body.model).engine
        shape = engine.runtime.shape
        allowed = body.allowed_token_ids
        if len(body.prompt) > shape.context or not all(
            0 <= one < shape.vocab for one in (*body.prompt, *(allowed or ()))
        ):
            raise ApiError(400, f"the prompt does not fit {shape.context} of {shape.vocab} tokens", param="prompt")
        id_, created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        if allowed is not None:
            sampling = (body.temperature, body.seed, body.logprobs)
            sampled = await engine.on_thread(lambda: engine.next_token(body.prompt, allowed, *sampling))
            return JSONResponse(masked_body(body, sampled, engine.tokens, id_, created))
        scored = await engine.score(body.prompt)
    except Busy:
        return _error(_overloaded())
    except ApiError as error:
        return _error(error)
    return JSONResponse(scored_body(body, scored, engine.tokens, id_, created))


async def _load(request: Request) -> Response:
    versions = _served(request).versions
    try:
        _check_admin(request)
        body = await _body(request, LoadRequest)
        version = await versions.load(body.name, Path(body.directory))
    except ApiError as error:
        return _error(error)
    except VersionRefused as error:
        return _error(ApiError(400, error.message, code=error.reason, param="directory"))
    return JSONResponse({"name": version.name, "drift": version.drift})


async def _unload(request: Request) -> Response:
    try:
        _check_admin(request)
        name = (await _body(request, UnloadRequest)).name
        _served(request).versions.unload(name)
    except ApiError as error:
        return _error(error)
    except VersionRefused as error:
        return _error(ApiError(409, error.message, code=error.reason, param="name"))
    return JSONResponse({"name": name})


def _check_admin(request: Request) -> None:
    """Raises ApiError(401) without the admin key."""
    key = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(key.encode(), (_served(request).admin_key or "").encode()):
        raise ApiError(401, "this route takes the server's admin key", code="invalid_api_key")


def _error(error: ApiError) -> Response:
    return JSONResponse(error.body, status_code=error.status)


def _overloaded() -> ApiError:
    return ApiError(503, "every decoding thread is taken and the queue is full", code="overloaded")


async def _chat(request: Request) -> Response:
    served = _served(request)
    try:
        call = await _admit(served, await _body(request, ChatCompletionRequest))
        response = await (_streamed(call) if call.request.stream else _complete(call, request))
    except ApiError as error:
        response = _error(error)
    served.metrics.requests.labels(str(response.status_code)).inc()
    return response


async def _body(request: Request, kind: type[Body]) -> Body:
    """The request's body, bounded and checked. Raises ApiError."""
    data = b""
    async for block in request.stream():
        data += block
        if len(data) > BODY_BYTES_MAX:
            raise ApiError(413, f"the body is larger than {BODY_BYTES_MAX} bytes", code="request_too_large")
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or None
        raise ApiError(400, f"{where or 'body'}: {first['msg']}", param=where) from error


async def _admit(served: ServerState, request: ChatCompletionRequest) -> Completion:
    """Everything that can refuse a request, before the first byte of a reply. Raises ApiError."""
    version = served.version(request.model)
    engine, schema = version.engine, request.schema_wanted()
    try:
        prompt_ids = await asyncio.to_thread(
            engine.tokens.encode_chat, [message.plain() for message in request.messages]
        )
        if schema is not None:
            await asyncio.to_thread(engine.tokens.matcher, schema)
    except (ValueError, BadSchema) as error:
        raise ApiError(400, str(error), param="messages" if isinstance(error, ValueError) else "schema") from error
    if engine.full:
        raise _overloaded()
    tokens_max = request.tokens_max(engine.runtime.shape.context - len(prompt_ids))
    jobs = tuple(
        DecodeRequest(
            prompt_ids=prompt_ids,
            schema=schema,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=None if request.seed is None else request.seed + index,
            tokens_max=tokens_max,
            top_logprobs=request.top_logprobs,
        )
        for index in range(request.n)
    )
    replies = Replies(request, engine.tokens, prompt_ids, f"chatcmpl-{uuid.uuid4().hex}", int(time.time()))
    return Completion(served.metrics, version, request, jobs, replies)


async def _streamed(call: Completion) -> Response:
    """Server-sent events. The first tokens are awaited here, so that a refusal still has its status."""
    pieces = call.pieces()
    try:
        first = await anext(pieces)
    except Busy as error:
        raise _overloaded() from error
    return EventStream(_events(call, first, pieces), pieces)


class EventStream(StreamingResponse):
    """A streamed reply that stops its decode when it ends, however it ends."""

    def __init__(self, events: AsyncIterator[bytes], pieces: Pieces) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._pieces.aclose()


async def _events(call: Completion, first: TextPiece, pieces: Pieces) -> AsyncIterator[bytes]:
    count = len(first.sampled)
    for index in range(len(call.jobs)):
        yield sse(call.replies.opening(index))
    yield sse(call.replies.piece(first))
    async for piece in pieces:
        count += len(piece.sampled)
        yield sse(call.replies.piece(piece))
    if call.request.stream_options and call.request.stream_options.include_usage:
        yield sse(call.replies.usage_chunk(count))
    yield DONE


async def _complete(call: Completion, request: Request) -> Response:
    """One body; a client that leaves before it is ready stops the decode."""
    collecting = asyncio.create_task(_collect(call))
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=499)
        return JSONResponse(collecting.result())
    except Busy as error:
        raise _overloaded() from error
    finally:
        collecting.cancel()
        leaving.cancel()
        await asyncio.gather(collecting, leaving, return_exceptions=True)


async def _collect(call: Completion) -> dict[str, Any]:
    async with aclosing(call.pieces()) as pieces:
        return call.replies.body([piece async for piece in pieces])


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
