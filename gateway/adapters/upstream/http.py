"""Workers behind any OpenAI-compatible endpoint or Anthropic's, over connections of our own (`http1/`; ADR 0041).

Each call is one attempt, without retries, redirects or cookies. Everything is bounded:
the call by `timeout_s`, the silence between chunks, and the decoded size of a reply and of one stream event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

from gateway.adapters.upstream import client as upstream
from gateway.adapters.upstream import replies
from gateway.adapters.upstream.http1.pool import Http1Reply
from gateway.adapters.upstream.http1.ways import Way
from gateway.adapters.upstream.sse import DONE, SseEvent, SseParser
from gateway.adapters.upstream.wires import PATHS, ChunkMaker, wire_of
from gateway.core.access import depth
from gateway.core.money.amounts import Usage
from gateway.core.openai.chat import Endpoint
from gateway.core.openai.reply import TextChunk, chunks_of, read_text, reply_facts
from gateway.core.openai.tasks.fields import FIELDS as TASK_FIELDS
from gateway.core.openai.texts import as_chat, check_embeddings, chunk_as_chat
from gateway.core.openai.vendors.dialects import UsageTally
from gateway.core.openai.vendors.forms import as_chunk, as_whole, fault_in
from gateway.core.openai.vendors.usage import billed_usage, read_usage, text_bytes, usage_body
from gateway.errors import UpstreamError, UpstreamProtocol, UpstreamRefused
from gateway.service.ports.request import WorkerCall, WorkerReply

HEAD: Mapping[str, Any] = {"id": "", "created": 0, "model": ""}  # what names a chunk, before one came
STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
# What a stream may not carry as a whole reply does: calls and what belongs to them, sound, sources, log-probs, ids.
BEYOND_TEXT = frozenset(("tools", "functions", "modalities", "audio", "web_search_options", "return_token_ids"))
BEYOND_TEXT |= {"logprobs", "prompt_logprobs"}


class HttpWorkers:
    """`ports.Workers` for kind `openai`. `secrets` maps worker names to keys; `depth_secret` signs the depth header;
    `places` maps `local:` URLs to where this gateway serves them; `ways` has those of workers that say more."""

    def __init__(
        self,
        secrets: Mapping[str, str],
        depth_secret: bytes,
        *,
        places: Mapping[str, str] = MappingProxyType({}),
        client: upstream.PooledClient | None = None,
        ways: Mapping[str, Way] = MappingProxyType({}),
        reply_bytes_max: int = 16 << 20,
        event_bytes_max: int = 1 << 20,
        chunk_gap_s_max: float = 60.0,
    ) -> None:
        self._secrets = dict(secrets)
        self._depth_secret = depth_secret
        self._places, self._ways = places, ways
        self._client = client or upstream.http_client()
        self._reply_bytes_max, self._event_bytes_max = reply_bytes_max, event_bytes_max
        self._chunk_gap_s_max = chunk_gap_s_max
        self._whole_only: set[str] = set()  # workers that refused to stream

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def complete(self, call: WorkerCall) -> WorkerReply:
        """See `ports.Workers.complete`. A worker that refuses to stream is asked for whole replies from then on."""
        body = request_body(call)
        if call.worker.name in self._whole_only or not streams_alike(call, body):
            return await self._send(call, body)
        try:
            return await self._gathered(call, body | STREAMED)
        except UpstreamRefused as refusal:
            if "stream" not in f"{refusal.param} {refusal.message}".lower():
                raise
        self._whole_only.add(call.worker.name)
        return await self._send(call, body)

    async def _send(self, call: WorkerCall, body: dict[str, Any]) -> WorkerReply:
        """The reply in one piece."""
        kind, content = upstream.encoded(as_sent(call, body))
        deadline = asyncio.get_running_loop().time() + call.timeout_s
        response = await self._opened(call, content, deadline, kind)
        return await self._read_reply(call, body, content, response, deadline)

    async def _gathered(self, call: WorkerCall, body: dict[str, Any]) -> WorkerReply:
        """The reply from a stream, or in one piece where the worker sends no stream."""
        content = upstream.encode(as_sent(call, body))
        deadline = asyncio.get_running_loop().time() + call.timeout_s
        response = await self._opened(call, content, upstream.first_until(call, deadline))
        if "event-stream" not in response.headers.get("content-type", ""):
            return await self._read_reply(call, body, content, response, deadline)
        response.gather()
        return await collected(call, self._chunks(call, body, content, response, deadline, call.timeout_s))

    async def _read_reply(
        self, call: WorkerCall, body: Mapping[str, Any], content: bytes, response: Http1Reply, deadline: float
    ) -> WorkerReply:
        async with aclosing(response):
            raw = await replies.Pieces(response, self._reply_bytes_max).read_all(deadline)
        kind = response.headers.get("content-type", "")
        if call.endpoint in TASK_FIELDS:
            return upstream.task_reply(call, upstream.read_task(call, raw, kind), kind)
        secret = self._secrets.get(call.worker.name)
        if call.endpoint != "embeddings" and replies.is_event_stream(raw):
            events = replies.ReadEvents(raw, SseParser(self._event_bytes_max), text_reader(call))
            return await collected(call, WorkerStream(call, body, len(content), events, secret))
        with replies.fault_counted(len(content), len(raw)):
            completion = check_reply(call, upstream.parse_object(raw), secret)
        usage = billed_usage(
            read_usage(completion), body, len(content), reply_text_bytes(completion), call.worker.context_tokens
        )
        return WorkerReply(completion, usage, {"content-type": kind})

    async def stream(self, call: WorkerCall) -> AsyncIterator[Mapping[str, Any]]:
        """See `ports.Workers.stream`. The last chunk always has the `usage` to bill, and no choices."""
        if "stream" in call.worker.cannot:
            reply = await self._send(call, request_body(call))
            for choices in chunks_of(reply.body):
                yield {"choices": choices}
            yield {"choices": [], "usage": usage_body(reply.usage)}
            return
        body = request_body(call) | STREAMED
        content = upstream.encode(as_sent(call, body))
        deadline = asyncio.get_running_loop().time() + call.timeout_s
        response = await self._opened(call, content, upstream.first_until(call, deadline))
        chunks = self._chunks(call, body, content, response, deadline, self._chunk_gap_s_max)
        async with aclosing(chunks):
            while (together := await chunks.next()) is not None:
                each: Any
                for each in together:
                    yield each
        yield last_chunk(*chunks.end(), done=chunks.is_done)

    def _chunks(
        self,
        call: WorkerCall,
        body: Mapping[str, Any],
        content: bytes,
        response: Http1Reply,
        deadline: float,
        gap_s_max: float,
    ) -> WorkerStream:
        try:
            pieces = replies.Pieces(response, self._reply_bytes_max)
        except UpstreamError:  # nothing of it can be read
            response.release()
            raise
        parser = SseParser(self._event_bytes_max)
        first, gap_s_max = upstream.first_until(call, deadline), call.worker.chunk_gap_s or gap_s_max
        events = replies.ReplyEvents(response, pieces, parser, text_reader(call), deadline, gap_s_max, first)
        return WorkerStream(call, body, len(content), events, self._secrets.get(call.worker.name))

    async def _opened(self, call: WorkerCall, content: bytes, deadline: float, kind: str = upstream.JSON) -> Http1Reply:
        """`_open` until the deadline. Raises UpstreamError."""
        try:
            return await self._open(call, content, kind, deadline)
        except replies.TRANSPORT as error:
            raise replies.reading_error(error) from error

    async def _open(self, call: WorkerCall, content: bytes, kind: str, deadline: float) -> Http1Reply:
        """Open a response with status 200. To close it before its end closes the connection."""
        secret, wire = self._secrets.get(call.worker.name), wire_of(call)
        headers = {
            "content-type": kind,
            "accept-encoding": "identity",
            "user-agent": "baton",
            depth.DEPTH_HEADER: depth.sign(call.depth, self._depth_secret),
        }
        if call.traceparent:
            headers["traceparent"] = call.traceparent
        if wire is not None:
            headers |= wire.headers(secret, {**call.worker.params, **call.body})
        elif secret:
            headers["authorization"] = f"Bearer {secret}"
        path, base = PATHS[call.endpoint], self._base(call)
        path, base = (path, base) if wire is None else (wire.path, wire.base(base))
        url = upstream.endpoint_url(base, path)
        response = await self._client.ask(url, headers, content, deadline, self._ways.get(call.worker.name))
        if response.status_code == 200:
            return response
        try:
            raw = await replies.error_body(response)
        finally:
            await response.aclose()
        raise upstream.status_error(response.status_code, response.headers, raw, secret)

    def _base(self, call: WorkerCall) -> str:
        """The base URL of the worker. Raises UpstreamError for a local model that was not started."""
        url = call.worker.url or ""
        if call.worker.local_model and url not in self._places:
            raise UpstreamError(f"{url} is not served here; `baton serve` starts it", dispatched=False)
        return self._places.get(url, url)


def text_reader(call: WorkerCall) -> Callable[[bytes], TextChunk] | None:
    """What reads a chunk of nothing but text; None where no chunk of the worker's API is one."""
    return read_text if call.endpoint == "chat" and wire_of(call) is None else None


