"""L10: two thousand clients of one key that send a head and nine bytes each, beside the traffic of another key."""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.faults.load import drive, gateways, limited_key, pool, report, settle, worker
from tests.faults.site import Gateway, Site
from tests.sizes import sized

pytestmark = pytest.mark.long

SENDERS = sized(ci=200, long=2000)
FILES_SPARE = 500
SECONDS = sized(ci=3.0, long=30.0)
IN_FLIGHT = 8
PROBES_PAUSE_S = 0.2
PROBES = ("/livez", "/readyz", "/metrics")


class Senders:
    """Connections that send slowly; one that is closed is opened again, so that there are always as many."""

    def __init__(self, one: Gateway, key: str) -> None:
        self.statuses: Counter[str] = Counter()
        self._port = urlsplit(one.facts["base_url"]).port
        self._head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
            "content-length: 1000\r\n\r\n" + '{"model":'
        ).encode()

    async def send(self) -> None:
        """One sender, until it is cancelled."""
        while True:
            writer = None
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.write(self._head)
                line = await reader.readline()
                self.statuses[line.split()[1].decode() if line else "closed"] += 1
                await asyncio.sleep(1)
            except OSError as error:
                self.statuses[type(error).__name__] += 1
                await asyncio.sleep(1)
            finally:
                if writer is not None:
                    writer.transport.abort()


@asynccontextmanager
async def sending(senders: Senders) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(senders.send()) for _ in range(SENDERS)]
    await asyncio.sleep(1)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _probe(here: Site, one: Gateway, took_ms: list[float], wrong: Counter[str]) -> None:
    base = one.facts["base_url"].removesuffix("/v1")
    while True:
        for path in PROBES:
            began_s = time.monotonic()
            try:
                async with here.http.get(f"{base}{path}") as reply:
                    if reply.status != 200:
                        wrong[f"{path}: {reply.status}"] += 1
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                wrong[f"{path}: {error!r}"] += 1
            took_ms.append((time.monotonic() - began_s) * 1000)
        await asyncio.sleep(PROBES_PAUSE_S)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("limits", [{"rpm": 3, "concurrency": 1}, {}], ids=["limited", "unlimited"])
async def test_l10_slow_senders_of_one_key_shut_nobody_out(here: Site, limits: dict[str, int]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < SENDERS + FILES_SPARE:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, SENDERS + FILES_SPARE), hard))
    async with worker() as upstream:
        here.worker_url = upstream.url
        pool(here, {"name": "alpha", "model": "m"})
        [one] = await gateways(here, 1)
        slow, _ = await here.new_key(**limits)
        await limited_key(here)
        alone = await drive(here, upstream, in_flight=IN_FLIGHT, seconds=SECONDS)
        took_ms, wrong, senders = list[float](), Counter[str](), Senders(one, slow)
        async with sending(senders):
            probing = asyncio.create_task(_probe(here, one, took_ms, wrong))
            beside = await drive(here, upstream, in_flight=IN_FLIGHT, seconds=SECONDS)
            probing.cancel()
        await settle(here, upstream)
    assert (alone.errors(), beside.errors()) == (0, 0), (beside.statuses, beside.examples)
    assert wrong == {}
    assert "200" not in senders.statuses
    numbers = {"senders": SENDERS, "alone_rps": round(alone.rps), "beside_rps": round(beside.rps)}
    numbers |= {"probes": len(took_ms), "refused": senders.statuses["429"]}
    report("L10" if limits else "L10 unlimited", beside, **numbers, probes_ms_max=round(max(took_ms)))
