"""The headers of a reply: the story of the rollout, what is left of the key's rates, and CORS."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from gateway.service.request.running import Running, reply_headers

DROPPED_CHARS_MAX = 512
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
        names = ",".join(running.chat.dropped)[:DROPPED_CHARS_MAX]
        headers["x-baton-dropped-fields"] = names.encode("ascii", "replace").decode()
    if running.chat.left_out:
        left_out = [*running.chat.left_out, *headers.get("x-baton-left-out", "").split(", ")]
        text = ", ".join(name for name in dict.fromkeys(left_out) if name)[:DROPPED_CHARS_MAX]
        headers["x-baton-left-out"] = text.encode("ascii", "replace").decode()
    if running.chat.stream and not running.finished.is_set():
        for name in ("x-baton-cost-usd", "x-baton-overhead-ms"):
            del headers[name]  # unknown so far; the closing comment of the stream has them
    return headers


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
