"""The headers of Baton: those that a request may have; the story of the rollout, the key's rates; and CORS."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from gateway.core.loop.caps import CAP_HEADERS
from gateway.core.loop.depth import DEPTH_HEADER
from gateway.errors import BadRequest
from gateway.service.request.running import Running, header_text, reply_headers

DROPPED_CHARS_MAX = 512
NAME_CHARS_MAX = 64
PREFIX = "x-baton-"
OWN_HEADERS = (
    "x-baton-pool",
    "x-baton-rounds",
    "x-baton-quality",
    "x-baton-keepalive",
    "x-baton-progress",
    "x-baton-sticky",
)
REQUEST_HEADERS = frozenset({*OWN_HEADERS, *CAP_HEADERS, DEPTH_HEADER})
PREFLIGHT_S = 600
EXPOSED = (
    "x-request-id", "retry-after", "retry-after-ms", "x-should-retry", "openai-processing-ms", "openai-version",
    "x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests",
    "x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens",
    "x-baton-rollout-id", "x-baton-policy", "x-baton-workers", "x-baton-steps", "x-baton-cost-usd",
    "x-baton-overhead-ms", "x-baton-why", "x-baton-fallback", "x-baton-capped", "x-baton-dropped-fields",
    "x-baton-left-out",
)  # fmt: skip


def headers_of(running: Running) -> dict[str, str]:
    """The headers that are known when a reply begins."""
    headers = {**reply_headers(running.record), **running.rate.headers()}
    if running.chat.dropped:
        headers["x-baton-dropped-fields"] = header_text(",".join(running.chat.dropped)[:DROPPED_CHARS_MAX])
    if running.chat.left_out:
        left_out = [*running.chat.left_out, *headers.get("x-baton-left-out", "").split(", ")]
        text = ", ".join(name for name in dict.fromkeys(left_out) if name)[:DROPPED_CHARS_MAX]
        headers["x-baton-left-out"] = header_text(text)
    if running.chat.stream and not running.finished.is_set():
        for name in ("x-baton-cost-usd", "x-baton-overhead-ms"):
            del headers[name]  # unknown so far; the closing comment of the stream has them
    return headers


def check_headers(names: Iterable[str]) -> None:
    """Raises BadRequest for a header of Baton's that Baton does not know: a cap in it would not hold."""
    for name in names:
        if name.startswith(PREFIX) and name not in REQUEST_HEADERS:
            nearest = get_close_matches(name, REQUEST_HEADERS, n=1, cutoff=0.0)[0]
            shown = header_text(name[:NAME_CHARS_MAX])
            raise BadRequest(f"Unknown header `{shown}`; did you mean `{nearest}`?", param=shown, code="unknown_header")


def with_cors(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """The application, which web pages of these origins may call; `*` stands for any. Without origins: `app` itself."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=EXPOSED,
        max_age=PREFLIGHT_S,
    )
