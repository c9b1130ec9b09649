"""Alerts out, on a real PostgreSQL and a real receiver over HTTP: each thing once, in order, and none is lost."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web
from sqlalchemy import insert, select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway import cli
from gateway.adapters.host.clock import SystemClock
from gateway.adapters.host.metrics import PrometheusMetrics
from gateway.adapters.journal.webhook import Webhook
from gateway.adapters.postgres.admin_tables import alerts, policy_events, policy_jobs, policy_versions
from gateway.adapters.postgres.operators.alerts import PostgresAlerts
from gateway.adapters.postgres.tables import ledger
from gateway.core.log.alerts import KINDS, Alert, secret_bytes, signed
from gateway.core.log.events import uuid7
from gateway.core.money.ledger import Balance
from gateway.core.pool.drift import Drift
from gateway.service.admin.alerts import AlertSender, AlertSources
from gateway.service.ports.admin import KeyRow, OrgRow
from tests.fakes.budgets import FakeBudgets
from tests.waiting import BOUND_S, until

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
KEY = secret_bytes(SECRET)
USD = 10**9
LEASE_S = 0.3
SEND_ONE = """
import asyncio, sys
from gateway.adapters.host.clock import SystemClock
from gateway.adapters.host.metrics import PrometheusMetrics
from gateway.adapters.journal.webhook import Webhook
from gateway.adapters.postgres.operators.alerts import PostgresAlerts
from gateway.adapters.postgres.database import async_engine
from gateway.core.log.alerts import secret_bytes
from gateway.service.admin.alerts import AlertSender

database_url, url, secret, lease_s = sys.argv[1:]

async def main():
    outbox, webhook = PostgresAlerts(async_engine(database_url)), Webhook(url, secret_bytes(secret))
    await AlertSender(outbox, webhook, SystemClock(), PrometheusMetrics()).send_next(float(lease_s))

