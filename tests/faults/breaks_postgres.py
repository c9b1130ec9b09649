"""The ways in which PostgreSQL breaks: a server of the test's own behind a proxy, and its faults."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from tests.faults.proxy import FaultProxy, Toxics
from tests.faults.site import Site
from tests.postgres_server import PostgresServer
from tests.sizes import SIZE, SLACK

CONNECTIONS_MAX = 60  # more than three gateways use
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
        pids = [postmaster]
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                pids += [int(path.parent.name)] if int(fields[1]) == postmaster else []
        return pids

    def signal_all(self, number: int) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


Heal = Callable[[], None]


async def stopped_at_once(world: World) -> Heal:
    world.server.handle.stop() if SIZE == "long" else os.kill(world.server.handle.get_pid(), signal.SIGQUIT)
    return lambda: world.server.handle.ensure_postgres_running()


async def _frozen(world: World) -> Heal:
    world.signal_all(signal.SIGSTOP)
    return lambda: world.signal_all(signal.SIGCONT)


async def _too_many_clients(world: World) -> Heal:
    """Use up all connections, and end those of the gateway."""
    await asyncio.to_thread(_take_all, world)

    def back() -> None:
        while world.taken:
            world.taken.pop().close()

    return back


def _take_all(world: World) -> None:
    end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'baton'"
    first = psycopg.connect(world.url, autocommit=True)
    world.taken.append(first)
    for _ in range(3):
        first.execute(end)
        with suppress(psycopg.OperationalError):
            while len(world.taken) < CONNECTIONS_MAX:
                world.taken.append(psycopg.connect(world.url))


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
    "stopped at once": stopped_at_once,
    "frozen": _frozen,
    "too many clients": _too_many_clients,
    "2 s a query": _slow,
    "disk full": _disk_full,
    "connection lost in COMMIT": _killed_in_commit,
}


@asynccontextmanager
async def healed(heal: Heal) -> AsyncIterator[None]:
    """Break it for the time of the block; heal it whatever happens."""
    try:
        yield
    finally:
        await asyncio.to_thread(heal)


async def shipped(here: Site, limit_s: float = 30.0 * SLACK) -> float:
    """Wait until PostgreSQL has all that is in the journals now; return how many seconds it took."""
    began_s = time.monotonic()
    wanted = {one.pid: await here.metric(one, "baton_log_records_total") for one in here.gateways}
    async with asyncio.timeout(limit_s):
        for one in here.gateways:
            while await here.metric(one, "baton_log_records_stored_total") < wanted[one.pid]:
                await asyncio.sleep(0.05)
    return time.monotonic() - began_s


async def capture_rate(here: Site) -> float:
    """Return the lowest capture rate of all gateways, once no request is in flight."""
    async with asyncio.timeout(20 * SLACK):
        while (rate := min([await here.metric(one, "baton_capture_rate") for one in here.gateways])) < 1.0:
            await asyncio.sleep(0.05)
    return rate
