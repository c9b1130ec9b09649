"""What counts as trainable, askable and the same question, on a real PostgreSQL and as the policy package has it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.inserts import insert_outcome, insert_rows
from gateway.adapters.postgres.reports.readiness import PostgresReadiness
from gateway.core.log.rollout import RolloutRecord
from gateway.core.policies.readiness import JudgedRequest
from policy.dataset.read import requests_of, rows_of, snapshot
from policy.dataset.select import Selection
from policy.gate.traffic.requests import _fault
from tests.records import T0_US, a_rollout, a_round, an_outcome, rollout_event

T0 = rows.EPOCH + timedelta(microseconds=T0_US)
DRAWN: dict[str, Any] = {
    "planner": "rule",
    "plan_token_ids": [],
    "prompt_token_ids": [],
    "plan_logprobs": [],
    "decision_mask": [],
}


async def add(engine: AsyncEngine, *records: RolloutRecord, judged: bool = True) -> None:
    new = rows.Rows()
    for record in records:
        new.extend(rows.event_rows(rollout_event(record)))
    async with engine.begin() as connection:
        await connection.run_sync(insert_rows, new)
        for record in records if judged else ():
            await connection.run_sync(insert_outcome, an_outcome(record.id, 1.0))


async def counted(engine: AsyncEngine, filters: Mapping[str, Any] | None = None, prompt: str | None = None) -> Any:
    return list(await PostgresReadiness(engine).judged(prompt, filters or {}))


async def only(engine: AsyncEngine, record: RolloutRecord, prompt: str | None = None) -> JudgedRequest:
    await add(engine, record)
    (one,) = await counted(engine, prompt=prompt)
    assert isinstance(one, JudgedRequest)
    return one


def asking(content: Any, **more: Any) -> dict[str, Any]:
    return {"model": "baton", "messages": [{"role": "user", "content": content}], **more}


async def test_only_what_was_judged_and_may_train_counts(pg_engine: AsyncEngine) -> None:
    await add(pg_engine, a_rollout(), a_rollout(train=False), a_rollout(status="failed"))
    await add(pg_engine, a_rollout(), judged=False)
    assert len(await counted(pg_engine)) == 1


async def test_a_plan_with_log_probs_at_a_temperature_trains(pg_engine: AsyncEngine) -> None:
    found = await only(pg_engine, a_rollout())
    assert (found.sampled, found.drawn, found.askable, found.key) == (True, False, True, "key1")


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": {"temperature": 0.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}},
        {"sampling": {"temperature": 1.0, "top_p": 0.9, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}},
        {"sampling": {"temperature": 1.0}},
        {"plan_logprobs": []},
        {"plan_token_ids": [], "plan_logprobs": []},
        {"allowed": None},
    ],
)
async def test_a_plan_that_explores_nothing_or_has_no_log_probs_does_not(
    pg_engine: AsyncEngine, changes: dict[str, Any]
) -> None:
    assert not (await only(pg_engine, a_rollout(rounds=[a_round(**changes)]))).trains


async def test_plans_of_another_prompt_are_not_counted(pg_engine: AsyncEngine) -> None:
    assert (await only(pg_engine, a_rollout(), prompt="ab12")).sampled
    (other,) = await counted(pg_engine, prompt="cd34")
    assert not other.sampled


@pytest.mark.parametrize(
    ("changes", "drawn"),
    [
        ({"decision": {"planner": "rule", "propensity": 0.93}}, True),
        ({"decision": {"planner": "rule", "propensity": 0.0}}, False),
        ({"decision": {"planner": "vote"}}, False),
        ({"decision": None}, False),
        ({"decision": {"planner": "rule", "propensity": 0.5}, "plan": None}, False),
    ],
)
async def test_a_plan_that_the_rule_drew_trains_if_its_propensity_is_known(
    pg_engine: AsyncEngine, changes: dict[str, Any], drawn: bool
) -> None:
    assert (await only(pg_engine, a_rollout(rounds=[a_round(**DRAWN | changes)]))).drawn is drawn


async def test_what_the_rule_planned_after_the_conductor_failed_does_not_train(pg_engine: AsyncEngine) -> None:
    planned = a_round(**DRAWN, decision={"planner": "rule", "propensity": 0.5})
    assert not (await only(pg_engine, a_rollout(rounds=[planned], fallback="slow"))).trains


@pytest.mark.parametrize(
    ("request_body", "askable"),
    [
        (asking("What is 2+2?"), True),
        (asking([{"type": "text", "text": "What is 2+2?"}]), True),
        (asking([{"type": "image_url", "image_url": {"url": "data:,"}}]), False),
        (asking("What is 2+2?", tools=[{"type": "function"}]), False),
        (asking("What is 2+2?", tools=[]), True),
        (asking(None), False),
        ({"model": "baton"}, False),
    ],
)
async def test_the_gate_can_ask_again_what_its_own_reader_takes(
    pg_engine: AsyncEngine, database_url: str, request_body: dict[str, Any], askable: bool
) -> None:
    found = await only(pg_engine, a_rollout(request=request_body))
    with snapshot(database_url) as connection:
        (stored,) = requests_of(connection, Selection())
    assert found.askable is askable is (_fault(stored) is None)


async def test_questions_are_the_same_as_training_finds_them(pg_engine: AsyncEngine, database_url: str) -> None:
    texts = ["What is 2+2?", " what is\n2+2? ", "What is 3+3?", "", ""]
    await add(pg_engine, *(a_rollout(request=asking(text)) for text in texts))
    ours = [one.group for one in await counted(pg_engine)]
    with snapshot(database_url) as connection:
        theirs = [row.group for row in rows_of(connection, Selection())]
    assert [ours.index(one) for one in ours] == [theirs.index(one) for one in theirs] == [0, 0, 2, 3, 4]


async def test_the_filters_of_a_job_hold(pg_engine: AsyncEngine) -> None:
    later = T0_US + 60_000_000
    await add(pg_engine, a_rollout(), a_rollout(created_us=later, pool_name="b", key_id="key2", tags={"team": "red"}))
    for filters in (
        {"since": (T0 + timedelta(seconds=1)).isoformat()},
        {"pools": ["b"]},
        {"keys": ["key2"]},
        {"tags": [["team", "red"]]},
    ):
        (one,) = await counted(pg_engine, filters)
        assert one.key == "key2", filters
    assert [one.key for one in await counted(pg_engine, {"until": T0 + timedelta(seconds=1)})] == ["key1"]
    assert await counted(pg_engine, {"policy_versions": ["conductor@8"]}) == []


async def test_the_bound_is_counted_over_the_versions_that_a_job_trains_on(pg_engine: AsyncEngine) -> None:
    """The job's own reader makes it of the selected requests: a version's few may all be the latest."""
    versions: tuple[dict[str, Any], ...] = tuple({"policy_version": f"conductor@{number}"} for number in (7, 8))
    await add(pg_engine, *(a_rollout(rounds=[a_round(**version)], **version) for version in versions))
    (one,) = await counted(pg_engine, {"policy_versions": ["conductor@8"]})
    assert one.sampled


async def test_the_shares_rise_while_too_few_can_be_trained_on_and_some_were_judged(pg_engine: AsyncEngine) -> None:
    reader = PostgresReadiness(pg_engine)
    assert await reader.trainable(2) is None, "nothing was judged"
    greedy = a_round(sampling={"temperature": 0.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0})
    await add(pg_engine, a_rollout(rounds=[greedy]))
    assert await reader.trainable(2) == 0
    await add(pg_engine, *(a_rollout() for _ in range(3)))
    assert await reader.trainable(2) == 2
