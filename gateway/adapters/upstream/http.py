"""Workers behind any OpenAI-compatible endpoint, over one pooled client (httpx on aiohttp's transport; ADR 0006).

Each call is one attempt, without retries, redirects, cookies or a proxy from the environment. Everything is bounded:
the call by `timeout_s`, the silence between chunks, and the decoded size of a reply and of one stream event.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from functools import lru_cache
from http.cookiejar import DefaultCookiePolicy
from types import MappingProxyType
from typing import Any

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from gateway.adapters.upstream import client as upstream
from gateway.adapters.upstream.sse import DONE, SseError, SseEvent, SseParser
from gateway.core.loop import depth
from gateway.core.money.amounts import Usage
from gateway.core.openai.chat import Endpoint
from gateway.core.openai.reply import chunks_of
from gateway.core.openai.texts import as_chat, check_embeddings, chunk_as_chat
from gateway.core.openai.usage import billed_usage, read_usage, text_bytes, usage_body
from gateway.errors import UpstreamError, UpstreamProtocol, UpstreamRefused
from gateway.service.ports.request import WorkerCall, WorkerReply

PATHS = {"chat": "chat/completions", "completions": "completions", "embeddings": "embeddings"}
CONNECT_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 512
KEEPALIVE_EXPIRY_S = 4.0  # uvicorn, and so vLLM, closes an idle connection after 5 s; a call on it then fails
DRAIN_S = 0.05
STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
# What a stream may not carry as a whole reply does: calls and what belongs to them, sound, sources, log-probs, ids.
BEYOND_TEXT = frozenset(
    (
        "tools",
        "functions",
        "modalities",
        "audio",
        "web_search_options",
        "logprobs",
        "prompt_logprobs",
        "return_token_ids",
    )
)


def http_client(connections_max: int = CONNECTIONS_MAX) -> httpx.AsyncClient:
    """Make a pooled client that keeps no state between calls. The caller closes it."""

    def session() -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=connections_max, keepalive_timeout=KEEPALIVE_EXPIRY_S, ssl=transport.ssl_context
        )
        return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())

    transport = AiohttpTransport(client=session, trust_env=False)
    client = httpx.AsyncClient(
        transport=transport,
        follow_redirects=False,
        headers={"user-agent": "baton"},
        trust_env=False,
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),  # the call's own deadline bounds the rest
    )
    client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))
    return client


class HttpWorkers:
    """`ports.Workers` for kind `openai`. `secrets` maps worker names to keys; `depth_secret` signs the depth header;
    `places` maps `local:` URLs to where this gateway serves them."""

    def __init__(
        self,
        secrets: Mapping[str, str],
        depth_secret: bytes,
        *,
        places: Mapping[str, str] = MappingProxyType({}),
        client: httpx.AsyncClient | None = None,
        reply_bytes_max: int = 16 << 20,
        event_bytes_max: int = 1 << 20,
        chunk_gap_s_max: float = 60.0,
    ) -> None:
        self._secrets = dict(secrets)
        self._depth_secret = depth_secret
        self._places = places
        self._client = client or http_client()
        self._reply_bytes_max = reply_bytes_max
        self._event_bytes_max = event_bytes_max
        self._chunk_gap_s_max = chunk_gap_s_max
        self._whole_only: set[str] = set()  # workers that refused to stream

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def complete(self, call: WorkerCall) -> WorkerReply:
        """See `ports.Workers.complete`. A worker that refuses to stream is asked for whole replies from then on."""
        body = request_body(call)
        if call.worker.name in self._whole_only or not streams_alike(call, body):
            return await self._whole(call, body)
        try:
            return await self._gathered(call, body | STREAMED)
        except UpstreamRefused as refused:
            if "stream" not in f"{refused.param} {refused.message}".lower():
                raise
        self._whole_only.add(call.worker.name)
        return await self._whole(call, body)

    async def _whole(self, call: WorkerCall, body: dict[str, Any]) -> WorkerReply:
        """The reply in one piece."""
        content = _encode(body)
        deadline = asyncio.get_running_loop().time() + call.timeout_s
        return await self._read_whole(call, body, content, await self._opened(call, content, deadline), deadline)

    async def _gathered(self, call: WorkerCall, body: dict[str, Any]) -> WorkerReply:
        """The reply from a stream, collected in `call.so_far`; or in one piece, where the worker sends no stream."""
        content, usage = _encode(body), Usage()
        deadline = asyncio.get_running_loop().time() + call.timeout_s
        response = await self._opened(call, content, deadline)
        if "event-stream" not in response.headers.get("content-type", ""):
            return await self._read_whole(call, body, content, response, deadline)
        head: dict[str, Any] = {}
        async with aclosing(self._chunks(call, body, content, response, deadline, call.timeout_s)) as chunks:
            async for chunk in chunks:
                call.so_far.add(chunk["choices"])
                call.so_far.about(chunk)
                head = {name: chunk[name] for name in ("id", "created", "model") if name in chunk}
                usage = read_usage(chunk) or usage
        completion = check_completion({**head, "object": "chat.completion", **call.so_far.body()})
        return WorkerReply(completion | {"usage": usage_body(usage)}, usage)

    async def _read_whole(
        self, call: WorkerCall, body: Mapping[str, Any], content: bytes, response: httpx.Response, deadline: float
    ) -> WorkerReply:
        with upstream.transport_errors():
            async with asyncio.timeout_at(deadline), aclosing(response):
                raw = await upstream.bounded_body(response, self._reply_bytes_max)
        completion = check_reply(call, upstream.parse_object(raw))
        usage = billed_usage(
            read_usage(completion), body, len(content), reply_text_bytes(completion), call.worker.context_tokens
        )
        return WorkerReply(completion, usage, {"content-type": response.headers.get("content-type", "")})

    async def stream(self, call: WorkerCall) -> AsyncIterator[Mapping[str, Any]]:
        """See `ports.Workers.stream`. The last chunk always has the `usage` to bill, and no choices."""
        if "stream" in call.worker.cannot:
            reply = await self._whole(call, request_body(call))
            for choices in chunks_of(reply.body):
                yield {"choices": choices}
            yield {"choices": [], "usage": usage_body(reply.usage)}
            return
        body = request_body(call) | STREAMED
        content = _encode(body)
        deadline = asyncio.get_running_loop().time() + call.timeout_s
        response = await self._opened(call, content, deadline)
        async with aclosing(self._chunks(call, body, content, response, deadline, self._chunk_gap_s_max)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _chunks(
        self,
        call: WorkerCall,
        body: Mapping[str, Any],
        content: bytes,
        response: httpx.Response,
        deadline: float,
        gap_s_max: float,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a reply. The last one always has the `usage` to bill, and no choices."""
        tally = StreamTally()
        async with aclosing(self._events(response, deadline, gap_s_max)) as events:
            async for event in events:
                if event.data == DONE:
                    tally.done = True
                    continue
                chunk = parse_chunk(event, self._secrets.get(call.worker.name), call.endpoint)
                if visible := tally.add(chunk):
                    yield visible
        yield tally.last_chunk(call, body, len(content))

    async def _events(
        self, response: httpx.Response, deadline: float, gap_s_max: float
    ) -> AsyncGenerator[SseEvent, None]:
        """Yield the events of the reply. Each wait ends at the call's deadline, and after the longest gap."""
        now = asyncio.get_running_loop().time
        try:
            parser = SseParser(self._event_bytes_max)
            pieces = upstream.bounded_bytes(response, self._reply_bytes_max)
            piece: bytes | None = b""
            until = deadline
            while piece is not None:
                with upstream.transport_errors():
                    async with asyncio.timeout_at(until):
                        piece = await anext(pieces, None)
                until = min(deadline, now() + gap_s_max)
                for event in _parse(parser, piece):
                    yield event
                    if event.data == DONE:
                        await _drain(pieces)
                        return
        finally:
            await response.aclose()

    async def _opened(self, call: WorkerCall, content: bytes, deadline: float) -> httpx.Response:
        """`_open` until the deadline. Raises UpstreamError."""
        with upstream.transport_errors():
            async with asyncio.timeout_at(deadline):
                return await self._open(call, content)

    async def _open(self, call: WorkerCall, content: bytes) -> httpx.Response:
        """Open a response with status 200. To close it before its end closes the connection."""
        secret = self._secrets.get(call.worker.name)
        headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
            "user-agent": "baton",
            depth.DEPTH_HEADER: depth.sign(call.depth, self._depth_secret),
        }
        if secret:
            headers["authorization"] = f"Bearer {secret}"
        request = httpx.Request("POST", _url(self._base(call), call.endpoint), content=content, headers=headers)
        request.headers.encoding = "ascii"  # they are ASCII; otherwise httpx decodes them all to find out
        response = await self._client.send(request, stream=True)
        if response.status_code == 200:
            return response
        try:
            raw = await upstream.error_body(response)
        finally:
            await response.aclose()
        raise upstream.status_error(response.status_code, response.headers, raw, secret)

    def _base(self, call: WorkerCall) -> str:
        """The base URL of the worker. Raises UpstreamError for a local model that was not started."""
        url = call.worker.url or ""
        if call.worker.local_model and url not in self._places:
            raise UpstreamError(
                f"{url} is not served here; `baton serve` starts it with the pool file", dispatched=False
            )
        return self._places.get(url, url)


