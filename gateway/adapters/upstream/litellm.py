"""All other vendors, through LiteLLM. Only this file imports LiteLLM, and only if a pool needs it (ADR 0006).

Everything that LiteLLM does besides translating is off: retries, fallbacks, caching, callbacks, logging, telemetry, the
price map from the web, `.env` files. Its exceptions become Baton's. It invents a finish reason for a cut stream; this
file detects that and raises.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from copy import deepcopy
from functools import cache
from types import ModuleType
from typing import Any

import aiohttp
import httpx

from gateway.adapters.upstream import client as upstream
from gateway.adapters.upstream.http import StreamTally, check_body, last_chunk, reply_text_bytes, request_body
from gateway.adapters.upstream.outbound.measure import SendAllowance, bytes_max, guard
from gateway.adapters.upstream.outbound.sideloop import SideLoop
from gateway.adapters.upstream.plain import plain_data, plain_task
from gateway.core.log.spans import HEADER
from gateway.core.openai.chat import FIELDS, HINTS, Endpoint
from gateway.core.openai.reply import chunks_of
from gateway.core.openai.tasks.fields import FIELDS as TASK_FIELDS
from gateway.core.openai.tasks.fields import Sound
from gateway.core.openai.texts import COMPLETION_FIELDS, EMBEDDING_FIELDS
from gateway.core.openai.vendors.empty import speaks
from gateway.core.openai.vendors.usage import billed_usage, read_usage, usage_body
from gateway.core.pool.models import vendor_params
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import ConfigError, UpstreamError, UpstreamProtocol, UpstreamRefused, UpstreamTimeout
from gateway.service.ports.request import WorkerCall, WorkerReply

_REMOTE = re.compile(r"(?i)\s*(https?|gs|s3|file|ftp):")
KNOWN: Mapping[Endpoint, Mapping[str, Any]] = {
    **TASK_FIELDS,
    "chat": FIELDS,
    "completions": COMPLETION_FIELDS,
    "embeddings": EMBEDDING_FIELDS,
}
TASK_FUNCTIONS: Mapping[Endpoint, str] = {
    "moderations": "amoderation",
    "rerank": "arerank",
    "images": "aimage_generation",
    "speech": "aspeech",
    "transcriptions": "atranscription",
}
_PREFIX = re.compile(r"^(litellm\.\w+: |\w+(Exception|Error)\s*-\s*)+")
GUARDED = (  # providers whose requests LiteLLM sends with httpx alone
    *("azure", "azure_ai", "bedrock", "cohere", "cohere_chat", "deepseek", "fireworks_ai", "gemini"),
    *("groq", "mistral", "ollama", "ollama_chat", "openai", "openrouter", "perplexity", "watsonx", "xai"),
)
OPENAI_TEXTS = ("openai/", "text-completion-openai/")
MISSING = "kind litellm needs the extra; pip install '.[litellm]'"
_TASK_OPTIONS = ("num_retries", "max_retries", "timeout", "api_key", "api_base")
_ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise its import makes three web requests
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_MODE": "PRODUCTION",  # otherwise its import loads .env files
}


@cache
def _litellm() -> ModuleType:
    """Import LiteLLM without its warnings, and switch off everything but translation. Raises ConfigError."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # boundary: LiteLLM reads these at import and has no other switch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside its own imports
        try:
            import litellm

            for model_class in (litellm.ModelResponse, litellm.ModelResponseStream):
                model_class()  # otherwise the first call would build their schemas, and warn
        except ImportError:
            raise ConfigError(MISSING) from None
    litellm.suppress_debug_info = True
    litellm.turn_off_message_logging = True
    litellm.telemetry = False
    litellm.drop_params = False
    litellm.modify_params = False
    litellm.num_retries = 0
    litellm.cache = None
    litellm.REPEATED_STREAMING_CHUNK_LIMIT = 2**31  # otherwise a hundred equal chunks are a server error
    litellm.disable_hf_tokenizer_download = True
    for callbacks in ("callbacks", "success_callback", "failure_callback", "input_callback", "service_callback"):
        setattr(litellm, callbacks, [])
    _keep_missing_finish_reasons()
    from litellm.llms.custom_httpx.aiohttp_transport import LiteLLMAiohttpTransport

    guard(LiteLLMAiohttpTransport, httpx.AsyncHTTPTransport, httpx.HTTPTransport)
    module: ModuleType = litellm
    return module


