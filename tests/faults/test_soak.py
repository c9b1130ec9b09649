"""L8: a soak. Half of what the installation can bear, and every twenty seconds something drawn from the whole kit
breaks; at the end every invariant holds, and the gateway that lived through it all has grown neither in memory nor in
files."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.faults.breaks_postgres import World
from tests.faults.checker import READY_S, check
from tests.faults.client import QUESTION, Client
from tests.faults.pace import Paced
from tests.faults.proxy import FaultProxy
from tests.faults.site import FLAT_NANO, Site, Zygote, site, through
from tests.faults.soak import Samples, SoakSite, broken
from tests.faults.witness import balances
from tests.sizes import RESULTS, report_row, sized

pytestmark = pytest.mark.long

SOAK_S = float(os.environ.get("FAULTS_SOAK_S", sized(ci=8, long=85 * 60)))
SEED = int(os.environ.get("FAULTS_SOAK_SEED", "1"))
EVERY_S = sized(ci=4.0, long=20.0)
BROKEN_S = sized(ci=(0.5, 1.0), long=(2.0, 8.0))
CAPACITY_S, CAPACITY_AT_ONCE = sized(ci=0.5, long=10.0), 32
LOAD_SHARE, PER_S_MAX = 0.5, float(os.environ.get("FAULTS_SOAK_PER_S", sized(ci=10, long=100)))
MIB_PER_MIN_MAX, FILES_GROWN_MAX, JUDGED_FROM_S = 1.0, 16, 20 * 60  # before that memory is still warming up
HOT_CALLS, HOT_PER_S = 200, 1.0
FLAT = {**QUESTION, "model": "flat"}
KINDS: tuple[dict[str, Any], ...] = (QUESTION, QUESTION, {**QUESTION, "stream": True}, {**QUESTION, "model": "baton"})
PROGRESS = RESULTS.with_name("soak.log")


@pytest.fixture
async def soaked(world: World, place: Path, zygote: Zygote) -> AsyncIterator[SoakSite]:
    async with AsyncExitStack() as stack:
        here: Site = await stack.enter_async_context(site(place, zygote, world.url))
        ways = [("127.0.0.1", here.redis.port)] * 2 + [("127.0.0.1", here.upstream.port)]
        redis, alone, worker = [await stack.enter_async_context(FaultProxy(to)) for to in ways]
        here.worker_url, here.worker_timeout_s = f"http://127.0.0.1:{worker.port}/v1", 1.0
        client, switch = Client(here, slim=True), place / "switch"
        here.settings |= {"DATABASE_URL": through(world.url, world.proxy.port), "BATON_DB_CONNECT_S": "2"}
        here.settings["FAULT_SWITCH"] = str(switch)
        for way in (redis, redis, alone):
            one = await here.gateway(start=False, REDIS_URL=f"redis://127.0.0.1:{way.port}")
            one.start(seam="disk full")
            await one.serving()
        yield SoakSite(here, world, client, redis, alone, worker, switch, random.Random(SEED))


@pytest.mark.timeout(2 * SOAK_S + 600)
async def test_l8_a_soak_under_faults_drawn_from_the_whole_kit(soaked: SoakSite) -> None:
    here, client, kinds = soaked.here, soaked.client, random.Random(SEED)
    hot_key, hot_id = await here.new_key(HOT_CALLS * FLAT_NANO)
    await here.new_key()
    hot, broke, back_s = Client(here, FLAT, slim=True), list[str](), list[float]()
    async with broken(soaked.ways()["clients: leave"]):
        pass  # what counts the tokens of cut streams is loaded once
    per_s = min(PER_S_MAX, LOAD_SHARE * await _capacity(client))
    taken, began_s = Samples(here.gateways[0]), time.monotonic()
    ask_hot = lambda: hot.ask(headers={"authorization": f"Bearer {hot_key}"})  # noqa: E731
    async with Paced(lambda: client.ask(**kinds.choice(KINDS)), per_s) as load, Paced(ask_hot, HOT_PER_S):
        while time.monotonic() - began_s < SOAK_S:
            turn_s, name, at = time.monotonic(), _drawn(soaked), len(client.history)
            async with broken(soaked.ways()[name]):
                await _until(turn_s + soaked.draw.uniform(*BROKEN_S))
            healed_s = time.monotonic()
            await here.ready(READY_S)
            await soaked.answers(READY_S)
            broke.append(name)
            back_s.append(time.monotonic() - healed_s)
            await _until(turn_s + EVERY_S)
            _, mib, files = taken.sample()
            seen = dict(client.statuses(client.history[at:]))
            _tell(f"{turn_s - began_s:6.0f} s {name}: back in {back_s[-1]:.1f} s, {mib:.0f} MiB, {files} files, {seen}")
    evidence = await check(here, [client, hot])
    posted, _ = await balances(here)
    assert evidence.posted(f"key:{hot_id}") == posted[f"key:{hot_id}"] <= HOT_CALLS * FLAT_NANO, "I1: the hot key"
    statuses = client.statuses()
    report_row(
        "L8",
        seconds=round(time.monotonic() - began_s),
        seed=SEED,
        faults=len(broke),
        kinds=len(set(broke)),
        per_s=round(per_s, 1),
        requests=len(client.history),
        good=statuses["200"],
        skipped=load.skipped,
        back_s_max=round(max(back_s), 1),
        hot_key_posted=evidence.posted(f"key:{hot_id}") // FLAT_NANO,
        rss_mib=round(taken.samples[-1][1]),
        rss_mib_per_min=round(taken.mib_per_min(), 2),
        files_grown=taken.files_grown(),
        violations=0,
    )
    assert SOAK_S < JUDGED_FROM_S or taken.mib_per_min() < MIB_PER_MIN_MAX
    assert taken.files_grown() <= FILES_GROWN_MAX


def _drawn(soaked: SoakSite) -> str:
    return soaked.draw.choice(list(soaked.ways()))


async def _capacity(client: Client) -> float:
    """Good replies a second when so many clients never pause."""
    first, began_s = len(client.history), time.monotonic()
    async with client.load(CAPACITY_AT_ONCE):
        await _until(began_s + CAPACITY_S)
    return sum(reply.whole for reply in client.history[first:]) / (time.monotonic() - began_s)


async def _until(at_s: float) -> None:
    await asyncio.sleep(max(0.0, at_s - time.monotonic()))


def _tell(line: str) -> None:
    """On standard output, and in a file that can be followed."""
    sys.stdout.write(f"L8 {line}\n")
    PROGRESS.parent.mkdir(exist_ok=True)
    with PROGRESS.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
