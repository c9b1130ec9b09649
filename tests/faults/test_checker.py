"""The checker sees what it is there to see: each thing that must never be is made by hand, and named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text

from tests.faults.checker import WALL_GRACE_S, _caps, _policy, at_once, check
from tests.faults.client import Client
from tests.faults.site import Site
from tests.faults.upstream import CANARY
from tests.faults.witness import connected

CAPS = {"depth": 2, "rounds": 4, "steps": 5, "parallel": 4, "calls": 16, "tokens": 1000, "cost_nano": 100, "wall_s": 9}
GOOD: dict[str, Any] = {
    **{"caps": CAPS, "hold_nano": 100, "cost_nano": 100, "took_s": 9.0, "attempts": None},
    **{name: CAPS[name] for name in ("depth", "rounds", "steps", "calls", "tokens")},
    **{"policy_used": "conductor", "policy_version": "v@1", "version": "v@1", "versions": 1, "conducted": True},
}
OVER: list[dict[str, Any]] = [
    *({name: CAPS[name] + 1} for name in ("depth", "rounds", "steps", "calls", "tokens")),
    {"hold_nano": 101},
    {"cost_nano": 101},
    {"took_s": 9.0 + WALL_GRACE_S + 1.0},
    {"attempts": [[{"started_us": 1, "finished_us": 9}]] * 5},
]
NAMELESS: list[dict[str, Any]] = [{"policy_used": ""}, {"versions": 2}, {"conducted": False}, {"policy_version": "v@2"}]
CHILD = """
INSERT INTO rollouts SELECT (jsonb_populate_record(NULL::rollouts, to_jsonb(r)
    || jsonb_build_object('id', gen_random_uuid(), 'parent_id', r.id, 'depth', r.depth + 1))).*
FROM rollouts r ORDER BY depth DESC LIMIT 1"""
AGAIN = """
INSERT INTO ledger SELECT (jsonb_populate_record(NULL::ledger, to_jsonb(l)
    || jsonb_build_object('event_id', gen_random_uuid()))).* FROM ledger l WHERE kind = 'dispatched'"""
SECRET = f"INSERT INTO dead_letters (digest, record, error) VALUES ('d', '', '{CANARY}')"  # noqa: S608 - a constant
HOLD = "SELECT event_id FROM ledger WHERE kind = 'hold' LIMIT 1"
# what the checker says, and what was done to the database by hand. In the reverse of the order in which it looks.
TAMPERED = (
    ("I8", ["ALTER TABLE audit DISABLE TRIGGER USER", "UPDATE audit SET why = 'another' WHERE seq = 1"]),
    ("I6: a secret in ..dead_letters", [SECRET]),
    ("I5: depth", [CHILD] * 3),
    ("I4: two calls", [AGAIN, "UPDATE steps SET attempts = attempts || attempts"]),
    ("I4: 6 calls, 0 in the log", ["UPDATE steps SET attempts = '[]'"]),
    ("I3: a whole reply", ["DELETE FROM rollouts WHERE depth = 0"]),
    ("I2: holds", [f"UPDATE ledger SET hold_id = 'another' WHERE event_id = ({HOLD})"]),  # noqa: S608 - a constant
)


def test_a_rollout_within_its_caps_passes() -> None:
    _caps(GOOD, bounded=True)
    _policy(GOOD)
    _policy({**GOOD, "policy_used": "fixed:alpha", "versions": 0, "version": None, "conducted": False})


@pytest.mark.parametrize("over", OVER, ids=[next(iter(over)) for over in OVER])
def test_a_rollout_over_a_cap_is_named(over: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="I5"):
        _caps({**GOOD, **over}, bounded=True)


@pytest.mark.parametrize("nameless", NAMELESS, ids=[next(iter(nameless)) for nameless in NAMELESS])
def test_a_rollout_names_its_policy_and_one_version_of_it(nameless: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="I8"):
        _policy({**GOOD, **nameless})


@pytest.mark.parametrize(
    ("spans", "most"), [([], 0), ([(1, 2), (2, 3)], 1), ([(1, 4), (2, 3), (3, 5)], 2), ([(1, 2)] * 3, 3)]
)
def test_calls_that_only_touch_were_not_at_one_time(spans: Sequence[tuple[int, int]], most: int) -> None:
    assert at_once([[{"started_us": began, "finished_us": ended} for began, ended in spans]]) == most


async def test_the_checker_finds_changes_made_by_hand(here: Site) -> None:
    await here.gateway()
    await here.new_key()
    client = Client(here)
    assert all(reply.whole for reply in await client.many(6, at_once=2))
    await check(here, [client])
    for says, changes in TAMPERED:
        async with connected(here) as connection:
            for change in changes:
                await connection.execute(text(change))
            await connection.commit()
        with pytest.raises(AssertionError, match=says):
            await check(here, [client])


async def test_a_secret_in_an_error_or_on_the_metrics_page_is_found(here: Site) -> None:
    await here.gateway()
    await here.new_key()
    client = Client(here)
    refused = await client.ask(model="nobody")
    assert refused.status == 404
    await check(here, [client])
    client.history.append(replace(refused, text=f"no such model; the key was {here.key}"))
    with pytest.raises(AssertionError, match="I6: a secret in a reply: 404"):
        await check(here, [client])
    client.history.pop()
    here.keys.append("baton_capture_rate")  # which stands there
    with pytest.raises(AssertionError, match="I6: a secret in metrics of g0"):
        await check(here, [client])
