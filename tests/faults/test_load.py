"""L1, L3, L4, L5: whole gateways under load, with client, worker, Redis and PostgreSQL on the same machine.

`make test` runs a few seconds of each and asserts what must be true at any speed: no error, nothing lost, doubled or
out of order, and the invariants. `TEST_SIZE=long` runs the matrix's minutes and asserts its numbers too;
FAULTS_LOAD_S=20 makes every row that short.
"""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec

import pytest

from tests.faults.checker import Evidence, check
from tests.faults.load import (
    LoadReport,
    Worker,
    drive,
    gateways,
    lasts_s,
    limited_key,
    most_mib,
    percentile,
    pool,
    question,
    report,
    settle,
    worker,
)
from tests.faults.site import Site
from tests.sizes import SIZE, sized

pytestmark = pytest.mark.long

LONG = SIZE == "long"
SECONDS = sized(ci=2.0, long=600.0)
IN_FLIGHT = sized(ci=16, long=128)
USERS = 8
TIMEOUT_S = 1800
PLAN_MS = {"plan": 50, "atlas": 60, "birch": 80, "cedar": 100}
CRITICAL_MS = PLAN_MS["plan"] + PLAN_MS["cedar"] + PLAN_MS["atlas"]
PLAN = [
    *({"worker": name, "task": f"Answer as {name}.", "see": []} for name in ("atlas", "birch", "cedar")),
    {"worker": "atlas", "task": "Merge the answers above.", "see": [0, 1, 2]},
]
PLANS_S = sized(ci=5, long=42)
STREAMS = sized(ci=20, long=1000)
TICK_MS = sized(ci=100, long=500)
OPENED_S = 50.0  # streams a second


def all_answered(here: Site, result: LoadReport, evidence: Evidence, calls: int, calls_each: int = 1) -> None:
    """Every request had its reply, every reply its rollout, every call its request."""
    assert result.errors() == 0, (result.statuses, result.examples, here.complaints())
    assert len(evidence.rollouts) == len(result.ids) == result.statuses["200"]
    assert calls == len(result.ids) * calls_each


# ---------------------------------------------------------------- L1, L3


@pytest.mark.timeout(TIMEOUT_S)
async def test_l1_single_steps_under_budgets_of_four_scopes(here: Site) -> None:
    async with worker() as upstream:
        here.worker_url = upstream.url
        pool(here, {"name": "alpha", "model": "m"})
        result, evidence, calls, mib = await _single_steps(here, upstream, 2)
    report("L1", result, rps=round(result.rps), ms_p50=result.ms(50, "200"), ms_p99=result.ms(99, "200"), **mib)
    all_answered(here, result, evidence, calls)
    assert not LONG or result.rps >= 300


@pytest.mark.litellm
@pytest.mark.skipif(not LONG, reason="loading LiteLLM takes longer than the load would")
@pytest.mark.timeout(TIMEOUT_S)
async def test_l3_single_steps_through_litellm(here: Site) -> None:
    if find_spec("litellm") is None:  # not imported here: the gateways do that, with its switches set
        pytest.skip("needs the litellm extra")
    async with worker() as upstream:
        here.worker_url = f"http://127.0.0.1:{upstream.port}"
        pool(here, {"name": "alpha", "kind": "litellm", "model": "anthropic/claude-haiku-4-5"})
        result, evidence, calls, mib = await _single_steps(here, upstream, 2)
    report("L3", result, rps=round(result.rps), ms_p50=result.ms(50, "200"), ms_p99=result.ms(99, "200"), **mib)
    all_answered(here, result, evidence, calls)
    assert not LONG or result.rps >= 120


