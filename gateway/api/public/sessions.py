"""Routes of sessions and budgets, for the key that spends them.

A key makes its sessions, and may freeze and kill them. Only an operator raises or thaws one: what spends a budget must
not widen it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from gateway.api.edge.bodies import data_key, query_number
from gateway.api.edge.stack import Router, read_json
from gateway.api.public.chat import OpenAIApi
from gateway.core.access.audit import Act
from gateway.core.access.keys import Principal
from gateway.core.money.amounts import nano_to_usd
from gateway.core.money.ledger import Scope, scopes_of, window_of
from gateway.core.openai.shapes import check_names
from gateway.errors import BadRequest
from gateway.service.admin import limits
from gateway.service.admin.sessions import Sessions
from gateway.service.ports.money import Budgets
from gateway.service.ports.request import Clock

PAGE, PAGE_MAX = 20, 100


@dataclass(frozen=True, slots=True)
class SessionsApi:
    """What the routes need. `chats` knows the keys."""

    chats: OpenAIApi
    sessions: Sessions
    budgets: Budgets
    clock: Clock

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/v1")
        router.add("POST", "/sessions", self.create)
        router.add("GET", "/sessions", self.list)
        router.add("GET", "/sessions/{session_id}", self.show)
        router.add("POST", "/sessions/{session_id}/freeze", self.freeze)
        router.add("POST", "/sessions/{session_id}/kill", self.kill)
        router.add("GET", "/budget", self.budget)
        return router

    async def create(self, request: Request) -> Response:
        """Make a session: `id`, and the most it may use of `usd`, `calls` and `minutes`. 201 for a new one, 200 where
        it exists with these limits."""
        principal = await self._who(request)
        body = _object(await read_json(request, self.chats.body_bytes_max, principal.public_id))
        session, new = await self.sessions.create(principal.public_id, body)
        return JSONResponse(session, status_code=201 if new else 200)

    async def list(self, request: Request) -> Response:
        """One page of this key's sessions, newest first, with what each spent and has left: `limit`, `before` (the
        `next` of the last page)."""
        principal = await self._who(request)
        limit = query_number(request, "limit", PAGE, 1, PAGE_MAX)
        before = request.query_params.get("before") or None
        return JSONResponse(await self.sessions.list(principal.public_id, limit, before))

    async def show(self, request: Request, session_id: str) -> Response:
        """One session of this key: its limits, and what was spent, is held and is left of each."""
        return JSONResponse(await self.sessions.show((await self._who(request)).public_id, session_id))

    async def freeze(self, request: Request, session_id: str) -> Response:
        """Let no further request run in a session; those under way go on. An operator can thaw it."""
        return await self._end(request, session_id, "frozen")

    async def kill(self, request: Request, session_id: str) -> Response:
        """End a session for good and cancel its requests under way, on every gateway."""
        return await self._end(request, session_id, "killed")

    async def budget(self, request: Request) -> Response:
        """What this key may still spend: its budgets in all, this month and today (UTC), its organisation's where it
        has any, and with `user` that end user's."""
        principal, now = await self._who(request), self.clock.now()
        user = request.query_params.get("user") or None
        scopes = [each for each in scopes_of(principal, user, now) if _is_shown(each, user)]
        balances = await self.budgets.balances([scope.name for scope in scopes])
        lines = [
            _line(scope, balances[scope.name].posted_nano, balances[scope.name].held_nano, now) for scope in scopes
        ]
        return JSONResponse({"object": "list", "data": lines})

    async def _end(self, request: Request, session_id: str, state: str) -> Response:
        principal = await self._who(request)
        body = (
            await read_json(request, self.chats.body_bytes_max, principal.public_id) if await _has_body(request) else {}
        )
        why = check_names(_object(body), {"why"}).get("why", "")
        act = Act(f"key:{principal.public_id}", limits.why(why))
        return JSONResponse(await self.sessions.change(principal.public_id, session_id, {"state": state}, act))

    async def _who(self, request: Request) -> Principal:
        return await data_key(request, self.chats.authenticator)


async def _has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


def _object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_type")
    return body


def _is_shown(scope: Scope, user: str | None) -> bool:
    """The spending of an organisation is shown only where a limit of it bounds the key."""
    owner = scope.name.partition(":")[0]
    return owner == "key" or (scope.limit_nano is not None and (owner == "org" or user is not None))


def _line(scope: Scope, spent_nano: int, held_nano: int, now: datetime) -> dict[str, Any]:
    window = window_of(scope.name)
    limit = scope.limit_nano
    return {
        "object": "budget",
        "scope": scope.name.partition(":")[0],
        "window": window,
        "limit_usd": None if limit is None else nano_to_usd(limit),
        "spent_usd": nano_to_usd(spent_nano),
        "held_usd": nano_to_usd(held_nano),
        "left_usd": None if limit is None else nano_to_usd(max(0, limit - spent_nano - held_nano)),
        "resets_at": _resets_at(window, now),
    }


def _resets_at(window: str, now: datetime) -> str | None:
    """When the window ends and the next begins; None for a life."""
    day = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if window == "day":
        return (day + timedelta(days=1)).isoformat()
    if window == "month":
        return (day.replace(day=28) + timedelta(days=4)).replace(day=1).isoformat()
    return None
