"""Admin routes, on their own listener and for admin keys only: keys and what they have spent."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from gateway.api.edge import read_json
from gateway.core.money import nano_to_usd
from gateway.core.pool import PoolFile
from gateway.errors import BadRequest
from gateway.service.admin import KeyAdmin, describe
from gateway.service.auth import Authenticator
from gateway.service.ports import Budgets

CREATE_FIELDS = frozenset(
    {
        "name",
        "key_class",
        "budget_usd",
        "rpm",
        "tpm",
        "concurrency",
        "pools",
        "workers",
        "caps",
        "org",
        "log_mode",
        "train",
    }
)


@dataclass(frozen=True, slots=True)
class AdminApi:
    """What the routes need."""

    keys: KeyAdmin
    budgets: Budgets
    pools: PoolFile
    authenticator: Authenticator
    body_bytes_max: int

    def router(self) -> APIRouter:
        """The routes."""
        router = APIRouter(prefix="/admin")
        router.add_api_route("/keys", self.create, methods=["POST"], response_model=None)
        router.add_api_route("/keys", self.list, methods=["GET"], response_model=None)
        router.add_api_route("/keys/{public_id}", self.revoke, methods=["DELETE"], response_model=None)
        router.add_api_route("/pools", self.show_pools, methods=["GET"], response_model=None)
        return router

    async def create(self, request: Request) -> Response:
        """A new key; its secret is in this reply and nowhere else."""
        await self._admin(request)
        body = await read_json(request, self.body_bytes_max)
        if not isinstance(body, dict) or not isinstance(body.get("name"), str):
            raise BadRequest("give the key a `name`", param="name", code="missing_required_parameter")
        unknown = sorted(set(body) - CREATE_FIELDS)
        if unknown:
            raise BadRequest(f"Unknown parameter: '{unknown[0]}'.", param=unknown[0], code="unknown_parameter")
        row, secret = await self.keys.create_key(**body)
        return JSONResponse({**describe(row), "key": secret}, status_code=201)

    async def list(self, request: Request) -> Response:
        """Every key with what it has posted and holds."""
        await self._admin(request)
        shown = []
        for row in await self.keys.list_keys():
            balance = await self.budgets.balance(f"key:{row.public_id}")
            spent = {"spent_usd": nano_to_usd(balance.posted_nano), "held_usd": nano_to_usd(balance.held_nano)}
            shown.append({**describe(row), **spent})
        return JSONResponse({"object": "list", "data": shown})

    async def revoke(self, request: Request, public_id: str) -> Response:
        """Revoke a key; it stops working within a second."""
        await self._admin(request)
        return JSONResponse(describe(await self.keys.revoke_key(public_id)))

    async def show_pools(self, request: Request) -> Response:
        """The pool file as it was read, without secret references."""
        await self._admin(request)
        workers = [worker.model_dump(mode="json", exclude={"api_key"}) for worker in self.pools.workers]
        return JSONResponse({"default": self.pools.default, "pools": self.pools.pools, "workers": workers})

    async def _admin(self, request: Request) -> None:
        await self.authenticator.authenticate(request.headers.get("authorization"), "admin")
