"""The headers of Baton: those that a request may have; the story of the rollout, the key's rates; and CORS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from difflib import get_close_matches
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Scope

from gateway.core.access.depth import DEPTH_HEADER
from gateway.core.loop.caps import CAP_HEADERS
from gateway.core.money.sessions import SESSION_HEADERS
from gateway.errors import BadRequest
from gateway.service.request.running import Running, header_text

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
    *SESSION_HEADERS,
)
OPTIONS = frozenset({*OWN_HEADERS, *CAP_HEADERS})  # also in the body, under `baton`
REQUEST_HEADERS = OPTIONS | {DEPTH_HEADER}
PREFLIGHT_S = 600
EXPOSED = (
    "x-request-id", "retry-after", "retry-after-ms", "x-should-retry", "openai-processing-ms", "openai-version",
    "x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests",
    "x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens",
    "x-baton-rollout-id", "x-baton-policy", "x-baton-workers", "x-baton-steps", "x-baton-cost-usd",
    "x-baton-overhead-ms", "x-baton-why", "x-baton-fallback", "x-baton-experience",
    "x-baton-capped", "x-baton-capped-by", "x-baton-lowered",
    "x-baton-dropped-fields", "x-baton-left-out", "x-baton-cut",
    "x-baton-session-left-usd", "x-baton-session-left-calls", "x-baton-session-left-minutes",
)  # fmt: skip


def headers_of(running: Running) -> dict[str, str]:
    """The headers that are known when a reply begins."""
    headers = {**running.headers(), **running.rate.headers()}
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


def header_map(scope: Scope) -> dict[str, str]:
    """The headers of a request, of each name the first, decoded once: Starlette looks through all of them for each look
    at one."""
    state, pairs = scope.setdefault("state", {}), scope["headers"]
    known: tuple[Any, dict[str, str]] | None = state.get("header_map")
    if known is None or known[0] is not pairs:  # options of the body replace the list
        known = pairs, {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(pairs)}
        state["header_map"] = known
    return known[1]


def own_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Those of Baton's headers that a request has; most have none. Raises BadRequest as `check_headers`."""
    own = {name: text for name, text in headers.items() if name.startswith(PREFIX)}
    if own:
        check_headers(own)
    return own


def check_headers(names: Iterable[str]) -> None:
    """Raises BadRequest for a header of Baton's that Baton does not know: a cap in it would not hold."""
    for name in names:
        if name.startswith(PREFIX) and name not in REQUEST_HEADERS:
            nearest = get_close_matches(name, REQUEST_HEADERS, n=1, cutoff=0.0)[0]
            name_shown = header_text(name[:NAME_CHARS_MAX])
            raise BadRequest(
                f"Unknown header `{name_shown}`; did you mean `{nearest}`?", param=name_shown, code="unknown_header"
            )


def take_options(request: Request, body: Any) -> bool:
    """Remove the object `baton` from a body and set its options as headers: `max_cost_usd` as `x-baton-max-cost-usd`.
    They replace headers of the same names. Return whether there was one. Raises BadRequest for an unknown option and
    for one of another type."""
    if not isinstance(body, dict) or "baton" not in body:
        return False
    options = body.pop("baton")
    if not isinstance(options, dict):
        raise BadRequest("`baton` must be an object", param="baton", code="invalid_type")
    values = {_option_header(name): _option_text(name, value) for name, value in options.items()}
    headers = request.scope["headers"]
    others = [pair for pair in headers if pair[0] not in values]
    request.scope["headers"] = [*others, *values.items()]
    return True


def _option_header(name: str) -> bytes:
    header = PREFIX + name.replace("_", "-")
    if header not in OPTIONS:
        nearest = get_close_matches(header, OPTIONS, n=1, cutoff=0.0)[0].removeprefix(PREFIX).replace("-", "_")
        field_name = f"baton.{name[:NAME_CHARS_MAX]}"
        raise BadRequest(
            f"Unknown option `{field_name}`; did you mean `baton.{nearest}`?",
            param=field_name,
            code="unknown_parameter",
        )
    return header.encode()


def _option_text(name: str, value: Any) -> bytes:
    if isinstance(value, bool):
        return b"on" if value else b"off"
    if isinstance(value, int | float):
        return format(Decimal(str(value)), "f").encode()
    if not isinstance(value, str):
        field_name = f"baton.{name[:NAME_CHARS_MAX]}"
        raise BadRequest(
            f"`{field_name}` must be a text, a number or true or false", param=field_name, code="invalid_type"
        )
    return header_text(value).encode()


def options_in(headers: Mapping[str, str]) -> dict[str, str]:
    """Those of Baton's options that a request has. Raises BadRequest as `check_headers`."""
    check_headers(headers.keys())
    return {name: headers[name] for name in sorted(OPTIONS) if name in headers}


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
