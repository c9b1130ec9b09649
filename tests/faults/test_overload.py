"""L6: five times what two gateways can do. What they take they serve, what they refuse they refuse at once and say when
to come back, and what spends nothing goes on."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
import pytest
from sqlalchemy import text

from gateway.adapters.postgres.database import async_engine
from tests.faults.checker import check
from tests.faults.load import (
    MESSAGES,
    drive,
    gateways,
    lasts_s,
    limited_key,
    most_mib,
    percentile,
    pool,
    report,
    settle,
    worker,
)
from tests.faults.site import Gateway, Site
from tests.sizes import SIZE, sized

pytestmark = pytest.mark.long

LONG = SIZE == "long"
SECONDS = sized(ci=2.0, long=300.0)
CAPACITY_S = sized(ci=1.5, long=20.0)
IN_FLIGHT = sized(ci=16, long=128)
TIMES = 5
JUDGED = 100  # requests before the load; the others are judged under it
PROBES_PAUSE_S = 0.1
RSS_MIB_MAX = 600


@dataclass(slots=True)
class Probes:
    """What an operator and a grader ask for meanwhile."""

    here: Site
    rollout_id: str
    took_ms: list[float] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)

    async def run(self) -> None:
        """In turns, until it is cancelled."""
        number = 0
        while True:
            for one in self.here.gateways:
                number += 1
                for name, ask in self._all(one, number).items():
                    began_s = time.monotonic()
                    try:
                        async with ask() as reply:
                            if reply.status >= 300:
                                self.wrong[f"{name}: {reply.status} {(await reply.text())[:200]}"] += 1
                    except (aiohttp.ClientError, OSError, TimeoutError) as error:
                        self.wrong[f"{name}: {error!r}"] += 1
                    self.took_ms.append((time.monotonic() - began_s) * 1000)
            await asyncio.sleep(PROBES_PAUSE_S)

    def _all(self, one: Gateway, number: int) -> dict[str, Callable[[], Any]]:
        get, post, facts = self.here.http.get, self.here.http.post, one.facts
        operator = {"authorization": f"Bearer {facts['admin_key']}"}
        client = {"authorization": f"Bearer {self.here.key}"}
        judged = {"rollout_id": self.rollout_id, "value": True, "source": f"probe-{number}"}
        return {
            "ready": partial(get, f"{facts['admin_url']}/{'readyz' if LONG else 'livez'}"),  # the first has a deadline
            "live": partial(get, f"{facts['base_url'].removesuffix('/v1')}/livez"),
            "key": partial(get, f"{facts['admin_url']}/admin/keys/{self.here.key_id}", headers=operator),
            "models": partial(get, f"{facts['base_url']}/models", headers=client),
            "outcome": partial(post, f"{facts['base_url']}/outcomes", json=judged, headers=client),
        }


@asynccontextmanager
async def meanwhile(work: Awaitable[Any]) -> AsyncIterator[asyncio.Future[Any]]:
    """The work goes on in the block, and is cancelled at its end."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.timeout(1800)
