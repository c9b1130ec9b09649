"""Load on a site: the client and the worker in processes of their own, and the processor time of each."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import text

from gateway.adapters.postgres.database import async_engine
from tests.faults.client import Client, Reply
from tests.faults.processes import Shares, parent
from tests.faults.site import ROOT, Gateway, Site
from tests.faults.upstream import PROMPT_TOKENS, Bill
from tests.sizes import SIZE, report_row

CALM = {
    "BATON_MONEY_LEASE_S": "10",
    "BATON_MONEY_SWEEP_S": "2",
}  # no gateway dies in these tests, so a stall must not count as a death
if SIZE != "long":
    CALM["BATON_REDIS_TIMEOUT_S"] = "5"  # whatever else the machine does meanwhile
WORKER = """
  - {{name: {name}, handle: {handle}, kind: {kind}, model: {model}, url: "{url}", api_key: "env:UPSTREAM_KEY",
     output_tokens_max: {tokens}, timeout_s: {timeout_s}, concurrency_max: 512,
     price: {{input_usd_per_mtok: 1, output_usd_per_mtok: 2}}}}"""
MESSAGES = [{"role": "user", "content": "How many grams are there in 51 kilograms? Give the amount as a number."}]


@dataclass(frozen=True, slots=True)
class Worker:
    """The worker's process."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The replies of a run. Milliseconds by status; `shares`: percent of one processor, by process;
    `blind`: what replies say of their experience, by rollout."""

    statuses: dict[str, int]
    took_ms: dict[str, list[float]]
    overhead_ms: list[float]
    ids: list[str]
    examples: dict[str, str]
    blind: dict[str, str]
    no_retry_after: int
    most_under_way: int
    chunks: int
    seconds: float
    good_in_time: int
    shares: dict[str, int]

    @property
    def rps(self) -> float:
        """Replies with status 200 a second."""
        return self.good_in_time / self.seconds

    def errors(self, *allowed: str) -> int:
        """Count replies with a status other than 200 and `allowed`."""
        return sum(n for status, n in self.statuses.items() if status not in ("200", *allowed))

    def ms(self, share: float, *statuses: str) -> float:
        """Return a percentile of the durations of replies with these statuses; 0 if there are none."""
        return percentile([ms for status in statuses for ms in self.took_ms.get(status, [])], share)

    def client(self, here: Site) -> Client:
        """Return these replies as a `Client`, for the checker."""
        history = [Reply(200, None, rollout_id, 0.0, True, 0.0) for rollout_id in self.ids]
        return Client(here, history=history)


def percentile(values: Sequence[float], share: float) -> float:
    ranked = sorted(values)
    return round(ranked[min(len(ranked) - 1, int(len(ranked) * share / 100))], 2) if ranked else 0.0


@asynccontextmanager
async def worker(plan: str = "") -> AsyncIterator[Worker]:
    """Start a worker that needs little processor time. `settle` adds its bill to the site's."""
    command = (sys.executable, "-m", "tests.faults.load_upstream", "--plan", plan)
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield Worker(int(await process.stdout.readline()), process.pid)
    finally:
        process.kill()
        await process.communicate()


async def gateways(here: Site, n: int, settings: Mapping[str, Any] | None = None) -> list[Gateway]:
    """Start `n` gateways and wait until they serve. The first makes the keys before the others start."""
    given: dict[str, Any] = {**CALM, **(settings or {})}
    made = [await here.gateway(**given)]
    made += [await here.gateway(start=False, **given) for _ in range(n - 1)]
    for one in made[1:]:
        one.start()
    for one in made[1:]:
        await one.serving()
    return made