async def collected(call: WorkerCall, chunks: WorkerStream) -> WorkerReply:
    """The whole reply that a stream makes, collected in `call.so_far`."""
    reply = call.so_far
    async with aclosing(chunks):
        try:
            while (together := await chunks.next()) is not None:
                reply.add_all(together)
        except asyncio.CancelledError:  # what came is billed
            reply.add_all(chunks.rest())
            raise
    head, usage = chunks.end()
    if not (chunks.is_done or reply.finished):
        raise UpstreamProtocol("the worker's stream ended before each of its choices was complete")
    completion = as_whole({**head, "object": "chat.completion", **reply.body()})
    return WorkerReply(completion | {"usage": usage_body(usage)}, usage)


class StreamTally:
    """The facts of a stream so far that are needed to detect a cut reply, and to bill it."""

    def __init__(self) -> None:
        self.done = False
        self._finished = False
        self._usage = UsageTally()
        self.text_bytes = 0
        self._head: dict[str, Any] = dict(HEAD)
        self.text: TextChunk | None = None  # the latest chunk, where it holds nothing but text

    def add(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """Count a chunk. Returns what it says of the reply, without the usage, which comes at the end; or None."""
        head = self._current_head()
        for key in HEAD:
            if key in chunk:
                head[key] = chunk[key]
        self._usage.add(chunk)
        chunk.pop("usage", None)
        choices = chunk.get("choices") or ()
        for choice in choices:
            self.text_bytes += text_bytes((choice["delta"],))
            self._finished = self._finished or bool(choice.get("finish_reason"))
        return chunk if choices or reply_facts(chunk) else None

    def end(self, call: WorkerCall, body: Mapping[str, Any], request_bytes: int) -> tuple[dict[str, Any], Usage]:
        """What names the reply, and the usage to bill. Raises UpstreamProtocol if the stream ended too early."""
        if not (self.done or self._finished):
            raise UpstreamProtocol("the worker's stream ended before its reply was complete")
        usage = billed_usage(self._usage.usage(), body, request_bytes, self.text_bytes, call.worker.context_tokens)
        head = self._current_head()
        return {**head, "model": head["model"] or call.worker.model}, usage

    def _current_head(self) -> dict[str, Any]:
        if (text := self.text) is not None:
            self._head |= {"id": text.id, "created": text.created, "model": text.model}
            self.text = None
        return self._head


def last_chunk(head: Mapping[str, Any], usage: Usage, *, done: bool = False) -> dict[str, Any]:
    """The last chunk of a stream, with the usage to bill. `done`: the worker said that its stream is over."""
    last = {**head, "object": "chat.completion.chunk", "choices": [], "usage": usage_body(usage)}
    return last | ({"done": True} if done else {})


class WorkerStream:
    """The chunks of a reply without their usage, and the tally of them."""

    def __init__(
        self,
        call: WorkerCall,
        body: Mapping[str, Any],
        request_bytes: int,
        events: replies.ReplyEvents[TextChunk] | replies.ReadEvents[TextChunk],
        secret: str | None,
    ) -> None:
        self._call, self._body, self._request_bytes = call, body, request_bytes
        self._events, self._secret = events, secret
        wire = wire_of(call)
        self._wire = None if wire is None else wire.chunks()
        self._tally = StreamTally()
        self._error: UpstreamError | None = None

    @property
    def is_done(self) -> bool:
        """Whether the worker said that its stream is over."""
        return self._tally.done

    async def next(self) -> list[dict[str, Any] | TextChunk] | None:
        """The chunks that came together, those of nothing but text as read; None at the end. Raises UpstreamError."""
        if self._error is not None:
            raise self._error
        events = await self._events.next()
        return None if events is None else self._chunks(events)

    def rest(self) -> list[dict[str, Any] | TextChunk]:
        """The chunks that have come and were not read, without a wait; as far as they are valid."""
        return self._chunks(self._events.rest())

    def _chunks(self, events: list[SseEvent | TextChunk]) -> list[dict[str, Any] | TextChunk]:
        tally, chunks = self._tally, list[dict[str, Any] | TextChunk]()
        try:
            for event in events:
                if isinstance(event, TextChunk):
                    tally.text, text = event, event.choices[0].delta.content
                    tally.text_bytes += len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
                    chunks.append(event)
                elif event.data == DONE:
                    tally.done = True
                elif visible := tally.add(parse_chunk(event, self._secret, self._call.endpoint, self._wire)):
                    chunks.append(visible)
        except UpstreamError as error:
            replies.count_fault(error, self._request_bytes, 0)
            self._error = error
        if tally.text_bytes:
            self._events.begun = True
        return chunks

    def end(self) -> tuple[dict[str, Any], Usage]:
        """`StreamTally.end`."""
        with replies.fault_counted(self._request_bytes, 0):
            return self._tally.end(self._call, self._body, self._request_bytes)

    async def aclose(self) -> None:
        """Release the connection."""
        await self._events.aclose()


def as_sent(call: WorkerCall, body: dict[str, Any]) -> dict[str, Any]:
    """The body in the form of the worker's API."""
    wire = wire_of(call)
    return body if wire is None else wire.request(call.worker, body)


def request_body(call: WorkerCall) -> dict[str, Any]:
    """The body to send: the pool file's defaults, overridden by the call's own body, with the upstream's model name."""
    return {
        **call.worker.params,
        **call.body,
        "model": call.worker.claude or call.worker.model,
    }


def streams_alike(call: WorkerCall, body: Mapping[str, Any]) -> bool:
    """Whether a stream says all that the whole reply would: it is text, and the worker streams."""
    is_plain = call.endpoint == "chat" and not call.worker.speaks_messages
    return is_plain and "stream" not in call.worker.cannot and BEYOND_TEXT.isdisjoint(body)


def check_reply(call: WorkerCall, body: dict[str, Any], secret: str | None = None) -> dict[str, Any]:
    """Return the body if it is valid for its endpoint, a text completion and a response in the form of chat. Raises
    UpstreamProtocol, and the error that a body is with status 200."""
    if (wire := wire_of(call)) is None:
        return check_body(call, body, secret)
    body = wire.completion(body)
    if (fault := fault_in(body)) is not None:
        raise upstream.event_error(fault, secret)
    return as_whole(body)


def check_body(call: WorkerCall, body: dict[str, Any], secret: str | None = None) -> dict[str, Any]:
    """`check_reply` of a body in the form of OpenAI's endpoint."""
    if (fault := fault_in(body)) is not None:
        raise upstream.event_error(fault, secret)
    if call.endpoint == "embeddings":
        return check_embeddings(body, call.body)
    return as_whole(as_chat(body) if call.endpoint == "completions" else body)


def reply_text_bytes(body: Mapping[str, Any]) -> int:
    """UTF-8 bytes of the generated text in a complete reply. Embeddings have none."""
    return text_bytes(choice["message"] for choice in body.get("choices") or ())


def parse_chunk(
    event: SseEvent, secret: str | None, endpoint: Endpoint = "chat", wire: ChunkMaker | None = None
) -> dict[str, Any]:
    """The chunk of an event, which may be the whole reply; `wire` makes it from one of the Responses API. Raises
    UpstreamProtocol for an invalid chunk, UpstreamError for an error."""
    chunk = upstream.parse_object(event.data)
    chunk = chunk if wire is None else wire.chunk(chunk)
    if fault := fault_in(chunk) or (chunk if event.name == "error" else None):
        raise upstream.event_error(fault, secret)
    return as_chunk(chunk_as_chat(chunk) if endpoint == "completions" and wire is None else chunk)
