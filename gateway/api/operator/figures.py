"""Admin routes of the pages of money and of workers: spending, open holds, and how each worker does."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request, Response

from gateway.api.edge.bodies import Operators, number
from gateway.api.edge.stack import Router
from gateway.api.operator.pages import WINDOW_S_DEFAULT, WINDOW_S_MAX, WINDOW_S_MIN, parameters, private
from gateway.service.admin.checkers import CheckerWatch
from gateway.service.admin.pools import Pools
from gateway.service.loop.health.breakers import Breakers
from gateway.service.policies.reach import Reach
from gateway.service.ports.admin import Reports
from gateway.service.ports.request import Clock

DAYS_DEFAULT, DAYS_MAX = 30, 92
NO_CALLS = {"calls": 0, "errors": 0, "retries": 0, "cost_nano": 0, "tokens": 0}


@dataclass(frozen=True, slots=True)
class FiguresApi:
    """What the routes need."""

    reports: Reports
    pools: Pools
    operators: Operators
    clock: Clock
    checkers: CheckerWatch
    rests: Breakers
    reach: Reach | None = None

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/admin")
        router.add("GET", "/spend", self.spend)
        router.add("GET", "/holds", self.holds)
        router.add("GET", "/workers", self.workers)
        return router

    async def spend(self, request: Request) -> Response:
        """Nano-dollars by day (UTC) and key, and by day and worker, of the last `days` (30), today included."""
        await self.operators.act(request)
        days = number(parameters(request, "days").get("days", str(DAYS_DEFAULT)), "days", 1, DAYS_MAX)
        return private(await self.reports.spend(self.clock.now(), days))

    async def holds(self, request: Request) -> Response:
        """Open holds of the last 30 days, newest first, 100 at most."""
        await self.operators.act(request)
        return private({"object": "list", "data": await self.reports.open_holds(self.clock.now())})

    async def workers(self, request: Request) -> Response:
        """Every worker of the pool file with its prices, its calls of the last `window_s` seconds (3600), their errors,
        its `rest` (null, or why, since when and until when it is not asked; state `due`: the next call tries it),
        and its success by kind of task, over its latest 1,000 judged steps. `reach`: what the latest look at it showed
        (`state`: ok, warn or bad; `what`; `fix`), null where there was none. `checks`: how often each checker errs,
        with counts and 95 % intervals, null where there are fewer than 10 cases; `checks_at`: when that was counted,
        at most every five minutes, null where it was not yet. `sources`: by organisation, how far each source of
        outcomes agrees with more trusted ones (`n` replies), and what its outcomes weigh."""
        await self.operators.act(request)
        window = parameters(request, "window_s").get("window_s", str(WINDOW_S_DEFAULT))
        window_s = number(window, "window_s", WINDOW_S_MIN, WINDOW_S_MAX)
        file = self.pools.now.loaded.pools
        report = await self.reports.workers(self.clock.now(), window_s, [worker.name for worker in file.workers])
        recent = {row["worker"]: row for row in report["calls"]}
        workers = []
        for worker in file.workers:
            facts = worker.model_dump(mode="json", include={"name", "handle", "kind", "model", "price", "tags", "task"})
            of = [name for name, members in file.pools.items() if worker.name in members]
            sight = self.reach.sights.get(worker.name) if self.reach else None
            reach = sight and {"state": sight.state, "what": sight.what, "fix": sight.fix}
            latest = {"rest": self.rests.report(worker), "recent": recent.get(worker.name, NO_CALLS)}
            workers.append({**facts, "pools": of, **latest, "reach": reach})
        checks = await self.checkers.recent()
        more = {name: report[name] for name in ("errors", "success", "sources")}
        more |= {"checks": [one.as_json() for one in checks.errors], "checks_at": checks.at and checks.at.isoformat()}
        return private({"object": "list", "data": workers, **more})
