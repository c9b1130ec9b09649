"""Admin routes of workers that changed: what is known about them, and their quarantine."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request, Response

from gateway.api.edge.bodies import Fields, Operators, query_number
from gateway.api.edge.stack import Router
from gateway.api.operator.pages import private
from gateway.service.policies.quarantine import FACTS_DEFAULT, FACTS_MAX, Quarantines

PUT_FIELDS: Fields = {"why": str}
RELEASE_FIELDS: Fields = {"why": str, "anew": bool}


@dataclass(frozen=True, slots=True)
class WorkersApi:
    """What the routes need."""

    quarantines: Quarantines
    operators: Operators

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/admin")
        router.add("GET", "/drift", self.drift)
        router.add("POST", "/workers/{worker:path}/quarantine", self.put)
        router.add("POST", "/workers/{worker:path}/release", self.release)
        return router

    async def drift(self, request: Request) -> Response:
        """Workers in quarantine, what happened to workers (flags, changes of the model or fingerprint that they name,
        quarantines, releases; the latest `limit`, 100), and every identity of each."""
        await self.operators.act(request)
        limit = query_number(request, "limit", FACTS_DEFAULT, 1, FACTS_MAX)
        return private(await self.quarantines.report(limit))

    async def put(self, request: Request, worker: str) -> Response:
        """Keep a model worker out of plans, on all gateways within 15 s. A worker in quarantine stays in it."""
        act, _ = await self.operators.change(request, PUT_FIELDS)
        return private(await self.quarantines.put(worker, act))

    async def release(self, request: Request, worker: str) -> Response:
        """End a worker's quarantine. With `anew`, what it does from now on counts as usual; else it is compared with
        what it did before its flag."""
        act, body = await self.operators.change(request, RELEASE_FIELDS)
        return private(await self.quarantines.release(worker, act, anew=body.get("anew", False)))
