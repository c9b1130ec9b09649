"""Shared by all HTTP upstreams: the pooled client, bodies as JSON or forms, replies in bytes, the errors that replies
name, and a circuit breaker.

Nothing that an upstream sends is trusted. Text that reaches a client is cut, and scrubbed of the worker's key.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from http.cookiejar import DefaultCookiePolicy
from typing import Any

import aiohttp
import httpx
import msgspec
import yarl
from httpx_aiohttp import AiohttpTransport

from gateway.adapters.upstream.http1.pool import ConnectionPool, Http1Reply
from gateway.adapters.upstream.http1.ways import HandedOver, Way, Ways
from gateway.adapters.upstream.sse import BOM
from gateway.core.money.amounts import Usage
from gateway.core.openai.body import parse_json
from gateway.core.openai.chat import Endpoint
from gateway.core.openai.tasks.fields import Sound
from gateway.core.openai.tasks.replies import check_task, is_raw, units_of
from gateway.core.openai.vendors import overflow
from gateway.core.openai.vendors.faults import VendorFault, fault_of, read_fault, status_of
from gateway.core.openai.vendors.usage import billed_usage, read_usage, usage_body
from gateway.core.pool.breaker import HEALTHY, RestRules, abandoned, failed, tried
from gateway.errors import (
    ConductorError,
    UpstreamError,
    UpstreamOverloaded,
    UpstreamProtocol,
    UpstreamRateLimited,
    UpstreamRefused,
    UpstreamTimeout,
)
from gateway.service.ports.request import (
    REFUSED_STATUSES,
    ConductorCall,
    ConductorChunk,
    ConductorEnd,
    WorkerCall,
    WorkerReply,
)

CONNECT_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 512
KEEPALIVE_EXPIRY_S = 4.0  # uvicorn, and so vLLM, closes an idle connection after 5 s; a call on it then fails
JSON = "application/json"
TIMED_OUT_SHARE = 0.9  # of a call's time-out: one that is cancelled later was given up for it
Items = AsyncGenerator[ConductorChunk | ConductorEnd, None]
MESSAGE_CHARS_MAX = 500
SECRET_CHARS_MIN = 4
RETRY_AFTER_S_MAX = 3600.0
_encode = msgspec.json.Encoder().encode
_KEY_LIKE = re.compile(r"(?i)\b(sk|rk|pk|key|AIza)[-_][\w*.-]{6,}|\bAIza[\w-]{10,}|\bbearer\s+\S+")
_SOUND = re.compile(r"audio/[a-z0-9.+-]{1,64}")
_RETRYABLE = (408, 409, 425, 429)
_NAMED_STATUSES: Mapping[int, type[UpstreamError]] = {
    408: UpstreamTimeout,
    429: UpstreamRateLimited,
    503: UpstreamOverloaded,
    504: UpstreamTimeout,
    529: UpstreamOverloaded,
}


class PooledClient(httpx.AsyncClient):
    """httpx's client over sessions of aiohttp. Calls of model workers and of conductors use connections of our own
    (`ask`), for httpx and aiohttp took most of a call's processor time; those through a proxy or with a certificate of
    their own do not. It keeps no state between calls."""

    def __init__(self, connections_max: int, ways: Ways | None = None) -> None:
        self._connections_max = connections_max
        self._made: dict[ssl.SSLContext, aiohttp.ClientSession] = {}
        self._pool: ConnectionPool | None = None
        self._ways = ways or Ways()
        self._by_url: dict[yarl.URL, Way] = {}  # of workers and conductors, whose URLs no client chooses
        super().__init__(
            transport=_ByWay(self._ways, self.session),
            follow_redirects=False,
            headers={"user-agent": "baton"},
            trust_env=False,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),  # the call's own deadline bounds the rest
        )
        self.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))

    def session(self, tls: ssl.SSLContext) -> aiohttp.ClientSession:
        """The session for such connections, made in the event loop of its first call."""
        made = self._made.get(tls)
        if made is None:
            connector = aiohttp.TCPConnector(limit=self._connections_max, keepalive_timeout=KEEPALIVE_EXPIRY_S, ssl=tls)
            made = self._made[tls] = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            )
        return made

    def connections(self) -> ConnectionPool:
        """The connections for calls of model workers and conductors, made in the event loop of the first call."""
        if self._pool is None:
            self._pool = ConnectionPool(
                self._connections_max,
                self._ways.tls,
                idle_s=KEEPALIVE_EXPIRY_S,
                connect_s=CONNECT_TIMEOUT_S,
            )
        return self._pool

    async def ask(
        self, url: yarl.URL, headers: Mapping[str, str], content: bytes, until_s: float, way: Way | None = None
    ) -> Http1Reply:
        """Send a request by the worker's way, else by that of the environment; the reply whose head has come. Raises
        what is in `replies.TRANSPORT`, and TimeoutError beyond `until_s` of the loop's clock."""
        way = way or self._by_url.get(url) or self._way_to(url)
        if way.is_plain:
            return await self.connections().post(url, headers, content, until_s)
        async with asyncio.timeout_at(until_s):
            response = await self.session(way.tls).post(
                url,
                headers={**headers, **way.headers(tunnels=False)},
                data=content,
                allow_redirects=False,
                proxy=way.proxy,
                proxy_headers=way.headers(tunnels=True),
            )
        return HandedOver(response)

    def _way_to(self, url: yarl.URL) -> Way:
        way = self._by_url[url] = self._ways.of(str(url))
        return way

    async def aclose(self) -> None:
        """Close every connection."""
        await super().aclose()
        if self._pool is not None:
            self._pool.close()
            await asyncio.sleep(0)  # a turn of the event loop, in which the connections end
        for session in self._made.values():
            await session.close()


