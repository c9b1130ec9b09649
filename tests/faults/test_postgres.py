"""F3: PostgreSQL breaks in six ways under load. No request notices while the journal has room, and nothing is lost; the
backlog goes once PostgreSQL is back (a short L9)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest

from gateway.adapters.migrate import upgrade
from tests.faults.checker import check
from tests.faults.client import Client, good
from tests.faults.proxy import FaultProxy, Toxics
from tests.faults.site import Site, Zygote, site, socket_path, through
from tests.faults.sizes import SIZE, held
from tests.servers_pg import PostgresServer, start, stop

AWAY_S = {"ci": 1.5, "long": 45.0}[SIZE]
CONNECTIONS_MAX = 30
DISK_FULL = """
CREATE FUNCTION no_space() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; END $$;
CREATE TRIGGER no_space BEFORE INSERT ON ledger EXECUTE FUNCTION no_space()
"""


@dataclass
class World:
    """A PostgreSQL that this test may break, behind a proxy."""

    server: PostgresServer
    url: str
    proxy: FaultProxy
    taken: list[psycopg.Connection] = field(default_factory=list)

    def run(self, statement: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(statement)

    def processes(self) -> list[int]:
        """The postmaster and all of its children."""
        postmaster = int(self.server.handle.get_pid())
        found = [postmaster]
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                found += [int(path.parent.name)] if int(fields[1]) == postmaster else []
        return found

    def signal_all(self, number: int) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    server = start()
    try:
        server.admin(f"ALTER SYSTEM SET max_connections = {CONNECTIONS_MAX}")
        server.admin("ALTER SYSTEM SET synchronous_commit = on")  # here what it has confirmed must outlive it
        server.handle.stop()
        server.handle.ensure_postgres_running()
        yield server
    finally:
        stop(server)


@pytest.fixture
async def world(own_server: PostgresServer) -> AsyncIterator[World]:
    url = own_server.create()
    await asyncio.to_thread(upgrade, url)
    async with FaultProxy(socket_path(url)) as proxy:
        yield World(own_server, url, proxy)


Heal = Callable[[], None]


async def _stopped_at_once(world: World) -> Heal:
    world.server.handle.stop() if SIZE == "long" else os.kill(world.server.handle.get_pid(), signal.SIGQUIT)
    return lambda: world.server.handle.ensure_postgres_running()


async def _frozen(world: World) -> Heal:
    world.signal_all(signal.SIGSTOP)
    return lambda: world.signal_all(signal.SIGCONT)


async def _too_many_clients(world: World) -> Heal:
    """Every connection is taken; the gateway's own are ended."""
    end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'baton'"
    first = psycopg.connect(world.url, autocommit=True)
    world.taken.append(first)
    for _ in range(3):
        first.execute(end)
        with suppress(psycopg.OperationalError):
            while len(world.taken) < CONNECTIONS_MAX:
                world.taken.append(psycopg.connect(world.url))

    def back() -> None:
        while world.taken:
            world.taken.pop().close()

    return back


async def _slow(world: World) -> Heal:
    world.proxy.down = Toxics(latency_s=2.0)
    return world.proxy.heal


async def _disk_full(world: World) -> Heal:
    await asyncio.to_thread(world.run, DISK_FULL)  # it may have to wait for a transaction that the proxy carries
    return lambda: world.run("DROP FUNCTION no_space CASCADE")


async def _killed_in_commit(world: World) -> Heal:
    world.proxy.up = Toxics(reset_on=b"COMMIT")
    return world.proxy.heal


FAULTS: dict[str, Callable[[World], Awaitable[Heal]]] = {
    "stopped at once": _stopped_at_once,
    "frozen": _frozen,
    "too many clients": _too_many_clients,
    "2 s a query": _slow,
    "disk full": _disk_full,
    "connection lost in COMMIT": _killed_in_commit,
}


@asynccontextmanager
async def healed(heal: Heal) -> AsyncIterator[None]:
    """The fault ends with the block, whatever happens in it."""
    try:
        yield
    finally:
        await asyncio.to_thread(heal)


@pytest.mark.timeout(900)
async def test_f3_postgres_breaks_in_six_ways_and_no_request_notices(world: World, place: Path, zygote: Zygote) -> None:
    async with site(place, zygote, world.url) as here:
        await here.gateway(DATABASE_URL=through(world.url, world.proxy.port), BATON_DB_CONNECT_S="2")
        await here.new_key()
        client, shipped_s = Client(here), []
        async with client.load(at_once=3, pause_s=0.05) as load:
            for name, fault in FAULTS.items():
                sys.stdout.write(f"F3: {name}\n")
                await load.until(lambda seen: len(good(seen)) >= 4)
                async with healed(await fault(world)):
                    await asyncio.sleep(AWAY_S)
                    await load.until(lambda seen: len(seen) >= 6)
                shipped_s.append(await _shipped(here))
        statuses = client.statuses()
        assert set(statuses) == {"200"}, statuses
        found = await check(here, [client])
        assert len(found.rollouts) == len(client.history)
        rate = await _capture_rate(here)
        held(
            "F3",
            faults=len(FAULTS),
            requests=len(client.history),
            failed=len(client.history) - statuses["200"],
            stored=len(found.rollouts),
            backlog_gone_s_max=round(max(shipped_s), 2),
            capture_rate=rate,
        )


async def _shipped(here: Site, limit_s: float = 30.0) -> float:
    """Seconds until what was in the journal at the call is in PostgreSQL."""
    began_s, one = time.monotonic(), here.gateways[0]
    wanted = await here.metric(one, "baton_log_records_total")
    async with asyncio.timeout(limit_s):
        while await here.metric(one, "baton_log_records_stored_total") < wanted:
            await asyncio.sleep(0.05)
    return time.monotonic() - began_s


async def _capture_rate(here: Site) -> float:
    async with asyncio.timeout(20):
        while (rate := await here.metric(here.gateways[0], "baton_capture_rate")) < 1.0:
            await asyncio.sleep(0.05)
    return rate
