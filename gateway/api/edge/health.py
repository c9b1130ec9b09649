"""Liveness, readiness and metrics, for probes and for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from fastapi import Response
from fastapi.responses import JSONResponse

from gateway.api.edge.stack import Router

CHECK_S = 1.0
Check = Callable[[], Awaitable[bool]]


@dataclass(slots=True)
class HealthApi:
    """`needed` checks decide readiness, `watched` ones are only reported. The shutdown sets `draining`."""

    needed: Mapping[str, Check]
    watched: Mapping[str, Check]
    metrics: Callable[[], tuple[bytes, str]]
    draining: bool = field(default=False)
    others: Callable[[bytes], Awaitable[bytes]] | None = None  # adds the metrics of the processes that serve

    def router(self) -> Router:
        """The routes."""
        router = Router()
        router.add("GET", "/livez", self.livez)
        router.add("GET", "/readyz", self.readyz)
        router.add("GET", "/metrics", self.exposition)
        return router

    async def livez(self) -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    async def readyz(self) -> Response:
        """200 when everything that a request needs is there, else 503; the state of each part."""
        parts = await self.parts()
        ready = not self.draining and all(parts[name] for name in self.needed)
        status = "draining" if self.draining else "ready" if ready else "not ready"
        body = {"status": status, "parts": {name: "ok" if good else "away" for name, good in parts.items()}}
        return JSONResponse(body, status_code=200 if ready else 503)

    async def parts(self) -> Mapping[str, bool]:
        """Whether each part passes its check."""
        checks = {**self.needed, **self.watched}
        results = await asyncio.gather(*(_check(check) for check in checks.values()))
        return dict(zip(checks, results, strict=True))

    async def exposition(self) -> Response:
        """Prometheus text."""
        body, content_type = self.metrics()
        if self.others is not None:
            body = await self.others(body)
        return Response(body, media_type=content_type)


async def _check(check: Check) -> bool:
    try:
        async with asyncio.timeout(CHECK_S):
            return await check()
    except Exception:  # boundary: a part whose check raises is away
        return False