class StreamTally:
    """The facts of a stream so far that are needed to detect a cut reply, and to bill it."""

    def __init__(self) -> None:
        self.done = False
        self._finished = False
        self._usage: Usage | None = None
        self.text_bytes = 0
        self._head: dict[str, Any] = {"id": "", "created": 0, "model": ""}

    def add(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """Count a chunk. Returns its part of the reply, without the usage, which goes into the last chunk; or None."""
        self._usage = read_usage(chunk) or self._usage
        self._head = {key: chunk.get(key, value) for key, value in self._head.items()}
        choices = chunk.get("choices") or []
        self.text_bytes += text_bytes(choice["delta"] for choice in choices)
        self._finished = self._finished or any(choice.get("finish_reason") for choice in choices)
        return {key: value for key, value in chunk.items() if key != "usage"} if choices else None

    def last_chunk(self, call: WorkerCall, body: Mapping[str, Any], request_bytes: int) -> dict[str, Any]:
        """The last chunk, with the usage to bill. Raises UpstreamProtocol if the stream ended too early."""
        if not (self.done or self._finished):
            raise UpstreamProtocol("the worker's stream ended before its reply was complete")
        usage = billed_usage(self._usage, body, request_bytes, self.text_bytes, call.worker.context_tokens)
        head = {**self._head, "model": self._head["model"] or call.worker.model}
        return {**head, "object": "chat.completion.chunk", "choices": [], "usage": usage_body(usage)}


@lru_cache(maxsize=1024)
def _url(base: str, endpoint: Endpoint) -> httpx.URL:
    """The URL of an endpoint, parsed once per worker and not once per call."""
    return httpx.URL(f"{base}/{PATHS[endpoint]}")


def request_body(call: WorkerCall) -> dict[str, Any]:
    """The body to send: the pool file's defaults, overridden by the call's own body, with the upstream's model name."""
    return {**call.worker.params, **call.body, "model": call.worker.model}


def streams_alike(call: WorkerCall, body: Mapping[str, Any]) -> bool:
    """Whether a stream says all that the whole reply would: it is text, and the worker streams."""
    return call.endpoint == "chat" and "stream" not in call.worker.cannot and BEYOND_TEXT.isdisjoint(body)


def check_reply(call: WorkerCall, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body if it is valid for its endpoint, a text completion in the form of chat. Raises
    UpstreamProtocol."""
    if call.endpoint == "embeddings":
        return check_embeddings(body, call.body)
    return check_completion(as_chat(body) if call.endpoint == "completions" else body)


def reply_text_bytes(body: Mapping[str, Any]) -> int:
    """UTF-8 bytes of the generated text in a complete reply. Embeddings have none."""
    return text_bytes(choice["message"] for choice in body.get("choices") or ())


def check_completion(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body if it is a completion with at least one message. Raises UpstreamProtocol."""
    choices = body.get("choices")
    if not (isinstance(choices, list) and choices and all(_holds(choice, "message") for choice in choices)):
        raise UpstreamProtocol("the worker's reply has no choices with a message")
    return body


def parse_chunk(event: SseEvent, secret: str | None, endpoint: Endpoint = "chat") -> dict[str, Any]:
    """The chunk of an event. Raises UpstreamProtocol for an invalid chunk, UpstreamError for an error event."""
    chunk = upstream.parse_object(event.data)
    if chunk.get("error") or event.name == "error":
        raise upstream.event_error(chunk.get("error") or chunk, secret)
    chunk = chunk_as_chat(chunk) if endpoint == "completions" else chunk
    choices = chunk.get("choices") or []
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and choice.get("delta") is None:
            choice["delta"] = {}  # Azure's asynchronous content filter sends choices without a delta
    if not (isinstance(choices, list) and all(_holds(choice, "delta") for choice in choices)):
        raise UpstreamProtocol("the worker's stream holds an invalid chunk")
    return chunk


def _holds(choice: Any, part: str) -> bool:
    return isinstance(choice, dict) and isinstance(choice.get(part), dict)


def _encode(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise UpstreamRefused("the request holds a value that JSON cannot represent", dispatched=False) from None


def _parse(parser: SseParser, piece: bytes | None) -> list[SseEvent]:
    try:
        return parser.end() if piece is None else parser.feed(piece)
    except SseError as error:
        raise UpstreamProtocol(f"the worker's stream is not an event stream: {error}") from None


async def _drain(pieces: AsyncIterator[bytes]) -> None:
    """Read what follows `[DONE]` for a short time: only a connection that was read to its end can be reused."""
    with suppress(UpstreamError), upstream.transport_errors():
        async with asyncio.timeout(DRAIN_S):
            async for _ in pieces:
                pass
