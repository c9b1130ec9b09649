"""Shadow plans: beside the reply and never in its way, compared, logged, and paid for by the operator or not made."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.adapters.postgres import rows
from gateway.core.log.events import Event
from gateway.core.loop.plan import Plan
from gateway.errors import ConductorError
from gateway.service.policies.shadow import SCOPE, ShadowLimits
from gateway.service.request.catalog import Shares
from tests.kit import KEY, PRICE, ask, plan
from tests.service.versions_kit import LIVE, Following
from tests.waiting import BOUND_S, until


async def shadowed(kit: Following) -> list[Event]:
    """The shadow events, once every shadow plan has ended."""
    await until(lambda: not kit.shadows._running)
    return kit.journal.of_kind("shadow")


async def two(place: Path, said: Any, **more: Any) -> Following:
    """A live version that plans one step on atlas, and a shadow that says `said`."""
    kit = Following(place, {"conductor@2": said}, **more)
    await kit.add(1, *LIVE)
    await kit.add(2, "shadow")
    await kit.settle()
    return kit


@pytest.mark.parametrize(
    ("said", "result", "refusal", "agrees"),
    [
        (plan(("atlas", None, [])), "agrees", None, True),
        (plan(("atlas", "in other words", [])), "agrees", None, True),
        (plan(("birch", None, [])), "differs", None, False),
        ("nonsense", "refused", "not_json", None),
        (ConductorError("slow", "too slow"), "refused", "slow", None),
    ],
)
async def test_the_plan_of_a_shadow_is_in_the_log(
    tmp_path: Path, said: Any, result: str, refusal: str | None, agrees: bool | None
) -> None:
    kit = await two(tmp_path, said)
    running = await kit.serve()
    (event,) = await shadowed(kit)
    assert (running.record.status, running.record.fallback, running.record.policy_version) == (
        *("done", None),
        "conductor@1",
    )
    payload = event.payload
    assert (payload["version"], payload["live_version"]) == ("conductor@2", "conductor@1")
    assert (payload["refusal"], payload["agrees"]) == (refusal, agrees)
    assert payload["rollout_id"] == running.record.id
    assert payload["latency_ms"] >= 0
    assert payload["live_latency_ms"] >= 0
    assert kit.watched.shadows == [("conductor@2", result)]
    (row,) = rows.event_rows(event).policy_shadows
    assert (row["id"], row["version"], row["agrees"]) == (event.id, "conductor@2", agrees)


async def test_a_shadow_calls_no_worker_and_costs_the_client_nothing(tmp_path: Path) -> None:
    kit = await two(tmp_path, plan(("birch", "a", []), ("grove", "b", [0])))
    await kit.serve()
    await shadowed(kit)
    assert [call.worker.name for call in kit.workers.calls] == ["alpha"]
    alone = Following(tmp_path / "alone")
    await alone.add(1, *LIVE)
    await alone.settle()
    await alone.serve()
    assert await kit.posted_nano() == await alone.posted_nano()


async def test_a_request_does_not_wait_for_its_shadow(tmp_path: Path) -> None:
    kit = await two(tmp_path, plan(("birch", None, [])))
    never = asyncio.Event()
    real = kit.shadows._learned.plan

    async def slow(situation: Any, *more: Any) -> Plan:
        if situation.version.version == "conductor@2":
            await never.wait()
        return await real(situation, *more)

    kit.shadows._learned.plan = slow  # type: ignore[method-assign, assignment]
    for _ in range(6):
        async with asyncio.timeout(BOUND_S):
            assert (await kit.serve()).record.status == "done"
    assert len(kit.shadows._running) == 4
    assert kit.watched.shadows == [("conductor@2", "dropped")] * 2
    await kit.shadows.drain()
    assert kit.journal.of_kind("shadow") == []


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.3, 4, 32), (1.0, 60, 60)])
async def test_a_share_of_requests_is_shadowed(tmp_path: Path, share: float, least: int, most: int) -> None:
    kit = await two(tmp_path, plan(("atlas", None, [])), shadow=ShadowLimits(share=share, parallel=60))
    for _ in range(60):
        await kit.serve()
    assert least <= len(await shadowed(kit)) <= most


async def test_a_plan_that_was_sampled_to_explore_is_not_compared(tmp_path: Path) -> None:
    kit = await two(tmp_path, plan(("atlas", None, [])))
    kit.completer._admission._policies = replace(kit.completer._admission._policies, shares=Shares(1.0))
    await kit.serve()
    assert await shadowed(kit) == []


async def test_a_live_version_that_planned_nothing_is_no_disagreement(tmp_path: Path) -> None:
    kit = await two(tmp_path, plan(("atlas", None, [])))
    kit.says["conductor@1"] = "nonsense"
    assert (await kit.serve()).record.fallback == "conductor_not_json"
    (event,) = await shadowed(kit)
    assert event.payload["agrees"] is None
    assert kit.watched.shadows == [("conductor@2", "alone")]


async def test_planning_that_costs_is_the_operators_or_is_not_done(tmp_path: Path) -> None:
    kit = await two(tmp_path, plan(("atlas", None, [])), price=PRICE)
    await kit.serve()
    assert await shadowed(kit) == []
    assert kit.watched.shadows == [("conductor@2", "unpaid")]
    assert (await kit.budgets.balance(SCOPE)).posted_nano == 0


async def test_the_operators_budget_pays_and_ends(tmp_path: Path) -> None:
    limits = ShadowLimits(share=1.0, parallel=1, budget_nano=1_600_000)
    kit = await two(tmp_path, plan(("atlas", None, [])), price=PRICE, shadow=limits)
    for _ in range(40):
        await kit.serve()
        await shadowed(kit)
    balance = await kit.budgets.balance(SCOPE)
    results = {result for _, result in kit.watched.shadows}
    assert results == {"agrees", "unpaid"}
    assert 0 < balance.posted_nano <= limits.budget_nano
    assert balance.held_nano == 0
    ledger = kit.store.rows.ledger
    paid = [row for row in ledger if row["kind"] == "posted" and row["scopes"] == [[SCOPE, None]]]
    assert sum(row["amount_nano"] for row in paid) == balance.posted_nano
    own = {row["id"] for row in kit.store.rows.rollouts}
    assert own.isdisjoint(row["rollout_id"] for row in paid)  # no client sees the operator's money
    assert await kit.open_nano(f"key:{KEY.public_id}") == 0


async def test_a_full_journal_ends_the_shadow_and_nothing_else(tmp_path: Path) -> None:
    kit = await two(tmp_path, plan(("atlas", None, [])))
    real = kit.journal.append

    async def full_for_shadows(*events: Event) -> None:
        kit.journal.full = any(event.kind == "shadow" for event in events)
        await real(*events)

    kit.journal.append = full_for_shadows  # type: ignore[method-assign]
    assert (await kit.serve()).record.status == "done"
    assert await shadowed(kit) == []


async def test_a_bug_in_a_shadow_is_seen_and_harms_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kit = await two(tmp_path, plan(("atlas", None, [])))

    async def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    kit.shadows._write = broken  # type: ignore[method-assign, assignment]
    assert (await kit.serve()).record.status == "done"
    await shadowed(kit)
    assert "a shadow plan of conductor@2 met a bug" in caplog.text


async def test_child_loops_and_later_rounds_are_not_shadowed(tmp_path: Path) -> None:
    kit = await two(tmp_path, plan(("atlas", None, [])))
    kit.says["conductor@1"] = plan(("echo", "go deeper", []))
    await kit.serve(ask(), caps={"depth": 1})
    assert len(await shadowed(kit)) == 1
