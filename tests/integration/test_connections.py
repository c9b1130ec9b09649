"""Two pools of PostgreSQL connections a process: what the background does keeps no request waiting."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import InternalError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres import database
from gateway.adapters.postgres.database import LOOKUPS_MAX, async_engine, lookup_engine, sync_engine, transaction
from gateway.adapters.postgres.reports.overview import REPORTS_MAX
from gateway.errors import Unavailable
from tests.redis_server import RedisServer
from tests.security.gateway import PROVIDER_KEY, Gateway, ask, running
from tests.waiting import BOUND_S, until, wait_until

REQUESTS_MAX, BACKGROUND_MAX = 2, 3
SHIPPER, CLAIM = 1, 1  # one connection each: docs/deploy.md names them with the look-ups as `six more`


@pytest.fixture
def gateway(
    tmp_path: Path, database_url: str, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Gateway]:
    monkeypatch.setenv("PROVIDER_KEY", PROVIDER_KEY)
    sizes = {"db_connections_max": REQUESTS_MAX, "db_background_connections_max": BACKGROUND_MAX}
    with running(Gateway(tmp_path, database_url, redis_server, **sizes)) as served:
        yield served


def connections(database_url: str) -> int:
    engine = sync_engine(database_url)
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND backend_type = 'client backend'"  # a vacuum may run
    )
    try:
        with engine.connect() as connection:
            return int(connection.scalar(text(query)) or 0)
    finally:
        engine.dispose()


def test_a_long_report_keeps_no_request_and_no_operator_waiting(gateway: Gateway) -> None:
    (_, secret), (_, admin) = gateway.key(), gateway.key("admin")
    engine = sync_engine(gateway.database_url)
    asked = threading.Barrier(REPORTS_MAX + 1)

    def report() -> int:
        with gateway.client(admin, admin=True) as http:
            asked.wait(BOUND_S)
            return http.get("/admin/overview?window_s=3600").status_code

    with ThreadPoolExecutor(REPORTS_MAX) as readers:
        with engine.begin() as connection:
            connection.execute(text("LOCK TABLE steps IN ACCESS EXCLUSIVE MODE"))
            reports = [readers.submit(report) for _ in range(REPORTS_MAX)]
            asked.wait(BOUND_S)
            _wait_for_locks(gateway.database_url, REPORTS_MAX)
            with gateway.client(secret) as http:
                assert http.post("/v1/chat/completions", json=ask()).status_code == 200
            with gateway.client(admin, admin=True) as http:
                assert http.get("/admin/keys").status_code == 200
                refused = http.get("/admin/overview?window_s=3600")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "reports_busy")
            assert [one.done() for one in reports] == [False] * REPORTS_MAX
        assert [one.result(BOUND_S) for one in reports] == [200] * REPORTS_MAX
    engine.dispose()


def _wait_for_locks(database_url: str, waiting: int) -> None:
    """Return once so many statements wait for a lock. Raises AssertionError if they never do."""
    engine = sync_engine(database_url)
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    until_s = time.monotonic() + BOUND_S
    try:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            while int(connection.scalar(text(query)) or 0) < waiting:
                assert time.monotonic() < until_s, "the reports do not read the log"
                time.sleep(0.02)
    finally:
        engine.dispose()


def test_a_process_has_no_more_connections_than_its_settings_and_six(gateway: Gateway) -> None:
    (_, secret), (_, admin) = gateway.key(), gateway.key("admin")
    paths = ["/admin/keys", "/admin/orgs", "/admin/audit", "/admin/pools", "/admin/jobs", "/admin/rollouts?limit=5"]

    def look(path: str) -> None:
        with gateway.client(admin, admin=True) as http:
            http.get(path)

    def chat(_: int) -> None:
        with gateway.client(secret) as http:
            assert http.post("/v1/chat/completions", json=ask()).status_code == 200

    with ThreadPoolExecutor(16) as clients:
        list(clients.map(look, paths * 4))
        list(clients.map(chat, range(16)))
    allowed = REQUESTS_MAX + BACKGROUND_MAX + LOOKUPS_MAX + SHIPPER + CLAIM
    # A statement that was cancelled ends its connection, which the server may count for a while beside the next one.
    wait_until(lambda: connections(gateway.database_url) <= allowed)


@pytest.mark.parametrize("make", [async_engine, lookup_engine])
async def test_a_connection_that_nobody_waits_for_any_longer_is_closed(
    database_url: str, make: Callable[[str], AsyncEngine]
) -> None:
    """psycopg leaves one whose `connect` was cancelled to the garbage collection, which a gateway rarely runs."""

    async def use(engine: AsyncEngine) -> None:
        async with engine.connect() as connection:
            await connection.execute(text("SELECT 1"))

    gc.disable()
    try:
        before = connections(database_url)
        for number in range(40):
            engine = make(database_url)
            using = asyncio.create_task(use(engine))
            await asyncio.sleep(number * 0.0003)
            using.cancel()
            await asyncio.wait([using])
            await engine.dispose()
        await until(lambda: asyncio.to_thread(lambda: connections(database_url) <= before))
    finally:
        gc.enable()


def test_a_transaction_whose_client_was_cut_off_gives_its_locks_back(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "IDLE_S", 0.2)
    first, again = (sync_engine(database_url, may_rest=False) for _ in range(2))
    new = text("INSERT INTO dead_letters (digest, record, error) VALUES ('one record', '', 'x')")
    try:
        with first.connect() as cut_off:
            cut_off.execute(new)  # and no commit comes
            with again.begin() as connection:  # as a shipper does that was started anew
                connection.execute(new)
            with pytest.raises(InternalError):
                cut_off.commit()
    finally:
        first.dispose()
        again.dispose()


async def test_a_process_that_was_stalled_in_a_transaction_is_told_so(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "IDLE_S", 0.05)
    engine = async_engine(database_url)

    async def stalled() -> None:
        async with transaction(engine) as connection:
            await connection.execute(text("SELECT 1"))
            time.sleep(0.5)  # noqa: ASYNC251 - the event loop stands still
            await connection.execute(text("SELECT 1"))

    try:
        with pytest.raises(Unavailable, match="IdleInTransactionSessionTimeout"):
            await stalled()
        async with transaction(engine) as connection:
            assert await connection.scalar(text("SELECT 1")) == 1
    finally:
        await engine.dispose()


def test_a_transaction_of_training_may_rest(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "IDLE_S", 0.05)
    engine = sync_engine(database_url)
    with engine.begin() as connection:
        assert connection.scalar(text("SHOW idle_in_transaction_session_timeout")) == "0"
    engine.dispose()
