"""Five times what a gateway can do: what it takes it serves, what it refuses it refuses at once, and what spends
nothing goes on. Row L6 of the fault matrix asserts the same of two gateways; this part measures one, on one core."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from bench.suite.baton import ADMIN_S, USER, Baton, baton, shipped
from bench.suite.client import Crowd, Replies
from bench.suite.cores import REST, on
from bench.suite.rounds import percentile, rounded, say
from bench.suite.sizes import Size
from policy.recipes.stack import program

TIMES = 5
PAUSE_S = 0.05
ROLLOUT = b"\nx-baton-rollout-id:"


class Probes:
    """What operators and graders ask for meanwhile. Milliseconds by kind, and what failed."""

    def __init__(self, own: Baton, rollout_id: str) -> None:
        self.took_ms: dict[str, list[float]] = {}
        self.failed: Counter[str] = Counter()
        self._own = own
        self._rollout_id = rollout_id

    async def run(self, session: aiohttp.ClientSession, tag: str) -> None:
        """In turns, until it is cancelled."""
        number = 0
        while True:
            number += 1
            for name, ask in self._all(session, f"{tag}-{number}").items():
                began_s = time.perf_counter()
                try:
                    async with ask() as reply:
                        if reply.status >= 300:
                            self.failed[f"{name}: {reply.status}"] += 1
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    self.failed[f"{name}: {type(error).__name__}"] += 1
                self.took_ms.setdefault(name, []).append((time.perf_counter() - began_s) * 1000)
            await asyncio.sleep(PAUSE_S)

    def _all(self, session: aiohttp.ClientSession, source: str) -> Mapping[str, Callable[[], Any]]:
        served, client = self._own.served, {"authorization": f"Bearer {self._own.key}"}
        judged = {"rollout_id": self._rollout_id, "value": True, "source": source}
        return {
            "health": lambda: session.get(f"{served.base_url.removesuffix('/v1')}/livez"),
            "ready": lambda: session.get(f"{served.admin_url}/readyz"),
            "admin": lambda: session.get(f"{served.admin_url}/admin/keys", headers=self._own.operator),
            "models": lambda: session.get(f"{served.base_url}/models", headers=client),
            "outcome": lambda: session.post(f"{served.base_url}/outcomes", json=judged, headers=client),
        }

    def row(self) -> dict[str, Any]:
        """Its figures."""
        every = [ms for took in self.took_ms.values() for ms in took]
        spread = {"p50_ms": percentile(every, 0.5), "p99_ms": percentile(every, 0.99)}
        return {"asked": len(every), "failed": dict(self.failed), **spread}


def measure(directory: Path, size: Size) -> dict[str, Any]:
    """Capacity and overload in turns; probes during both."""
    with ExitStack() as held:
        with on(REST):
            upstream = held.enter_context(program("upstream", directory, "bench.suite.upstream"))
        own = held.enter_context(baton(directory / "baton", upstream.url))
        with on(REST):
            rows = asyncio.run(_rounds(own, size))
    return {"rows": rows, "times": TIMES, "in_flight": size.crowd}


async def _rounds(own: Baton, size: Size) -> list[dict[str, Any]]:
    target = own.target("mock")
    crowd = Crowd(target.address, [target.request(**USER)])
    first = await crowd.closed(size.in_flight, size.seconds)
    if not first.good:
        raise SystemExit(f"overload: nothing is served: {first.examples}")
    rollout_id = value_of(first.head, ROLLOUT)
    await shipped(own.served)
    rows = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ADMIN_S)) as session:
        for number in range(size.overload_rounds):
            async with _meanwhile(Probes(own, rollout_id), session, f"calm{number}") as calm:
                capacity = await crowd.closed(size.crowd, size.overload_s)
            await shipped(own.served)
            async with _meanwhile(Probes(own, rollout_id), session, f"over{number}") as probes:
                over = await crowd.open(TIMES * capacity.per_s, size.overload_s)
            await shipped(own.served)
            rows.append(_row(number, capacity, over) | {"probes_calm": calm.row(), "probes": probes.row()})
            say(f"  round {number + 1} of {size.overload_rounds}")
    crowd.close()
    return rows


def value_of(head: bytes, name: bytes) -> str:
    """The value of a header; empty where there is none."""
    at = head.lower().find(name)
    return head[at + len(name) : head.index(b"\r", at + 1)].decode().strip() if at >= 0 else ""


@asynccontextmanager
async def _meanwhile(probes: Probes, session: aiohttp.ClientSession, tag: str) -> AsyncIterator[Probes]:
    task = asyncio.create_task(probes.run(session, tag))
    try:
        yield probes
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _row(number: int, capacity: Replies, over: Replies) -> dict[str, Any]:
    refused = over.took_ms.get(503, [])
    other = {str(status): n for status, n in over.statuses.items() if status not in (200, 503)}
    return {
        "round": number,
        "capacity_per_s": capacity.per_s,
        "capacity_refused": capacity.requests - capacity.statuses[200],
        "asked": over.requests,
        "served_per_s": over.per_s,
        "refused": len(refused),
        "refused_p50_ms": percentile(refused, 0.5),
        "refused_p99_ms": percentile(refused, 0.99),
        "no_retry_after": over.requests - over.statuses[200] - over.retry_after,
        "served_p50_ms": percentile(over.took_ms.get(200, []), 0.5),
        "capacity_p50_ms": percentile(capacity.took_ms.get(200, []), 0.5),
        "other": other,
    }


def figures(raw: dict[str, Any]) -> dict[str, Any]:
    """Medians over rounds; ratios are taken within a round, sums over all of them."""
    rows = raw["rows"]

    def middle(values: list[float]) -> list[float]:
        return [rounded(value) for value in (statistics.median(values), min(values), max(values))]

    shown = ("refused_p50_ms", "refused_p99_ms", "served_p50_ms", "capacity_p50_ms", "capacity_per_s")
    found: dict[str, Any] = {name: middle([row[name] for row in rows]) for name in shown}
    found["goodput"] = middle([row["served_per_s"] / row["capacity_per_s"] for row in rows])
    sums = ("asked", "refused", "no_retry_after")
    found |= {name: sum(row[name] for row in rows) for name in sums}
    found["other"] = sum(sum(row["other"].values()) for row in rows)
    for probes in ("probes_calm", "probes"):
        found[probes] = {
            "asked": sum(row[probes]["asked"] for row in rows),
            "failed": sum(sum(row[probes]["failed"].values()) for row in rows),
            "p50_ms": middle([row[probes]["p50_ms"] for row in rows]),
            "p99_ms": middle([row[probes]["p99_ms"] for row in rows]),
        }
    return found | {"times": raw["times"], "in_flight": raw["in_flight"]}
