"""A budget worth a few requests and ten times as many at once, in each scope and each form that a request has: it is
used before the first refusal, nothing passes it, and nothing stays held."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.faults.checker import READY_S
from tests.faults.client import QUESTION, Client
from tests.faults.site import Gateway, Site
from tests.faults.test_batches import ended, line, made, sdk_of
from tests.faults.upstream import Bill, Upstream, chunk, good, usage
from tests.faults.witness import at_rest, balances
from tests.sizes import report_row, sized
from tests.upstreams.server import EVENTS, Reply, event
from tests.waiting import BOUND_S, until

WORTH, ASKED = 20, sized(small=50, ci=200, long=200)
FORMS = ("named", "stream", "responses", "messages", "rule", "conductor", "vote", "cascade", "org", "user", "session")
LATER = ("batch", "background")
USED_MIN = 0.8
POOL = """
workers:
  - {{name: alpha, handle: atlas, kind: openai, model: m, answers: true, url: "{url}", output_tokens_max: 4096,
     price: {{input_usd_per_mtok: 1, output_usd_per_mtok: 2}}}}
  - {{name: beta, handle: birch, kind: openai, model: m, url: "{url}", output_tokens_max: 4096,
     price: {{input_usd_per_mtok: 1, output_usd_per_mtok: 2}}}}
  - {{name: gamma, handle: grove, kind: openai, model: m, url: "{url}", output_tokens_max: 4096,
     price: {{input_usd_per_mtok: 1, output_usd_per_mtok: 2}}}}
  - {{name: vote, handle: tally, kind: tool, url: "builtin:vote"}}
