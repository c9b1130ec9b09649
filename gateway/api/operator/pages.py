"""The operator's page, and the three admin routes that it reads: the overview, the list of rollouts, one rollout.

The page itself holds no data and needs no key. It runs only its own files, and the words of a worker reach it as text
only; the security policy below makes the browser enforce both.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from gateway.api.edge.bodies import Operators, number
from gateway.api.edge.stack import Router
from gateway.core.openai.shapes import unknown_parameter
from gateway.errors import BadRequest, NotFound
from gateway.service.ports.admin import STATUSES, Reports, RolloutsQuery
from gateway.service.ports.request import Clock

log = logging.getLogger("baton")
WINDOW_S_MIN, WINDOW_S_DEFAULT, WINDOW_S_MAX = 60, 3_600, 7 * 86_400
PAGE_DEFAULT, PAGE_MAX = 50, 200
FILTER_CHARS_MAX = 200
MEDIA_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def page_files() -> dict[str, bytes]:
    """The files of the page by name."""
    paths = (files("gateway.api.operator") / "ui").iterdir()
    return {file.name: file.read_bytes() for file in paths if file.name.rpartition(".")[2] in MEDIA_TYPES}


@dataclass(frozen=True, slots=True)
class PagesApi:
    """What the routes need."""

    reports: Reports
    operators: Operators
    clock: Clock

    def router(self) -> Router:
        """The routes."""
        router = Router()
        for path in ("/", "/ui"):
            router.add("GET", path, self.home, include_in_schema=False)
        for name, content in page_files().items():
            path = "" if name == "index.html" else name
            serve = _serving(content, MEDIA_TYPES[name.rpartition(".")[2]])
            router.add("GET", f"/ui/{path}", serve, include_in_schema=False)
        router.add("GET", "/admin/overview", self.overview)
        router.add("GET", "/admin/rollouts", self.rollouts)
        router.add("GET", "/admin/rollouts/{rollout_id}", self.rollout)
        return router

    async def home(self) -> Response:
        """Redirect to the page."""
        return RedirectResponse("ui/", headers=HEADERS)

    async def overview(self, request: Request) -> Response:
        """Requests, dollars, errors, fallbacks and latencies of the last `window_s` seconds (3600), by key, policy and
        worker."""
        await self.operators.act(request)
        query = _parameters(request, "window_s")
        window_s = number(query.get("window_s", str(WINDOW_S_DEFAULT)), "window_s", WINDOW_S_MIN, WINDOW_S_MAX)
        return _private(await self.reports.overview(self.clock.now(), window_s))

    async def rollouts(self, request: Request) -> Response:
        """One page of the requests of all keys, newest first: `limit`, `before` (the `next` of the last page), `key`,
        `policy`, `status` (done, failed, aborted, fallback, capped)."""
        await self.operators.act(request)
        query = _parameters(request, "limit", "before", "key", "policy", "status")
        if query.get("status", STATUSES[0]) not in STATUSES:
            raise BadRequest(f"`status` must be one of {', '.join(STATUSES)}", param="status")
        limit = number(query.get("limit", str(PAGE_DEFAULT)), "limit", 1, PAGE_MAX)
        filters = {name: query.get(name) for name in ("before", "key", "policy", "status")}
        return _private(await self.reports.rollouts_page(RolloutsQuery(limit, **filters)))

    async def rollout(self, request: Request, rollout_id: str) -> Response:
        """The whole tree of any key's rollout, by rollout or completion id. The log says who read it."""
        act = await self.operators.act(request)
        tree = await self.reports.rollout_any(rollout_id)
        if tree is None:
            raise NotFound(f"no rollout `{rollout_id[:64]}`", param="rollout_id")
        log.info("admin %s read rollout %s of key %s", act.actor.replace(":", " "), tree["id"], tree["key_id"])
        return _private(tree)


def _serving(content: bytes, media_type: str) -> Any:
    async def serve() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return serve


def _private(body: Mapping[str, Any]) -> Response:
    return JSONResponse(body, headers=HEADERS)


def _parameters(request: Request, *known: str) -> dict[str, str]:
    """The parameters of the query; an empty one counts as absent. Raises BadRequest for one that is not in `known`."""
    query = {name: value for name, value in request.query_params.items() if value}
    for name, value in query.items():
        if name not in known:
            raise unknown_parameter(name)
        if len(value) > FILTER_CHARS_MAX:
            raise BadRequest(f"`{name}` is over {FILTER_CHARS_MAX} characters", param=name)
    return query
