"""Baton as the suite measures it: budgets of organisation, key and end user, journal and metrics on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from bench.cost import SETTINGS
from bench.suite.client import Target
from bench.suite.cores import REST, UNDER_TEST, data_servers, move, on
from policy.recipes.stack import Gateway, gateway

ADMIN_S, SHIPPED_S = 60.0, 300.0
LIMITS = {"budget_usd": "1000", "budget_month_usd": "900", "budget_day_usd": "800"}  # far above what is spent
USER = {"user": "somebody"}  # its limits are counted too
WORKER = """\
  - {{name: {name}, handle: {name}, kind: openai, model: {model}, url: "{url}/v1", output_tokens_max: 512,
     concurrency_max: 4096, timeout_s: 600, price: {{input_usd_per_mtok: 1, output_usd_per_mtok: 2}}}}
"""


@dataclass(frozen=True, slots=True)
class Baton:
    """A gateway under test. `key` has LIMITS."""

    served: Gateway
    key: str

    @property
    def pid(self) -> int:
        """The process that serves, or that watches those that serve."""
        return self.served.pid

    def target(self, model: str) -> Target:
        """Where requests for a model go."""
        return Target(self.served.base_url, model, {"authorization": f"Bearer {self.key}"})

    def with_key(self, key: str) -> Baton:
        """The same gateway, called with another key."""
        return replace(self, key=key)

    @property
    def operator(self) -> dict[str, str]:
        """The header of the admin key."""
        return {"authorization": f"Bearer {self.served.admin_key}"}


def pool_file(directory: Path, upstream: str, workers: Mapping[str, str]) -> Path:
    """Write a pool file: name of each worker → its model."""
    rows = "".join(WORKER.format(name=name, model=model, url=upstream) for name, model in workers.items())
    path = directory / "pool.yaml"
    path.write_text(f"workers:\n{rows}pools: {{main: [{', '.join(workers)}]}}\ndefault: main\n")
    return path


@contextmanager
def baton(
    directory: Path,
    upstream: str,
    *,
    workers: Mapping[str, str] | None = None,
    conductor: str = "none",
    settings: Mapping[str, str] | None = None,
    cores: frozenset[int] = UNDER_TEST,
    rest: frozenset[int] = REST,
) -> Iterator[Baton]:
    """A gateway on `cores` with its state in `directory`; its PostgreSQL and Redis on `rest`."""
    directory.mkdir(exist_ok=True)
    pool = pool_file(directory, upstream, workers or {"mock": "m"})
    with ExitStack() as held:
        with on(cores):
            given = SETTINGS | dict(settings or {})
            served = held.enter_context(gateway(directory, conductor=conductor, pool=pool, settings=given))
        move(data_servers(served.pid), rest)
        yield Baton(served, asyncio.run(_limited_key(served)))


async def _limited_key(served: Gateway) -> str:
    """Make a key with limits on its own dollars, its organisation's and its users'."""
    every = LIMITS | {f"user_{name}": usd for name, usd in LIMITS.items()}
    headers = {"authorization": f"Bearer {served.admin_key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(ADMIN_S)) as session:
        await _post(session, f"{served.admin_url}/admin/orgs", {"name": "bench", **every})
        made = await _post(session, f"{served.admin_url}/admin/keys", {"name": "bench", "org": "bench", **every})
    return str(made["key"])


async def _post(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    async with session.post(url, json=body) as reply:
        if reply.status >= 300:
            raise SystemExit(f"{url}: {reply.status} {await reply.text()}")
        made: dict[str, Any] = await reply.json()
        return made


async def shipped(served: Gateway) -> None:
    """Wait until every journal record is in PostgreSQL. Raises SystemExit after SHIPPED_S."""
    until_s = time.monotonic() + SHIPPED_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ADMIN_S)) as session:
        while time.monotonic() < until_s:
            async with session.get(f"{served.admin_url}/metrics") as reply:
                text = await reply.text()
            if total(text, "baton_log_records_stored_total") >= total(text, "baton_log_records_total"):
                return
            await asyncio.sleep(0.1)
    raise SystemExit("the log does not reach PostgreSQL")


async def counter(served: Gateway, name: str) -> int:
    """The sum of a counter now."""
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(ADMIN_S)) as session,
        session.get(f"{served.admin_url}/metrics") as reply,
    ):
        return round(total(await reply.text(), name))


def total(exposition: str, name: str) -> float:
    """The sum of a counter over the processes of a gateway."""
    lines = (line.rsplit(" ", 1) for line in exposition.splitlines())
    return sum(float(line[1]) for line in lines if line[0].partition("{")[0] == name)
