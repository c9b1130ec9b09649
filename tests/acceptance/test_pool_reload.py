"""A real gateway whose pool file changes under streaming traffic: a worker comes, another's price changes, one goes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from sqlalchemy import text

from gateway.adapters.postgres.database import sync_engine
from tests.acceptance.test_serve import ROOT, START_S, STOP_S
from tests.redis_server import start_redis
from tests.upstreams.server import EVENTS, Reply, Request, Server, event
from tests.waiting import PATIENT, until, wait_until

pytestmark = pytest.mark.long

PROMPT_TOKENS, REPLY_TOKENS = 40, 20
WAIT_S = 20.0
HANDLES = {"alpha": "atlas", "beta": "birch", "gamma": "grove"}


class Models(Server):
    """Streams of every model, a piece at a time. Those asked to `wait` go on when `go` is set. It keeps the keys that
    each model gets, and repeats them in its replies."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.go, self.waiting = asyncio.Event(), asyncio.Event()
        self.keys: dict[str, list[str]] = {}

    @property
    def base(self) -> str:
        """The `url` of a pool file."""
        return f"{self.url}/v1"

    def _answer(self, request: Request) -> Reply:
        if request.method != "POST":
            return Reply(status=404)  # a look at whether it is there
        key = request.headers.get("authorization", "no key")
        self.keys.setdefault(request.body["model"], []).append(key)
        return Reply(headers=EVENTS, pieces=self._pieces(key, wait="wait" in str(request.body["messages"])))

    async def _pieces(self, key: str, *, wait: bool) -> AsyncGenerator[bytes, None]:
        for piece in ("I was ", "shown ", key):
            yield _chunk(choices=[{"index": 0, "delta": {"content": piece}}])
            if wait:
                self.waiting.set()
                await self.go.wait()
            await asyncio.sleep(random.random() * 0.02)  # so that streams overlap
        yield _chunk(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
        yield _chunk(choices=[], usage={"prompt_tokens": PROMPT_TOKENS, "completion_tokens": REPLY_TOKENS})
        yield event("[DONE]")


def _chunk(**fields: Any) -> bytes:
    return event({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", **fields})


@dataclass
class PoolFile:
    """The file on disk: prices by worker name, dollars per million tokens of input; twice that of output."""

    path: Path
    url: str
    prices: dict[str, int] = field(default_factory=lambda: {"alpha": 1, "beta": 2})
    bad: bool = False

    def write(self) -> None:
        workers = [self._worker(name, usd) for name, usd in self.prices.items()]
        if self.bad:
            workers[0]["price"]["input_usd_per_mtok"] = "-1"
        pools = {"default": [worker["name"] for worker in workers]}
        self.path.write_text(yaml.safe_dump({"workers": workers, "pools": pools}, sort_keys=False))

    def keep_key(self, value: str) -> None:
        self.path.with_name("key").write_text(value)

    def _worker(self, name: str, usd: int) -> dict[str, Any]:
        price = {"input_usd_per_mtok": str(usd), "output_usd_per_mtok": str(2 * usd)}
        key = {"api_key": f"file:{self.path.with_name('key')}"} if name == "gamma" else {}
        about = {"kind": "openai", "model": name, "url": self.url, "output_tokens_max": 64}
        return {"name": name, "handle": HANDLES[name], **about, **key, "price": price}


@dataclass
class Gateway:
    process: subprocess.Popen[bytes]
    directory: Path
    output: Path
    environ: dict[str, str]

    @property
    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "serve.json").read_text())
        return found

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "gateway", *arguments]
        return subprocess.run(
            line, cwd=ROOT, env=self.environ, capture_output=True, text=True, timeout=120, check=False
        )


@contextmanager
def serving(place: Path, file: PoolFile, database_url: str) -> Iterator[Gateway]:
    redis = start_redis(place)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")} | {
        "DATABASE_URL": database_url,
        "REDIS_URL": redis.url,
        "BATON_DATA_DIR": str(place / "data"),
        "BATON_CONDUCTOR_INPUT_USD_PER_MTOK": "0",
        "BATON_CONDUCTOR_OUTPUT_USD_PER_MTOK": "0",
        "BATON_CONDUCTOR_STRUCTURED": "json_schema",
        "BATON_DEFAULT_POLICY": "conductor",
        "BATON_CONDUCTOR_ROUNDS": "1",
        "BATON_JOBS_WORKER": "false",
        **PATIENT,
    }
    where = ["--pool", str(file.path), "--conductor", f"{file.url}#none", "--port", "0", "--admin-port", "0"]
    output = place / "out"
    with output.open("wb") as said:
        line = [sys.executable, "-m", "gateway", "serve", *where]
        process = subprocess.Popen(line, cwd=ROOT, env=environ, stdout=said, stderr=said)
    gateway = Gateway(process, place / "data", output, environ)
    try:
        wait_until(lambda: "With Python" in output.read_text() or process.poll() is not None, START_S)
        assert process.poll() is None, output.read_text()
        yield gateway
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        redis.stop()


