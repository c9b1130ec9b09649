"""What the console asks of the store, with few and with many rollouts in it: two gateways, asked nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from bench.suite.baton import ADMIN_S, Baton, baton
from bench.suite.cores import REST, on
from bench.suite.fill import fill_rollouts, sum_days
from bench.suite.parts.flat import POOL, ROLLOUTS_FEW
from bench.suite.rounds import percentile, rounded, say
from bench.suite.sizes import Size
from policy.recipes.stack import program

FEW, MANY = "few", "many"
DAY_S = 86_400
PATHS: Mapping[str, str] = {
    "overview, an hour": "overview?window_s=3600",
    "overview, a day": f"overview?window_s={DAY_S}",
    "rollouts": "rollouts?limit=50",
    "rollouts of a worker that has none": "rollouts?limit=50&worker=worker0",
    "rollouts that failed": "rollouts?limit=50&status=failed",
    "rollouts judged right": "rollouts?limit=50&outcome_min=1",
    "rollouts with a text": "rollouts?limit=50&text=kilograms",
    "rollouts with a text that none has": "rollouts?limit=50&text=no-such-words-anywhere",
    "one rollout": "rollouts/{rollout}",
    "why it went where it went": "rollouts/{rollout}/explain",
    "spending, 30 days": "spend?days=30",
    "spending, 90 days": "spend?days=90",
    "workers, a day": f"workers?window_s={DAY_S}",
    "keys": "keys",
    "audit": "audit?limit=100",
}


def measure(directory: Path, size: Size) -> dict[str, Any]:
    """Milliseconds of each ask, by query, with few rollouts and with many."""
    with ExitStack() as held:
        with on(REST):
            upstream = held.enter_context(program("upstream", directory, "bench.suite.upstream"))
        took_ms, counts = {}, {}
        for name, count in ((FEW, ROLLOUTS_FEW), (MANY, size.rollouts)):
            own = held.enter_context(baton(directory / name, upstream.url, workers=POOL))
            counts[name] = fill_rollouts(own, "baton/rule", count)
            sum_days(own)
            say(f"  {counts[name]} rollouts")
            with on(REST):
                took_ms[name] = asyncio.run(_ask_all(own, size.asks))
    return {"took_ms": took_ms, "counts": counts}


async def _ask_all(own: Baton, asks: int) -> dict[str, list[float]]:
    took_ms: dict[str, list[float]] = {}
    timeout = aiohttp.ClientTimeout(ADMIN_S)
    async with aiohttp.ClientSession(headers=own.operator, timeout=timeout) as session:
        newest = await _ask(session, f"{own.served.admin_url}/admin/rollouts?limit=1")
        rollout = newest["data"][0]["id"]
        for label, path in PATHS.items():
            url = f"{own.served.admin_url}/admin/{path.format(rollout=rollout)}"
            for _ in range(asks):
                began_s = time.perf_counter()
                await _ask(session, url)
                took_ms.setdefault(label, []).append(1000 * (time.perf_counter() - began_s))
    return took_ms


async def _ask(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as reply:
        if reply.status != 200:
            raise SystemExit(f"{url}: {reply.status} {await reply.text()}")
        return await reply.json()


def figures(raw: dict[str, Any]) -> dict[str, Any]:
    """The first ask, the median and the longest of each query, in milliseconds."""
    spreads = {
        name: {
            label: [rounded(each) for each in (took[0], percentile(took, 0.5), max(took))]
            for label, took in by_label.items()
        }
        for name, by_label in raw["took_ms"].items()
    }
    return {"counts": raw["counts"], "ms": spreads}