pools: {{main: [alpha, beta, gamma, vote]}}
default: main
"""
PLAN = {"steps": [{"worker": "birch", "task": "think", "see": []}, {"worker": "grove", "task": None, "see": [0]}]}
MODELS = {"rule": "baton/rule", "conductor": "baton/conductor", "vote": "baton/vote", "cascade": "baton/cascade"}


@dataclass(slots=True)
class Sent:
    """What the clients of one form saw. `done`: (when, nano-dollars) of each answer."""

    statuses: Counter[str] = field(default_factory=Counter)
    done: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)

    def before(self) -> int:
        """Answers before the first refusal."""
        first = min(self.refused, default=float("inf"))
        return sum(at < first for at in self.done)


async def planned(upstream: Upstream, bill: Bill) -> Reply:
    """A good worker that plans if it is asked for a plan."""
    if "response_format" not in bill.body:
        return await good(upstream, bill)
    bill.prompt_tokens, bill.completion_tokens = len(json.dumps(bill.body)) // 4, 150
    return Reply(headers=EVENTS, pieces=_plan(bill))


async def _plan(bill: Bill) -> AsyncGenerator[bytes, None]:
    yield event(chunk({"content": json.dumps(PLAN)}))
    yield event(chunk({}, "stop")) + event({**chunk({}), "choices": [], "usage": usage(bill)}) + event("[DONE]")


def request_of(form: str) -> tuple[str, dict[str, Any], dict[str, str]]:
    """(path, body, headers) of a request of this form."""
    messages, model = QUESTION["messages"], MODELS.get(form, "alpha")
    if form == "responses":
        return "/responses", {"model": model, "input": "Say something.", "max_output_tokens": 16}, {}
    if form == "messages":
        return "/messages", {"model": model, "messages": messages, "max_tokens": 16}, {}
    more = {"stream": True} if form == "stream" else {"user": "somebody"} if form == "user" else {}
    headers = {"x-baton-session": "one"} if form == "session" else {}
    return "/chat/completions", {"model": model, "messages": messages, "max_tokens": 16, **more}, headers


async def ask(here: Site, gateway: Gateway, form: str, sent: Sent, **headers: str) -> None:
    path, body, own = request_of(form)
    headers = {"authorization": f"Bearer {here.key}", **own, **headers}
    async with here.http.post(gateway.facts["base_url"] + path, json=body, headers=headers) as reply:
        text = await reply.text()
        whole = reply.status == 200 and (form != "stream" or "[DONE]" in text)
        error = None if whole else json.loads(text.removeprefix("data: ").partition("\n\n")[0])["error"]
        sent.statuses[
            "200" if whole else f"{reply.status} {(error or {}).get('code') or (error or {}).get('type')}"
        ] += 1
        (sent.done if whole else sent.refused).append(time.monotonic())


async def admin(here: Site, method: str, path: str, body: dict[str, Any]) -> None:
    facts = here.gateways[0].facts
    headers = {"authorization": f"Bearer {facts['admin_key']}"}
    async with here.http.request(method, f"{facts['admin_url']}/admin{path}", json=body, headers=headers) as reply:
        assert reply.status in (200, 201), await reply.text()


async def budgeted(here: Site, form: str, nano: int) -> tuple[str, dict[str, str]]:
    """A key whose requests may cost so much in the scope of this form; the start of that scope's name, and the headers
    of its requests."""
    usd = f"{nano / 1e9:.9f}"
    if form == "org":
        await admin(here, "POST", "/orgs", {"name": "small", "budget_usd": usd})
        await here.new_key(org="small")
        return "org:small", {}
    if form == "user":
        await here.new_key(user_budget_usd=usd)
        return f"user:{here.key_id}", {}
    if form == "session":
        await here.new_key()
        return f"session:{here.key_id}", {"x-baton-session-usd": usd}
    await here.new_key(nano)
    return f"key:{here.key_id}", {}


async def spent(here: Site, scope: str) -> int:
    """The nano-dollars of a scope over its life."""
    posted, _ = await balances(here)
    return max((nano for name, nano in posted.items() if name.startswith(scope)), default=0)


async def price(here: Site, gateway: Gateway, form: str) -> int:
    """What one request of this form costs."""
    await here.new_key()
    sent = Sent()
    await ask(here, gateway, form, sent)
    assert sent.statuses == {"200": 1}, sent.statuses
    await until(lambda: at_rest(here), BOUND_S)
    return await spent(here, f"key:{here.key_id}")


async def at_once(here: Site, gateway: Gateway, form: str) -> tuple[Sent, int, int]:
    """Send ten times what the budget is worth, all at once; (what came, what one costs, what was spent)."""
    cost = await price(here, gateway, form)
    scope, headers = await budgeted(here, form, WORTH * cost)
    sent = Sent()
    await asyncio.gather(*(ask(here, gateway, form, sent, **headers) for _ in range(ASKED)))
    await until(lambda: at_rest(here), BOUND_S)
    return sent, cost, await spent(here, scope)


async def in_a_batch(here: Site, gateway: Gateway) -> tuple[Sent, int, int]:
    cost, sent = await price(here, gateway, "named"), Sent()
    await here.new_key()
    async with sdk_of(here, gateway) as sdk:
        lines = [line(f"line-{n}", "Say something.", max_tokens=16) for n in range(2 * WORTH)]
        usd = {"x-baton-max-cost-usd": f"{WORTH * cost / 1e9:.9f}"}
        batch = await ended(sdk, await made(sdk, lines, extra_headers=usd))
        assert batch.request_counts is not None
        sent.statuses = Counter({"200": batch.request_counts.completed, "refused": batch.request_counts.failed})
        sent.done = [0.0] * batch.request_counts.completed
        return sent, cost, await spent(here, f"batch:{batch.id}")


async def in_the_background(here: Site, gateway: Gateway) -> tuple[Sent, int, int]:
    cost, sent = await price(here, gateway, "responses"), Sent()
    scope, _ = await budgeted(here, "background", WORTH * cost)
    async with sdk_of(here, gateway) as sdk:

        async def one() -> str:
            asked: Any = {"model": "alpha", "input": "Say something.", "max_output_tokens": 16, "background": True}
            response = await sdk.responses.create(**asked)
            while response.status in ("queued", "in_progress"):
                await asyncio.sleep(0.2)
                response = await sdk.responses.retrieve(response.id)
            return str(response.status)

        async with asyncio.timeout(2 * BOUND_S):
            sent.statuses = Counter(await asyncio.gather(*(one() for _ in range(2 * WORTH))))
        sent.done = [0.0] * sent.statuses["completed"]
    await until(lambda: at_rest(here), BOUND_S)
    return sent, cost, await spent(here, scope)


async def test_a_budget_is_used_to_its_end_in_each_scope_and_form(here: Site) -> None:
    here.place.joinpath("pool.yaml").write_text(POOL.format(url=here.upstream.base))
    here.upstream.behave, here.upstream.delay_s = planned, 0.02
    gateway = await here.gateway(BATON_IN_FLIGHT_MAX="500", BATON_REDIS_TIMEOUT_S="5", BATON_BUDGET_WAIT_S="60")
    await here.ready(READY_S)
    runs: dict[str, Callable[[], Awaitable[tuple[Sent, int, int]]]] = {
        form: lambda form=form: at_once(here, gateway, form)  # type: ignore[misc]
        for form in FORMS
    }
    runs |= {"batch": lambda: in_a_batch(here, gateway), "background": lambda: in_the_background(here, gateway)}
    short = []
    for form, run in runs.items():
        sent, cost, used = await run()
        budget = WORTH * cost
        share, refused = sent.before() * cost / budget, sum(sent.statuses.values()) - len(sent.done)
        report_row(
            "held",
            form=form,
            cost_nano=cost,
            served=len(sent.done),
            refused=refused,
            used=round(used / budget, 3),
            used_before_the_first_refusal=round(share, 3),
        )
        assert used <= budget, (form, sent.statuses)
        if refused and (used < USED_MIN * budget or share < USED_MIN):
            short.append((form, used / budget, share, dict(sent.statuses)))
    assert short == []


async def test_a_budget_worth_many_small_requests_serves_them_all_at_once(here: Site) -> None:
    here.place.joinpath("pool.yaml").write_text(POOL.format(url=here.upstream.base))
    here.upstream.delay_s = 0.3
    gateway = await here.gateway(BATON_REDIS_TIMEOUT_S="5", BATON_BUDGET_WAIT_S="0")
    cost = await price(here, gateway, "named")
    await here.new_key(500 * cost)
    client = Client(here, {**QUESTION, "max_tokens": 16})
    await client.many(40, at_once=40)
    assert client.statuses() == {"200": 40}


pytestmark = pytest.mark.timeout(600)
