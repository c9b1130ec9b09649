"""Admin routes of the pool file: what serves, another in its place, and every one that ever served."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from gateway.api.edge.bodies import asked, operator, whole
from gateway.errors import BadRequest
from gateway.service.admin import limits
from gateway.service.admin.pools import REVISIONS_MAX, Pools
from gateway.service.request.auth import Authenticator

RELOAD_FIELDS = frozenset({"dry_run"})
REVISIONS_DEFAULT = 100


@dataclass(frozen=True, slots=True)
class PoolsApi:
    """What the routes need."""

    pools: Pools
    authenticator: Authenticator
    body_bytes_max: int

    def router(self) -> APIRouter:
        """The routes."""
        router = APIRouter(prefix="/admin/pools")
        router.add_api_route("", self.show, methods=["GET"], response_model=None)
        router.add_api_route("/reload", self.reload, methods=["POST"], response_model=None)
        router.add_api_route("/revisions", self.list, methods=["GET"], response_model=None)
        router.add_api_route("/revisions/{revision}", self.revision, methods=["GET"], response_model=None)
        return router

    async def show(self, request: Request) -> Response:
        """The pool in use, without secret references, with its hash and when it was loaded."""
        await operator(request, self.authenticator)
        now = self.pools.now
        file = now.loaded.pools
        workers = [worker.model_dump(mode="json", exclude={"api_key"}) for worker in file.workers]
        pool = {"default": file.default, "pools": file.pools, "workers": workers}
        return JSONResponse({**pool, "hash": now.hash, "loaded_at": now.at.isoformat()})

    async def reload(self, request: Request) -> Response:
        """Read the pool file anew and let it take the place of the one in use: what changed, by worker and field. With
        `dry_run` only say what would. A file with a mistake is a 400 that names the field, and changes nothing."""
        body, act = await asked(request, self.body_bytes_max, await operator(request, self.authenticator))
        dry = limits.known(body, RELOAD_FIELDS).get("dry_run", False)
        if type(dry) is not bool:
            raise BadRequest("`dry_run` must be true or false", param="dry_run", code="invalid_type")
        return JSONResponse(await self.pools.reload(act, dry=dry))

    async def list(self, request: Request) -> Response:
        """Every pool that served, newest first: `limit` (100)."""
        await operator(request, self.authenticator)
        limit = whole(request, "limit", REVISIONS_DEFAULT, REVISIONS_MAX)
        return JSONResponse({"object": "list", "data": await self.pools.revisions(limit)})

    async def revision(self, request: Request, revision: str) -> Response:
        """One pool as it was, by the hash that its rollouts name as `pool_revision`."""
        await operator(request, self.authenticator)
        return JSONResponse(await self.pools.revision(revision))