CHANGING = "until the gateway has said that it took the file, either pool may serve"


class Traffic:
    """Clients that stream one reply after another, each from a model that it may name now."""

    def __init__(self, gateway: Gateway) -> None:
        facts = gateway.facts
        self.http = httpx.AsyncClient(base_url=facts["base_url"], timeout=120)
        self.http.headers["authorization"] = f"Bearer {facts['data_key']}"
        self.admin = httpx.AsyncClient(base_url=facts["admin_url"], timeout=120)
        self.admin.headers["authorization"] = f"Bearer {facts['admin_key']}"
        self.names = ["alpha", "beta", "baton/rule"]
        self.done: list[tuple[str, str, str]] = []  # (rollout, pool before it was sent, pool after its first byte)
        self.failed: list[str] = []
        self.pool = ""

    async def stream(self, model: str, say: str = "hello") -> str:
        body = {"model": model, "messages": [{"role": "user", "content": say}], "stream": True}
        before = self.pool
        async with self.http.stream("POST", "/chat/completions", json=body) as reply:
            after, rollout = self.pool, reply.headers.get("x-baton-rollout-id", "")
            said = (await reply.aread()).decode()
        if reply.status_code != 200 or "[DONE]" not in said or '"error"' in said:
            self.failed.append(f"{model}: {reply.status_code} {said[:300]}")
        self.done.append((rollout, before, after))
        return str(rollout)

    async def client(self) -> None:
        while True:
            await self.stream(random.choice(self.names))

    async def more(self, count: int = 30) -> None:
        """Wait for so many more replies."""
        wanted = len(self.done) + count
        await until(lambda: len(self.done) >= wanted)

    async def now(self) -> str:
        found = (await self.admin.get("/admin/pools")).json()
        assert found["loaded_at"]
        return str(found["hash"])

    async def reload(self, **body: Any) -> dict[str, Any]:
        self.pool = CHANGING
        reply = await self.admin.post("/admin/pools/reload", json=body)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        assert found["applied"], found
        self.pool = found["hash"]
        return found

    async def by_signal(self, gateway: Gateway) -> None:
        before, self.pool = self.pool, CHANGING
        gateway.process.send_signal(signal.SIGHUP)

        async def changed() -> str | None:
            return hash_ if (hash_ := await self.now()) != before else None

        self.pool = await until(changed)

    async def metric(self, line: str) -> None:

        async def shown() -> bool:
            return line in (await self.admin.get("/metrics")).text

        await until(shown)

    async def close(self) -> None:
        await self.http.aclose()
        await self.admin.aclose()


def rows(url: str, query: str, **given: Any) -> list[dict[str, Any]]:
    engine = sync_engine(url)
    with engine.connect() as connection:
        found = [dict(row) for row in connection.execute(text(query), given).mappings()]
    engine.dispose()
    return found


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="baton-pools-", ignore_cleanup_errors=True) as path:
        yield Path(path)


async def test_a_pool_changes_under_traffic_and_no_request_notices(place: Path, database_url: str) -> None:
    async with Models() as models:
        file = PoolFile(place / "pool.yaml", models.base)
        file.keep_key("first-key-of-gamma")
        file.write()
        with serving(place, file, database_url) as gateway:
            traffic = Traffic(gateway)
            try:
                held = await _change_everything(gateway, traffic, file, models)
            finally:
                await traffic.close()
            gateway.process.send_signal(signal.SIGTERM)
            assert gateway.process.wait(STOP_S) == 0
            said = gateway.output.read_text()
    assert traffic.failed == []
    assert len(traffic.done) > 150
    _books_are_right(database_url, traffic, held)
    assert models.keys["gamma"][0] == "Bearer first-key-of-gamma"
    assert models.keys["gamma"][-1] == "Bearer second-key-of-gamma"
    everything = str(rows(database_url, "SELECT r, s FROM rollouts r JOIN steps s ON s.rollout_id = r.id"))
    everything += str(rows(database_url, "SELECT * FROM audit")) + str(
        rows(database_url, "SELECT * FROM pool_revisions")
    )
    assert "of-gamma" not in everything + said
    assert "I was shown" in everything
    assert str(file.path.with_name("key")) not in everything


