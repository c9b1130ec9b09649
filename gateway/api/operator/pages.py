"""The operator's page, and the three admin routes it reads: sums, the list of rollouts, one rollout.

The page itself holds no data and needs no key. It runs nothing but its own files, and what a worker said reaches it as
text only; the policy below has the browser enforce both.
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
    found = (files("gateway.api.operator") / "ui").iterdir()
    return {file.name: file.read_bytes() for file in found if file.name.rpartition(".")[2] in MEDIA_TYPES}


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
        """To the page."""
        return RedirectResponse("ui/", headers=HEADERS)

    async def overview(self, request: Request) -> Response:
        """Requests, dollars, errors, fallbacks and quantiles of the last `window_s` seconds (3600), by key, policy and
        worker."""
        await self.operators.act(request)
        asked = _parameters(request, "window_s")
        window_s = number(asked.get("window_s", str(WINDOW_S_DEFAULT)), "window_s", WINDOW_S_MIN, WINDOW_S_MAX)
        return _private(await self.reports.overview(self.clock.now(), window_s))

    async def rollouts(self, request: Request) -> Response:
        """A page of every key's requests, newest first: `limit`, `before` (the `next` of the page before it), `key`,
        `policy`, `status` (done, failed, aborted, fallback, capped)."""
        await self.operators.act(request)
        asked = _parameters(request, "limit", "before", "key", "policy", "status")
        if asked.get("status", STATUSES[0]) not in STATUSES:
            raise BadRequest(f"`status` must be one of {', '.join(STATUSES)}", param="status")
        limit = number(asked.get("limit", str(PAGE_DEFAULT)), "limit", 1, PAGE_MAX)
        filters = {name: asked.get(name) for name in ("before", "key", "policy", "status")}
        return _private(await self.reports.rollouts_page(RolloutsQuery(limit, **filters)))

    async def rollout(self, request: Request, rollout_id: str) -> Response:
        """The whole tree of any key's rollout, by rollout or completion id. Who read it is logged."""
        act = await self.operators.act(request)
        found = await self.reports.rollout_any(rollout_id)
        if found is None:
            raise NotFound(f"no rollout `{rollout_id[:64]}`", param="rollout_id")
        log.info("admin %s read rollout %s of key %s", act.actor.replace(":", " "), found["id"], found["key_id"])
        return _private(found)


def _serving(content: bytes, media_type: str) -> Any:
    async def serve() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return serve


def _private(body: Mapping[str, Any]) -> Response:
    return JSONResponse(body, headers=HEADERS)


def _parameters(request: Request, *known: str) -> dict[str, str]:
    """The query by name; an empty value counts as absent. Raises BadRequest for a name nobody knows."""
    asked = {name: value for name, value in request.query_params.items() if value}
    for name, value in asked.items():
        if name not in known:
            raise unknown_parameter(name)
        if len(value) > FILTER_CHARS_MAX:
            raise BadRequest(f"`{name}` is over {FILTER_CHARS_MAX} characters", param=name)
    return asked
