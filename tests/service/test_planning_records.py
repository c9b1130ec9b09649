"""The record of planning that failed: every planning call is kept, and the flags of child loops reach the top."""

from __future__ import annotations

import pytest

from gateway.adapters.postgres import rows
from gateway.core.log.rollout import as_payload
from gateway.core.loop.caps import Caps
from gateway.core.loop.plan import PlanLimits, limits_from_json, plan_schema, schema_hash
from gateway.core.loop.prompt import Profile
from gateway.service.loop.conducting import ConductorPlanner, ConductorSettings
from gateway.service.loop.routers import RulePlanner
from gateway.service.request.running import reply_headers
from tests.kit import ONE_STEP, PRICE, Kit, plan


async def test_a_refused_plan_and_the_routers_are_two_rows_of_the_log() -> None:
    kit = Kit((plan(("nobody", None, [])),))
    record = (await kit.serve()).record
    assert [(planned.round, planned.planner, planned.refusal) for planned in record.rounds] == [
        (1, "conductor", "unknown_worker"),
        (2, "rule", None),
    ]
    assert [step.round for step in record.steps] == [2]
    stored = rows.event_rows(next(event for event in kit.journal.of_kind("rollout")))
    assert len({(row["rollout_id"], row["round"]) for row in stored.rounds}) == 2
    assert as_payload(record)["rounds"][1]["plan"] is not None


async def test_a_child_loop_that_met_a_cap_is_told_of_in_the_reply() -> None:
    kit = Kit((plan(("echo", None, [])),), caps=Caps(depth=1, wall_s=60.0))  # every loop asks for another
    record = (await kit.serve()).record
    headers = reply_headers(record)
    assert (headers["x-baton-capped"], headers["x-baton-fallback"]) == ("depth", "conductor_depth_cap")


async def test_every_round_says_what_its_plan_was_allowed() -> None:
    first = plan(("echo", None, []), ("atlas", None, []))
    kit = Kit((first, *ONE_STEP, '{"steps":[]}'), caps=Caps(depth=1, steps=3, wall_s=5.0), rounds=2)
    await kit.serve()
    seen = {}
    for loop in (event.payload for event in kit.journal.of_kind("rollout")):
        for planned in loop["rounds"]:
            allowed = limits_from_json(planned["allowed"])
            assert planned["schema_hash"] == schema_hash(plan_schema(allowed))
            seen[loop["depth"], planned["round"]] = allowed
    assert (seen[0, 1].steps_max, seen[0, 1].first_index, seen[0, 2].first_index) == (3, 0, 2)
    assert "echo" in seen[0, 1].handles
    assert "echo" not in seen[1, 1].handles
    assert seen[1, 1].depth_capped == {"echo"}


async def test_a_routers_round_says_it_too() -> None:
    kit = Kit((plan(("nobody", None, [])),))
    refused, routed = (await kit.serve()).record.rounds
    assert refused.allowed == routed.allowed
    assert routed.schema_hash is None


@pytest.mark.parametrize(
    ("profile", "asked", "default", "logged"),
    [
        ("dial", 3, 7, 3),
        ("dial", None, 7, 7),
        ("dial", None, None, None),
        ("full", 9, None, 9),
        ("compact", 3, 7, None),
    ],
)
async def test_a_round_keeps_the_dial_that_its_prompt_showed(
    profile: Profile, asked: int | None, default: int | None, logged: int | None
) -> None:
    kit = Kit()
    planner = ConductorPlanner(kit.conductor, ConductorSettings(profile, PRICE, 5.0, quality=default))
    kit.catalog._planners["baton"] = (planner, RulePlanner(draws=False))
    planned = (await kit.serve(quality=asked)).record.rounds[0]
    assert planned.quality == logged
    assert (f"quality {logged}" in planned.messages[-1]["content"]) == (profile == "dial" and logged is not None)


@pytest.mark.parametrize("logged", [{}, {"handles": None, "depth_capped": [], "steps_max": 1, "first_index": 0}])
def test_bad_limits_of_a_plan_are_refused(logged: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="limits of a plan"):
        limits_from_json(logged)
    allowed = PlanLimits(("a", "b"), 3, 2, frozenset({"c"}))
    assert limits_from_json(allowed.as_json()) == allowed
