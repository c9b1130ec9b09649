"""The console's files, and the route of its overview.

The page itself holds no data and needs no key. It runs only its own files, and the words of a worker reach it as text
only; the security policy below makes the browser enforce both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from gateway.api.edge.bodies import Operators, number
from gateway.api.edge.stack import Router
from gateway.core.openai.shapes import unknown_parameter
from gateway.errors import BadRequest
from gateway.service.policies.standings import Standings
from gateway.service.ports.admin import Reports
from gateway.service.ports.request import Clock

WINDOW_S_MIN, WINDOW_S_DEFAULT, WINDOW_S_MAX = 60, 3_600, 7 * 86_400
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
    standings: Standings

    def router(self) -> Router:
        """The routes."""
        router = Router()
        for path in ("/", "/ui"):
            router.add("GET", path, self.home, include_in_schema=False)
        for name, content in page_files().items():
            path = "" if name == "index.html" else name
            serve = _serving(content, MEDIA_TYPES[name.rpartition(".")[2]])
            router.add("GET", f"/ui/{path}", serve, include_in_schema=False)
        router.add("GET", "/admin/me", self.me)
        router.add("GET", "/admin/overview", self.overview)
        return router

    async def home(self) -> Response:
        """Redirect to the page."""
        return RedirectResponse("ui/", headers=HEADERS)

    async def me(self, request: Request) -> Response:
        """Who asks, as the audit names them, and their role: admin, operator or auditor."""
        act = await self.operators.act(request)
        return private({"actor": act.actor, "role": act.role})

    async def overview(self, request: Request) -> Response:
        """Requests, dollars, errors, fallbacks and latencies of the last `window_s` seconds (3600), by key, policy and
        worker. `planners`: who plans in each pool, the next rung and how far away it is, the default pool first."""
        await self.operators.act(request)
        query = parameters(request, "window_s")
        window_s = number(query.get("window_s", str(WINDOW_S_DEFAULT)), "window_s", WINDOW_S_MIN, WINDOW_S_MAX)
        planners = [standing.as_json() for standing in await self.standings.count()]
        return private({**await self.reports.overview(self.clock.now(), window_s), "planners": planners})


def _serving(content: bytes, media_type: str) -> Any:
    async def serve() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return serve


def private(body: Mapping[str, Any]) -> Response:
    """A reply that no cache stores."""
    return JSONResponse(body, headers=HEADERS)


def parameters(request: Request, *names: str) -> dict[str, str]:
    """The parameters of the query; an empty one counts as absent. Raises BadRequest for one that is not in `names`."""
    query = {name: value for name, value in request.query_params.items() if value}
    for name, value in query.items():
        if name not in names:
            raise unknown_parameter(name)
        if len(value) > FILTER_CHARS_MAX:
            raise BadRequest(f"`{name}` is over {FILTER_CHARS_MAX} characters", param=name)
    return query
