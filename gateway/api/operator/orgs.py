"""Admin routes of organisations, credits and the audit."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from gateway.api.edge.bodies import Operators, query_number, required
from gateway.api.edge.stack import Router
from gateway.api.operator.keys import Balances
from gateway.core.money.ledger import org_scope, user_scope
from gateway.service.admin.audit import Auditor, describe_entry
from gateway.service.admin.orgs import OrgAdmin, describe_org
from gateway.service.money.credits import Credits, describe_credit, describe_uncertain

AUDIT_DEFAULT, AUDIT_MAX = 100, 1_000
SEQ_MAX = 10**18
UNCERTAIN_DEFAULT, UNCERTAIN_MAX = 100, 1_000


@dataclass(frozen=True, slots=True)
class OrgsApi:
    """What the routes of organisations need."""

    orgs: OrgAdmin
    balances: Balances
    operators: Operators

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/admin")
        router.add("POST", "/orgs", self.create, status_code=201)
        router.add("GET", "/orgs", self.list)
        router.add("GET", "/orgs/{name}", self.show)
        router.add("PATCH", "/orgs/{name}", self.update)
        router.add("POST", "/orgs/{name}/close", self.close)
        return router

    async def create(self, request: Request) -> Response:
        """Make an organisation: `name`, limits for all of its keys together, and limits for each of their end users."""
        act, body = await self.operators.change(request)
        return JSONResponse(describe_org(await self.orgs.create(required(body, "name"), body, act)), status_code=201)

    async def list(self, request: Request) -> Response:
        """Every organisation, including closed ones."""
        await self.operators.act(request)
        return JSONResponse({"object": "list", "data": [describe_org(row) for row in await self.orgs.list()]})

    async def show(self, request: Request, name: str) -> Response:
        """One organisation, with the dollars that it has posted and holds in all, this month and today; with `user`,
        one end user's."""
        await self.operators.act(request)
        row = await self.orgs.get(name)
        user = request.query_params.get("user")
        scope = org_scope(row.name) if user is None else user_scope(org_scope(row.name), user)
        return JSONResponse({**describe_org(row), **await self.balances.windows(scope)})

    async def update(self, request: Request, name: str) -> Response:
        """Change limits; null removes one."""
        act, body = await self.operators.change(request)
        return JSONResponse(describe_org(await self.orgs.update(name, body, act)))

    async def close(self, request: Request, name: str) -> Response:
        """Close an organisation for ever. Its keys stop working within a second."""
        act = await self.operators.act(request)
        return JSONResponse(describe_org(await self.orgs.close(name, act)))


@dataclass(frozen=True, slots=True)
class CreditsApi:
    """What the routes of credits need."""

    credits: Credits
    operators: Operators

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/admin")
        router.add("POST", "/credits", self.give, status_code=201)
        router.add("GET", "/credits", self.list)
        router.add("GET", "/uncertain", self.uncertain)
        router.add("POST", "/uncertain/{charge}/credit", self.give_back, status_code=201)
        return router

    async def give(self, request: Request) -> Response:
        """Give money back: of a `charge` (the id of a hold, rollout or completion) all or `usd`; or top up the budget
        of a `key` or an `org` in a `window` (life, month, day) by `usd`. With the header `idempotency-key` a repeated
        request gives nothing."""
        act, body = await self.operators.change(request)
        credit = await self.credits.give(body, request.headers.get("idempotency-key"), act)
        return JSONResponse(credit, status_code=201 if credit["created"] else 200)

    async def list(self, request: Request) -> Response:
        """The latest credits, newest first."""
        await self.operators.act(request)
        return JSONResponse({"object": "list", "data": [describe_credit(one) for one in await self.credits.list()]})

    async def uncertain(self, request: Request) -> Response:
        """Charges that no reply confirmed, because a gateway died with calls on the way, newest first: `limit` (100).
        `left_usd` is what was not given back."""
        await self.operators.act(request)
        limit = query_number(request, "limit", UNCERTAIN_DEFAULT, 1, UNCERTAIN_MAX)
        charges = await self.credits.uncertain(limit)
        return JSONResponse({"object": "list", "data": [describe_uncertain(one) for one in charges]})

    async def give_back(self, request: Request, charge: str) -> Response:
        """Give all of an uncertain charge back, with `why`. A repeated request gives nothing and returns the first
        credit."""
        act, _ = await self.operators.change(request, {"why": str})
        credit = await self.credits.give_back(charge, act)
        return JSONResponse(credit, status_code=201 if credit["created"] else 200)


@dataclass(frozen=True, slots=True)
class AuditApi:
    """What the routes of the audit need."""

    auditor: Auditor
    operators: Operators

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/admin")
        router.add("GET", "/audit", self.list)
        router.add("GET", "/audit/verify", self.verify)
        return router

    async def list(self, request: Request) -> Response:
        """Every change, who made it and why, newest first: `limit` (100), `before` (an entry's number), `target`,
        `actor`, `act`."""
        await self.operators.act(request)
        limit = query_number(request, "limit", AUDIT_DEFAULT, 1, AUDIT_MAX)
        before = query_number(request, "before", SEQ_MAX, 1, SEQ_MAX)
        target, actor, act = (request.query_params.get(name) or None for name in ("target", "actor", "act"))
        links = await self.auditor.latest(limit, before, target, actor, act)
        return JSONResponse({"object": "list", "data": [describe_entry(link) for link in links]})

    async def verify(self, request: Request) -> Response:
        """Check the audit from its first entry on: the reply lists entries that were changed, removed, swapped, cut off
        or replaced."""
        await self.operators.act(request)
        return JSONResponse(await self.auditor.verify())