class _ByWay(httpx.AsyncBaseTransport):
    """Sends each request of httpx by its way: that of its extension `way`, else that of the environment."""

    def __init__(self, ways: Ways, session: Callable[[ssl.SSLContext], aiohttp.ClientSession]) -> None:
        self._ways, self._session = ways, session
        self._over: dict[Way, AiohttpTransport] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx. Raises ConfigError for a proxy that cannot be used."""
        way = request.extensions.get("way") or self._ways.of(str(request.url.copy_with(raw_path=b"/")))
        if (over := self._over.get(way)) is None:
            headers = way.headers(tunnels=True)
            proxy = None if way.proxy is None else httpx.Proxy(str(way.proxy), headers=headers)
            over = AiohttpTransport(verify=way.tls, client=self._session(way.tls), proxy=proxy)
            self._over[way] = over
        request.headers.update(way.headers(tunnels=False))
        return await over.handle_async_request(request)


@lru_cache(maxsize=1024)
def endpoint_url(base: str, path: str) -> yarl.URL:
    """The URL of an endpoint, parsed once per server and not once per call. Raises httpx.InvalidURL."""
    return yarl.URL(str(httpx.URL(f"{base}/{path}")), encoded=True)


def http_client(connections_max: int = CONNECTIONS_MAX, ways: Ways | None = None) -> PooledClient:
    """Make a pooled client. The caller closes it. None: the straight way to every server."""
    return PooledClient(connections_max, ways)


def parse_object(raw: bytes | str) -> dict[str, Any]:
    """Parse a reply that must be a JSON object; an error of Google's comes in a list. Raises UpstreamProtocol."""
    try:
        value = parse_json(raw.removeprefix(BOM) if isinstance(raw, bytes) else raw)
    except (ValueError, RecursionError):
        raise UpstreamProtocol("the worker's reply is not JSON") from None
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(value, dict):
        raise UpstreamProtocol("the worker's reply is not a JSON object")
    return value


def status_error(status: int, headers: Mapping[str, str], body: bytes, secret: str | None) -> UpstreamError:
    """The error for a status other than 200. It never contains the worker's key, nor the message of a 401 about it."""
    if status in (401, 403):
        return UpstreamError(f"the worker refused Baton's key ({status})", upstream_status=status)
    if status == 407:
        return UpstreamError("the worker's proxy asks for a user and a password (407)", upstream_status=status)
    if 300 <= status < 400:
        return UpstreamError(f"the worker answered with a redirect ({status}), never followed", upstream_status=status)
    return _fault_error(status, headers, read_fault(body), secret)


