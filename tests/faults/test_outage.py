"""L9: PostgreSQL is away for a long time under a steady load: no request fails, and what the journals have gathered is
stored quickly once it is back, each record once."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from sqlalchemy import text

from tests.faults.breaks_postgres import World, capture_rate, healed, shipped, stopped_at_once
from tests.faults.checker import check
from tests.faults.client import Client
from tests.faults.pace import Paced
from tests.faults.site import Site, Zygote, site, through
from tests.faults.witness import connected
from tests.sizes import SLACK, report_row, sized
from tests.waiting import PATIENT

pytestmark = pytest.mark.long

AWAY_S = float(os.environ.get("FAULTS_AWAY_S", sized(ci=3.0, long=900.0)))
PER_S = sized(ci=20.0, long=100.0)
GATEWAYS = sized(ci=1, long=2)
GONE_WITHIN_S, ROWS_PER_S_MIN = 60.0, sized(ci=0, long=5_000)
AS_INSTALLED = {"BATON_MONEY_LEASE_S": "60", "BATON_MONEY_SWEEP_S": "15"}
ROWS = """
SELECT (SELECT count(*) FROM rollouts) + (SELECT count(*) FROM rounds) + (SELECT count(*) FROM steps)
    + (SELECT count(*) FROM ledger)
"""


@pytest.mark.timeout(3000)
async def test_l9_postgres_is_away_and_no_request_fails_and_nothing_is_lost(
    world: World, place: Path, zygote: Zygote
) -> None:
    async with site(place, zygote, world.url, **AS_INSTALLED, **PATIENT) as here:
        for _ in range(GATEWAYS):
            await here.gateway(DATABASE_URL=through(world.url, world.proxy.port), BATON_DB_CONNECT_S="2")
        await here.new_key()
        client = Client(here, slim=True)
        await client.many(4 * GATEWAYS, at_once=GATEWAYS)
        async with Paced(client.ask, PER_S) as load:
            async with healed(await stopped_at_once(world)):
                before, began_s = len(client.history), time.monotonic()
                await asyncio.sleep(AWAY_S)
                meanwhile, lasted_s = len(client.history) - before, time.monotonic() - began_s
            stored, back_s = await _rows(here), time.monotonic()
            gone_s = await shipped(here, limit_s=10 * GONE_WITHIN_S)
            rows_per_s = (await _rows(here) - stored) / (time.monotonic() - back_s)
        statuses = client.statuses()
        assert set(statuses) == {"200"}, statuses
        assert SLACK > 1 or meanwhile >= 0.9 * PER_S * lasted_s, f"the load was too little: {load.skipped} turns passed"
        evidence = await check(here, [client])
        assert len(evidence.rollouts) == len(client.history)
        report_row(
            "L9",
            away_s=round(lasted_s),
            per_s=round(meanwhile / lasted_s, 1),
            requests=len(client.history),
            meanwhile=meanwhile,
            failed=len(client.history) - statuses["200"],
            backlog_gone_s=round(gone_s, 1),
            rows_per_s=round(rows_per_s),
            lost=len(client.history) - len(evidence.rollouts),
            capture_rate=await capture_rate(here),
        )
        assert gone_s <= GONE_WITHIN_S * SLACK
        assert rows_per_s >= ROWS_PER_S_MIN


async def _rows(here: Site) -> int:
    async with connected(here) as connection:
        return int(await connection.scalar(text(ROWS)))
