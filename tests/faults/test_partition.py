"""F6: one of three gateways is cut off from Redis, with calls under way. It refuses money, the others go on, and what
it had been granted is neither granted again nor forgotten."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.checker import READY_S, check
from tests.faults.client import QUESTION, Client, Reply
from tests.faults.proxy import FaultProxy
from tests.faults.site import FLAT_NANO, Site
from tests.sizes import SLACK, report_row, sized

pytestmark = pytest.mark.long

SEEDS, AWAY_S = sized(ci=(1, 2.0), long=(5, 30.0))  # two leases of a hold, and thirty
UNDER_WAY = 4
SLOW_S = 0.3
REFUSED_S = 0.25


@pytest.mark.timeout(600)
async def test_f6_a_gateway_cut_off_from_redis_refuses_while_the_others_go_on(here: Site) -> None:
    """The worker has one price a call, so that what is charged says how many calls were granted."""
    async with FaultProxy(("127.0.0.1", here.redis.port)) as proxy:
        here.settings["BATON_RETRY_ATTEMPTS_MAX"] = "1"  # so that the worst case of a call is its price
        others = [await here.gateway() for _ in range(2)]
        alone = await here.gateway(REDIS_URL=f"redis://127.0.0.1:{proxy.port}")
        refused_s: list[float] = []
        back_s: list[float] = []
        answered = 0
        for _ in range(SEEDS):
            affords = round(20 + 30 * AWAY_S)
            await here.new_key(affords * FLAT_NANO)
            here.upstream.bills.clear()
            asks_alone, asks_others = [Client(here, {**QUESTION, "model": "flat"}) for _ in range(2)]
            asks_alone.serving, asks_others.serving = [alone], others
            assert (await asks_alone.ask()).status == 200
            here.upstream.delay_s = SLOW_S
            calls = len(here.upstream.bills)
            under_way = asyncio.ensure_future(asks_alone.many(UNDER_WAY, at_once=UNDER_WAY))
            while len(here.upstream.bills) < calls + UNDER_WAY:
                await asyncio.sleep(0.01)
            proxy.set(black_hole=True)
            async with asks_others.load(at_once=2, pause_s=0.1):
                assert asks_alone.statuses(await under_way) == {"200": UNDER_WAY}  # it was held before
                refused = await _asked_for(asks_alone, AWAY_S)
            here.upstream.delay_s = 0.0
            assert asks_alone.statuses(refused) == {"503 money_unavailable": len(refused)}
            assert set(asks_others.statuses()) == {"200"}, asks_others.statuses()
            refused_s += [reply.took_s for reply in refused]
            answered += len(asks_others.history)
            proxy.heal()
            back_s.append(await here.ready(READY_S))
            asks_alone.serving = None
            for _ in range(2):  # to the budget's end, of all three; then what a refusal had left held, if one did
                await asks_alone.many(affords, at_once=16)
                evidence = await check(here, [asks_alone, asks_others], limit_nano=affords * FLAT_NANO)
            assert evidence.posted(f"key:{here.key_id}") == affords * FLAT_NANO
    ranked = sorted(refused_s)
    assert ranked[len(ranked) // 2] <= REFUSED_S * SLACK
    report_row(
        "F6",
        seeds=SEEDS,
        away_s=AWAY_S,
        refused=len(ranked),
        refused_ms_p50=round(ranked[len(ranked) // 2] * 1000),
        refused_ms_p95=round(ranked[len(ranked) * 95 // 100] * 1000),
        answered_by_others=answered,
        failed_at_others=0,
        back_s_max=round(max(back_s), 2),
        overspend_nano=0,
    )


async def _asked_for(client: Client, seconds: float) -> list[Reply]:
    """The replies of so many seconds."""
    first = len(client.history)
    async with client.load(at_once=2):
        await asyncio.sleep(seconds)
    return client.history[first:]
