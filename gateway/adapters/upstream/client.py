"""Shared by all HTTP upstreams: bounded reading, the conversion of failures to the errors of `gateway.errors`, and a
circuit breaker.

Nothing that an upstream sends is trusted. Sizes are counted after decoding, and this file decodes encodings itself with
a bound, so that a gzip bomb stops at the limit. Text that reaches a client is cut, and scrubbed of the worker's key.
"""

from __future__ import annotations

import json
import math
import re
import ssl
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import httpx

from gateway.errors import (
    UpstreamError,
    UpstreamOverloaded,
    UpstreamProtocol,
    UpstreamRateLimited,
    UpstreamRefused,
    UpstreamTimeout,
)
from gateway.service.ports.request import REFUSED_STATUSES

MESSAGE_CHARS_MAX = 500
ERROR_BODY_BYTES_MAX = 65_536
RETRY_AFTER_S_MAX = 3600.0
_KEY_LIKE = re.compile(r"(?i)\b(sk|rk|pk|key|AIza)[-_][\w*.-]{6,}|\bAIza[\w-]{10,}|\bbearer\s+\S+")
_RETRYABLE = (408, 409, 425, 429)
_NAMED_STATUSES: Mapping[int, type[UpstreamError]] = {
    408: UpstreamTimeout,
    429: UpstreamRateLimited,
    503: UpstreamOverloaded,
    504: UpstreamTimeout,
    529: UpstreamOverloaded,
}
_TOO_LONG = re.compile(r"(?i)context[ _](length|window)|prompt is too long|too many (input )?tokens")
_WBITS = {"gzip": 31, "x-gzip": 31, "deflate": 47}


async def bounded_bytes(response: httpx.Response, bytes_max: int) -> AsyncIterator[bytes]:
    """Yield the decoded body in pieces of at most `bytes_max` bytes in all. Raises UpstreamProtocol beyond that."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", *_WBITS):
        raise UpstreamProtocol(f"the worker answered in an encoding that Baton did not ask for: {encoding[:40]}")
    declared = response.headers.get("content-length", "")
    if declared.isdigit() and len(declared) < 20 and int(declared) > bytes_max:
        raise _too_large(bytes_max)
    left = bytes_max
    inflate = zlib.decompressobj(_WBITS[encoding]) if encoding in _WBITS else None
    async for raw in response.aiter_raw():
        piece = inflate.decompress(raw, left + 1) if inflate else raw
        left -= len(piece)
        if left < 0:
            raise _too_large(bytes_max)
        if piece:
            yield piece
    if inflate and not inflate.eof:
        raise UpstreamProtocol("the worker's compressed reply was cut short")


async def bounded_body(response: httpx.Response, bytes_max: int) -> bytes:
    """The complete decoded body. Raises UpstreamProtocol if it has more than `bytes_max` bytes."""
    return b"".join([piece async for piece in bounded_bytes(response, bytes_max)])


async def error_body(response: httpx.Response) -> bytes:
    """The body of an error reply, cut at ERROR_BODY_BYTES_MAX. Never raises for its content."""
    pieces: list[bytes] = []
    with suppress(UpstreamProtocol, zlib.error, httpx.HTTPError):
        async for piece in bounded_bytes(response, ERROR_BODY_BYTES_MAX):
            pieces.append(piece)
    return b"".join(pieces)


def parse_object(raw: bytes | str) -> dict[str, Any]:
    """Parse a reply that must be a JSON object. Raises UpstreamProtocol."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise UpstreamProtocol("the worker's reply is not JSON") from None
    if not isinstance(value, dict):
        raise UpstreamProtocol("the worker's reply is not a JSON object")
    return value


def status_error(status: int, headers: Mapping[str, str], body: bytes, secret: str | None) -> UpstreamError:
    """The error for a status other than 200. It never contains the worker's key, nor the message of a 401 about it."""
    message, param, code = _describe(body, secret)
    if status in (401, 403):
        return UpstreamError(f"the worker's key was refused upstream ({status})", upstream_status=status)
    if 300 <= status < 400:
        return UpstreamError(f"the worker answered with a redirect ({status}), never followed", upstream_status=status)
    if status in REFUSED_STATUSES:
        text = message or f"the worker refused the request ({status})"
        if code is None and _TOO_LONG.search(text):  # clients shorten the conversation on this code
            param, code = param or "messages", "context_length_exceeded"
        return UpstreamRefused(text, upstream_status=status, param=param, code=code)
    text = f"the worker failed ({status})" + (f": {message}" if message else "")
    wait_s = retry_after_s(headers, datetime.now(UTC))
    if error_class := _NAMED_STATUSES.get(status):
        return error_class(text, upstream_status=status, retry_after_s=wait_s)
    retryable = status >= 500 or status in _RETRYABLE
    return UpstreamError(text, upstream_status=status, retryable=retryable, retry_after_s=wait_s)


