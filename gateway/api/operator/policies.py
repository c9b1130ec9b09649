"""Admin routes of policy versions: list, show, publish, shadow, canary, promote, retire, roll back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from gateway.api.edge.bodies import Fields, Operators, required
from gateway.api.edge.stack import Router
from gateway.errors import NotFound
from gateway.service.policies.admin import PolicyAdmin

PUBLISH_FIELDS: Fields = {"directory": str, "gate": dict, "force": bool, "why": str}
MOVE_FIELDS: Fields = {"why": str}
CANARY_FIELDS: Fields = {"percent": int, "why": str}
EMPTY: Mapping[str, Any] = {"object": "list", "name": None, "data": [], "compared": [], "events": []}
Move = Callable[[PolicyAdmin, str, str, str], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class PoliciesApi:
    """What the routes need. `policies`: None where this gateway's conductor has one version and no registry."""

    policies: PolicyAdmin | None
    operators: Operators

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/admin/policies")
        router.add("GET", "", self.list)
        router.add("POST", "", self.publish)
        router.add("GET", "/{version}", self.show)
        for name in ("shadow", "canary", "promote", "retire", "rollback"):
            router.add("POST", f"/{{version}}/{name}", getattr(self, name))
        return router

    async def list(self, request: Request) -> Response:
        """Every version with its state, the figures of the two that are compared, and the latest events. Empty where
        the conductor has no versions."""
        await self.operators.act(request)
        return JSONResponse(EMPTY if self.policies is None else await self.policies.overview())

    async def show(self, request: Request, version: str) -> Response:
        """One version: manifest, gate report, shadow plans, events."""
        await self.operators.act(request)
        return JSONResponse(await self._policies().show(version))

    async def publish(self, request: Request) -> Response:
        """Copy a policy directory of the gateway's host, as a candidate: `directory` (absolute), `gate` (the gate's
        report), and, where the gate refused it, `force` and `why`."""
        act, body = await self.operators.change(request, PUBLISH_FIELDS)
        directory = Path(required(body, "directory"))
        version = await self._policies().publish(
            directory, act.actor, act.why, body.get("gate"), body.get("force", False)
        )
        return JSONResponse(version, status_code=201)

    async def shadow(self, request: Request, version: str) -> Response:
        """Let a candidate plan beside the live version, with no effect on any reply."""
        return await self._move(request, version, PolicyAdmin.shadow)

    async def canary(self, request: Request, version: str) -> Response:
        """Give a version `percent` of the requests: 1, 5, 25 or 100."""
        act, body = await self.operators.change(request, CANARY_FIELDS)
        percent = required(body, "percent", int)
        return JSONResponse(await self._policies().canary(version, percent, act.actor, act.why))

    async def promote(self, request: Request, version: str) -> Response:
        """Make the canary live."""
        return await self._move(request, version, PolicyAdmin.promote)

    async def retire(self, request: Request, version: str) -> Response:
        """Retire a candidate, a shadow or a canary."""
        return await self._move(request, version, PolicyAdmin.retire)

    async def rollback(self, request: Request, version: str) -> Response:
        """Roll back a canary or the live version. `conductor` means the canary, else the live version."""
        return await self._move(request, version, PolicyAdmin.rollback)

    async def _move(self, request: Request, version: str, move: Move) -> Response:
        act, _ = await self.operators.change(request, MOVE_FIELDS)
        return JSONResponse(await move(self._policies(), version, act.actor, act.why))

    def _policies(self) -> PolicyAdmin:
        if self.policies is None:
            fix = "BATON_POLICY_ENGINE says who holds them"
            raise NotFound(f"this gateway's conductor has no versions; {fix}", code="no_versions")
        return self.policies
