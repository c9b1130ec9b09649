"""The operator's sums, pages and look-ups on a real PostgreSQL."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.admin import PostgresAdmin
from gateway.adapters.postgres.inserts import insert_outcome, insert_rows
from gateway.adapters.postgres.reports import search
from gateway.adapters.postgres.reports.overview import PostgresReports
from gateway.core.access.audit import Act
from gateway.core.log.events import Event, uuid7
from gateway.core.log.rollout import AttemptRecord, RolloutRecord
from gateway.core.loop.experience.likeness import EMBEDDING_DIM
from gateway.errors import BadRequest, Unavailable
from gateway.service.ports.admin import KeyRow, RolloutsQuery
from tests.postgres_server import PostgresServer
from tests.records import T0_US, a_rollout, a_round, a_step, an_outcome, new_id, rollout_event

T0 = rows.EPOCH + timedelta(microseconds=T0_US)
UNTIL = T0 + timedelta(minutes=5)
EVERYTHING = RolloutsQuery(limit=50)


@pytest.fixture
def reports(pg_engine: AsyncEngine) -> PostgresReports:
    return PostgresReports(pg_engine)


async def add(engine: AsyncEngine, *records: RolloutRecord) -> None:
    new = rows.Rows()
    for record in records:
        new.extend(rows.event_rows(rollout_event(record)))
    async with engine.begin() as connection:
        await connection.run_sync(insert_rows, new)


async def rate(engine: AsyncEngine, rollout_id: str, value: float) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(insert_outcome, an_outcome(rollout_id, value))


def says(content: str) -> dict[str, Any]:
    """A reply."""
    return {"choices": [{"message": {"role": "assistant", "content": content}}]}


def taking(latency_ms: int, after_s: int = 0, **changes: Any) -> RolloutRecord:
    """A rollout of that latency which began `after_s` after T0."""
    began_us = T0_US + after_s * 1_000_000
    changes = {"id": uuid7(began_us // 1000)} | changes
    return a_rollout(created_us=began_us, finished_us=began_us + latency_ms * 1000, **changes)


async def test_totals_count_top_level_requests_of_the_window_only(
    reports: PostgresReports, pg_engine: AsyncEngine
) -> None:
    top = taking(100, cost_nano=10, overhead_ms=1.0)
    await add(
        pg_engine,
        top,
        taking(300, 1, cost_nano=20, overhead_ms=3.0, status="failed", error={"code": "x"}, steps=[]),
        taking(200, 2, cost_nano=30, overhead_ms=2.0, fallback="conductor_slow", capped="cost", steps=[]),
        taking(500, 3, cost_nano=40, overhead_ms=9.0, status="aborted", steps=[]),
        taking(9_000, 0, cost_nano=10**6, parent_id=top.id, depth=1, steps=[]),
        taking(9_000, -600, cost_nano=10**6, steps=[]),
        taking(9_000, 301, cost_nano=10**6, steps=[]),
    )
    found = await reports.overview(UNTIL, 600)
    assert found["totals"] == {
        "requests": 4,
        "errors": 1,
        "aborted": 1,
        "fallbacks": 1,
        "capped": 1,
        "cost_nano": 100,
        "latency_p50_ms": 250.0,
        "latency_p95_ms": 470.0,
        "overhead_p50_ms": 2.5,
        "overhead_p95_ms": 8.1,
    }
    assert (found["truncated"], found["since"]) == (False, (UNTIL - timedelta(seconds=600)).isoformat())
    assert json.loads(json.dumps(found, allow_nan=False)) == found


async def test_nothing_logged_is_zero_not_an_error(reports: PostgresReports) -> None:
    found = await reports.overview(UNTIL, 900)
    assert (found["totals"]["requests"], found["totals"]["cost_nano"], found["totals"]["latency_p50_ms"]) == (
        0,
        0,
        None,
    )
    assert [found[name] for name in ("series", "by_key", "by_policy", "by_worker")] == [[], [], [], []]


async def test_the_series_has_sixty_parts_and_both_ends_of_the_window_are_in_them(
    reports: PostgresReports, pg_engine: AsyncEngine
) -> None:
    await add(pg_engine, taking(1, -299), taking(1, 0), taking(1, 1), taking(1, 300))
    series = (await reports.overview(UNTIL, 600))["series"]
    assert [(part["bucket"], part["requests"]) for part in series] == [(0, 1), (30, 2), (59, 1)]


async def test_sums_by_key_and_policy_are_of_that_key_and_policy(
    reports: PostgresReports, pg_engine: AsyncEngine
) -> None:
    await PostgresAdmin(pg_engine).key_insert(a_key("key1", "shop"), Act("test"))
    await add(
        pg_engine,
        taking(100, cost_nano=5, key_id="key1"),
        taking(100, 1, cost_nano=7, key_id="key1", policy_used="rule", status="failed"),
        taking(100, 2, cost_nano=9, key_id="gone", policy_used="rule"),
    )
    found = await reports.overview(UNTIL, 600)
    by_key = [(r["key_id"], r["key_name"], r["requests"], r["errors"], r["cost_nano"]) for r in found["by_key"]]
    assert by_key == [("key1", "shop", 2, 1, 12), ("gone", None, 1, 0, 9)]
    by_policy = [(r["policy"], r["requests"], r["cost_nano"]) for r in found["by_policy"]]
    assert by_policy == [("rule", 2, 16), ("conductor", 1, 5)]


async def test_workers_are_counted_by_call_and_child_loops_count(
    reports: PostgresReports, pg_engine: AsyncEngine
) -> None:
    tries = [AttemptRecord(T0_US, T0_US + 1, "upstream_timeout"), AttemptRecord(T0_US + 2, T0_US + 3)]
    tries.append(AttemptRecord(T0_US, T0_US + 1, worker="sum"))  # a call beside the step, which is no retry of it
    top = taking(900, steps=[a_step(0, "alpha", attempts=tries), a_step(1, "beta")])
    failed = a_step(0, "alpha", status="failed", finished_us=T0_US + 10**8, cost_nano=0, attempts=[])
    await add(pg_engine, top, taking(500, parent_id=top.id, depth=1, steps=[failed]))
    alpha, beta = (await reports.overview(UNTIL, 600))["by_worker"]
    assert (alpha["worker"], alpha["calls"], alpha["errors"], alpha["retries"]) == ("alpha", 2, 1, 1)
    assert (alpha["cost_nano"], alpha["tokens"], alpha["latency_p95_ms"]) == (400, 20, 100.0)
    assert (beta["worker"], beta["calls"]) == ("beta", 1)


async def test_what_was_refused_for_want_of_money_is_neither_a_call_nor_an_error_of_a_worker(
    reports: PostgresReports, pg_engine: AsyncEngine
) -> None:
    for _ in range(3):
        refused = a_step(1, "onyx", status="refused", error="cap_reached", cost_nano=0, attempts=[])
        await add(pg_engine, taking(500, steps=[a_step(0, "onyx"), refused]))
    (onyx,) = (await reports.overview(UNTIL, 600))["by_worker"]
    assert (onyx["worker"], onyx["calls"], onyx["errors"]) == ("onyx", 3, 0)
    assert (await reports.workers(UNTIL, 600, ["onyx"]))["errors"] == []


async def test_dollars_of_workers_sum_to_the_total_where_plans_begin_loops(
    reports: PostgresReports, pg_engine: AsyncEngine
) -> None:
    child = taking(500, depth=1, rounds=[], cost_nano=70, steps=[a_step(0, "beta", cost_nano=70)])
    steps = [a_step(0, "alpha", cost_nano=30), a_step(1, "self", cost_nano=70, child_rollout_id=child.id)]
    top = taking(900, rounds=[], cost_nano=100, steps=steps)
    child.parent_id = top.id
    await add(pg_engine, top, child)
    overview = await reports.overview(UNTIL, 600)
    spent = {row["worker"]: row["cost_nano"] for row in overview["by_worker"]}
    assert spent == {"alpha": 30, "beta": 70, "self": 0}
    assert sum(spent.values()) == overview["totals"]["cost_nano"]


async def test_the_gauges_of_the_stores_are_of_the_last_hour_and_day(
    reports: PostgresReports, pg_engine: AsyncEngine
) -> None:
    now = datetime.now(UTC)
    now_us = int(now.timestamp() * 1e6)
    new = rows.Rows()
    for hold_id, kinds in {"h1": ("hold",), "h2": ("hold", "uncertain"), "h3": ("hold", "posted")}.items():
        payload = {"hold_id": hold_id, "rollout_id": new_id(), "scopes": [["key:key1", None]]}
        amounts = {"amount_nano": 3_000_000_000, "charged_nano": 3_000_000_000}
        for kind in kinds:
            event = Event.new("hold" if kind == "hold" else "settle", now_us, {**payload, **amounts, "state": kind})
            new.extend(rows.event_rows(event))
    judged = a_rollout(created_us=now_us, policy_assigned="conductor@7", depth=0)
    new.extend(rows.event_rows(rollout_event(judged)))
    async with pg_engine.begin() as connection:
        await connection.run_sync(insert_rows, new)
        await connection.run_sync(insert_outcome, an_outcome(judged.id, 0.5))
    found = {(name, label): value for name, label, value in await reports.figures(now)}
    assert (found["holds", None], found["held_usd", None]) == (1, 3.0)
    assert (found["uncertain", None], found["uncertain_usd", None]) == (1, 3.0)
    assert (found["version_requests", "conductor@7"], found["outcomes", "conductor@7"]) == (1, 1)
    assert found["reward", "conductor@7"] == 0.5
    later = {name: value for name, _, value in await reports.figures(now + timedelta(days=2))}
    assert (later["holds"], later["uncertain"]) == (0, 0)


async def test_a_window_too_full_is_cut_to_its_latest_and_says_so(pg_engine: AsyncEngine) -> None:
    await add(pg_engine, *(taking(10, second, cost_nano=second) for second in range(4)))
    found = await PostgresReports(pg_engine, rollouts_max=2).overview(UNTIL, 600)
    assert (found["truncated"], found["totals"]["requests"], found["totals"]["cost_nano"]) == (True, 2, 5)
    assert {row["worker"]: row["calls"] for row in found["by_worker"]} == {"alpha": 2, "beta": 2}


async def test_calls_before_and_after_the_window_do_not_count(reports: PostgresReports, pg_engine: AsyncEngine) -> None:
    await add(pg_engine, *(taking(10, second) for second in (-301, -300, 0, 300, 301)))
    found = await reports.overview(UNTIL, 600)
    assert (found["totals"]["requests"], found["series"][0]["bucket"], found["series"][-1]["bucket"]) == (2, 30, 59)
    assert {row["worker"]: row["calls"] for row in found["by_worker"]} == {"alpha": 2, "beta": 2}


async def test_pages_follow_each_other_without_gap_or_repeat(reports: PostgresReports, pg_engine: AsyncEngine) -> None:
    together = [taking(10, 5) for _ in range(3)]  # three of the same microsecond
    others = [taking(10, second) for second in (1, 2, 9)]
    child = taking(10, 5, parent_id=together[0].id, depth=1)
    await add(pg_engine, *together, *others, child)
    seen: list[str] = []
    page = await reports.rollouts_page(RolloutsQuery(limit=2))
    seen += [row["id"] for row in page["data"]]
    while page["next"]:
        page = await reports.rollouts_page(RolloutsQuery(limit=2, before=page["next"]))
        seen += [row["id"] for row in page["data"]]
    newest_first = sorted([*together, *others], key=lambda r: (r.created_us, r.id), reverse=True)
    assert seen == [record.id for record in newest_first]


async def test_a_line_says_who_answered_and_holds_no_text(reports: PostgresReports, pg_engine: AsyncEngine) -> None:
    await PostgresAdmin(pg_engine).key_insert(a_key("key1", "shop"), Act("test"))
    await add(pg_engine, taking(1_250, status="failed", error={"code": "upstream_timeout", "message": "private"}))
    (line,) = (await reports.rollouts_page(EVERYTHING))["data"]
    assert (line["workers"], line["latency_ms"], line["error_code"]) == (["alpha", "beta"], 1250.0, "upstream_timeout")
    assert (line["key_id"], line["key_name"], line["policy_requested"]) == ("key1", "shop", "baton")
    assert not {"request", "reply", "error", "end_user"} & set(line)
    json.dumps(line, allow_nan=False)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"key": "key2"}, {"second"}),
        ({"policy": "rule"}, {"second"}),
        ({"policy": "baton/fixed:a"}, {"third"}),
        ({"status": "failed"}, {"third"}),
        ({"status": "fallback"}, {"second"}),
        ({"status": "capped"}, {"third"}),
        ({"key": "key1", "status": "done"}, {"first"}),
        ({"key": "nobody\x00"}, set()),
        ({"policy": "conductor@7"}, {"first", "second", "third"}),
        ({"fault": "conductor_down"}, {"second"}),
        ({"fault": "steps"}, {"third"}),
        ({"fault": "upstream_timeout"}, {"first"}),
        ({"worker": "gamma"}, {"second"}),
        ({"user": "bob"}, {"third"}),
        ({"cost_min_nano": 100, "cost_max_nano": 900}, {"first"}),
        ({"tag": ("team", None)}, {"first", "second", "third"}),
        ({"tag": ("team", "red")}, {"second"}),
        ({"since": T0 + timedelta(seconds=2), "until": T0 + timedelta(seconds=3)}, {"second"}),
        ({"judged": True}, {"first", "second"}),
        ({"judged": False}, {"third"}),
        ({"outcome_min": 0.5}, {"first"}),
        ({"outcome_max": 0.5}, {"second"}),
        ({"text": 'SAY "50 %_OF" it'}, {"third"}),
        ({"text": "forty-two"}, {"first"}),
        ({"text": "content"}, set()),
        ({"text": "50 %of"}, set()),
    ],
)
async def test_filters(
    reports: PostgresReports, pg_engine: AsyncEngine, wanted: dict[str, Any], found: set[str]
) -> None:
    await add(
        pg_engine,
        first := taking(
            1,
            1,
            task_type="first",
            cost_nano=500,
            error={"code": "upstream_timeout"},
            reply=says("It is Forty-two."),
        ),
        second := taking(
            1,
            2,
            task_type="second",
            key_id="key2",
            policy_used="rule",
            fallback="conductor_down",
            cost_nano=5_000,
            steps=[a_step(0, "gamma")],
            tags={"team": "red"},
        ),
        taking(
            1,
            3,
            task_type="third",
            policy_requested="baton/fixed:a",
            status="failed",
            capped="steps",
            error=None,
            cost_nano=50,
            end_user="bob",
            request={"messages": [{"content": 'Say "50 %_of" it'}]},
        ),
    )
    await rate(pg_engine, first.id, 1.0)
    await rate(pg_engine, second.id, 0.0)
    page = await reports.rollouts_page(RolloutsQuery(limit=50, **wanted))
    assert {row["task_type"] for row in page["data"]} == found


async def test_a_page_looks_at_a_bounded_number_of_requests_and_the_next_one_goes_on(pg_engine: AsyncEngine) -> None:
    reports = PostgresReports(pg_engine, scanned_max=10)
    await add(pg_engine, *(taking(1, n, status="failed" if n == 3 else "done") for n in range(25)))
    query, pages = RolloutsQuery(limit=5, status="failed"), []
    while True:
        page = await reports.rollouts_page(query)
        pages.append((len(page["data"]), page["scanned_to"] is not None))
        if page["next"] is None:
            break
        query = replace(query, before=page["next"])
    assert pages == [(0, True), (0, True), (1, False)]
    by_text = await reports.rollouts_page(RolloutsQuery(limit=5, text="2+2"))
    assert (len(by_text["data"]), by_text["scanned_to"]) == (1, (T0 + timedelta(seconds=24)).isoformat())


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        ({}, "created_at"),
        ({"status": "failed", "worker": "gamma", "judged": True, "tag": ("a", None)}, "created_at"),
        ({"key": "key1", "text": "what is"}, "key_id"),
        ({"user": "user7", "cost_min_nano": 5}, "end_user"),
    ],
)
async def test_a_search_reads_by_an_index_and_sorts_no_more_than_it_needs(
    pg_engine: AsyncEngine, wanted: dict[str, Any], index: str
) -> None:
    """EXPLAIN on 4,000 requests of 40 keys and 400 users: no scan of a whole table of the log, no full sort of one."""
    records = [
        taking(1, n, key_id=f"key{n % 40}", end_user=f"user{n % 400}", rounds=[], steps=[]) for n in range(4_000)
    ]
    await add(pg_engine, *records)
    async with pg_engine.begin() as connection:
        await connection.execute(text("ANALYZE rollouts"))
        wanted_page = search.page_query(RolloutsQuery(limit=50, **wanted), 200)
        written = wanted_page.compile(
            dialect=postgresql.dialect(),  # type: ignore[no-untyped-call]
            compile_kwargs={"literal_binds": True},
        )
        plan = "\n".join(await connection.scalars(text(f"EXPLAIN {str(written).replace(':', chr(92) + ':')}")))
    assert re.search(rf"Index Scan.* (using|on) rollouts_rest_{index}\w*_idx", plan), plan
    assert "Seq Scan on rollouts_rest" not in plan, plan


async def test_a_search_for_a_worker_looks_at_the_steps_of_what_it_scans(pg_engine: AsyncEngine) -> None:
    records = [taking(1, n, rounds=[], steps=[a_step(0, "rare" if n in (1, 6, 9) else "often")]) for n in range(10)]
    await add(pg_engine, *records)
    reports = PostgresReports(pg_engine, scanned_max=4)
    page = await reports.rollouts_page(RolloutsQuery(limit=5, worker="rare"))
    assert [row["id"] for row in page["data"]] == [records[9].id, records[6].id]
    assert page["scanned_to"] is not None
    rest = await PostgresReports(pg_engine).rollouts_page(RolloutsQuery(limit=5, worker="rare", before=page["next"]))
    assert [row["id"] for row in rest["data"]] == [records[1].id]


@pytest.mark.parametrize("cursor", ["", "12", f"1.{'x' * 36}", f"1.{'-' * 36}", f"{'9' * 18}.{new_id()}"], ids=range(5))
async def test_a_cursor_that_no_page_gave_is_refused(reports: PostgresReports, cursor: str) -> None:
    with pytest.raises(BadRequest, match="`next` of another page"):
        await reports.rollouts_page(RolloutsQuery(limit=1, before=cursor))


async def test_any_keys_rollout_is_found_by_either_id_with_all_its_parts(
    reports: PostgresReports, pg_engine: AsyncEngine
) -> None:
    top = taking(900, key_id="somebody", rounds=[a_round(plan_logprobs=[-0.1, float("-inf"), -1.0])])
    child = taking(500, key_id="somebody", parent_id=top.id, depth=1)
    await add(pg_engine, top, child)
    judged = an_outcome(top.id, kind="boolean", key_id="somebody", source="person")
    async with pg_engine.begin() as connection:
        await connection.run_sync(insert_outcome, judged)
    for name in (top.id, top.completion_id, top.id.upper()):
        found = await reports.rollout_any(name)
        assert found is not None
        assert (found["id"], [c["id"] for c in found["children"]]) == (top.id, [child.id])
        assert (len(found["steps"]), found["outcomes"][0]["value"]) == (2, 1.0)
        assert found["rounds"][0]["plan_logprobs"] == [-0.1, None, -1.0]
        json.dumps(found, allow_nan=False)
    assert await reports.rollout_any(new_id()) is None
    assert await reports.rollout_any("chatcmpl-\x00") is None


async def test_a_database_that_is_away_is_unavailable(
    database_url: str, pg_server: PostgresServer, reports: PostgresReports
) -> None:
    pg_server.shut(database_url)
    try:
        with pytest.raises(Unavailable):
            await reports.overview(UNTIL, 600)
        with pytest.raises(Unavailable):
            await reports.rollouts_page(EVERYTHING)
    finally:
        pg_server.reopen(database_url)


async def test_a_report_that_takes_too_long_is_stopped(pg_engine: AsyncEngine) -> None:
    async with pg_engine.begin() as blocker:
        await blocker.exec_driver_sql("LOCK TABLE rollouts IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(Unavailable):
            await PostgresReports(pg_engine, timeout_s=0.05).overview(UNTIL, 600)


def a_key(public_id: str, name: str) -> KeyRow:
    return KeyRow(
        public_id, "data", name, b"d", 1, "default", (), (), None, None, None, None, {}, "full", True, datetime.now(UTC)
    )


async def test_rewards_of_rule_and_conductor_by_task_type(reports: PostgresReports, pg_engine: AsyncEngine) -> None:
    planned = [a_round(1)]
    fell_back = [a_round(1, refusal="not_json"), a_round(2, planner="rule")]  # counts as the conductor's
    kinds: list[tuple[dict[str, Any], float]] = [
        ({"rounds": planned}, 1.0),
        ({"rounds": fell_back}, 0.0),
        ({"rounds": [a_round(1, planner="rule")], "task_type": None}, 1.0),
        ({"rounds": [a_round(1, planner="fixed")]}, 1.0),
        ({"rounds": planned, "policy_requested": "baton/conductor"}, 1.0),
        ({"rounds": planned, "train": False}, 1.0),
    ]
    for changes, value in kinds:
        record = a_rollout(cost_nano=10**6, **changes)
        await add(pg_engine, record)
        for at, judged in ((T0, 1.0 - value), (UNTIL, value)):  # the latest judgement counts
            outcome = an_outcome(record.id, judged, created_at=at)
            async with pg_engine.begin() as connection:
                await connection.run_sync(insert_outcome, outcome)
    found = {(one.task_type, one.planner): one for one in await reports.planner_rewards({"default": 0.05})}
    assert set(found) == {("arithmetic", "conductor"), (None, "rule")}
    conductor = found["arithmetic", "conductor"]
    assert (conductor.pool, conductor.n) == ("default", 2)
    assert conductor.reward_sum == pytest.approx(1.0 - 2 * 0.02)
    assert conductor.square_sum == pytest.approx(0.98**2 + 0.02**2)


# ---------------------------------------------------------------- plans of requests that are alike


async def judge(engine: AsyncEngine, *records: RolloutRecord, value: float = 1.0) -> None:
    await add(engine, *records)
    async with engine.begin() as connection:
        for record in records:
            await connection.run_sync(insert_outcome, an_outcome(record.id, value, key_id=record.key_id))


async def test_judged_plans_are_of_the_same_pool_task_type_organisation_and_key(
    reports: PostgresReports, pg_engine: AsyncEngine
) -> None:
    asked = a_rollout()
    await add(pg_engine, asked, a_rollout())
    others: list[dict[str, Any]] = [{"task_type": "prose"}, {"pool_name": "big"}, {"parent_id": asked.id, "depth": 1}]
    others.append({"org": "another", "key_id": "key3"})
    await judge(pg_engine, *(a_rollout(**other) for other in others))
    await judge(pg_engine, a_rollout(), value=0.25)
    await judge(pg_engine, a_rollout(key_id="key2", rounds=[a_round(planner="rule")]))
    common, plans = await reports.judged_plans(asked.id, "key1")
    assert common == "requests of task type arithmetic"
    (own,) = plans
    assert (own.alone, own.value) == ("alpha", 0.25)
    assert own.probability == pytest.approx(math.exp(-0.1 - 0.000001))
    _, plans = await reports.judged_plans(asked.id, None)
    assert sorted(plan.probability is None for plan in plans) == [False, True], "that plan was not drawn"


async def test_judged_plans_have_the_chances_of_the_rule_and_the_rounds_after_the_first(
    reports: PostgresReports, pg_engine: AsyncEngine
) -> None:
    arms = [{"worker": "alpha", "handle": "quill", "propensity": 0.6}, {"worker": "beta", "propensity": 0.4}]
    decision = {"planner": "rule", "chosen": "alpha", "propensity": 0.6, "arms": arms}
    refused = a_round(plan=None, refusal="not_json", plan_logprobs=[], decision_mask=[])
    ruled = a_round(2, planner="rule", decision=decision, plan_logprobs=[], decision_mask=[])
    asked = a_rollout()
    await add(pg_engine, asked)
    await judge(pg_engine, a_rollout(rounds=[refused, ruled]))
    await judge(pg_engine, a_rollout(rounds=[a_round(), a_round(2)]))
    _, (more, drawn) = await reports.judged_plans(asked.id, None)
    assert (drawn.alone, drawn.probability, drawn.chances) == ("alpha", 0.6, {"alpha": 0.6, "beta": 0.4})
    assert (more.alone, more.chances) == (None, None), "two rounds with steps are not the worker alone"


async def test_without_a_task_type_plans_are_those_of_texts_alike(
    reports: PostgresReports, pg_engine: AsyncEngine
) -> None:
    def vector(*ends: float) -> list[float]:
        return [*([0.0] * (EMBEDDING_DIM - 2)), *ends]

    common: dict[str, Any] = {"task_type": None, "task_embedder": "words"}
    asked = a_rollout(**common, task_embedding=vector(1.0, 0.0))
    await add(pg_engine, asked)
    await judge(pg_engine, a_rollout(**common, task_embedding=vector(0.95, 0.3)))
    await judge(pg_engine, a_rollout(**common, task_embedding=vector(0.9, 0.4)), value=0.0)
    await judge(pg_engine, a_rollout(**common | {"task_embedder": "other"}, task_embedding=vector(1.0, 0.0)), value=0.0)
    likeness, plans = await reports.judged_plans(asked.id, None)
    assert likeness == "requests with nearly this text (cosine of 0.93 or more); a task type would say more"
    assert [plan.value for plan in plans] == [1.0]
    bare = a_rollout(task_type=None, task_embedding=[])
    await add(pg_engine, bare)
    assert (await reports.judged_plans(bare.id, None))[1] == ()