def event_error(payload: Any, secret: str | None) -> UpstreamError:
    """The error for an error object inside a stream that began with status 200."""
    error = payload if isinstance(payload, Mapping) else {}
    status = next((v for v in (error.get("code"), error.get("status")) if isinstance(v, int) and 300 <= v < 600), None)
    if status is not None:
        return status_error(status, {}, json.dumps({"error": dict(error)}).encode(), secret)
    message = scrub(str(error.get("message") or payload), secret)
    return UpstreamError(f"the worker failed while it answered: {message}", retryable=True)


def _describe(body: bytes, secret: str | None) -> tuple[str, str | None, str | None]:
    """(message, param, code) of an error body in the format of OpenAI or of another vendor."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return "", None, None
    error = value.get("error", value) if isinstance(value, dict) else None
    if not isinstance(error, dict):
        return scrub(error, secret) if isinstance(error, str) else "", None, None
    message, param, code = (error.get(name) for name in ("message", "param", "code"))
    return (
        scrub(message, secret) if isinstance(message, str) else "",
        scrub(param, secret) if isinstance(param, str) else None,
        scrub(code, secret) if isinstance(code, str) else None,
    )


def scrub(text: str, secret: str | None) -> str:
    """Make upstream text fit for a client: one line of at most MESSAGE_CHARS_MAX characters, without the key or
    anything that looks like a key."""
    if secret:
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


@contextmanager
def transport_errors() -> Iterator[None]:
    """Convert exceptions of the HTTP clients to UpstreamTimeout, UpstreamError or UpstreamProtocol."""
    try:
        yield
    except TimeoutError:
        raise UpstreamTimeout("the worker did not answer in time") from None
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, aiohttp.ClientError, OSError, zlib.error) as error:
        raise transport_error(error) from error


def transport_error(error: Exception) -> UpstreamError:
    """Convert an exception of an HTTP client. `dispatched` of the result says whether the request may have left."""
    cause = error.__cause__ if isinstance(error.__cause__, aiohttp.ClientError) else error
    if isinstance(cause, aiohttp.ClientSSLError | ssl.SSLError):
        return UpstreamError("no secure connection to the worker", retryable=True, dispatched=False)
    if isinstance(cause, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError | httpx.ConnectError):
        return UpstreamError("the worker cannot be reached", retryable=True, dispatched=False)
    if isinstance(cause, aiohttp.InvalidURL | httpx.InvalidURL | httpx.UnsupportedProtocol):
        return UpstreamError("the worker's URL is not usable", dispatched=False)
    if isinstance(cause, zlib.error):
        return UpstreamProtocol("the worker's compressed reply is broken")
    return UpstreamProtocol("the worker hung up before its reply was complete")


def _too_large(bytes_max: int) -> UpstreamProtocol:
    return UpstreamProtocol(f"the worker's reply is larger than {bytes_max} bytes", retryable=False)


class Breaker:
    """Stops calls to a service that keeps failing. It opens after `failures_max` failures in a row; then it admits one
    call every `cool_down_s` until one succeeds."""

    def __init__(
        self, failures_max: int = 5, cool_down_s: float = 10.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._failures_max, self._cool_down_s, self._now = failures_max, cool_down_s, now
        self._failures = 0
        self._blocked_until_s = 0.0
        self._probing = False

    def admit(self) -> bool:
        """Whether a call may leave now. After True, call `succeed`, `fail` or `abandon` once."""
        if self._failures < self._failures_max:
            return True
        if self._probing or self._now() < self._blocked_until_s:
            return False
        self._probing = True
        return True

    def succeed(self) -> None:
        """Report that the call succeeded."""
        self._failures, self._probing = 0, False

    def fail(self) -> None:
        """Report that the call failed."""
        self._failures, self._probing = self._failures + 1, False
        self._blocked_until_s = self._now() + self._cool_down_s

    def abandon(self) -> None:
        """Report that the caller left before the call ended, so that its result is unknown."""
        self._probing = False
