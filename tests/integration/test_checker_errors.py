"""How often checkers err, from verdicts in the log and outcomes: on real PostgreSQL, and on to reports and planners."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import event, select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.host.clock import SystemClock
from gateway.adapters.postgres.inserts import insert_rows
from gateway.adapters.postgres.reports.checks import PostgresChecks
from gateway.adapters.postgres.rows import event_rows
from gateway.adapters.postgres.store import PostgresStore
from gateway.adapters.postgres.tables import experience
from gateway.core.log.rollout import AttemptRecord, StepRecord
from gateway.core.loop.replies.errors import CheckerErrors, Share
from gateway.service.admin.checkers import CheckerWatch
from tests.records import a_rollout, a_step, an_outcome, rollout_event


def attempt_with(accept: bool | None, by: str = "verify", worker: str | None = None) -> AttemptRecord:
    return AttemptRecord(1, 2, worker=worker, verdict={"by": by, "accept": accept, "why": ""})


def verify(accept: bool | None, step: int = 1) -> StepRecord:
    return a_step(step, "check", kind="tool", see=[step - 1], reply="a word", attempts=[attempt_with(accept)])


async def add(engine: AsyncEngine, steps: Sequence[StepRecord], value: float | None, **outcome: Any) -> None:
    """A request with these steps; `value`: None for none judged."""
    record = a_rollout(steps=list(steps))
    async with engine.begin() as connection:
        await connection.run_sync(insert_rows, event_rows(rollout_event(record)))
    if value is not None:
        await PostgresStore(engine).outcome_insert(an_outcome(record.id, value, **outcome))


async def errors_of(engine: AsyncEngine) -> dict[str, CheckerErrors]:
    return {one.checker: one for one in await PostgresChecks(engine).errors()}


async def test_verdicts_of_verify_steps_are_counted_beside_outcomes(pg_engine: AsyncEngine) -> None:
    for accept, value, times in ((True, 1.0, 3), (True, 0.0, 2), (None, 1.0, 1), (True, None, 1)):
        for _ in range(times):
            await add(pg_engine, [a_step(0, "alpha"), verify(accept)], value)
    best = a_step(2, "beta", task=None, see=[])  # says what the rejected candidate says
    await add(pg_engine, [a_step(0, "alpha"), verify(False), best], 1.0)
    other = a_step(2, "beta", task=None, see=[], reply="5")
    for _ in range(4):
        await add(pg_engine, [a_step(0, "alpha"), verify(False), other], 1.0)
    await add(pg_engine, [a_step(0, "alpha"), verify(False), other], 0.0)  # of the candidate nothing is known
    assert await errors_of(pg_engine) == {"check": CheckerErrors("check", Share(2, 6), Share(1, 4), Share(2, 5))}


@pytest.mark.parametrize("value", [1.0, 0.0])
async def test_whether_two_replies_say_the_same_is_no_verdict_on_one(pg_engine: AsyncEngine, value: float) -> None:
    compared = AttemptRecord(1, 2, verdict={"by": "verify", "accept": True, "why": "", "pairwise": True})
    said = json.dumps({"same": True, "by": "builtin:judge@1"})
    judge = a_step(2, "check", kind="tool", see=[0, 1], reply=said, attempts=[compared])
    essays = ["Plant trees. They give shade to all who walk there.", "Shade is what a street wants, so plant a tree."]
    tried = [a_step(at, name, task=None, see=[], reply=essays[at]) for at, name in enumerate(("alpha", "beta"))]
    await add(pg_engine, [*tried, judge], value)
    assert await errors_of(pg_engine) == {}
    async with pg_engine.connect() as connection:  # what agrees by the judge shares the outcome
        rows = (await connection.execute(select(experience.c.worker, experience.c.success))).all()
    assert sorted(map(tuple, rows)) == [("alpha", value), ("beta", value)]


async def test_a_rejected_reply_that_a_later_step_read_is_compared_with_the_answer(pg_engine: AsyncEngine) -> None:
    revised = a_step(2, "beta", task="Put it right.", see=[0], reply="5")
    await add(pg_engine, [a_step(0, "alpha"), verify(False), revised], 1.0)
    middle = a_step(2, "beta", task=None, see=[], reply="5")
    await add(pg_engine, [a_step(0, "alpha"), verify(False), middle, verify(True, 3)], 1.0)
    errors = await errors_of(pg_engine)
    assert errors["check"] == CheckerErrors("check", Share(0, 2), Share(0, 1), Share(0, 1))


async def test_an_outcome_of_the_step_counts_first_and_a_verifiers_never(pg_engine: AsyncEngine) -> None:
    await add(pg_engine, [a_step(0, "alpha"), verify(True)], 0.0, source="verifier")
    assert await errors_of(pg_engine) == {}
    steps = [a_step(0, "alpha"), verify(False), a_step(2, "beta", task=None, see=[], reply="5")]
    await add(pg_engine, steps, 1.0, step=0)
    assert (await errors_of(pg_engine))["check"].false_rejects == Share(1, 1)


async def test_contracts_tell_of_the_reply_that_stands_and_only_of_accepted_ones(pg_engine: AsyncEngine) -> None:
    repaired = [
        attempt_with(True, "contract"),
        attempt_with(False, "contract", "judge"),
        attempt_with(True, "contract"),
    ]
    alone = a_step(
        0, "alpha", attempts=[attempt_with(True, "contract")]
    )  # code found nothing, and nobody else was asked
    handed = a_step(0, "beta", attempts=[attempt_with(False, "contract", "alpha"), attempt_with(True, "contract")])
    for steps in ([alone], [handed]):
        await add(pg_engine, steps, 1.0)
    assert await errors_of(pg_engine) == {}
    for value in (1.0, 1.0, 0.0):
        await add(pg_engine, [a_step(0, "alpha", attempts=[*repaired, attempt_with(True, "contract", "judge")])], value)
    assert await errors_of(pg_engine) == {"judge": CheckerErrors("judge", accepted_wrong=Share(1, 3))}


async def test_the_page_of_workers_has_shares_with_their_interval_or_unknown(pg_engine: AsyncEngine) -> None:
    for value in [0.0] * 3 + [1.0] * 7:
        await add(pg_engine, [a_step(0, "alpha"), verify(True)], value)
    asked: list[str] = []
    event.listen(pg_engine.sync_engine, "before_cursor_execute", lambda *told: asked.append(told[2]))
    watch = CheckerWatch(PostgresChecks(pg_engine), lambda: False, SystemClock())
    figures = [await watch.recent()]
    queries = len(asked)
    figures += [await watch.recent() for _ in range(20)]
    assert len(asked) == queries > 0
    assert len({id(one) for each in figures for one in each.errors}) == 1
    check = figures[-1].errors[0].as_json()
    assert check["checker"] == "check"
    assert check["accepted_wrong"] == {"k": 3, "n": 10, "share": 0.3, "low": 0.108, "high": 0.603}
    assert check["false_accepts"] == {"k": 3, "n": 3, "share": None, "low": None, "high": None}
    json.dumps(check, allow_nan=False)


@pytest.mark.parametrize("n", [0, 9])
def test_little_is_no_figure(n: int) -> None:
    errors = CheckerErrors("check", Share(0, n), Share(0, n), Share(0, n))
    assert errors.clause() == ""
    assert errors.as_json()["false_accepts"] == {"k": 0, "n": n, "share": None, "low": None, "high": None}


async def test_a_rejected_reply_is_credited_by_the_answer_and_not_by_a_checkers_word(pg_engine: AsyncEngine) -> None:
    for reply in ("4", "5"):
        middle = a_step(2, "beta", task=None, see=[], reply=reply)
        await add(pg_engine, [a_step(0, "alpha"), verify(False), middle, verify(True, 3)], 1.0)
    async with pg_engine.begin() as connection:
        rows = await connection.execute(select(experience.c.worker, experience.c.success).order_by(experience.c.at))
        assert [tuple(row) for row in rows if row.worker == "alpha"] == [("alpha", 1.0), ("alpha", 0.0)]
