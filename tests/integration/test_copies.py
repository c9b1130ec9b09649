"""What COPY stores is what inserts store, for every kind of record; and what COPY cannot do, inserts do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from sqlalchemy import Engine, delete, func, select, text

from gateway.adapters.postgres import copies, rows
from gateway.adapters.postgres.database import sync_engine
from gateway.adapters.postgres.inserts import insert_rows
from gateway.adapters.postgres.tables import (
    continuations,
    dead_letters,
    gradings,
    ledger,
    policy_shadows,
    rollouts,
    rounds,
    steps,
)
from gateway.adapters.postgres.writer import LogWriter
from gateway.core.log.events import Event, canonical, parse
from gateway.errors import Unavailable
from tests.records import (
    T0_US,
    a_rollout,
    a_round,
    a_step,
    dispatch_event,
    event,
    hold_event,
    new_id,
    rollout_event,
    settle_event,
)

TABLES = (rollouts, rounds, steps, ledger, gradings, policy_shadows, continuations, dead_letters)
ODD_TEXT = 'é "quoted" \\n back\\slash \t tab \u2028 🙂 \x1f'
LONG = {"facts": {"tools": ["a"], "n": 1}, "answered_by": "alpha", "marks": {"m1": 60.0, "m2": 3600.5}}
BARE_ROUND: dict[str, Any] = {
    "plan": None,
    "plan_text": None,
    "prompt_token_ids": [],
    "plan_token_ids": [],
    "plan_logprobs": [],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "texts": {"end_user": ODD_TEXT, "task_type": "", "request": {"messages": [{"role": "user", "content": ODD_TEXT}]}},
    "no question": {"request": {"messages": "none"}},
    "parts": {
        "request": {"messages": [{"role": "user", "content": [{"type": "text", "text": "parts"}, {"type": "x"}]}]}
    },
    "nothing to embed": {"request": {"messages": [{"role": "user", "content": ""}]}},
    "metadata": {"log_mode": "metadata"},
    "embedded": {"task_embedding": [0.6, -0.8, 1e-3], "task_embedder": "endpoint"},
    "embedded by nobody": {"task_embedding": [0.5], "task_embedder": None},
    "not embedded": {"task_embedding": []},
    "child": {"parent_id": new_id(), "depth": 1, "request_id": None},
    "failed": {"status": "failed", "error": {"code": "x", "n": 10**17}, "reply": None, "finished_us": 0},
    "graded": {"tags": {"grader": "exact", "reference": "4"}},
    "graded by nobody": {"tags": {"grader": "none-such", "reference": "4"}},
    "continued": LONG,
    "continued in the past": LONG | {"finished_us": T0_US - 10**9},
    "a turn": {"turn": {"worker": "alpha", "kept": True}, "pool_revision": "7", "fallback": "slow", "capped": "calls"},
    "numbers": {"overhead_ms": 3, "cost_nano": 2**53 - 1, "hold_nano": 0, "caps": {"a": 1.5e300, "b": -0.0}},
    "untrained": {"train": False, "stream": True},
    "no parts": {"rounds": [], "steps": []},
    "bare round": {"rounds": [a_round(**BARE_ROUND, decision_mask=[], flags=[], quality=None, started_us=0)]},
    "two rounds": {"rounds": [a_round(2), a_round(1, flags=["prose", ODD_TEXT], refusal="slow")]},
    "much": {"rounds": [a_round(prompt_token_ids=list(range(900)), plan_logprobs=[-0.1 * n for n in range(900)])]},
    "steps": {"steps": [a_step(1, child_rollout_id=new_id(), tool_calls=[{"id": "a"}]), a_step(0, first_byte_us=None)]},
    "a NUL": {"end_user": "a\x00b"},
    "an infinity": {"rounds": [a_round(plan_logprobs=[float("-inf"), 0.0])]},
    "Korean": {"end_user": "한국어"},
}


def events() -> list[Event]:
    made = [rollout_event(a_rollout(**changes)) for changes in VARIANTS.values()]
    hold, rollout = new_id(), new_id()
    made += [hold_event(hold, rollout, 9, ("org:a", None), ("key:k", 70)), dispatch_event(hold, rollout)]
    made += [settle_event(hold, rollout, "posted", 8, "org:a"), settle_event(hold, rollout, "voided", 0, "org:a")]
    made.append(
        event("settle", {"hold_id": "x", "state": "posted", "charged_nano": 1, "scopes": ["org:a"], "why": ODD_TEXT})
    )
    shadow = {"rollout_id": new_id(), "version": "v", "latency_ms": 1.0, "live_latency_ms": 2, "prompt_tokens": 1}
    return [*made, event("shadow", shadow | {"completion_tokens": 1, "cost_nano": 0})]


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = sync_engine(database_url)
    yield engine
    engine.dispose()


def stored(engine: Engine) -> dict[str, Sequence[Any]]:
    with engine.connect() as connection:
        return {
            table.name: [
                {name: value for name, value in row.items() if table is not dead_letters or name != "at"}
                for row in connection.execute(select(table).order_by(*table.primary_key.columns)).mappings()
            ]
            for table in TABLES
        }


def forget(engine: Engine) -> None:
    with engine.begin() as connection:
        for table in reversed(TABLES):
            connection.execute(delete(table))


def test_copies_are_what_inserts_are(engine: Engine) -> None:
    made = events()
    by_copy = {name: payload for name, payload in zip([*VARIANTS, *range(6)], map(canonical, made), strict=True)}
    odd = [name for name, payload in by_copy.items() if not is_copied(payload)]
    assert odd == ["a NUL", "an infinity", "Korean", 4, 5]
    payloads = [payload for name, payload in by_copy.items() if name != 3]  # of one hold the first settlement counts
    writer = LogWriter(engine)
    records = writer.read(payloads)
    assert sum(bool(record.copied) for record in records) == len(payloads) - len(odd)
    assert not writer.put(records).dead
    copied = stored(engine)
    assert len(copied["rollouts"]) == len(VARIANTS)
    forget(engine)
    with engine.begin() as connection:
        for payload in payloads:
            insert_rows(connection, rows.event_rows(parse(payload)))
    assert copied == stored(engine)


def is_copied(payload: bytes) -> bool:
    try:
        return copies.read(payload) is not None
    except copies.ODD:
        return False


def test_a_batch_that_is_stored_in_part_is_completed(engine: Engine) -> None:
    payloads = [canonical(one) for one in events()]
    writer = LogWriter(engine)
    writer.store(payloads[::3])
    some = stored(engine)
    writer.store(payloads)
    all_of_it = stored(engine)
    assert len(some["rollouts"]) < len(all_of_it["rollouts"]) == len(VARIANTS)
    assert not writer.store(payloads).dead
    assert stored(engine) == all_of_it


def test_the_report_of_a_batch_is_the_same_in_both_ways(engine: Engine) -> None:
    payloads = [canonical(one) for one in events()]
    writer = LogWriter(engine)
    assert writer.store(payloads) == writer.store(payloads)


def test_one_record_that_postgres_refuses_alone_is_a_dead_letter(engine: Engine) -> None:
    good, bad = a_rollout(), a_rollout(depth=2**15)
    large, listed = a_rollout(cost_nano=2**70), a_rollout(request=[1, None])
    delivery = LogWriter(engine).store([canonical(rollout_event(one)) for one in (good, bad, large, listed)])
    assert [kind for kind, _ in delivery.dead] == ["rollout"] * 3
    assert delivery.rollouts_us == [good.finished_us]
    with engine.connect() as connection:
        assert connection.scalars(select(rollouts.c.id)).all() == [good.id]
        assert connection.scalar(select(func.count()).select_from(dead_letters)) == 3


def test_of_several_answers_under_one_mark_the_latest_counts(engine: Engine) -> None:
    early, late = (a_rollout(**LONG | {"finished_us": T0_US + n}) for n in (1, 2_000_000))
    for order in ((early, late), (late, early)):
        LogWriter(engine).store([canonical(rollout_event(one)) for one in order])
        with engine.connect() as connection:
            assert set(connection.scalars(select(continuations.c.rollout_id))) == {late.id}
        forget(engine)


def test_a_server_that_refuses_everything_is_no_fault_of_the_records(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE ledger RENAME TO elsewhere"))
    with pytest.raises(Unavailable):
        LogWriter(engine).store([canonical(hold_event("h", new_id(), 1))])