asyncio.run(main())
"""


class Receiver:
    """Answers with the statuses of `plan`, then with 204. `hang`: it takes a message, and never answers."""

    def __init__(self) -> None:
        self.plan: list[int] = []
        self.hang = False
        self.got: list[tuple[str, dict[str, Any]]] = []
        self.came = asyncio.Event()
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        headers = {name: request.headers[f"webhook-{name}"] for name in ("id", "timestamp", "signature")}
        at = datetime.fromtimestamp(int(headers["timestamp"]), UTC)
        assert signed(KEY, headers["id"], at, body)["webhook-signature"] == headers["signature"]
        self.got.append((headers["id"], json.loads(body)))
        self.came.set()
        if self.hang:
            await asyncio.sleep(BOUND_S)
        return web.Response(status=self.plan.pop(0) if self.plan else 204, text="taken")


@asynccontextmanager
async def serving(receiver: Receiver) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/hook", receiver.take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    try:
        yield f"http://{host}:{port}/hook?token=hidden"
    finally:
        await runner.cleanup()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    it = Receiver()
    async with serving(it) as it.url:
        yield it


@pytest.fixture
def outbox(pg_engine: AsyncEngine) -> PostgresAlerts:
    return PostgresAlerts(pg_engine)


def an_alert(n: int) -> Alert:
    at = datetime.now(UTC) - timedelta(minutes=10 - n)
    return Alert("job", f"job:{n}", at, {"n": n})


SenderOf = Callable[[str], tuple[AlertSender, PrometheusMetrics]]


@pytest.fixture
async def a_sender(outbox: PostgresAlerts) -> AsyncIterator[SenderOf]:
    webhooks: list[Webhook] = []

    def make(url: str) -> tuple[AlertSender, PrometheusMetrics]:
        webhooks.append(Webhook(url, KEY))
        metrics = PrometheusMetrics()
        return AlertSender(outbox, webhooks[-1], SystemClock(), metrics), metrics

    yield make
    for webhook in webhooks:
        await webhook.close()


async def make_due(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE alerts SET due_at = now()"))


async def rows(engine: AsyncEngine) -> list[Any]:
    async with engine.begin() as connection:
        return list(await connection.execute(select(alerts).order_by(alerts.c.at)))


async def test_a_receiver_that_fails_twice_gets_all_in_order_and_signed(
    outbox: PostgresAlerts,
    pg_engine: AsyncEngine,
    receiver: Receiver,
    a_sender: SenderOf,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="baton")
    now = datetime.now(UTC)
    assert await outbox.store([an_alert(2), an_alert(1), an_alert(3)], now) == 3
    assert await outbox.store([an_alert(1)], now) == 0  # told already
    receiver.plan = [500, 503]
    sender, metrics = a_sender(receiver.url)
    for _ in range(2):
        assert not await sender.send_next()
        assert not await sender.send_next()  # not due; and no later one goes first
        await make_due(pg_engine)
    while await sender.send_next():
        pass
    assert [message["data"]["n"] for _, message in receiver.got] == [1, 1, 1, 2, 3]
    assert len({message_id for message_id, _ in receiver.got}) == 3
    assert [(row.state, row.attempts) for row in await rows(pg_engine)] == [("sent", 3), ("sent", 1), ("sent", 1)]
    count = metrics.registry.get_sample_value
    assert count("baton_alerts_out_total", {"kind": "job", "result": "failed"}) == 2
    assert count("baton_alerts_out_total", {"kind": "job", "result": "sent"}) == 3
    assert "HTTP 500; next attempt in 5 s" in caplog.text
    assert "hidden" not in caplog.text
    assert await outbox.waiting() == 0


async def test_a_message_that_is_refused_five_times_lets_the_others_pass(
    outbox: PostgresAlerts, pg_engine: AsyncEngine, receiver: Receiver, a_sender: SenderOf
) -> None:
    await outbox.store([an_alert(1), an_alert(2)], datetime.now(UTC))
    receiver.plan = [400] * 5
    sender, _ = a_sender(receiver.url)
    for _ in range(5):
        await sender.send_next()
        await make_due(pg_engine)
    assert await sender.send_next()
    assert [(row.state, row.said) for row in await rows(pg_engine)] == [("given_up", "HTTP 400"), ("sent", "HTTP 204")]


async def test_several_gateways_send_each_once_and_in_order(
    outbox: PostgresAlerts, receiver: Receiver, a_sender: SenderOf
) -> None:
    now = datetime.now(UTC)
    assert sum(await asyncio.gather(*(outbox.store([an_alert(n) for n in range(9)], now) for _ in range(3)))) == 9
    senders = [a_sender(receiver.url)[0] for _ in range(3)]

    async def work(sender: AlertSender) -> None:
        while await outbox.waiting():
            await sender.send_next()

    await asyncio.wait_for(asyncio.gather(*map(work, senders)), BOUND_S)
    assert [message["data"]["n"] for _, message in receiver.got] == list(range(9))


async def test_a_gateway_killed_between_send_and_mark_sends_again_with_the_same_id(
    outbox: PostgresAlerts, database_url: str, receiver: Receiver, a_sender: SenderOf
) -> None:
    await outbox.store([an_alert(1), an_alert(2)], datetime.now(UTC))
    receiver.hang = True
    command = [sys.executable, "-c", SEND_ONE, database_url, receiver.url, SECRET, str(LEASE_S)]
    gateway = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
    await asyncio.wait_for(receiver.came.wait(), BOUND_S)
    os.kill(gateway.pid, signal.SIGKILL)
    await gateway.wait()
    receiver.hang = False
    sender, _ = a_sender(receiver.url)
    await until(sender.send_next)  # once the claim of the dead gateway has run out
    assert await sender.send_next()
    assert not await sender.send_next()
    (first, body), (again, same), (_, second) = receiver.got
    assert (first, body) == (again, same)
    assert [body["data"]["n"], second["data"]["n"]] == [1, 2]


async def test_a_receiver_that_is_away_is_named_without_path_and_query(
    outbox: PostgresAlerts, a_sender: SenderOf, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="baton")
    await outbox.store([an_alert(1)], datetime.now(UTC))
    sender, _ = a_sender("http://127.0.0.1:1/secret?token=hidden")
    assert not await sender.send_next()
    assert "did not get through to http://127.0.0.1:1: ConnectError" in caplog.text
    assert "secret" not in caplog.text
    assert "hidden" not in caplog.text


async def test_rollbacks_jobs_and_charges_are_told_once(outbox: PostgresAlerts, pg_engine: AsyncEngine) -> None:
    now = datetime.now(UTC)
    times = {"created_at": now, "changed_at": now}
    version = {"name": "conductor", "number": 4, "state": "retired", "directory": "d", "manifest": {}, **times}
    event: dict[str, Any] = {
        "name": "conductor",
        "number": 4,
        "what": "rolled back",
        "was": "canary",
        "state": "retired",
        "at": now,
    }
    event |= {"who": "watcher", "why": "outcome", "forced": False, "detail": {"cause": "outcome"}}
    job: dict[str, Any] = {
        "id": uuid7(1),
        "policy": "conductor",
        "spec": {},
        "by": "a",
        "state": "failed",
        "error": "no data",
    }
    job |= {"progress": {}, "attempts": 1, "cancel": False, "ended_at": now, **times}
    async with pg_engine.begin() as connection:
        await connection.execute(insert(policy_versions).values(**version))
        await connection.execute(insert(policy_events).values(**event))
        await connection.execute(insert(policy_jobs).values(**job))
    await add_charges(pg_engine, 3)
    assert sum(await asyncio.gather(*(outbox.collect(KINDS, now) for _ in range(2)))) == 3
    await add_charges(pg_engine, 1)
    assert await outbox.collect(("job",), now) == 0
    assert await outbox.collect(KINDS, now + timedelta(seconds=1)) == 1
    assert await outbox.collect(KINDS, now + timedelta(seconds=2)) == 0
    data = {(row.kind, row.data.get("charges")): row.data for row in await rows(pg_engine)}
    assert data["uncertain", 3]["usd"] == "0.03"
    assert data["uncertain", 1]["usd"] == "0.01"
    assert (data["rollback", None]["version"], data["rollback", None]["cause"]) == ("conductor@4", "outcome")
    assert (data["job", None]["state"], data["job", None]["error"]) == ("failed", "no data")


async def add_charges(engine: AsyncEngine, n: int) -> None:
    at = datetime.now(UTC)
    ids = [uuid7(int(at.timestamp() * 1000)) for _ in range(n)]
    values = [
        {"event_id": one, "hold_id": one, "kind": "uncertain", "amount_nano": USD // 100, "scopes": [], "detail": {}}
        | {"at": at}
        for one in ids
    ]
    async with engine.begin() as connection:
        await connection.execute(insert(ledger), values)


class Owners:
    """One organisation with $10 a month."""

    async def key_budgets(self, limit: int, after: str = "", among: Collection[str] | None = None) -> list[KeyRow]:
        return []

    async def org_list(self) -> list[OrgRow]:
        return [OrgRow("acme", datetime.now(UTC), budget_month_nano=10 * USD)]


class Spent(FakeBudgets):
    """Budgets of which `nano` is spent."""

    nano = 0

    async def balances(self, scopes: Sequence[str]) -> Mapping[str, Balance]:
        return {scope: Balance(self.nano, 0) for scope in scopes}


async def test_each_threshold_and_flag_is_told_once(outbox: PostgresAlerts, pg_engine: AsyncEngine) -> None:
    budgets, flags, exhausted = Spent(), list[tuple[Drift, datetime]](), set[str]()
    clock = SystemClock()
    told = {"flags": flags, "exhausted": exhausted}
    main = AlertSources(outbox, KINDS, Owners(), budgets, clock, alone=True, **told)  # type: ignore[arg-type]
    other = AlertSources(outbox, KINDS, Owners(), budgets, clock, alone=False, **told)  # type: ignore[arg-type]

    async def percents() -> list[int]:
        await main.budgets()
        await other.budgets()
        return sorted(row.data["percent"] for row in await rows(pg_engine) if row.kind == "budget")

    assert await percents() == []
    budgets.nano = 6 * USD
    assert await percents() == await percents() == [50]
    budgets.nano = 9 * USD
    assert await percents() == [50, 80]
    exhausted.add(f"org:acme:{clock.now():%Y-%m}")  # a request was refused
    await other.budgets()
    assert exhausted == set()
    assert await percents() == [50, 80, 100]
    flags.append((Drift("atlas", "1", "code", "outcome", 0.1, 0.4, 90), clock.now()))
    for _ in range(2):
        await main.drift()
    (flag,) = [row for row in await rows(pg_engine) if row.kind == "drift"]
    assert flag.data["worker"] == "atlas"


async def test_a_test_alert_is_sent_by_hand(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["alerts", "test"]) == 2
    assert "BATON_ALERTS_URL" in capsys.readouterr().err
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    monkeypatch.setenv("BATON_ALERTS_SECRET", "env:HOOK_SECRET")
    monkeypatch.setenv("BATON_ALERTS_URL", receiver.url)
    assert await asyncio.to_thread(cli.main, ["alerts", "test"]) == 0
    receiver.plan = [401]
    assert await asyncio.to_thread(cli.main, ["alerts", "test"]) == 1
    out = capsys.readouterr().out
    assert ("answered HTTP 204" in out, "answered HTTP 401" in out, "taken" in out) == (True, True, True)
    assert "hidden" not in out
    assert [message["type"] for _, message in receiver.got] == ["baton.test", "baton.test"]
