"""Routes of outcomes and rollouts, for the key that made the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.encoders import jsonable_encoder
from fastapi.responses import JSONResponse

from gateway.api.edge.bodies import data_key, query_number
from gateway.api.edge.stack import Router, read_json
from gateway.core.access.keys import Principal
from gateway.core.openai.body import replace_nonfinite
from gateway.errors import BadRequest
from gateway.service.admin.explain import Explain
from gateway.service.ports.admin import STATUSES, Reports, RolloutsQuery
from gateway.service.request.auth import Authenticator
from gateway.service.request.outcomes import Outcomes

PAGE, PAGE_MAX = 20, 100


@dataclass(frozen=True, slots=True)
class OutcomesApi:
    """What the routes need."""

    outcomes: Outcomes
    authenticator: Authenticator
    reports: Reports
    explaining: Explain
    body_bytes_max: int

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/v1")
        router.add("POST", "/outcomes", self.add)
        router.add("GET", "/rollouts", self.rollouts)
        router.add("GET", "/rollouts/{rollout_id}", self.rollout)
        router.add("GET", "/rollouts/{rollout_id}/explain", self.explain)
        return router

    async def add(self, request: Request) -> Response:
        """Attach an outcome to a rollout. 201 for a new one, 200 for an idempotency key that came before."""
        principal = await self._who(request)
        body = await read_json(request, self.body_bytes_max, principal.public_id)
        added: dict[str, Any] = await self.outcomes.add(principal, body, request.headers.get("idempotency-key"))
        return JSONResponse(added, status_code=201 if added["created"] else 200)

    async def rollouts(self, request: Request) -> Response:
        """One page of this key's requests, newest first and without their texts: `limit`, `before` (the `next` of the
        last page), `policy`, `status` (done, failed, aborted, fallback, capped)."""
        principal, query = await self._who(request), request.query_params
        status = query.get("status") or None
        if status is not None and status not in STATUSES:
            raise BadRequest(f"`status` must be one of {', '.join(STATUSES)}", param="status")
        rollouts_query = RolloutsQuery(
            query_number(request, "limit", PAGE, 1, PAGE_MAX),
            before=query.get("before") or None,
            key=principal.public_id,
            policy=query.get("policy") or None,
            status=status,
        )
        return JSONResponse(dict(await self.reports.rollouts_page(rollouts_query)))

    async def rollout(self, request: Request, rollout_id: str) -> Response:
        """The whole tree of one rollout, by rollout or completion id."""
        tree = await self.outcomes.rollout(await self._who(request), rollout_id)
        return JSONResponse(replace_nonfinite(jsonable_encoder(tree)))

    async def explain(self, request: Request, rollout_id: str) -> Response:
        """Why this key's request went where it went: alternatives, what the planner was shown, what was ruled out and
        hidden, and what the log says of the workers that were not chosen."""
        principal = await self._who(request)
        tree = replace_nonfinite(jsonable_encoder(await self.outcomes.rollout(principal, rollout_id)))
        return JSONResponse(replace_nonfinite(await self.explaining.for_key(tree, principal.workers)))

    async def _who(self, request: Request) -> Principal:
        return await data_key(request, self.authenticator)
