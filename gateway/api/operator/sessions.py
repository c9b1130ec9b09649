"""Admin routes of sessions: every key's, with limits that an operator sets, freezes, thaws and kills."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from gateway.api.edge.bodies import Operators, query_number
from gateway.api.edge.stack import Router
from gateway.service.admin.sessions import Sessions

PAGE, PAGE_MAX = 100, 1_000


@dataclass(frozen=True, slots=True)
class SessionLimitsApi:
    """What the routes need."""

    sessions: Sessions
    operators: Operators

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/admin")
        router.add("GET", "/sessions", self.list)
        router.add("GET", "/sessions/{public_id}/{session_id}", self.show)
        router.add("PATCH", "/sessions/{public_id}/{session_id}", self.update)
        return router

    async def list(self, request: Request) -> Response:
        """One page of the sessions of all keys, newest first, with what each spent and has left: `limit` (100),
        `before` (the `next` of the last page), `key`."""
        await self.operators.act(request)
        limit = query_number(request, "limit", PAGE, 1, PAGE_MAX)
        query = request.query_params
        return JSONResponse(await self.sessions.list(query.get("key") or None, limit, query.get("before") or None))

    async def show(self, request: Request, public_id: str, session_id: str) -> Response:
        """One session of a key: its limits, and what was spent, is held and is left of each."""
        await self.operators.act(request)
        return JSONResponse(await self.sessions.show(public_id, session_id))

    async def update(self, request: Request, public_id: str, session_id: str) -> Response:
        """Change a session: its limits `usd`, `calls`, `minutes` (null lifts one), or its `state`: open, frozen, or
        killed, which ends its requests under way and is for good. It counts from the next request on."""
        act, body = await self.operators.change(request)
        return JSONResponse(await self.sessions.change(public_id, session_id, body, act))
