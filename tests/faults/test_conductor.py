"""F7: the conductor fails in six ways, through a whole gateway: a router answers within the deadline, and once it has
failed five times in a row it is left alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from tests.faults.checker import check
from tests.faults.client import Client
from tests.faults.proxy import FaultProxy
from tests.faults.site import Site
from tests.faults.upstream import Behaviour, Bill, Upstream, chunk
from tests.sizes import SLACK, report_row
from tests.upstreams.server import Reply, event, event_stream, json_reply

pytestmark = pytest.mark.long

TIMEOUT_S, DEADLINE_S = 0.5, 20.0
BREAKER_MAX = 5
CALLS = 8


async def hang(conductor: Upstream, bill: Bill) -> Reply:
    await asyncio.sleep(30)
    return Reply()


def says(text: str) -> Behaviour:
    """A plan, streamed in pieces."""

    async def behave(conductor: Upstream, bill: Bill) -> Reply:
        deltas = [chunk({"content": text[at : at + 65_536]}) for at in range(0, len(text), 65_536)]
        return event_stream(map(event, [*deltas, chunk({}, "stop"), "[DONE]"]))

    return behave


async def wrong_version(conductor: Upstream, bill: Bill) -> Reply:
    error = {"message": "The model `planner` does not exist.", "type": "NotFoundError", "param": None, "code": 404}
    return json_reply({"error": error}, 404)


async def not_json(conductor: Upstream, bill: Bill) -> Reply:
    return event_stream([b"data: {oops\n\n"])


NONSENSE = json.dumps({"steps": [{"worker": "nobody", "task": None, "see": []}]})
WAYS: dict[str, Behaviour | None] = {
    "down": None,
    "hangs": hang,
    "bad JSON": not_json,
    "valid nonsense": says(NONSENSE),
    "a plan of 10 MB": says('{"steps": [{"worker": "atlas", "task": "' + "x" * 10_000_000 + '", "see": []}]}'),
    "wrong version": wrong_version,
}


@pytest.fixture
async def planner() -> AsyncIterator[tuple[Upstream, FaultProxy]]:
    async with Upstream() as upstream, FaultProxy(("127.0.0.1", upstream.port)) as proxy:
        yield upstream, proxy


@pytest.mark.timeout(300)
async def test_f7_a_conductor_that_fails_in_six_ways_is_replaced_by_a_router(
    here: Site, planner: tuple[Upstream, FaultProxy]
) -> None:
    conductor, proxy = planner
    await here.gateway(
        BATON_CONDUCTOR=f"http://127.0.0.1:{proxy.port}/v1#planner",
        BATON_CONDUCTOR_INPUT_USD_PER_MTOK="0",
        BATON_CONDUCTOR_OUTPUT_USD_PER_MTOK="0",
        BATON_CONDUCTOR_TIMEOUT_S=str(TIMEOUT_S),
    )
    await here.new_key()
    client, asked_most = Client(here, {"model": "baton", "messages": [{"role": "user", "content": "Say it."}]}), 0
    conductor.behave = says(json.dumps({"steps": [{"worker": "atlas", "task": None, "see": []}]}))
    planned = await client.ask()
    assert planned.headers["x-baton-policy"].startswith("conductor"), planned
    slowest_s = 0.0
    for name, behave in WAYS.items():
        conductor.behave, proxy.refuse = behave, behave is None
        before = len(conductor.bills)
        for _ in range(CALLS):
            reply = await client.ask()
            assert reply.whole, (name, reply)
            assert reply.headers.get("x-baton-fallback", "").startswith("conductor_"), (name, reply.headers)
            slowest_s = max(slowest_s, reply.took_s)
        asked_most = max(asked_most, len(conductor.bills) - before)
    assert slowest_s < DEADLINE_S * SLACK
    await check(here, [client])
    report_row("F7", ways=len(WAYS), answered=len(client.history), failed=0, slowest_s=round(slowest_s, 2))