async def drive(here: Site, upstream: Worker, **order: Any) -> LoadReport:
    """Give the client its order and wait for its report."""
    targets = [("127.0.0.1", urlsplit(one.facts["base_url"]).port) for one in here.gateways]
    whole = {"bodies": [question()], **order, "targets": targets, "key": here.key}
    pids = {"gateways": [one.pid for one in here.gateways], "worker": [upstream.pid]}
    shares = Shares({**pids, "redis": [here.redis.process.pid], "postgres": [await postmaster(here)]})
    command, pipe = (sys.executable, "-m", "tests.faults.load_client"), asyncio.subprocess.PIPE
    client = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe)
    output, _ = await client.communicate(json.dumps(whole).encode())
    assert client.returncode == 0
    result = json.loads(output)
    shown = shares.percent({"client": result.pop("cpu_s")})
    return LoadReport(**result, shares=shown)


def lasts_s(otherwise_s: float) -> float:
    """How long a row lasts: FAULTS_LOAD_S, where that is set."""
    return float(os.environ.get("FAULTS_LOAD_S", otherwise_s))


def pool(here: Site, *workers: Mapping[str, object]) -> None:
    """Replace the pool of the site. Call this before its first gateway starts."""
    usual = {"kind": "openai", "tokens": 16, "timeout_s": 20, "url": here.worker_url}
    lines = [WORKER.format(**{**usual, "handle": each["name"], **each}) for each in workers]
    names = ", ".join(str(each["name"]) for each in workers)
    (here.place / "pool.yaml").write_text(f"workers:{''.join(lines)}\npools: {{main: [{names}]}}\ndefault: main\n")


def report(row: str, result: LoadReport, *allowed: str, **numbers: object) -> None:
    """Report the numbers of a row, and percent of one processor by process."""
    shares = {f"cpu_percent_{name}": share for name, share in result.shares.items()}
    every = {
        "seconds": round(result.seconds),
        "requests": sum(result.statuses.values()),
        "errors": result.errors(*allowed),
    }
    report_row(row, **every, **numbers, **shares)


async def most_mib(serving: Sequence[Gateway], every_s: float = 0.5) -> int:
    """Sample until cancelled; return the peak of their memory together, in MiB."""
    most = 0.0
    with suppress(asyncio.CancelledError):
        while True:
            most = max(most, sum(one.rss_mib() for one in serving))
            await asyncio.sleep(every_s)
    return round(most)


async def limited_key(here: Site) -> None:
    """A key with budgets of its organisation, of its own and of each end user, in all, by month and by day; far above
    what is spent, so that each request is counted in all of them and refused by none."""
    facts = here.gateways[0].facts
    every = {"budget_usd": "1000", "budget_month_usd": "900", "budget_day_usd": "800"}
    limits: dict[str, Any] = {**every, **{f"user_{name}": usd for name, usd in every.items()}}
    headers = {"authorization": f"Bearer {facts['admin_key']}"}
    org = {"name": "acme", **limits}
    async with here.http.post(f"{facts['admin_url']}/admin/orgs", json=org, headers=headers) as reply:
        assert reply.status == 201, await reply.text()
    await here.new_key(org="acme", **limits)


def question(**more: Any) -> dict[str, Any]:
    return {"model": "alpha", "messages": MESSAGES, "max_tokens": 8, **more}


async def postmaster(here: Site) -> int:
    """The process whose children serve PostgreSQL's connections."""
    engine = async_engine(here.database_url, pool_size=1)
    try:
        async with engine.connect() as connection:
            return parent(int(await connection.scalar(text("SELECT pg_backend_pid()"))))
    finally:
        await engine.dispose()


async def settle(here: Site, upstream: Worker, priced: str = "") -> int:
    """Add the worker's bill for models with this prefix to the site's; return the calls of all models."""
    async with here.http.get(f"http://127.0.0.1:{upstream.port}/bill") as reply:
        rows = (await reply.json())["rows"]
    for model, tokens, calls in rows:
        if model.startswith(priced):
            here.upstream.bills += [Bill(PROMPT_TOKENS, {}, tokens, "done")] * calls
    return sum(calls for _, _, calls in rows)