@cache
def _side_loop() -> SideLoop:
    """The loop of all calls: LiteLLM keeps one client of each vendor, which belongs to one loop."""
    return SideLoop("litellm")


def _keep_missing_finish_reasons() -> None:
    """Make a missing finish reason of Gemini stay missing: LiteLLM adds one to every chunk, which hides a cut
    stream."""
    from litellm.llms.vertex_ai.gemini.vertex_and_google_ai_studio_gemini import VertexGeminiConfig

    check_by_litellm = VertexGeminiConfig._check_finish_reason

    def check_finish_reason(message: Any, finish_reason: str | None) -> Any:
        return None if finish_reason is None else check_by_litellm(message, finish_reason)

    VertexGeminiConfig._check_finish_reason = staticmethod(check_finish_reason)


class LiteLLMWorkers:
    """`ports.Workers` for kind `litellm`. `secrets` maps worker names to keys. Raises ConfigError without the extra."""

    def __init__(
        self, secrets: Mapping[str, str], *, reply_bytes_max: int = 16 << 20, chunk_gap_s_max: float = 60.0
    ) -> None:
        self._litellm = _litellm()
        self._side = _side_loop()
        self._secrets = dict(secrets)
        self._reply_bytes_max = reply_bytes_max
        self._chunk_gap_s_max = chunk_gap_s_max

    async def close(self) -> None:
        """Close the clients that LiteLLM caches."""
        await self._side.run(self._litellm.close_litellm_async_clients())

    async def complete(self, call: WorkerCall) -> WorkerReply:
        """See `ports.Workers.complete`."""
        return await self._side.run(self._task(call) if call.endpoint in TASK_FIELDS else self._complete(call))

    async def _complete(self, call: WorkerCall) -> WorkerReply:
        body = _request_body(call)
        until = asyncio.get_running_loop().time() + call.timeout_s
        async with self._client(call) as client:
            arguments = {**deepcopy(body), **self._options(call), **client}
            response = await self._sent(call, _allowance(body), until, self._function(call)(**arguments))
        completion = check_body(call, plain_data(response))
        text_bytes = reply_text_bytes(completion)
        if text_bytes > self._reply_bytes_max:
            raise UpstreamProtocol(f"the worker's reply is larger than {self._reply_bytes_max} bytes", retryable=False)
        usage = billed_usage(read_usage(completion), body, _size_bytes(body), text_bytes, call.worker.context_tokens)
        return WorkerReply(completion, usage)

    async def _task(self, call: WorkerCall) -> WorkerReply:
        """The reply to a request that is no conversation. Raises UpstreamRefused for a task that LiteLLM lacks."""
        name = TASK_FUNCTIONS.get(call.endpoint)
        if name is None:
            raise UpstreamRefused(f"LiteLLM has no {call.endpoint}", param="model", dispatched=False)
        measured = _request_body(call)
        body = dict(measured)
        if isinstance(sound := body.get("file"), Sound):
            body["file"] = (sound.name, sound.data, sound.kind)
        options = {key: value for key, value in self._options(call).items() if key in _TASK_OPTIONS}
        until = asyncio.get_running_loop().time() + call.timeout_s
        response = await self._sent(
            call, _allowance(measured), until, getattr(self._litellm, name)(**{**body, **options})
        )
        reply = plain_task(call, response)
        if len(reply.get("content") or b"") > self._reply_bytes_max:
            raise UpstreamProtocol(f"the worker's reply is larger than {self._reply_bytes_max} bytes", retryable=False)
        return upstream.task_reply(call, reply)

    async def stream(self, call: WorkerCall) -> AsyncIterator[Mapping[str, Any]]:
        """See `ports.Workers.stream`. The last chunk always has the `usage` to bill, and no choices."""
        if call.endpoint == "completions":  # LiteLLM's own stream of texts cannot be closed, and hides a cut
            reply = await self.complete(call)
            for choices in chunks_of(reply.body):
                yield {"choices": choices}
            yield {"choices": [], "usage": usage_body(reply.usage)}
            return
        body = _request_body(call) | {"stream": True, "stream_options": {"include_usage": True}}
        tally = StreamTally()
        async with aclosing(self._side.pump(self._chunks(call, body))) as chunks:
            while (plain := await chunks.next()) is not None:
                if visible := tally.add(plain):
                    yield visible
                if tally.text_bytes > self._reply_bytes_max:
                    raise UpstreamProtocol(f"the worker's reply is larger than {self._reply_bytes_max} bytes")
        yield last_chunk(*tally.end(call, body, _size_bytes(body)))

    async def _chunks(self, call: WorkerCall, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """LiteLLM's stream as JSON data. LiteLLM changes what it is given, so it gets a copy. Some vendors' requests
        leave with the first chunk."""
        now, allowance = time.monotonic, _allowance(body)
        deadline = now() + call.timeout_s
        until, spoken = upstream.first_until(call, deadline), False
        arguments = {**deepcopy(body), **self._options(call)}
        chunks = await self._sent(call, allowance, until, self._function(call)(**arguments))
        try:
            while (chunk := await self._sent(call, allowance, until, anext(chunks, None))) is not None:
                plain = plain_data(chunk)
                _refuse_invented_end(plain, chunks)
                yield plain
                spoken = spoken or speaks(plain)
                last = deadline if spoken else upstream.first_until(call, deadline)
                until = min(last, now() + (call.worker.chunk_gap_s or self._chunk_gap_s_max))
        finally:
            await chunks.aclose()

    async def _sent(self, call: WorkerCall, allowance: SendAllowance, until: float, awaitable: Any) -> Any:
        """`_await_until` for what may send a request, which leaves only if the allowance has room for it."""
        try:
            with allowance:
                return await self._await_until(call, until, awaitable)
        except UpstreamError as error:
            if allowance.excess_bytes:
                raise allowance.refusal(call.worker.name) from None
            if isinstance(error, UpstreamProtocol) and not allowance.requests and _is_guarded(call.worker):
                problem = f"LiteLLM cannot translate this request for worker {call.worker.name}"
                raise UpstreamRefused(problem, dispatched=False) from error
            raise

    def _function(self, call: WorkerCall) -> Any:
        """LiteLLM's function for the endpoint."""
        functions = {"completions": self._litellm.atext_completion, "embeddings": self._litellm.aembedding}
        return functions.get(call.endpoint, self._litellm.acompletion)

    @asynccontextmanager
    async def _client(self, call: WorkerCall) -> AsyncIterator[dict[str, Any]]:
        """The client argument of a call. For text completions of OpenAI's kind, LiteLLM would open a client of its own
        and never close it."""
        if call.endpoint != "completions" or not (call.worker.model or "").startswith(OPENAI_TEXTS):
            yield {}
            return
        from openai import AsyncOpenAI

        key, url = self._secrets.get(call.worker.name, "none"), call.worker.url
        async with AsyncOpenAI(api_key=key, base_url=url, max_retries=0, timeout=call.timeout_s) as client:
            yield {"client": client}

    async def _await_until(self, call: WorkerCall, until: float, awaitable: Any) -> Any:
        """Await one of LiteLLM's awaitables until the time `until` of the event loop. Raises UpstreamError."""
        try:
            async with asyncio.timeout_at(until):
                return await awaitable
        except Exception as error:  # boundary: LiteLLM raises anything; every error becomes one of Baton's
            raise self._map_error(error, call) from error

    def _options(self, call: WorkerCall) -> dict[str, Any]:
        """The arguments of a call besides the body."""
        options: dict[str, Any] = {
            "num_retries": 0,
            "max_retries": 0,
            "timeout": call.timeout_s,
            "drop_params": False,
            "caching": False,
            "no-log": True,
            "_skip_mcp_handler": True,  # otherwise LiteLLM looks in the client's tools for MCP servers to call
            "api_key": self._secrets.get(call.worker.name),
        }
        if call.traceparent:
            options["extra_headers"] = {HEADER: call.traceparent}
        return options | ({"api_base": call.worker.url} if call.worker.url else {})

    def _map_error(self, error: Exception, call: WorkerCall) -> UpstreamError:
        """Convert an exception of LiteLLM's. They are OpenAI's, with a status; if LiteLLM guessed the status, the cause
        says more."""
        if isinstance(error, UpstreamError):
            return error
        if isinstance(original := getattr(error, "original_exception", None), Exception):
            return self._map_error(original, call)
        if _never_left(error):
            return UpstreamError("the worker cannot be reached", retryable=True, dispatched=False)
        if isinstance(error, TimeoutError | self._litellm.Timeout):
            return UpstreamTimeout("the worker did not answer in time")
        if isinstance(error, self._litellm.APIConnectionError):
            return UpstreamProtocol("the worker hung up before its reply was complete, or its reply is invalid")
        status = getattr(error, "status_code", None)
        if not isinstance(status, int):
            return UpstreamProtocol(f"the worker's reply is invalid ({type(error).__name__})")
        response = getattr(error, "response", None)
        headers = getattr(error, "litellm_response_headers", None) or getattr(response, "headers", None) or {}
        message = _vendor_message(str(getattr(error, "message", error)))
        kind = type(error).__name__  # LiteLLM knows by it more than the words say
        body = json.dumps({"error": {"message": message, "type": kind}}).encode()
        return upstream.status_error(status, headers, body, self._secrets.get(call.worker.name))


def _refuse_invented_end(chunk: Mapping[str, Any], chunks: Any) -> None:
    """Raises UpstreamProtocol for a finish reason that the worker did not send: LiteLLM ends a cut stream with
    `stop`."""
    received = getattr(chunks, "received_finish_reason", True) or getattr(chunks, "intermittent_finish_reason", None)
    if not received and any(choice.get("finish_reason") for choice in chunk.get("choices") or ()):
        raise UpstreamProtocol("the worker's stream ended before its reply was complete")


def _never_left(error: BaseException | None) -> bool:
    """Whether no connection was made: a cause in the chain says so, or LiteLLM quotes the exception that it dropped."""
    text = str(error)
    while error is not None:
        if isinstance(error, httpx.ConnectError | aiohttp.ClientConnectorError):
            return True
        error = error.__cause__ or error.__context__
    return "Cannot connect to host" in text


def _vendor_message(text: str) -> str:
    """Extract the vendor's message from `litellm.SomeError: VendorException - b'{"error": {…}}'`."""
    start = text.find("{")
    with suppress(ValueError, RecursionError):
        body, _ = json.JSONDecoder(strict=False).raw_decode(text, start) if start >= 0 else ({}, 0)
        message = (body.get("error") or {}).get("message")
        if isinstance(message, str):
            return message
    return _PREFIX.sub("", text)


def _request_body(call: WorkerCall) -> dict[str, Any]:
    """The body to translate. LiteLLM takes settings and body properties under the same names, and fetches URLs itself,
    so only known properties may come from a request, and files only as `data:`. Raises UpstreamRefused."""
    unknown_names = sorted(call.body.keys() - KNOWN[call.endpoint].keys() - vendor_params(call.worker))
    if unknown_names:
        raise UpstreamRefused(
            f"`{unknown_names[0]}` cannot be sent to this worker", param=unknown_names[0], dispatched=False
        )
    for message in call.body.get("messages") or ():
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            if _REMOTE.match(target := _target(part)) and not (call.worker.fetches and _is_picture(part, target)):
                raise UpstreamRefused(
                    "this worker takes images and files as data: URLs only", param="messages", dispatched=False
                )
    body = request_body(call)
    if call.endpoint == "embeddings":  # LiteLLM's type holds only numbers; Baton encodes them in the reply
        return {**body, "encoding_format": "float"}
    if (call.worker.model or "").startswith(("openai/", "azure/")):
        return body
    return {name: value for name, value in body.items() if name not in HINTS}  # no other vendor accepts them


def _is_guarded(worker: WorkerSpec) -> bool:
    """Whether all requests to a worker are known to pass the guard of the transports."""
    return (worker.model or "").partition("/")[0] in GUARDED


def _allowance(body: Mapping[str, Any]) -> SendAllowance:
    return SendAllowance(bytes_max(body))


def _is_picture(part: Mapping[str, Any], target: str) -> bool:
    return part.get("type") == "image_url" and target.startswith("https:")


def _target(part: Mapping[str, Any]) -> str:
    """The URL, file id or data of a content part, or an empty string."""
    for name, field in (("image_url", "url"), ("file", "file_id"), ("file", "file_data")):
        target = part.get(name)
        value = target.get(field) if isinstance(target, Mapping) else target
        if isinstance(value, str):
            return value
    return ""


def _size_bytes(body: Mapping[str, Any]) -> int:
    with suppress(TypeError, ValueError):
        return len(json.dumps(body, separators=(",", ":")).encode())
    return 0
