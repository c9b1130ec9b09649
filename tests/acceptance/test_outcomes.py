"""Outcomes without code, as a user meets them: a gateway with a judge, two workers, and a client that says nothing."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.core.money.amounts import usd_to_nano
from policy.jobs.judging import DRAW_S
from tests.acceptance.test_serve import Gateway, serving
from tests.upstreams.openai import OpenAI
from tests.upstreams.server import Request
from tests.upstreams.vendor import Script

pytestmark = pytest.mark.long

RIGHT, WRONG = "It has four legs.", "It has nine legs."
USD_A_DAY = "0.1"
CALL_NANO = (300 + Script().completion_tokens) * 10_000  # tokens of a call at the price below
BATCH = 10
REQUESTS_MAX = 200
POOL = """
workers:
  - {{name: cheap, handle: atlas, kind: openai, model: cheap-1, url: "{cheap}", api_key: "env:WORKER_KEY",
     price: {{input_usd_per_mtok: 0.1, output_usd_per_mtok: 0.1}}}}
  - {{name: dear, handle: birch, kind: openai, model: dear-1, url: "{dear}", api_key: "env:WORKER_KEY",
     price: {{input_usd_per_mtok: 2, output_usd_per_mtok: 2}}}}
  - {{name: wise, handle: cedar, kind: openai, model: wise-1, url: "{wise}", api_key: "env:WORKER_KEY",
     price: {{input_usd_per_mtok: 10, output_usd_per_mtok: 10}}}}
pools: {{main: [cheap, dear], judges: [wise]}}
default: main
"""


class Judge(OpenAI):
    """Finds RIGHT right, and anything else wrong."""

    def whole(self, request: Request) -> Mapping[str, Any]:
        self._judge(request)
        return super().whole(request)

    def events(self, request: Request) -> Iterator[bytes]:
        self._judge(request)
        return iter(list(super().events(request)))

    def _judge(self, request: Request) -> None:
        verdict = "right" if f"> {RIGHT}" in request.body["messages"][-1]["content"] else "wrong"
        self.script = Script(text=json.dumps({"reason": "counted", "verdict": verdict}), prompt_tokens=300)


@asynccontextmanager
async def judged_gateway(directory: Path, **settings: str) -> AsyncIterator[tuple[Gateway, Judge]]:
    """A gateway of two workers, cheap and wrong, dear and right, and of a judge."""
    cheap, dear, wise = OpenAI("w"), OpenAI("w"), Judge("w")
    cheap.script, dear.script = Script(text=WRONG), Script(text=RIGHT)
    async with AsyncExitStack() as opened:
        for server in (cheap, dear, wise):
            await opened.enter_async_context(server)
        pool = directory / "pool.yaml"
        pool.write_text(POOL.format(cheap=cheap.base, dear=dear.base, wise=wise.base))
        environ = {"BATON_POOL": str(pool), "WORKER_KEY": "w", "BATON_JUDGE": "worker:wise", **settings}
        starting = serving(directory / "data", Path("none"), **environ)
        gateway = await asyncio.to_thread(starting.__enter__)
        opened.callback(starting.__exit__, None, None, None)
        yield gateway, wise


async def ask(client: httpx.AsyncClient, number: int) -> str:
    """Ask a question of one kind; the worker that answered."""
    text = f"How many legs has the animal in picture {number}, counted from the left?"
    body = {"model": "baton", "messages": [{"role": "user", "content": text}]}
    reply = await client.post("/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.headers["x-baton-workers"]


async def spent_nano(gateway: Gateway) -> int:
    """What the judge's key has posted today, in nano-dollars."""
    headers = {"authorization": f"Bearer {gateway.facts['admin_key']}"}
    async with httpx.AsyncClient(base_url=gateway.facts["admin_url"], headers=headers, timeout=120) as admin:
        keys = (await admin.get("/admin/keys?q=judge")).json()["data"]
        (one,) = (key for key in keys if key["name"] == "judge")
        assert one["budget_day_usd"] == USD_A_DAY
        shown = (await admin.get(f"/admin/keys/{one['id']}")).json()
        return usd_to_nano(shown["balances"]["day"]["spent_usd"])


async def as_judge(gateway: Gateway, number: int) -> int:
    """Ask the judge under its own key; the status of the reply."""
    key = json.loads((gateway.directory / "judge.json").read_text())["judge_key"]
    text = f"> {WRONG} {number}\n" + "and so on " * 150  # long enough for the tokens that the judge reports
    body = {"model": "wise", "messages": [{"role": "user", "content": text}], "max_completion_tokens": 100}
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=gateway.facts["base_url"], headers=headers, timeout=120) as client:
        return (await client.post("/chat/completions", json=body)).status_code


async def learning(gateway: Gateway) -> list[str]:
    """Who answered each request, until the dear worker answers nine of the latest ten."""
    headers = {"authorization": f"Bearer {gateway.facts['data_key']}"}
    answered: list[str] = []
    async with httpx.AsyncClient(base_url=gateway.facts["base_url"], headers=headers, timeout=120) as client:
        while len(answered) < REQUESTS_MAX:
            answered += [await ask(client, len(answered) + n) for n in range(BATCH)]
            if answered[-BATCH:].count("dear") >= 0.9 * BATCH:
                break
            await asyncio.sleep(DRAW_S + 2.0)  # as slow clients do: the judge has had its look
    return answered


async def test_the_rule_learns_from_the_judge_alone_and_no_day_costs_more_than_it_may() -> None:
    with tempfile.TemporaryDirectory(prefix="baton-outcomes-", ignore_cleanup_errors=True) as place:
        settings = {"BATON_JUDGE_SHARE": "0.5", "BATON_JUDGE_USD_A_DAY": USD_A_DAY}
        async with judged_gateway(Path(place), **settings) as (gateway, judge):
            answered = await learning(gateway)
            assert answered[-BATCH:].count("dear") >= 0.9 * BATCH, answered
            statuses = await asyncio.gather(*(as_judge(gateway, number) for number in range(100)))
            assert set(statuses) == {200, 429}
            limit = usd_to_nano(USD_A_DAY)
            while await spent_nano(gateway) < 0.8 * limit:  # those under way held what was left
                await as_judge(gateway, 1_000)
            statuses = await asyncio.gather(*(as_judge(gateway, number) for number in range(100)))
            assert 429 in statuses
            assert await spent_nano(gateway) <= limit
            assert len(judge.requests) * CALL_NANO <= limit  # by what its server counts
