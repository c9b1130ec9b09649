"""The conductor over the OpenAI protocol: one client for vLLM, the embedded server, and hosted models.

A dialect says how the server accepts the schema. `vllm` (vLLM and the embedded server) also returns token ids and
behaviour log-probs, which learning needs. `json_schema` and `json_object` are OpenAI's two formats. `none` sends no
schema and leaves all checks to `core.loop.plan`. `auto` asks the server who it is, before each call until it answers.
If a hosted model refuses an option (log-probs, a seed, a temperature), the client never sends it again.

Every wait ends at the call's deadline. The text is bounded by `text_bytes_max`, a stream event by `EVENT_BYTES_MAX`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal, get_args

import aiohttp
import httpx

from gateway.adapters.upstream.client import JSON, Breaker, Items, PooledClient, endpoint_url, guarded, http_client
from gateway.adapters.upstream.conductor.stream import (
    MESSAGE_CHARS_MAX,
    PlanChunk,
    PlanStream,
    json_object,
    json_objects,
    read_chunk,
)
from gateway.adapters.upstream.http1.connection import HungUp
from gateway.adapters.upstream.http1.pool import Http1Reply
from gateway.adapters.upstream.http1.ways import Way
from gateway.adapters.upstream.replies import HttpxReply, transport_error
from gateway.adapters.upstream.sse import DONE, SseError, SseEvent, SseParser
from gateway.core.loop.plan import portable_schema
from gateway.core.openai.reply import json_bytes
from gateway.core.openai.structured import strict_schema
from gateway.errors import ConductorError
from gateway.service.ports.request import Conductor, ConductorCall

Structured = Literal["auto", "vllm", "json_schema", "json_object", "none"]
Reply = Http1Reply | HttpxReply

TEXT_BYTES_MAX = 256 << 10
EVENT_BYTES_MAX = 1 << 20
ERROR_BYTES_MAX = 64 << 10
PROBE_TIMEOUT_S = 2.0
FORMS_KEPT = 64  # of schemas
DROPPABLE = ("logprobs", "seed", "temperature", "top_p", "stream_options")
OURS = ("model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "response_format")
VLLM_SAMPLING = ("top_k", "min_p", "repetition_penalty")
TRANSPORT_ERRORS = (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, aiohttp.ClientError, OSError)


class HttpConductor(Conductor):
    """`ports.Conductor` over HTTP. `base_url` ends like OpenAI's (`…/v1`); `model` is the name of the live version.
    `params` are sent with every call, `cannot` names options that never are: both as in a pool file."""

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        *,
        logprobs: bool = True,
        structured: Structured = "vllm",
        timeout_s: float = 30.0,
        text_bytes_max: int = TEXT_BYTES_MAX,
        params: Mapping[str, Any] | None = None,
        cannot: Collection[str] = (),
        breaker: Breaker | None = None,
        client: httpx.AsyncClient | None = None,
        way: Way | None = None,
    ) -> None:
        if structured not in get_args(Structured):
            raise ValueError(f"structured is {structured!r}, not one of {get_args(Structured)}")
        self._base_url = base_url.rstrip("/")
        self._model = model
        self._headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        self._structured = structured
        self._timeout_s = timeout_s
        self._text_bytes_max = text_bytes_max
        self._breaker = breaker or Breaker()
        self._client = client or http_client()
        self._extensions = {"way": way}
        self._params = dict(params or {})
        self._refused: set[str] = ({"logprobs"} if not logprobs else set()) | ({*DROPPABLE, "max_tokens"} & set(cannot))
        if "max_completion_tokens" in self._params:
            self._refused.add("max_tokens")
        self._forms: dict[int, tuple[Mapping[str, Any], Structured, dict[str, Any]]] = {}  # by the schema's identity

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    def decode(self, call: ConductorCall) -> Items:
        """See `ports.Conductor.decode`. Also raises ConductorError(refused) if the server rejects the request."""
        return guarded(self._breaker, call, self._decode(call))

    async def ready(self) -> bool:
        """See `ports.Conductor.ready`."""
        try:
            await self.describe()
        except ConductorError:
            return False
        return True

    async def describe(self) -> dict[str, Any]:
        """The server's description of the live version: {"id", "owned_by", **manifest}. Raises ConductorError."""
        timeout_s = min(PROBE_TIMEOUT_S, self._timeout_s)
        async with _transport(asyncio.get_running_loop().time() + timeout_s):
            url, more = f"{self._base_url}/models", self._extensions
            request = self._client.build_request("GET", url, headers=self._headers, extensions=more)
            response = HttpxReply(await self._client.send(request, stream=True))
            try:
                body = await _bounded(response, EVENT_BYTES_MAX)
            finally:
                await response.aclose()
        if response.status_code != 200:
            raise _status_error(response.status_code, body)
        for entry in json_objects(json_object(body.decode(errors="replace")).get("data")):
            if entry.get("id") == self._model:
                manifest = entry.get("baton")
                facts = manifest if isinstance(manifest, dict) else {}
                return {**facts, "id": self._model, "owned_by": str(entry.get("owned_by", ""))}
        raise ConductorError("refused", f"the conductor's server does not serve {self._model!r}")

    # ---------------------------------------------------------------- one call

    async def _dialect(self) -> Structured:
        """The dialect of a server: vLLM names itself as the owner of its models, and only vLLM gives the token ids and
        log-probs that learning needs. Raises ConductorError(down | slow) until the server answers."""
        try:
            return "vllm" if (await self.describe())["owned_by"] == "vllm" else "json_schema"
        except ConductorError as error:
            if error.reason == "refused":  # it answers, and lists no such model: not a vLLM
                return "json_schema"
            raise ConductorError(error.reason, error.message, billable=False) from None

    async def _decode(self, call: ConductorCall) -> Items:
        deadline = time.monotonic() + min(call.timeout_s, self._timeout_s)
        if self._structured == "auto":
            self._structured = await self._dialect()
        until_s = asyncio.get_running_loop().time() + deadline - time.monotonic()
        response, body = await self._open(call, until_s)
        plan, parser = PlanStream(call.model or self._model, self._text_bytes_max), SseParser(EVENT_BYTES_MAX)
        try:
            while not plan.is_over:
                if chunk := plan.take(*await _events(response, parser, until_s)):
                    yield chunk
                plan.check()
        finally:
            await response.aclose()
        yield plan.end(body)

    async def _open(self, call: ConductorCall, until_s: float) -> tuple[Reply, dict[str, Any]]:
        """Open a response with status 200; return it with the request's body. Drops refused options one at a time."""
        for _ in range(len(DROPPABLE) + 2):
            body = self._body(call)
            async with _transport(until_s):
                response = await self._sent(json_bytes(body), call.headers, until_s)
                if response.status_code == 200:
                    return response, body
                try:
                    raw = await _bounded(response, ERROR_BYTES_MAX)
                finally:
                    await response.aclose()
            option = self._refused_option(response.status_code, raw, body)
            if option is None:
                raise _status_error(response.status_code, raw)
            self._refused.add(option)
        raise ConductorError("refused", "the conductor's server refuses every form of the request", billable=False)

    async def _sent(self, content: bytes, headers: Mapping[str, str], until_s: float) -> Reply:
        """Send a request; once more if the server closes the connection before it has answered. A server closes idle
        connections, and a call may meet that. A plan changes nothing, so it may be asked for twice (RFC 9110
        §9.2.2)."""
        try:
            return await self._posted(content, headers, until_s)
        except HungUp:
            return await self._posted(content, headers, until_s)

    async def _posted(self, content: bytes, headers: Mapping[str, str], until_s: float) -> Reply:
        """Send a request once: over the pool's connections where the client has them, as httpx costs a multiple."""
        headers = {**headers, **self._headers, "content-type": JSON, "user-agent": "baton"}
        if isinstance(self._client, PooledClient):
            parsed = endpoint_url(self._base_url, "chat/completions")
            return await self._client.ask(parsed, headers, content, until_s, self._extensions["way"])
        url = f"{self._base_url}/chat/completions"
        request = self._client.build_request("POST", url, content=content, headers=headers)
        return HttpxReply(await self._client.send(request, stream=True))

    def _form(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that hold the schema. Planners send the same object again and again."""
        kept = self._forms.get(id(schema))
        if kept is None or kept[0] is not schema or kept[1] != self._structured:
            if len(self._forms) >= FORMS_KEPT:
                self._forms.clear()
            kept = self._forms[id(schema)] = schema, self._structured, _schema_fields(self._structured, schema)
        return kept[2]

    def _refused_option(self, status: int, raw: bytes, body: Mapping[str, Any]) -> str | None:
        """The option that a hosted model refuses and that Baton can do without, or None. Always None for `vllm`."""
        if status not in (400, 422) or self._structured == "vllm":
            return None
        text = raw.decode(errors="replace")
        options = [name for name in (*DROPPABLE, "max_tokens") if name in body]
        return next((name for name in options if re.search(rf"\b{name}\b", text)), None)

    def _body(self, call: ConductorCall) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": call.model or self._model,
            "messages": [dict(message) for message in call.messages],
            "temperature": call.sampling.temperature,
            "top_p": call.sampling.top_p,
            "max_tokens": call.sampling.tokens_max,
            "logprobs": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._form(call.schema),
        }
        if self._structured == "vllm":
            body |= {name: getattr(call.sampling, name) for name in VLLM_SAMPLING}
        if call.sampling.seed is not None:
            body["seed"] = call.sampling.seed
        # of what the pool file sets, the form of the reply and the bound on its tokens are the planner's own
        body |= {name: value for name, value in self._params.items() if name not in OURS}
        if "max_tokens" in self._refused:
            body["max_completion_tokens"] = body["max_tokens"]
        return {name: value for name, value in body.items() if name not in self._refused}


# ---------------------------------------------------------------- the schema, in each dialect


def _schema_fields(structured: Structured, schema: Mapping[str, Any]) -> dict[str, Any]:
    if structured == "vllm":
        outputs = {"json": dict(schema), "disable_any_whitespace": True}
        return {"structured_outputs": outputs, "return_token_ids": True}
    if structured == "json_schema":
        specification = {"name": "plan", "strict": True, "schema": strict_schema(portable_schema(schema))}
        return {"response_format": {"type": "json_schema", "json_schema": specification}}
    return {"response_format": {"type": "json_object"}} if structured == "json_object" else {}


# ---------------------------------------------------------------- reading, within bounds


@asynccontextmanager
async def _transport(until_s: float) -> AsyncIterator[None]:
    """Convert exceptions of the HTTP clients, and a deadline of the loop's clock that has passed, to
    ConductorError(down | slow)."""
    try:
        async with asyncio.timeout_at(until_s):
            yield
    except (TimeoutError, *TRANSPORT_ERRORS) as error:
        raise _unreachable(error) from error


def _unreachable(error: Exception) -> ConductorError:
    if isinstance(error, TimeoutError):
        return ConductorError("slow", "the conductor did not answer in time")
    problem = f"the conductor cannot be reached: {error or type(error).__name__}"
    return ConductorError("down", problem, billable=transport_error(error).dispatched)


async def _events(response: Reply, parser: SseParser, until_s: float) -> tuple[list[PlanChunk | str], bool]:
    """The events that came together, as chunks or as their data, and whether the stream has ended. Raises
    ConductorError."""
    try:
        piece = await response.next_raw(until_s)
    except (TimeoutError, *TRANSPORT_ERRORS) as error:
        raise _unreachable(error) from error
    try:
        events = parser.feed_to(read_chunk, piece) if piece else parser.end()
    except SseError as error:
        raise ConductorError("unparseable", f"the conductor's stream is not an event stream: {error}") from None
    came = [event.data if isinstance(event, SseEvent) else event for event in events]
    return (came[: came.index(DONE)], True) if DONE in came else (came, not piece)


async def _bounded(response: Reply, bytes_max: int) -> bytes:
    """The first `bytes_max` bytes of a body."""
    body = b""
    async for piece in response.aiter_raw():
        body += piece
        if len(body) >= bytes_max:
            break
    return body[:bytes_max]


def _status_error(status: int, raw: bytes) -> ConductorError:
    reason = "down" if status >= 500 or status in (408, 429) else "refused"
    text = " ".join(raw.decode(errors="replace").split())[:MESSAGE_CHARS_MAX]
    message = f"the conductor's server answered {status}: {text}"
    return ConductorError(reason, message, billable=False, upstream_status=status)
