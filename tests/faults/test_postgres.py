"""F3: PostgreSQL breaks in six ways under load. No request notices while the journal has room, and nothing is lost; the
backlog goes once PostgreSQL is back (a short L9)."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.faults.breaks_postgres import FAULTS, World, capture_rate, healed, shipped
from tests.faults.checker import check
from tests.faults.client import Client, good
from tests.faults.site import Zygote, site, through
from tests.sizes import report_row, sized
from tests.waiting import PATIENT

pytestmark = pytest.mark.long

AWAY_S = sized(ci=1.5, long=45.0)


@pytest.mark.timeout(900)
async def test_f3_postgres_breaks_in_six_ways_and_no_request_notices(world: World, place: Path, zygote: Zygote) -> None:
    async with site(place, zygote, world.url, **PATIENT) as here:
        await here.gateway(DATABASE_URL=through(world.url, world.proxy.port), BATON_DB_CONNECT_S="2")
        await here.new_key()
        client, shipped_s = Client(here), []
        async with client.load(at_once=3, pause_s=0.05) as load:
            for name, fault in FAULTS.items():
                sys.stdout.write(f"F3: {name}\n")
                await load.until(lambda seen: len(good(seen)) >= 4)
                async with healed(await fault(world)):
                    await asyncio.sleep(AWAY_S)
                    await load.until(lambda seen: len(seen) >= 6)
                shipped_s.append(await shipped(here))
        statuses = client.statuses()
        assert set(statuses) == {"200"}, statuses
        evidence = await check(here, [client])
        assert len(evidence.rollouts) == len(client.history)
        rate = await capture_rate(here)
        report_row(
            "F3",
            faults=len(FAULTS),
            requests=len(client.history),
            failed=len(client.history) - statuses["200"],
            stored=len(evidence.rollouts),
            backlog_gone_s_max=round(max(shipped_s), 2),
            capture_rate=rate,
        )