def _fault_error(status: int, headers: Mapping[str, str], fault: VendorFault, secret: str | None) -> UpstreamError:
    message, param, code = (None if text is None else scrub(text, secret) for text in fault[:3])
    too_long = fault.is_overflow and status in overflow.STATUSES
    if too_long:  # clients shorten the conversation on this code
        param, code = param or "messages", overflow.CODE
    if too_long or status in REFUSED_STATUSES:
        text = message or f"the worker refused the request ({status})"
        return UpstreamRefused(text, upstream_status=status, param=param, code=code)
    text = f"the worker failed ({status})" + (f": {message}" if message else "")
    wait_s = retry_after_s(headers, datetime.now(UTC))
    if error_class := _NAMED_STATUSES.get(status):
        return error_class(text, upstream_status=status, retry_after_s=wait_s)
    retryable = status >= 500 or status in _RETRYABLE
    return UpstreamError(text, upstream_status=status, retryable=retryable, retry_after_s=wait_s)


def event_error(payload: Any, secret: str | None) -> UpstreamError:
    """The error for an error object in a reply that began with status 200. It costs nothing, as one with a status of
    its own."""
    fault = fault_of(payload)
    status = 400 if fault.is_overflow else status_of(payload)
    if status is not None:
        return status_error(status, {}, json.dumps({"error": payload}).encode(), secret)
    message = scrub(fault.message or str(payload), secret)
    return UpstreamError(f"the worker failed while it answered: {message}", retryable=True, upstream_status=200)


def scrub(text: str, secret: str | None) -> str:
    """Make upstream text fit for a client: one line of at most MESSAGE_CHARS_MAX characters, without the key or
    anything that looks like a key."""
    if secret and len(secret) >= SECRET_CHARS_MIN:  # a placeholder such as `x` would be found in every word
        text = text.replace(secret, "[key]")
    return " ".join(_KEY_LIKE.sub("[key]", text).split())[:MESSAGE_CHARS_MAX]


