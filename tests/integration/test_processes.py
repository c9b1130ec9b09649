"""`baton serve --processes 2`, with real processes: one port, limits over both, and nothing lost by a kill."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from gateway.adapters.host.siblings import Siblings
from gateway.adapters.journal.spool import Spool
from gateway.core.log.events import Event
from policy.recipes.stack import Gateway, gateway, temporary_directory
from tests.upstreams.server import Reply, Request, Server, json_reply
from tests.waiting import PATIENT, until, wait_until

POOL = """\
workers:
  - {{name: wide, handle: atlas, kind: openai, model: m, url: "{url}/v1", output_tokens_max: 16,
     price: {{input_usd_per_mtok: 1, output_usd_per_mtok: 2}}}}
  - {{name: narrow, handle: birch, kind: openai, model: m, url: "{url}/v1", output_tokens_max: 16, concurrency_max: 1,
     price: {{input_usd_per_mtok: 1, output_usd_per_mtok: 2}}}}
pools: {{main: [wide, narrow]}}
default: main
"""
IN_FLIGHT_MAX = 6
SETTINGS = {
    "BATON_PROCESSES": "2",
    "BATON_JOBS_WORKER": "false",
    **PATIENT,
    "BATON_IN_FLIGHT_MAX": str(IN_FLIGHT_MAX),
}
GATED = "answer when the gate opens"


@dataclass(slots=True)
class Upstream:
    """A worker that counts the calls it has at a time, and answers questions with GATED once its gate is open. It runs
    in a thread of its own."""

    url: str = ""
    now: int = 0
    most: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    ready: threading.Event = field(default_factory=threading.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop | None = None

    async def answer(self, request: Request) -> Reply:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if GATED.encode() in request.content:
                await self.gate.wait()
        finally:
            self.now -= 1
        choice = {"index": 0, "message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
        return json_reply({"id": "c", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage})

    @contextlib.contextmanager
    def gated(self) -> Iterator[None]:
        """Open the gate at the end of the block."""
        assert self.loop is not None
        self.gate.clear()
        self.most = 0
        try:
            yield
        finally:
            self.loop.call_soon_threadsafe(self.gate.set)

    async def serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        async with Server(self.answer, 0) as server:
            self.url = f"http://127.0.0.1:{server.port}"
            self.ready.set()
            await self.stop.wait()


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    one = Upstream()
    thread = threading.Thread(target=lambda: asyncio.run(one.serve()), daemon=True)
    thread.start()
    assert one.ready.wait(10)
    yield one
    assert one.loop is not None
    one.loop.call_soon_threadsafe(one.stop.set)
    thread.join(10)


@dataclass(slots=True)
class Place:
    """The gateway with its directory."""

    gateway: Gateway
    directory: Path

    @property
    def siblings(self) -> Siblings:
        return Siblings(self.directory / "data" / "processes", 2)

    @property
    def log(self) -> str:
        return (self.directory / "gateway.log").read_text()

    def pids(self) -> dict[int, int]:
        """The process ids, by index; those that hold their data directory's lock."""
        places = {index: self.siblings.place(index) / "lock" for index in (1, 2)}
        return {index: int(path.read_text()) for index, path in places.items()}


@pytest.fixture(scope="module")
def place(upstream: Upstream) -> Iterator[Place]:
    with temporary_directory() as directory:
        pool = directory / "pool.yaml"
        pool.write_text(POOL.format(url=upstream.url))
        left = directory / "data" / "spool" / "process-7"
        left.mkdir(parents=True)
        asyncio.run(_leave_a_journal(left))
        with gateway(directory, conductor="none", pool=pool, settings=SETTINGS) as served:
            yield Place(served, directory)


