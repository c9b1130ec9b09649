"""The record of planning that failed: every planning call is kept, and the flags of child loops reach the top."""

from __future__ import annotations

from gateway.adapters.postgres import rows
from gateway.core.log.rollout import as_payload
from gateway.core.loop.caps import Caps
from gateway.service.request.running import reply_headers
from tests.kit import Kit, plan


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
    kit = Kit((plan(("echo", None, [])),), caps=Caps(depth=1, wall_s=5.0))  # every loop asks for another
    record = (await kit.serve()).record
    headers = reply_headers(record)
    assert (headers["x-baton-capped"], headers["x-baton-fallback"]) == ("depth", "conductor_depth_cap")