def retry_after_s(headers: Mapping[str, str], now: datetime) -> float | None:
    """The seconds to wait according to `retry-after-ms` or `retry-after` (seconds or HTTP date, RFC 9110 §10.2.3), or
    None if neither is present."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            wait_s = float(headers.get(name, "")) * unit_s
        except ValueError:
            continue
        if math.isfinite(wait_s):
            return min(max(wait_s, 0.0), RETRY_AFTER_S_MAX)
    try:
        when = parsedate_to_datetime(headers.get("retry-after", ""))
    except ValueError:
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return min(max((when - now).total_seconds(), 0.0), RETRY_AFTER_S_MAX)


def first_until(call: WorkerCall, deadline: float) -> float:
    """The time of the event loop until which the first token of a stream must have come, of a call that ends at
    `deadline`."""
    return min(deadline, deadline - call.timeout_s + call.worker.silence_s_max)


class Breaker:
    """Stops calls to a service that keeps failing. It opens after `failures_max` failures in a row; then it admits one
    call every `cool_down_s` until one succeeds."""

    def __init__(
        self, failures_max: int = 5, cool_down_s: float = 10.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._rules, self._now = RestRules(failures_max, cool_down_s, cool_down_s), now
        self._health = HEALTHY

    def admit(self) -> bool:
        """Whether a call may leave now. After True, call `succeed`, `fail` or `abandon` once."""
        now_s = self._now()
        if self._health.holds(now_s):
            return False
        if self.is_open:
            self._health = tried(self._health, now_s)
        return True

    @property
    def is_open(self) -> bool:
        """Whether calls are paused, but for the one that tries."""
        return self._health.rests > 0

    def succeed(self) -> None:
        """Report that the call succeeded."""
        self._health = HEALTHY

    def fail(self) -> None:
        """Report that the call failed."""
        now_s = self._now()
        self._health = failed(self._health, "failed", now_s, now_s, self._rules)

    def abandon(self) -> None:
        """Report that the caller left before the call ended, so that its result is unknown."""
        self._health = abandoned(self._health, self._now())


async def guarded(breaker: Breaker, call: ConductorCall, items: Items) -> Items:
    """The items of a call, which the breaker admits and counts. A call that its caller ends at its time-out has failed,
    as one that ends by itself; a rejected request and a hasty call say nothing about the server. Raises
    ConductorError(down) while calls are paused."""
    if not breaker.admit():
        await items.aclose()
        raise ConductorError("down", "the conductor keeps failing; calls to it are paused", billable=False)
    report, began_s = breaker.abandon, time.monotonic()
    try:
        async with aclosing(items):
            async for item in items:
                if isinstance(item, ConductorEnd):
                    report = breaker.succeed
                yield item
    except ConductorError as error:
        if error.reason != "refused" and not (call.hasty and error.reason == "slow"):
            report = breaker.fail
        raise
    except (asyncio.CancelledError, GeneratorExit):
        if not call.hasty and time.monotonic() - began_s >= TIMED_OUT_SHARE * call.timeout_s:
            report = breaker.fail
        raise
    finally:
        report()


# ---------------------------------------------------------------- bodies, and replies that are no conversation


def encode(body: Mapping[str, Any]) -> bytes:
    """A body as JSON. Raises UpstreamRefused for a number that JSON does not have."""
    with suppress(TypeError, ValueError, OverflowError, RecursionError):  # half a surrogate pair, a large integer
        content = _encode(body)
        if b"null" not in content or not any(mark + b"null" in content for mark in (b":", b",", b"[")):  # NaN, to it
            return content
    try:
        return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise UpstreamRefused("the request holds a value that JSON cannot represent", dispatched=False) from None


def encoded(body: Mapping[str, Any]) -> tuple[str, bytes]:
    """(media type, content) of a body: JSON, or a form where it has a recording."""
    sound = body.get("file")
    if not isinstance(sound, Sound):
        return JSON, encode(body)
    fields = {name: value for name, value in body.items() if name != "file"}
    form = {f"{name}[]" if isinstance(value, list) else name: _field(value) for name, value in fields.items()}
    request = httpx.Request("POST", "http://form", data=form, files={"file": (sound.name, sound.data, sound.kind)})
    return request.headers["content-type"], request.read()


def _field(value: Any) -> Any:
    if isinstance(value, list):
        return [str(item) for item in value]
    return json.dumps(value) if isinstance(value, dict) else str(value)


def raw_reply(endpoint: Endpoint, raw: bytes, kind: str) -> dict[str, Any]:
    """A reply in bytes (speech) or in text. Of the worker's media types only those of sound reach the client."""
    if endpoint != "speech":
        return {"content": raw.decode("utf-8", "replace"), "content_type": "text/plain; charset=utf-8"}
    kind = kind.partition(";")[0].strip().lower()
    return {"content": raw, "content_type": kind if _SOUND.fullmatch(kind) else "application/octet-stream"}


def read_task(call: WorkerCall, raw: bytes, kind: str) -> dict[str, Any]:
    """The reply to a request that is no conversation: JSON, bytes or text. Raises UpstreamProtocol."""
    return raw_reply(call.endpoint, raw, kind) if is_raw(call.endpoint, call.body) else parse_object(raw)


def task_reply(call: WorkerCall, body: dict[str, Any], kind: str = "") -> WorkerReply:
    """The reply to a request that is no conversation, with the units and the tokens that will be billed. Raises
    UpstreamProtocol."""
    reply = check_task(call.endpoint, body)
    usage, spec = read_usage(reply), call.worker
    units = units_of(call.endpoint, call.body, reply)
    if usage is not None:
        most = {"max_tokens": spec.output_tokens_max * units.get("images", 1)}
        usage = billed_usage(usage, most, 0, 0, spec.context_tokens)
    usage = usage or Usage()
    return WorkerReply(reply, replace(usage, details={**usage.details, **units}), {"content-type": kind})


def tool_completion(call: WorkerCall, content: str, usage: Usage) -> dict[str, Any]:
    """A tool's answer as an OpenAI completion."""
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    head = {"id": f"tool-{call.rollout_id}-{call.step_id}", "object": "chat.completion", "created": 0}
    return {**head, "model": call.worker.name, "choices": [choice], "usage": usage_body(usage)}
