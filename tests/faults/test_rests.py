"""F16: workers that hang, fail, or are not there, beside a sound one: who is asked, and what it costs the requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.faults.bad_workers import status
from tests.faults.client import Client, Reply
from tests.faults.site import Site
from tests.faults.upstream import Behaviour, Bill, Upstream, good
from tests.sizes import report_row, sized
from tests.upstreams.server import Reply as Answer
from tests.waiting import BOUND_S

pytestmark = pytest.mark.long

REQUESTS, AT_ONCE = sized(ci=600, long=1_000), 8
HUNG_S = sized(ci=5.0, long=60.0)
REST_S = 2.0
ASKED_MAX = 20  # by two gateways: before its rest, in twos and thrice, and to try it
SOUND_S = 0.05  # that the sound worker takes
POOL = """
workers:
  - {{name: sound, handle: atlas, kind: openai, model: sound, url: "{url}", output_tokens_max: 16,
     price: {{input_usd_per_mtok: 1, output_usd_per_mtok: 2}}}}
  - {{name: bad, handle: birch, kind: openai, model: bad, url: "{url}", output_tokens_max: 16, timeout_s: {timeout_s},
     price: {{input_usd_per_mtok: 0.1, output_usd_per_mtok: 0.2}}}}
pools: {{main: [sound, bad], alone: [sound]}}
default: main
"""
SETTINGS: dict[str, Any] = {
    "BATON_CONDUCTOR": "none",
    "BATON_DEFAULT_POLICY": "rule",
    "BATON_WORKER_REST_S": str(REST_S),
}
DEAD = {"500": status(500), "402": status(402), "404": status(404), "429": status(429, retry_after="1")}


async def sound(upstream: Upstream, bill: Bill) -> Answer:
    await asyncio.sleep(SOUND_S)
    return await good(upstream, bill)


async def silent(upstream: Upstream, bill: Bill) -> Answer:
    await asyncio.sleep(3_600)
    return await good(upstream, bill)


def bad_one(behave: Behaviour) -> Behaviour:
    """Behaves so as `bad`, and well as `sound`."""
    return lambda upstream, bill: (behave if bill.body["model"] == "bad" else sound)(upstream, bill)


def asked(here: Site) -> int:
    return sum(bill.body["model"] == "bad" for bill in here.upstream.bills)


def p99_s(replies: Sequence[Reply]) -> float:
    return sorted(reply.took_s for reply in replies)[-(-len(replies) * 99 // 100) - 1]


async def two_gateways(here: Site, timeout_s: float) -> Client:
    """Two gateways on one Redis, and a client that asks them in turns."""
    (here.place / "pool.yaml").write_text(POOL.format(url=here.upstream.base, timeout_s=timeout_s))
    for _ in range(2):
        await here.gateway(**SETTINGS)
    await here.new_key(pools=["main", "alone"])
    return Client(here, {"model": "baton/rule", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8})


@pytest.mark.timeout(600)
async def test_f16_a_hung_worker_costs_a_few_requests_and_not_each(here: Site) -> None:
    client = await two_gateways(here, HUNG_S)
    here.upstream.behave = bad_one(silent)
    alone = await client.many(REQUESTS, AT_ONCE, headers={"x-baton-pool": "alone"})
    replies = await client.many(REQUESTS, AT_ONCE)
    assert all(reply.whole for reply in [*alone, *replies]), client.statuses()
    ratio = p99_s(replies) / p99_s(alone)
    slow = sum(reply.took_s > HUNG_S for reply in replies)
    assert slow <= REQUESTS // 100
    times = {"p99_alone_s": round(p99_s(alone), 3), "p99_s": round(p99_s(replies), 3), "ratio": round(ratio, 2)}
    report_row("F16", requests=REQUESTS, hung_s=HUNG_S, asked_hung=asked(here), slow=slow, **times)
    assert ratio <= 2.0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", DEAD)
async def test_f16_a_dead_worker_is_asked_a_handful_of_times_and_comes_back(here: Site, way: str) -> None:
    client = await two_gateways(here, 5.0)
    here.upstream.behave = bad_one(DEAD[way])
    replies = await client.many(REQUESTS, AT_ONCE)
    assert all(reply.whole for reply in replies), client.statuses()
    while_dead = asked(here)
    here.upstream.behave = bad_one(good)
    healthy_s = time.monotonic()
    async with asyncio.timeout(BOUND_S):
        while asked(here) == while_dead:
            await client.many(AT_ONCE, AT_ONCE)
    back_s = round(time.monotonic() - healthy_s, 1)
    report_row(f"F16 {way}", requests=REQUESTS, asked=while_dead, back_s=back_s)
    assert 1 <= while_dead <= ASKED_MAX