async def _single_steps(here: Site, upstream: Worker, n: int) -> tuple[LoadReport, Evidence, int, dict[str, object]]:
    """The report of the clients, the evidence, the worker's calls, and the memory of the gateways."""
    serving = await gateways(here, n)
    await limited_key(here)
    rest = [round(one.rss_mib()) for one in serving]
    bodies = [question(user=f"user-{number}") for number in range(USERS)]
    result = await drive(here, upstream, in_flight=IN_FLIGHT, seconds=lasts_s(SECONDS), bodies=bodies)
    after = [round(one.rss_mib()) for one in serving]
    calls = await settle(here, upstream)
    evidence = await check(here, [result.client(here)])
    return result, evidence, calls, {"rss_mib_at_rest": max(rest), "rss_mib_after": max(after)}


# ---------------------------------------------------------------- L4


@pytest.mark.timeout(TIMEOUT_S)
async def test_l4_a_plan_of_three_steps_and_a_merge(here: Site) -> None:
    steps = {name: ms for name, ms in PLAN_MS.items() if name != "plan"}
    async with worker(json.dumps({"steps": PLAN}, separators=(",", ":"))) as upstream:
        here.worker_url = upstream.url
        pool(here, *({"name": name, "model": f"wait-{ms}"} for name, ms in steps.items()))
        conductor = {
            "BATON_CONDUCTOR": f"{upstream.url}#plan-{PLAN_MS['plan']}",
            "BATON_CONDUCTOR_INPUT_USD_PER_MTOK": "0",
            "BATON_CONDUCTOR_OUTPUT_USD_PER_MTOK": "0",
        }
        await gateways(here, 2 if LONG else 1, conductor)
        await limited_key(here)
        result = await drive(
            here, upstream, rate=PLANS_S, seconds=lasts_s(SECONDS), bodies=[question(model="baton/conductor")]
        )
        calls = await settle(here, upstream, priced="wait-")
        evidence = await check(here, [result.client(here)])
    added_ms = [ms - CRITICAL_MS for ms in result.took_ms.get("200", [])]
    spread = {f"over_slowest_ms_p{share}": percentile(added_ms, share) for share in (50, 95, 99)}
    own_ms = percentile(result.overhead_ms, 99)
    calls_s = round(calls / result.seconds)
    report("L4", result, plans_s=round(result.rps, 1), upstream_calls_s=calls_s, **spread, own_overhead_ms_p99=own_ms)
    all_answered(here, result, evidence, calls, calls_each=len(PLAN) + 1)
    for rollout in evidence.rollouts:
        assert rollout["policy_used"] == "conductor", rollout
        assert len(rollout["workers"]) == len(PLAN), rollout
    assert not LONG or (result.rps >= 40 and spread["over_slowest_ms_p99"] <= 80)


# ---------------------------------------------------------------- L5


@pytest.mark.timeout(TIMEOUT_S)
async def test_l5_open_streams_lose_and_reorder_nothing(here: Site) -> None:
    opening_s = STREAMS / OPENED_S
    open_s = opening_s + lasts_s(SECONDS)
    tokens = round(open_s * 1000 / TICK_MS)
    async with worker() as upstream:
        here.worker_url = upstream.url
        pool(here, {"name": "alpha", "model": f"ticks-{TICK_MS}", "tokens": tokens, "timeout_s": 2 * open_s + 60})
        serving = await gateways(here, 2 if LONG else 1, {"BATON_CAPS_WALL_S_MAX": str(2 * open_s + 60)})
        await limited_key(here)
        watch = asyncio.create_task(most_mib(serving))
        streams = {"streams": STREAMS, "opening_s": opening_s, "tokens": tokens}
        bodies = [question(stream=True, max_tokens=tokens)]
        result = await drive(here, upstream, **streams, seconds=open_s, bodies=bodies)
        watch.cancel()
        calls = await settle(here, upstream)
        evidence = await check(here, [result.client(here)])
    rss_mib = await watch
    numbers = {"streams": STREAMS, "open_at_once": result.most_under_way, "chunks": result.chunks, "rss_mib": rss_mib}
    report("L5", result, **numbers)
    all_answered(here, result, evidence, calls)
    assert result.most_under_way == STREAMS
    assert result.chunks == STREAMS * tokens
    assert not LONG or rss_mib <= 600
