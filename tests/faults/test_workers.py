"""F8: a worker in fourteen bad ways, through a whole gateway: memory stays bounded, holds end, what came is billed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.faults.bad_workers import WAYS
from tests.faults.checker import check
from tests.faults.client import Client
from tests.faults.proxy import FaultProxy
from tests.faults.site import Site
from tests.faults.upstream import good
from tests.sizes import report_row

pytestmark = pytest.mark.long

ANSWERED = {"no usage", "bills over the bound"}
CALLS = 6
RETRIES_TO_BEGIN_WITH, RETRIES_SHARE_MAX = 2, 0.2  # so that the first calls of a gateway may be tried again too
RSS_MIB_MAX = CALLS * 16 + 64  # each reply is read up to 16 MiB (BATON_WORKER_REPLY_BYTES_MAX)


@pytest.fixture
async def proxied(here: Site) -> AsyncIterator[tuple[Site, FaultProxy]]:
    async with FaultProxy(("127.0.0.1", here.upstream.port)) as proxy:
        here.worker_url = f"http://127.0.0.1:{proxy.port}/v1"
        here.worker_timeout_s = 1.0
        yield here, proxy


@pytest.mark.timeout(300)
async def test_f8_a_worker_in_fourteen_bad_ways(proxied: tuple[Site, FaultProxy]) -> None:
    here, proxy = proxied
    gateway = await here.gateway()
    await here.new_key()
    client = Client(here)
    await client.many(4, at_once=2)
    here.upstream.behave, _ = WAYS["no usage"]
    await client.ask()  # a vocabulary, to count what is not reported, is loaded once
    calls_before, before_mib, most_mib = len(here.upstream.bills), gateway.rss_mib(), 0.0
    for name, (behave, stream) in WAYS.items():
        here.upstream.behave, proxy.refuse = behave or good, behave is None
        proxy.cut()  # a connection that is kept alive would go on
        replies = await client.many(CALLS, at_once=CALLS, stream=stream)
        most_mib = max(most_mib, gateway.rss_mib())
        whole = [reply for reply in replies if reply.whole]
        assert len(whole) == (CALLS if name in ANSWERED else 0), (name, client.statuses(replies))
        assert all(reply.status for reply in replies), (name, client.statuses(replies))
    here.upstream.behave, proxy.refuse = None, False
    assert all(reply.whole for reply in await client.many(4, at_once=2))
    evidence = await check(here, [client], bounded=False)
    calls, asked = len(here.upstream.bills) - calls_before, len(client.history)
    retries = len(evidence.of_kind("dispatched")) - asked
    beyond_two = round((retries - RETRIES_TO_BEGIN_WITH) / asked, 3)
    assert beyond_two <= RETRIES_SHARE_MAX
    assert most_mib - before_mib <= RSS_MIB_MAX
    grown = round(most_mib - before_mib)
    spread = {"calls": calls, "asked": asked, "retries": retries, "retries_beyond_two_per_asked": beyond_two}
    report_row("F8", ways=len(WAYS), **spread, rss_grown_mib=grown)
