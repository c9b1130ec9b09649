"""Admin routes of keys, on their own listener and for admin keys only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from gateway.api.edge.bodies import Fields, Operators, query_number, required
from gateway.api.edge.stack import Router
from gateway.core.money.amounts import nano_to_usd
from gateway.core.money.ledger import WINDOWS, Balance, key_scope, user_scope, windows
from gateway.core.openai.shapes import check_names
from gateway.service.admin.keys import CREATABLE, GRACE_S, KeyAdmin, describe
from gateway.service.ports.money import Budgets
from gateway.service.ports.request import Clock

PAGE_MAX = 1_000
ROTATE_FIELDS: Fields = {"grace_s": int, "why": str}


@dataclass(frozen=True, slots=True)
class Balances:
    """What scopes have posted and hold. `budgets` None: no gateway runs, so replies have no balances."""

    budgets: Budgets | None
    clock: Clock

    async def lives(self, scopes: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
        """Dollars in all, as fields of a reply, by scope; no scope without budgets."""
        if self.budgets is None:
            return {}
        balances = await self.budgets.balances(scopes)
        return {name: _dollars(balances[name]) for name in scopes}

    async def windows(self, scope: str) -> dict[str, Any]:
        """Dollars in all, this month and today (UTC), as the reply's field `balances`."""
        if self.budgets is None:
            return {}
        names = dict(zip(WINDOWS, windows(scope, self.clock.now()), strict=True))
        balances = await self.budgets.balances(tuple(names.values()))
        return {"balances": {window: {"scope": name, **_dollars(balances[name])} for window, name in names.items()}}


def _dollars(balance: Balance) -> dict[str, str]:
    return {"spent_usd": nano_to_usd(balance.posted_nano), "held_usd": nano_to_usd(balance.held_nano)}


@dataclass(frozen=True, slots=True)
class KeysApi:
    """What the routes need."""

    keys: KeyAdmin
    balances: Balances
    operators: Operators

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/admin")
        router.add("POST", "/keys", self.create, status_code=201)
        router.add("GET", "/keys", self.list)
        router.add("GET", "/keys/{public_id}", self.show)
        router.add("PATCH", "/keys/{public_id}", self.update)
        router.add("DELETE", "/keys/{public_id}", self.revoke)
        router.add("POST", "/keys/{public_id}/rotate", self.rotate)
        return router

    async def create(self, request: Request) -> Response:
        """Make a key. Its secret is in this reply and nowhere else."""
        act, body = await self.operators.change(request)
        name = required(body, "name")
        check_names(body, CREATABLE)
        row, secret = await self.keys.create_key(name, act=act, **body)
        return JSONResponse({**describe(row), "key": secret}, status_code=201)

    async def list(self, request: Request) -> Response:
        """One page of the keys, newest first, each with the dollars that it has posted and holds: `limit` (1000),
        `before` (the `next` of the last page), `q` (a part of id, name or organisation)."""
        await self.operators.act(request)
        limit, query = query_number(request, "limit", PAGE_MAX, 1, PAGE_MAX), request.query_params
        rows, after = await self.keys.list_keys(limit, query.get("before") or None, query.get("q") or None)
        lives = await self.balances.lives([key_scope(row.public_id) for row in rows])
        keys = [{**describe(row), **lives.get(key_scope(row.public_id), {})} for row in rows]
        return JSONResponse({"object": "list", "data": keys, "next": after})

    async def show(self, request: Request, public_id: str) -> Response:
        """One key, with the dollars that it has posted and holds in all, this month and today; with `user`, one end
        user's."""
        await self.operators.act(request)
        row = await self.keys.get_key(public_id)
        user = request.query_params.get("user")
        scope = key_scope(row.public_id)
        balances = await self.balances.windows(scope if user is None else user_scope(scope, user))
        return JSONResponse({**describe(row), **balances})

    async def update(self, request: Request, public_id: str) -> Response:
        """Change a key's name, role (of an admin key), limits, pools, workers, caps, log mode, and whether it trains
        or takes signals; null removes a limit."""
        act, body = await self.operators.change(request)
        return JSONResponse(describe(await self.keys.update_key(public_id, body, act)))

    async def rotate(self, request: Request, public_id: str) -> Response:
        """Give a key a new secret, which is in this reply and nowhere else. The old one works for `grace_s` (86400)."""
        act, body = await self.operators.change(request, ROTATE_FIELDS)
        row, secret = await self.keys.rotate_key(public_id, body.get("grace_s", GRACE_S), act)
        return JSONResponse({**describe(row), "key": secret})

    async def revoke(self, request: Request, public_id: str) -> Response:
        """Revoke a key. It stops working within a second."""
        act = await self.operators.act(request)
        return JSONResponse(describe(await self.keys.revoke_key(public_id, act)))