async def test_l6_overload_is_refused_at_once_and_what_is_taken_is_served(here: Site) -> None:
    async with worker() as upstream:
        here.worker_url = upstream.url
        pool(here, {"name": "alpha", "model": "m"})
        serving = await gateways(here, 2 if LONG else 1, {} if LONG else {"BATON_IN_FLIGHT_MAX": str(IN_FLIGHT)})
        await limited_key(here)
        capacity = await drive(here, upstream, in_flight=IN_FLIGHT, seconds=CAPACITY_S)
        assert capacity.errors() == 0, capacity.examples
        watching = asyncio.create_task(most_mib(serving))
        probes = Probes(here, capacity.ids[0])
        async with meanwhile(probes.run()):
            result = await drive(here, upstream, rate=TIMES * capacity.rps, seconds=lasts_s(SECONDS))
        watching.cancel()
        calls, rss_mib = await settle(here, upstream), await watching
        evidence = await check(here, [capacity.client(here), result.client(here)])
    goodput, refused_ms = result.rps / capacity.rps, result.ms(99, "503")
    numbers = {
        "capacity_rps": round(capacity.rps),
        "asked_rps": round(TIMES * capacity.rps),
        "goodput": f"{goodput:.0%}",
    }
    numbers |= {
        "refused": result.statuses.get("503", 0),
        "refused_ms_p50": result.ms(50, "503"),
        "refused_ms_p99": refused_ms,
    }
    numbers |= {"served_ms_p50": result.ms(50, "200"), "served_ms_p99": result.ms(99, "200")}
    numbers |= {"probes": len(probes.took_ms), "probes_failed": probes.wrong.total()}
    report("L6", result, "503", **numbers, probes_ms_p99=percentile(probes.took_ms, 99), rss_mib=rss_mib)
    assert result.errors("503") == 0, (result.statuses, result.examples, here.complaints())
    assert "overloaded" in result.examples["503"], result.examples
    assert result.no_retry_after == 0
    assert probes.wrong == {}
    counts = {"rollouts": len(evidence.rollouts), "replies": len(capacity.ids) + len(result.ids), "calls": calls}
    assert len(set(counts.values())) == 1, (counts, Counter(one["status"] for one in evidence.rollouts))
    assert rss_mib <= RSS_MIB_MAX
    assert not LONG or (goodput >= 0.9 and refused_ms <= 50)


async def _judge(here: Site, ids: Sequence[str]) -> None:
    """Judge requests, every other one as right, one after the other."""
    url, headers = f"{here.gateways[0].facts['base_url']}/outcomes", {"authorization": f"Bearer {here.key}"}
    for number, rollout_id in enumerate(ids):
        body = {"rollout_id": rollout_id, "value": number % 2}
        async with here.http.post(url, json=body, headers=headers) as reply:
            assert reply.status in (200, 201), await reply.text()


async def _states(here: Site) -> Mapping[str, str | None]:
    """By what each planned request of the log was planned, by rollout."""
    engine = async_engine(here.database_url, pool_size=1)
    planned = "SELECT CAST(id AS text), memory ->> 'state' FROM rollouts WHERE policy_requested = 'baton/rule'"
    try:
        async with engine.connect() as connection:
            return {str(row[0]): row[1] for row in await connection.execute(text(planned))}
    finally:
        await engine.dispose()


@pytest.mark.timeout(1800)
async def test_l6_at_overload_no_request_is_planned_blind_in_silence(here: Site) -> None:
    """Requests that the rule plans by judged steps, while outcomes come: five times what the gateway can do."""
    body = {"model": "baton/rule", "messages": MESSAGES, "max_tokens": 8}
    async with worker() as upstream:
        here.worker_url = upstream.url
        pool(here, {"name": "alpha", "model": "m"}, {"name": "beta", "model": "m"})
        await gateways(here, 1, {} if LONG else {"BATON_IN_FLIGHT_MAX": str(IN_FLIGHT)})
        await here.new_key()
        capacity = await drive(here, upstream, in_flight=IN_FLIGHT, seconds=CAPACITY_S, bodies=[body])
        assert capacity.errors() == 0, capacity.examples
        await _judge(here, capacity.ids[:JUDGED])
        async with meanwhile(_judge(here, capacity.ids[JUDGED:])):
            rate = TIMES * capacity.rps
            result = await drive(here, upstream, rate=rate, seconds=lasts_s(SECONDS), bodies=[body])
        await settle(here, upstream)
        await check(here, [capacity.client(here), result.client(here)])
        states = await _states(here)
    served = [states[one] for one in result.ids]
    blind = {one: states[one] for one in result.ids if states[one] != "fresh"}
    numbers = {"capacity_rps": round(capacity.rps), "asked_rps": round(rate), "served": len(served)}
    numbers |= {"stale": served.count("stale"), "missing": served.count("missing")}
    report("L6 blind", result, "503", **numbers, unannounced=len(blind.keys() - result.blind.keys()))
    assert result.errors("503") == 0, (result.statuses, result.examples)
    assert None not in served
    assert {one: said.partition(";")[0] for one, said in result.blind.items()} == blind
    assert len(blind) < 0.01 * len(served)
