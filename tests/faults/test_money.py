"""L7: one hot budget and three gateways. F4, F5: Redis breaks in seven ways, or is not there at the start. Whatever
happens to it, nobody spends more than the limit, and money is refused within its deadline rather than guessed."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from gateway.adapters.redis.budgets import RedisBudgets
from gateway.core.money.ledger import Balance, Scope
from gateway.errors import BudgetExceeded
from tests.faults.breaks_redis import FAULTS
from tests.faults.checker import READY_S, check
from tests.faults.client import QUESTION, Client, good
from tests.faults.proxy import FaultProxy
from tests.faults.site import FLAT_NANO, Site
from tests.faults.witness import look
from tests.redis_server import RedisServer, start_redis
from tests.sizes import SLACK, report_row, sized

AFFORDS, ASKED = 137, 1000
SEEDS = sized(ci=20, long=200)
PROCESS_SEEDS = sized(ci=4, long=50)
HANG_S = sized(ci=2.0, long=30.0)
REFUSED_S = 0.25


async def test_l7_a_hot_budget_is_exact_over_three_clients_of_redis(redis_server: RedisServer) -> None:
    exact = 0
    for _ in range(SEEDS):
        prefix = secrets.token_hex(4)
        gateways = [RedisBudgets(redis_server.url, prefix=prefix, deadline_s=20.0) for _ in range(3)]
        for gateway in gateways:
            await gateway.load({})
        scopes = [Scope("org:o", None), Scope("key:k", AFFORDS * 1_000_003 + 5)]

        async def one(number: int, gateways: list[RedisBudgets] = gateways, scopes: list[Scope] = scopes) -> bool:
            try:
                await gateways[number % 3].hold(f"h{number}", 1_000_003, 1_000_003, scopes, 60)
            except BudgetExceeded:
                return False
            return True

        admitted = sum(await asyncio.gather(*(one(number) for number in range(ASKED))))
        assert admitted == AFFORDS
        assert await gateways[0].balance("key:k") == Balance(0, AFFORDS * 1_000_003)
        exact += 1
        for gateway in gateways:
            await gateway.close()
    report_row("L7 holds", seeds=SEEDS, exact=exact, admitted=AFFORDS, asked=ASKED)


async def test_l7_a_hot_budget_is_exact_over_three_gateway_processes(here: Site) -> None:
    """The worker has one price a call, so that the worst case of a call is its price, and exactly 137 fit."""
    for _ in range(3):
        await here.gateway(BATON_REDIS_TIMEOUT_S="10", BATON_IN_FLIGHT_MAX=str(ASKED), BATON_RETRY_ATTEMPTS_MAX="1")
    exact = 0
    for _ in range(PROCESS_SEEDS):
        await here.new_key(AFFORDS * FLAT_NANO)
        here.upstream.bills.clear()
        client = Client(here, {**QUESTION, "model": "flat"})
        await client.many(ASKED, at_once=ASKED)
        statuses = client.statuses()
        assert statuses == {"200": AFFORDS, "429 insufficient_quota": ASKED - AFFORDS}, statuses
        assert len(here.upstream.bills) == AFFORDS
        evidence = await look(here)
        assert evidence.redis_posted[f"key:{here.key_id}"] == AFFORDS * FLAT_NANO
        exact += 1
    await here.ready(READY_S)
    report_row("L7", processes=3, seeds=PROCESS_SEEDS, exact=exact, admitted=AFFORDS, asked=ASKED)


# ---------------------------------------------------------------- F4, F5


async def test_f4_redis_breaks_in_seven_ways_and_nobody_overspends(here: Site) -> None:
    async with FaultProxy(("127.0.0.1", here.redis.port)) as proxy:
        for _ in range(2):
            await here.gateway(REDIS_URL=f"redis://127.0.0.1:{proxy.port}")
        limit_nano = 50_000_000
        await here.new_key(limit_nano, rpm=1_000_000)  # its rates are asked of the same Redis, before its money
        client, refusals, back_s = Client(here), [], []
        async with client.load(at_once=4, pause_s=0.02) as load:
            for fault in FAULTS.values():
                await load.until(lambda seen: len(good(seen)) >= 8)
                heal, first = await fault(here, proxy, here.place / "redis"), len(client.history)
                await load.until(lambda seen: sum(reply.status == 503 for reply in seen) >= 8)
                await asyncio.sleep(HANG_S)
                refusals += [reply for reply in client.history[first:] if reply.code == "money_unavailable"]
                await heal()
                back_s.append(await here.ready(READY_S))
                await load.until(lambda seen: len(good(seen)) >= 2)
        statuses = client.statuses()
        assert set(statuses) <= {"200", "503 money_unavailable", "429 insufficient_quota"}, here.complaints()
        await check(here, [client], limit_nano=limit_nano)
        took_ms = sorted(reply.took_s * 1000 for reply in refusals)
        median_ms, p95_ms = took_ms[len(took_ms) // 2], took_ms[len(took_ms) * 95 // 100]
        report_row(
            "F4",
            faults=len(FAULTS),
            refused=len(refusals),
            refused_ms_p50=round(median_ms),
            refused_ms_p95=round(p95_ms),
            rebuilt_s_max=round(max(back_s), 2),
            overspend_nano=0,
        )
        assert sized(ci=median_ms, long=p95_ms) <= SLACK * REFUSED_S * 1000


async def test_f5_without_redis_at_the_start_a_gateway_waits_and_serves_once_it_is_there(here: Site) -> None:
    here.redis.stop()
    gateways = [await here.gateway(start=False, BATON_RETRY_ATTEMPTS_MAX="1") for _ in range(2)]
    for one in gateways:
        one.start()
    for one in gateways:
        await one.serving()
        assert not await here.is_ready(one)
    affords = 10
    await here.new_key(affords * FLAT_NANO)
    client = Client(here, {**QUESTION, "model": "flat"})
    refused = await client.many(6, at_once=3)
    assert client.statuses(refused) == {"503 money_unavailable": 6}
    assert here.upstream.bills == []
    here.redis = start_redis(here.place / "redis", port=here.redis.port)
    back_s = await here.ready(READY_S)
    assert len(good(await client.many(60, at_once=6))) == affords  # once, and not once a gateway
    await check(here, [client], limit_nano=affords * FLAT_NANO)
    report_row("F5", ready_s=round(back_s, 2), gateways=2, affords=affords, admitted=affords)


pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
