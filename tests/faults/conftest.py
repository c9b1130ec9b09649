"""Fixtures of the fault tests."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.adapters.postgres.migrate import upgrade
from tests.faults.breaks_postgres import CONNECTIONS_MAX, World
from tests.faults.proxy import FaultProxy
from tests.faults.site import Site, Zygote, site, socket_path
from tests.postgres_server import PostgresServer, start, stop

Make = Callable[..., Any]


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """The process that forks the gateways of this run."""
    one = Zygote(tmp_path_factory.mktemp("zygote") / "zygote.log")
    yield one
    one.close()


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short path."""
    with tempfile.TemporaryDirectory(prefix="baton-faults-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture
async def here(place: Path, zygote: Zygote, database_url: str) -> AsyncIterator[Site]:
    """A site without gateways yet."""
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(site(place, zygote, database_url))


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    server = start()
    try:
        server.admin(f"ALTER SYSTEM SET max_connections = {CONNECTIONS_MAX}")
        server.admin("ALTER SYSTEM SET synchronous_commit = on")  # what it confirms must survive its crash
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
