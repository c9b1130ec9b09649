"""What is counted and logged of every reply, refusals included: a line of the access log, and the series of its route.

A line has the method, the path without its query, the status, the error's code, the time, the key and the rollout. A
flood of refusals writes LINES_PER_S_MAX lines a second at most; the rest are counted in the next line.
"""

from __future__ import annotations

import logging
import time
from typing import Literal, Protocol

from starlette.types import Message, Scope

from gateway.errors import BatonError, UpstreamRefused

log = logging.getLogger("baton.access")
LINES_PER_S_MAX = 50
PATH_CHARS_MAX = 200
CLIENT_CLOSED_REQUEST = 499  # the client left before its reply
UNKNOWN = "unknown"  # the route of a path that no route was looked for
ROLLOUT_HEADER = b"x-baton-rollout-id"
AccessLog = Literal["off", "errors", "all"]


class EdgeMetrics(Protocol):
    """Counts of replies."""

    def replied(self, route: str, status: int, code: str | None, seconds: float, times: int = 1) -> None:
        """Count a reply, or several alike. `route` is the template of its path; `code` the error's, None where it is
        none."""
        ...


class NoMetrics:
    """Counts nothing."""

    def replied(self, route: str, status: int, code: str | None, seconds: float, times: int = 1) -> None:
        """Do nothing."""


class Accesses:
    """Counts and logs replies. `lines`: which of them get a line."""

    def __init__(self, metrics: EdgeMetrics | None = None, lines: AccessLog = "errors") -> None:
        self._metrics = metrics or NoMetrics()
        self._lines = lines
        self._second = 0
        self._written = self._left_out = 0

    def ended(self, scope: Scope, began_s: float, start: Message | None) -> None:
        """Count and log one request. `start`: the message that began its reply; None: the client left before it."""
        status = CLIENT_CLOSED_REQUEST if start is None else int(start["status"])
        took_s = time.monotonic() - began_s
        code = scope["state"].get("error_code") or ("client_left" if status == CLIENT_CLOSED_REQUEST else None)
        self._metrics.replied(route_of(scope), status, code, took_s)
        if self._lines == "all" or (self._lines == "errors" and status >= 400):
            self._write(scope, status, code, took_s, start)

    def writes_errors(self) -> bool:
        """Whether an error that ended now would have a line."""
        return self._lines != "off" and (self._written < LINES_PER_S_MAX or int(time.monotonic()) != self._second)

    def refused(self, status: int, code: str, times: int) -> None:
        """Count errors of unknown paths that ended at once, without lines."""
        self._metrics.replied(UNKNOWN, status, code, 0.0, times)
        if self._lines != "off":
            self._left_out += times

    def _write(self, scope: Scope, status: int, code: str | None, took_s: float, start: Message | None) -> None:
        second = int(time.monotonic())
        if second != self._second:
            if self._left_out:
                log.warning("%d lines were left out", self._left_out)
            self._second, self._written, self._left_out = second, 0, 0
        if status >= 400 and self._written >= LINES_PER_S_MAX:
            self._left_out += 1
            return
        self._written += 1
        state = scope["state"]
        headers = dict(start.get("headers", ())) if start is not None else {}
        rollout = headers.get(ROLLOUT_HEADER, b"-").decode("latin-1")
        path = ascii(scope["path"][:PATH_CHARS_MAX])[1:-1]
        log.log(
            logging.INFO if status < 400 else logging.WARNING,
            *("%s %s %d %s %.1f ms %s key=%s rollout=%s", scope["method"], path, status, code or "-", took_s * 1000),
            *(state["request_id"], state.get("key_id", "-"), rollout),
        )


def note_error(scope: Scope, error: BatonError) -> None:
    """Note the code of a request's error. A worker's own code is one of many, and counts as one."""
    scope.setdefault("state", {})["error_code"] = (
        "upstream_refused" if isinstance(error, UpstreamRefused) else error.code
    )


def route_of(scope: Scope) -> str:
    """The template of the path, such as `/v1/models/{model}`; `unknown` for a path without a route."""
    template = getattr(scope.get("route"), "path", None)
    return template if isinstance(template, str) else UNKNOWN
