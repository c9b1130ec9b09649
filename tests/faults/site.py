"""One installation under test: PostgreSQL, Redis, a worker with its own bill, and gateways as real processes."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from sqlalchemy import make_url

from tests.faults.upstream import CANARY, Upstream
from tests.redis_server import RedisServer, start_redis

ROOT = Path(__file__).resolve().parents[2]
START_S, STOP_S = 120.0, 120.0
LEASE_S = 1.0
INPUT_NANO, OUTPUT_NANO = 1_000, 2_000  # price of a token at every worker but `flat`
FLAT_NANO = 1_000_000  # price of a call at `flat`
POOL = """
workers:
  - {{name: alpha, handle: atlas, kind: openai, model: m, answers: true, url: "{url}", api_key: "env:UPSTREAM_KEY",
     output_tokens_max: 16, timeout_s: {timeout_s}, price: {{input_usd_per_mtok: 1, output_usd_per_mtok: 2}}}}
  - {{name: beta, handle: birch, kind: openai, model: m, url: "{url}", output_tokens_max: 16, timeout_s: {timeout_s},
     price: {{input_usd_per_mtok: 1, output_usd_per_mtok: 2}}}}
  - {{name: flat, handle: cedar, kind: openai, model: m, url: "{url}", output_tokens_max: 16, timeout_s: {timeout_s},
     price: {{input_usd_per_mtok: 0, output_usd_per_mtok: 0, call_usd: "0.001"}}}}
pools: {{main: [alpha, beta, flat]}}
default: main
"""
SETTINGS = {
    "BATON_JOBS_WORKER": "false",
    "BATON_FIRST_KEYS": "always",
    "BATON_LAME_DUCK_S": "0",
    "BATON_POLICY_ENGINE": "none",
    "BATON_MONEY_LEASE_S": str(LEASE_S),
    "BATON_MONEY_SWEEP_S": "0.3",
    "BATON_RETRY_BACKOFF_S": "0.01",
    "BATON_CONDUCTOR": "worker:alpha",
    "BATON_DEFAULT_POLICY": "conductor",
    "BATON_CONDUCTOR_ROUNDS": "1",
    "UPSTREAM_KEY": CANARY,
}


class Zygote:
    """Forks gateways from one process with all imports done. One for a whole run."""

    def __init__(self, log: Path) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.zygote"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def fork(self, **order: Any) -> int:
        """The new process's id."""
        pipe = self._process
        assert pipe.stdin is not None
        assert pipe.stdout is not None
        pipe.stdin.write(json.dumps(order) + "\n")
        pipe.stdin.flush()
        return int(json.loads(pipe.stdout.readline())["pid"])

    def close(self) -> None:
        with self._process:  # closes its input, which ends it
            pass


