"""F11, the parts that need a process: a full disk refuses and recovers, a failed fsync ends the gateway."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest

from gateway.wiring.shipping import EXIT_JOURNAL_BROKEN
from tests.faults.checker import check
from tests.faults.client import Client
from tests.faults.site import ROOT, Site
from tests.sizes import report_row

FORK = "import json, sys; from tests.faults.zygote import child; child(json.loads(sys.argv[1]))"


async def test_f11_a_full_disk_refuses_before_anything_is_spent_and_recovers(here: Site) -> None:
    switch = here.place / "switch"
    one = await here.gateway(start=False, FAULT_SWITCH=str(switch))
    one.start(seam="disk full")
    await one.serving()
    await here.new_key()
    client = Client(here)
    assert (await client.ask()).whole
    switch.touch()
    calls = len(here.upstream.bills)
    refused = await client.many(4, at_once=2)
    assert client.statuses(refused) == {"503 spool_full": 4}
    assert len(here.upstream.bills) == calls
    switch.unlink()
    assert (await client.ask()).whole
    await check(here, [client])
    report_row("F11 disk full", refused=len(refused), calls_meanwhile=0)


@pytest.mark.long
async def test_f11_a_failed_fsync_ends_the_gateway_and_what_was_acknowledged_is_there(here: Site) -> None:
    switch = here.place / "switch"
    one = await here.gateway(start=False, FAULT_SWITCH=str(switch))
    order: dict[str, Any] = {"argv": [], "env": one.env, "log": str(one.log), "kill": None, "seam": "fsync fails"}
    order["argv"] = ["serve", "--data-dir", str(one.directory), "--port", "0", "--admin-port", "0"]
    process = subprocess.Popen([sys.executable, "-c", FORK, json.dumps(order)], cwd=ROOT)  # noqa: ASYNC220
    try:
        while not one.facts_file.exists():
            assert process.poll() is None, one.log.read_text()
            await asyncio.sleep(0.05)
        await here.new_key()
        client = Client(here)
        replies = [await client.ask(gateway=one) for _ in range(3)]
        assert all(reply.whole for reply in replies)
        switch.touch()
        last = await client.ask(gateway=one)
        assert not last.whole
        status = await asyncio.to_thread(process.wait, 20)
    finally:
        process.kill()
        process.wait()
    assert status == EXIT_JOURNAL_BROKEN
    switch.unlink()
    one.start()
    await one.serving()
    await check(here, [client])
    report_row("F11 fsync", exit_status=status, acknowledged=len(replies), lost=0)
