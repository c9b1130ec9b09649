"""Admin routes of policy versions: look, publish, shadow, canary, promote, retire, roll back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from gateway.api.edge.stack import read_json
from gateway.errors import BadRequest, NotFound
from gateway.service.policies.admin import PolicyAdmin
from gateway.service.request.auth import Authenticator

PUBLISH_FIELDS = {"directory": str, "gate": dict, "force": bool, "why": str}
MOVE_FIELDS: Mapping[str, type] = {"why": str}
CANARY_FIELDS = {"percent": int, "why": str}
EMPTY: Mapping[str, Any] = {"object": "list", "name": None, "data": [], "compared": [], "events": []}
Move = Callable[[PolicyAdmin, str, str, str], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class PoliciesApi:
    """What the routes need. `policies`: None where this gateway's conductor has one version and no registry."""

    policies: PolicyAdmin | None
    authenticator: Authenticator
    body_bytes_max: int

    def router(self) -> APIRouter:
        """The routes."""
        router = APIRouter(prefix="/admin/policies")
        router.add_api_route("", self.list, methods=["GET"], response_model=None)
        router.add_api_route("", self.publish, methods=["POST"], response_model=None)
        router.add_api_route("/{version}", self.show, methods=["GET"], response_model=None)
        for name in ("shadow", "canary", "promote", "retire", "rollback"):
            router.add_api_route(f"/{{version}}/{name}", getattr(self, name), methods=["POST"], response_model=None)
        return router

    async def list(self, request: Request) -> Response:
        """Every version with its state, the two being compared with their figures, and the latest events; empty where
        this gateway's conductor has no versions."""
        await self._who(request)
        return JSONResponse(EMPTY if self.policies is None else await self.policies.overview())

    async def show(self, request: Request, version: str) -> Response:
        """One version: manifest, gate report, shadow plans, events."""
        await self._who(request)
        return JSONResponse(await self._policies().show(version))

    async def publish(self, request: Request) -> Response:
        """Copy a policy directory of this host in, as a candidate: `directory` (absolute), `gate` (the gate's report),
        and, for one that the gate refused, `force` and `why`."""
        by = await self._who(request)
        body = await self._body(request, PUBLISH_FIELDS)
        if "directory" not in body:
            raise BadRequest("give the `directory`", param="directory", code="missing_required_parameter")
        made = await self._policies().publish(
            Path(body["directory"]), by, body.get("why", ""), body.get("gate"), body.get("force", False)
        )
        return JSONResponse(made, status_code=201)

    async def shadow(self, request: Request, version: str) -> Response:
        """Let a candidate plan beside the live version, with no effect on any reply."""
        return await self._move(request, version, PolicyAdmin.shadow)

    async def canary(self, request: Request, version: str) -> Response:
        """Give it `percent` of requests: 1, 5, 25 or 100."""
        by = await self._who(request)
        body = await self._body(request, CANARY_FIELDS)
        if "percent" not in body:
            raise BadRequest("give the `percent`", param="percent", code="missing_required_parameter")
        return JSONResponse(await self._policies().canary(version, body["percent"], by, body.get("why", "")))

    async def promote(self, request: Request, version: str) -> Response:
        """Make the canary live."""
        return await self._move(request, version, PolicyAdmin.promote)

    async def retire(self, request: Request, version: str) -> Response:
        """Take a candidate, a shadow or a canary out."""
        return await self._move(request, version, PolicyAdmin.retire)

    async def rollback(self, request: Request, version: str) -> Response:
        """Take back a canary or the live version; `conductor` for whichever is there, the canary first."""
        return await self._move(request, version, PolicyAdmin.rollback)

    async def _move(self, request: Request, version: str, move: Move) -> Response:
        by = await self._who(request)
        body = await self._body(request, MOVE_FIELDS)
        return JSONResponse(await move(self._policies(), version, by, body.get("why", "")))

    def _policies(self) -> PolicyAdmin:
        if self.policies is None:
            fix = "BATON_POLICY_ENGINE says who holds them"
            raise NotFound(f"this gateway's conductor has no versions; {fix}", code="no_versions")
        return self.policies

    async def _body(self, request: Request, fields: Mapping[str, type]) -> dict[str, Any]:
        """The body's fields, each of its type; none at all is an empty object. Raises BadRequest."""
        body = await read_json(request, self.body_bytes_max)
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object", code="invalid_type")
        for name, value in body.items():
            if name not in fields:
                raise BadRequest(f"Unknown parameter: '{name}'.", param=name, code="unknown_parameter")
            if not isinstance(value, fields[name]) or (fields[name] is int and isinstance(value, bool)):
                raise BadRequest(f"`{name}` is no {fields[name].__name__}", param=name, code="invalid_type")
        return body

    async def _who(self, request: Request) -> str:
        """The admin key that asks, as the audit names it."""
        principal = await self.authenticator.authenticate(request.headers.get("authorization"), "admin")
        return f"key:{principal.public_id}"
