"""F1: a gateway is killed at every point of a request's way, and started again. F2: rolling restarts."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.faults.checker import check
from tests.faults.client import Client, good
from tests.faults.killpoints import KILLED, POINTS
from tests.faults.site import Site
from tests.sizes import SLACK, report_row, sized
from tests.waiting import PATIENT

SEEDS = sized(small=1, ci=3, long=50)
KILLED_AT = sized(small=POINTS[1::4], ci=POINTS, long=POINTS)
ROUNDS = sized(ci=3, long=20)
POLL_S = 0.25  # a balancer's look at /readyz


@pytest.mark.sized
@pytest.mark.timeout(sized(ci=900, long=3600))
async def test_f1_a_gateway_killed_anywhere_loses_doubles_and_overspends_nothing(here: Site) -> None:
    """Each start recovers what the kill before left, and is itself killed at the next point: under load, or already
    while it recovers, before it listens."""
    gateway = await here.gateway()
    limit_nano = 2_000_000_000
    await here.new_key(limit_nano)
    client, kills, recovering, draw = Client(here), 0, 0, random.Random(1)
    await gateway.stop()
    for seed in range(SEEDS):
        for point in KILLED_AT:
            gateway.start(kill=(point, 1 + draw.randrange(3) if seed else 1))
            recovering += not await gateway.came_up()
            while gateway.alive:
                await client.many(4, at_once=4)
            kills += 1
    assert gateway.log.read_text().count(KILLED) == kills  # nothing else has ended it
    gateway.start()
    await gateway.serving()
    assert len(good(await client.many(4, at_once=4))) == 4
    evidence = await check(here, [client], limit_nano=limit_nano)
    assert evidence.of_kind("uncertain")  # the kills did hit what they were to hit
    numbers = {"kills": kills, "points": len(KILLED_AT), "while_recovering": recovering, "replies": len(client.history)}
    report_row("F1", **numbers, uncertain=len(evidence.of_kind("uncertain")), violations=0)


@pytest.mark.long
async def test_f2_a_rolling_restart_fails_no_request_and_loses_no_row(here: Site) -> None:
    """Three gateways behind a client that goes to one that is ready; each is ended by SIGTERM and started again."""
    here.upstream.delay_s = 0.05
    here.settings |= PATIENT
    for _ in range(3):
        await here.gateway()
    await here.new_key()
    client, drains = Client(here), []
    async with client.load(at_once=6) as load:
        for turn in range(ROUNDS):
            one = here.gateways[turn % 3]
            rest = [each for each in here.gateways if each is not one]
            client.serving = rest  # what a load balancer does once readiness is off, and before the process goes
            drains.append(await one.stop())
            one.start()
            await one.serving()
            client.serving = None
            await load.until(lambda seen: len(good(seen)) >= 12)
    failed = [reply for reply in client.history if reply.status != 200]
    assert failed == []
    evidence = await check(here, [client])
    assert len(evidence.rollouts) == len(client.history)
    assert max(drains) <= 30 * SLACK
    rounds = {"rounds": ROUNDS, "requests": len(client.history)}
    report_row("F2", **rounds, failed=len(failed), drain_s_max=round(max(drains), 2))


@pytest.mark.long
async def test_f2_a_balancer_that_never_retries_fails_no_request_either(here: Site) -> None:
    """It asks each gateway for its readiness every POLL_S, and hears of nothing else. The gateways are lame ducks for
    longer than that."""
    here.upstream.delay_s = 0.05
    here.settings |= PATIENT | {"BATON_LAME_DUCK_S": "2"}
    for _ in range(2):
        await here.gateway()
    await here.new_key()
    client = Client(here)

    async def balance() -> None:
        while True:
            client.serving = [one for one in list(here.gateways) if one.alive and await here.is_ready(one)]
            await asyncio.sleep(POLL_S)

    client.serving = list(here.gateways)
    balancer = asyncio.create_task(balance())
    try:
        async with client.load(at_once=6) as load:
            for turn in range(ROUNDS):
                one = here.gateways[turn % 2]
                await one.stop()
                one.start()
                await one.serving()
                await load.until(lambda seen: len(good(seen)) >= 12 and len(client.serving or ()) == 2)
    finally:
        balancer.cancel()
        await asyncio.gather(balancer, return_exceptions=True)
    failed = [reply for reply in client.history if reply.status != 200]
    assert failed == []
    evidence = await check(here, [client])
    assert len(evidence.rollouts) == len(client.history)
    report_row(
        "F2",
        behind="a balancer",
        rounds=ROUNDS,
        requests=len(client.history),
        failed=len(failed),
        poll_s=POLL_S,
        lame_duck_s=2,
    )