async def _leave_a_journal(directory: Path) -> None:
    """The journal of a seventh process, of an earlier start with more of them."""
    spool = await Spool.open(directory)
    hold = {"hold_id": "h7", "rollout_id": None, "amount_nano": 1, "scopes": [["org:left", None]]}
    await spool.append(Event.new("hold", time.time_ns() // 1000, hold))
    await spool.close()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(force_close=True)  # so that the kernel chooses a process for each request
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


async def ask(
    client: aiohttp.ClientSession, place: Place, worker: str = "wide", text: str = "2 + 2?"
) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {place.gateway.data_key}"}
    body = {"model": worker, "messages": [{"role": "user", "content": text}]}
    async with client.post(f"{place.gateway.base_url}/chat/completions", json=body, headers=headers) as reply:
        return reply.status, reply.headers.get("x-baton-rollout-id") if reply.status == 200 else await reply.json()


async def served(client: aiohttp.ClientSession, place: Place) -> Counter[str]:
    """Requests by process, as the admin port counts them."""
    async with client.get(f"{place.gateway.admin_url}/metrics") as reply:
        text = await reply.text()
    lines = re.findall(r'^baton_requests_total\{process="(\d)".*\} ([0-9.]+)$', text, re.MULTILINE)
    return Counter({index: int(float(value)) for index, value in lines})


async def all_ready(place: Place) -> None:
    """Wait until all processes can serve."""

    async def ready() -> bool:
        return None not in (await place.siblings.ask("/readyz", 2.0)).values()

    await until(ready)


async def test_both_processes_serve_one_port(place: Place, client: aiohttp.ClientSession) -> None:
    before = await served(client, place)
    for _ in range(40):
        status, _id = await ask(client, place)
        assert status == 200
    gained = await served(client, place) - before
    assert gained.keys() == {"1", "2"}
    assert gained.total() == 40


async def test_a_request_of_one_process_is_read_from_any(place: Place, client: aiohttp.ClientSession) -> None:
    headers = {"authorization": f"Bearer {place.gateway.data_key}"}
    for _ in range(12):
        _, rollout_id = await ask(client, place)
        judged = {"rollout_id": rollout_id, "value": True, "source": "unit-test"}
        async with client.post(f"{place.gateway.base_url}/outcomes", json=judged, headers=headers) as reply:
            assert reply.status == 201, await reply.text()


async def test_requests_in_flight_are_bounded_over_both(
    place: Place, client: aiohttp.ClientSession, upstream: Upstream
) -> None:
    with upstream.gated():
        asking = [asyncio.create_task(ask(client, place, text=f"{GATED} {n}")) for n in range(30)]
        await until(lambda: upstream.now + sum(one.done() for one in asking) == 30)
    statuses = Counter(status for status, _ in await asyncio.gather(*asking))
    assert upstream.most <= IN_FLIGHT_MAX
    assert statuses[200] + statuses[503] == 30
    assert 1 <= statuses[200] <= IN_FLIGHT_MAX
    assert (await ask(client, place))[0] == 200


async def test_calls_of_a_worker_are_bounded_over_both(
    place: Place, client: aiohttp.ClientSession, upstream: Upstream
) -> None:
    with upstream.gated():
        asking = [asyncio.create_task(ask(client, place, "narrow", f"{GATED} {n}")) for n in range(6)]
        await until(lambda: upstream.now == 1)
    assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 6
    assert upstream.most == 1


async def test_a_journal_without_a_process_is_shipped(place: Place) -> None:
    await until(lambda: "process-7 is shipped" in place.log)


@pytest.mark.long
async def test_a_killed_process_loses_nothing_and_comes_back(place: Place, client: aiohttp.ClientSession) -> None:
    await all_ready(place)
    pids, ids, ended = place.pids(), list[str](), asyncio.Event()

    async def load() -> None:
        while not ended.is_set():
            with contextlib.suppress(aiohttp.ClientError):  # the connections of the killed process
                status, rollout_id = await ask(client, place)
                if status == 200:
                    ids.append(rollout_id)

    async def kill() -> None:
        await until(lambda: len(ids) >= 10)
        os.kill(pids[1], signal.SIGKILL)
        before = len(ids)
        await until(lambda: len(ids) >= before + 10)
        ended.set()

    await asyncio.gather(load(), load(), load(), kill())
    await all_ready(place)
    assert place.pids()[1] != pids[1]
    assert place.pids()[2] == pids[2]
    headers = {"authorization": f"Bearer {place.gateway.data_key}"}

    async def stored(rollout_id: str) -> bool:
        async with client.get(f"{place.gateway.base_url}/rollouts/{rollout_id}", headers=headers) as reply:
            return reply.status == 200

    for rollout_id in ids:  # those of the killed process are shipped by its successor
        await until(partial(stored, rollout_id))


async def test_a_changed_pool_reaches_both(place: Place, client: aiohttp.ClientSession, upstream: Upstream) -> None:
    await all_ready(place)
    pool = place.directory / "pool.yaml"
    text = POOL.format(url=upstream.url)
    pool.write_text(text.replace("name: wide", "name: broad").replace("[wide,", "[broad,"))
    headers = {"authorization": f"Bearer {place.gateway.admin_key}"}
    try:
        async with client.post(f"{place.gateway.admin_url}/admin/pools/reload", headers=headers, json={}) as reply:
            assert reply.status == 200, await reply.text()

        async def known_to_all() -> bool:
            return [(await ask(client, place, "broad"))[0] for _ in range(12)] == [200] * 12

        await until(known_to_all)
    finally:
        pool.write_text(text)
        async with client.post(f"{place.gateway.admin_url}/admin/pools/reload", headers=headers, json={}) as reply:
            assert reply.status == 200

        async def known_again() -> bool:
            return [(await ask(client, place))[0] for _ in range(12)] == [200] * 12

        await until(known_again)


async def test_readiness_needs_a_process(place: Place, client: aiohttp.ClientSession) -> None:
    await all_ready(place)
    for pid in place.pids().values():
        os.kill(pid, signal.SIGSTOP)
    try:
        async with client.get(f"{place.gateway.admin_url}/readyz") as reply:
            body = await reply.json()
            assert (reply.status, body["parts"]["processes"]) == (503, "away")
    finally:
        for pid in place.pids().values():
            os.kill(pid, signal.SIGCONT)
    await all_ready(place)


async def refuses(gateway: Gateway) -> bool:
    """Whether nothing listens on the public port any more."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(gateway.base_url).port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


@pytest.mark.long
def test_a_clean_end_answers_what_is_open(upstream: Upstream) -> None:
    with temporary_directory() as directory:
        pool = directory / "pool.yaml"
        pool.write_text(POOL.format(url=upstream.url))
        with gateway(directory, conductor="none", pool=pool, settings=SETTINGS) as one:
            place = Place(one, directory)
            pids = place.pids()

            async def stop_during_a_request() -> int:
                async with aiohttp.ClientSession() as client:
                    with upstream.gated():
                        asking = asyncio.create_task(ask(client, place, text=GATED))
                        await until(lambda: upstream.now == 1)
                        os.kill(one.pid, signal.SIGTERM)
                        await until(lambda: refuses(one))
                    return (await asking)[0]

            assert asyncio.run(stop_during_a_request()) == 200
            wait_until(lambda: "baton: stopped" in place.log)
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