@dataclass(slots=True)
class Gateway:
    """One `baton serve`. `directory` outlives it: the next one started there finds its journal and its keys."""

    zygote: Zygote
    directory: Path
    env: dict[str, str]
    pid: int = 0
    fd: int = -1

    def start(self, *, kill: tuple[str, int] | None = None, seam: str | None = None) -> None:
        """Fork it; `ready` says when it serves."""
        argv = ["serve", "--data-dir", str(self.directory), "--port", "0", "--admin-port", "0"]
        self.facts_file.unlink(missing_ok=True)
        self.pid = self.zygote.fork(argv=argv, env=self.env, log=str(self.log), kill=kill, seam=seam)
        self.fd = os.pidfd_open(self.pid)

    @property
    def log(self) -> Path:
        return self.directory.with_suffix(".log")

    @property
    def facts_file(self) -> Path:
        return self.directory / "serve.json"

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self.facts_file.read_text())
        return facts

    @property
    def alive(self) -> bool:
        return self.fd >= 0 and not select.select([self.fd], [], [], 0)[0]

    def rss_mib(self) -> float:
        """Return its resident memory."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024

    async def serving(self) -> None:
        """Return once it listens. Raises AssertionError with the end of its log."""
        assert await self.came_up(), self.log.read_text()[-3000:]

    async def came_up(self) -> bool:
        """Return whether it listened before it ended."""
        until_s = time.monotonic() + START_S
        while not self.facts_file.exists():
            if not self.alive:
                return False
            assert time.monotonic() < until_s, self.log.read_text()[-3000:]
            await asyncio.sleep(0.02)
        return True

    async def ended(self, limit_s: float = STOP_S) -> None:
        """Wait for the end of the process."""
        async with asyncio.timeout(limit_s):
            while self.alive:
                await asyncio.sleep(0.01)

    def signal(self, number: int) -> None:
        if self.alive:
            signal.pidfd_send_signal(self.fd, number)

    async def kill(self) -> None:
        """Kill it, as a crash does."""
        self.signal(signal.SIGKILL)
        await self.ended()

    async def stop(self) -> float:
        """Stop it, as an operator does; return how many seconds it took."""
        began_s = time.monotonic()
        self.signal(signal.SIGTERM)
        await self.ended()
        return time.monotonic() - began_s


@dataclass(slots=True)
class Site:
    """Everything of one installation. `gateways[0]` made the first keys."""

    place: Path
    zygote: Zygote
    database_url: str
    redis: RedisServer
    upstream: Upstream
    http: aiohttp.ClientSession
    settings: dict[str, str] = field(default_factory=dict)
    gateways: list[Gateway] = field(default_factory=list)
    key: str = ""
    key_id: str = ""
    keys: list[str] = field(default_factory=list)  # all keys of this site
    worker_url: str = ""
    worker_timeout_s: float = 20.0

    async def gateway(self, *, start: bool = True, **settings: str) -> Gateway:
        """Add a gateway and wait until it serves (unless `start` is false)."""
        pool, pepper = self.place / "pool.yaml", self.place / "pepper"
        if not pool.exists():
            pool.write_text(POOL.format(url=self.worker_url or self.upstream.base, timeout_s=self.worker_timeout_s))
        if not pepper.exists():
            pepper.write_text("a-pepper-for-tests-and-for-nothing-else")
        given = {"BATON_POOL": str(pool), "BATON_PEPPER": f"file:{pepper}", "DATABASE_URL": self.database_url}
        env = {**SETTINGS, **given, "REDIS_URL": self.redis.url, **self.settings, **settings}
        one = Gateway(self.zygote, self.place / f"g{len(self.gateways)}", env)
        self.gateways.append(one)
        if start:
            one.start()
            await one.serving()
        return one

    async def new_key(self, budget_nano: int | None = None, **limits: Any) -> tuple[str, str]:
        """Make a data key for all later requests; return (key, id)."""
        facts = self.gateways[0].facts
        usd = {} if budget_nano is None else {"budget_usd": f"{budget_nano / 1e9:.9f}"}
        headers = {"authorization": f"Bearer {facts['admin_key']}"}
        body = {"name": "tests", **usd, **limits}
        async with self.http.post(f"{facts['admin_url']}/admin/keys", json=body, headers=headers) as reply:
            made = await reply.json()
            assert reply.status in (200, 201), made
        self.key, self.key_id = made["key"], made["id"]
        self.keys.append(self.key)
        return self.key, self.key_id

    async def ready(self, limit_s: float) -> float:
        """Seconds until every living gateway says that it is ready. Raises TimeoutError."""
        began_s = time.monotonic()
        async with asyncio.timeout(limit_s):
            for one in [each for each in self.gateways if each.alive]:
                while not await self.is_ready(one):
                    await asyncio.sleep(0.05)
        return time.monotonic() - began_s

    async def is_ready(self, one: Gateway) -> bool:
        try:
            async with self.http.get(f"{one.facts['admin_url']}/readyz") as reply:
                return reply.status == 200
        except (aiohttp.ClientError, OSError, ValueError):
            return False

    async def metric(self, one: Gateway, name: str) -> float:
        """The sum of a metric's samples."""
        async with self.http.get(f"{one.facts['admin_url']}/metrics") as reply:
            lines = [line for line in (await reply.text()).splitlines() if line.startswith((name + " ", name + "{"))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def complaints(self) -> str:
        """Return the last unexpected error of each gateway's log."""
        logs = [one.log.read_text() for one in self.gateways if one.log.exists()]
        traces = [log[log.rindex("Traceback") :].partition("\n20")[0] for log in logs if "Traceback" in log]
        return "\n".join(trace[-2000:] for trace in traces)

    async def stop(self) -> None:
        """Stop every gateway; kill those that do not end."""
        for one in self.gateways:
            one.signal(signal.SIGCONT)
            one.signal(signal.SIGTERM)
        for one in self.gateways:
            try:
                await one.ended(STOP_S)
            except TimeoutError:
                await one.kill()


@asynccontextmanager
async def site(place: Path, zygote: Zygote, database_url: str, **settings: str) -> AsyncIterator[Site]:
    """An installation without gateways. Its Redis is its own, the database is the caller's."""
    (place / "redis").mkdir(parents=True)
    redis = start_redis(place / "redis")
    here: Site | None = None
    try:
        async with Upstream() as upstream, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as http:
            here = Site(place, zygote, database_url, redis, upstream, http, settings)
            try:
                yield here
            finally:
                await here.stop()
    finally:
        (here.redis if here is not None else redis).stop()  # it may have been started again


def socket_path(database_url: str) -> str:
    """The Unix socket of an embedded server."""
    url = make_url(database_url)
    return f"{url.query['host']}/.s.PGSQL.{url.port or 5432}"


def through(database_url: str, port: int) -> str:
    """The same database by TCP on loopback."""
    url = make_url(database_url)
    return url.set(host="127.0.0.1", port=port, query={}).render_as_string(hide_password=False)
