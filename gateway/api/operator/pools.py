"""Admin routes of the pool file: show the pools, reload the file, list every pool that ever served."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from gateway.api.edge.bodies import Fields, Operators, query_number
from gateway.api.edge.stack import Router
from gateway.service.admin.pools import REVISIONS_MAX, Pools

RELOAD_FIELDS: Fields = {"dry_run": bool, "why": str}
REVISIONS_DEFAULT = 100


@dataclass(frozen=True, slots=True)
class PoolsApi:
    """What the routes need."""

    pools: Pools
    operators: Operators

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/admin/pools")
        router.add("GET", "", self.show)
        router.add("POST", "/reload", self.reload)
        router.add("GET", "/revisions", self.list)
        router.add("GET", "/revisions/{revision}", self.revision)
        return router

    async def show(self, request: Request) -> Response:
        """The pools in use, without references to secrets, with their hash and the time of loading."""
        await self.operators.act(request)
        now = self.pools.now
        file = now.loaded.pools
        workers = [worker.model_dump(mode="json", exclude={"api_key"}) for worker in file.workers]
        pool = {"default": file.default, "pools": file.pools, "workers": workers}
        return JSONResponse({**pool, "hash": now.hash, "loaded_at": now.at.isoformat()})

    async def reload(self, request: Request) -> Response:
        """Read the pool file again and use it from now on; the reply lists what changed, by worker and field. With
        `dry_run` it only lists. A file with a mistake is a 400 that names the field, and changes nothing."""
        act, body = await self.operators.change(request, RELOAD_FIELDS)
        return JSONResponse(await self.pools.reload(act, dry=body.get("dry_run", False)))

    async def list(self, request: Request) -> Response:
        """Every pool that ever served, newest first: `limit` (100)."""
        await self.operators.act(request)
        limit = query_number(request, "limit", REVISIONS_DEFAULT, 1, REVISIONS_MAX)
        return JSONResponse({"object": "list", "data": await self.pools.revisions(limit)})

    async def revision(self, request: Request, revision: str) -> Response:
        """One pool that served, by the hash that rollouts name as `pool_revision`."""
        await self.operators.act(request)
        return JSONResponse(await self.pools.revision(revision))