async def _change_everything(gateway: Gateway, traffic: Traffic, file: PoolFile, models: Models) -> str:
    """The whole story; returns the rollout that was open all the time."""
    traffic.pool = first = await traffic.now()
    clients = [asyncio.create_task(traffic.client()) for _ in range(8)]
    slow = asyncio.create_task(traffic.stream("beta", "wait for it"))
    await models.waiting.wait()
    await traffic.more()

    file.prices["gamma"] = 3
    file.write()
    dry = await asyncio.to_thread(gateway.command, "pools", "reload", "--dry-run")
    assert dry.stdout.splitlines() == [
        "worker gamma: added",
        "pool default: alpha, beta -> alpha, beta, gamma",
        "dry run: nothing was changed",
    ], dry
    assert await traffic.now() == first
    assert (await traffic.reload(why="a new model"))["changes"]["workers"] == {"added": ["gamma"]}
    traffic.names.append("gamma")
    await traffic.more()

    file.prices["beta"] = 50
    file.write()
    found = await traffic.reload()
    assert found["changes"]["workers"]["changed"]["beta"]["price.input_usd_per_mtok"] == ["2", "50"]
    await traffic.more()

    file.bad = True
    file.write()
    bad = await asyncio.to_thread(gateway.command, "pools", "reload")
    assert (bad.returncode, bad.stderr.count("\n")) == (2, 1), bad
    assert "pool.yaml:" in bad.stderr
    assert "workers[0].price.input_usd_per_mtok" in bad.stderr
    gateway.process.send_signal(signal.SIGHUP)
    await traffic.metric('baton_pool_reloads_total{result="refused"} 2.0')
    assert await traffic.now() == traffic.pool
    file.bad = False

    traffic.names.remove("beta")  # open streams of it go on
    del file.prices["beta"]
    file.keep_key("second-key-of-gamma")
    file.write()
    await traffic.by_signal(gateway)
    await traffic.more()
    gone = await traffic.http.post(
        "/chat/completions", json={"model": "beta", "messages": [{"role": "user", "content": "x"}]}
    )
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    models.go.set()
    held = await slow
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)

    await traffic.metric(f'baton_pool_info{{hash="{traffic.pool}"}} 1.0')
    await traffic.metric('baton_pool_reloads_total{result="changed"} 3.0')
    verdict = (await traffic.admin.get("/admin/audit/verify")).json()
    assert verdict["ok"], verdict
    entries = (await traffic.admin.get("/admin/audit?target=pools")).json()["data"]
    assert [(one["act"], one["actor"].partition(":")[0], one["why"]) for one in reversed(entries)] == [
        ("pool.loaded", "baton", ""),
        ("pool.reloaded", "key", "a new model"),
        ("pool.reloaded", "key", ""),
        ("pool.reloaded", "signal", ""),
    ]
    assert entries[0]["after"]["changes"]["rekeyed"] == ["gamma"]
    return held


def _books_are_right(url: str, traffic: Traffic, held: str) -> None:
    """Every rollout names the pool that it was sent under, and cost what that pool says, as it was held."""
    shelves = {row["hash"]: json.loads(row["file"]) for row in rows(url, "SELECT hash, file FROM pool_revisions")}
    assert len(shelves) == 4
    logged = {str(row["id"]): row for row in rows(url, "SELECT * FROM rollouts")}
    steps = {str(row["rollout_id"]): row["worker"] for row in rows(url, "SELECT rollout_id, worker FROM steps")}
    for rollout, before, after in traffic.done:
        row = logged[rollout]
        assert row["status"] == "done", row
        assert row["pool_revision"] in shelves
        if before == after != CHANGING:
            assert row["pool_revision"] == before, (rollout, before)
        price = shelves[row["pool_revision"]]["workers"][steps[rollout]]["price"]
        usd_per_mtok = (
            int(price["input_usd_per_mtok"]) * PROMPT_TOKENS + int(price["output_usd_per_mtok"]) * REPLY_TOKENS
        )
        assert row["cost_nano"] == usd_per_mtok * 1_000, (rollout, steps[rollout])
        assert row["cost_nano"] <= row["hold_nano"]
    slow = logged[held]
    assert slow["cost_nano"] == 2 * (PROMPT_TOKENS + 2 * REPLY_TOKENS) * 1_000  # of beta at $2, not at $50
    ledger = rows(url, "SELECT kind, amount_nano FROM ledger WHERE rollout_id = :id ORDER BY at", id=held)
    assert {row["kind"]: row["amount_nano"] for row in ledger}["posted"] == slow["cost_nano"]
    assert rows(url, "SELECT 1 FROM rollouts WHERE pool_revision IS NULL") == []
