"""The inserts that the shipper, the store and the grading worker share: rows of the log, outcomes and their credit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from math import isfinite
from typing import Any

from psycopg import sql
from sqlalchemy import (
    ARRAY,
    REAL,
    Connection,
    Double,
    Integer,
    Table,
    Text,
    TextClause,
    any_,
    bindparam,
    cast,
    delete,
    func,
    select,
)
from sqlalchemy.dialects import postgresql as pg

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.database import identifiers, query
from gateway.adapters.postgres.tables import (
    MODEL_KINDS,
    continuations,
    experience,
    gradings,
    ledger,
    outcomes,
    policy_shadows,
    rollouts,
    rounds,
    steps,
)
from gateway.core.log.outcome import Outcome
from gateway.core.loop.credit import FinishedStep, credits

_INDICES: Any = ARRAY(Integer)


def insert_rows(connection: Connection, new: rows.Rows) -> None:
    """Insert the rows that are not stored yet, in the order of their primary keys, so that two writers cannot
    deadlock."""
    for table in (rollouts, rounds, steps, ledger, gradings, policy_shadows):
        values = getattr(new, table.name)
        if values:
            key = [column.name for column in table.primary_key.columns]
            values.sort(key=lambda row, key=key: tuple(row[name] for name in key))
            _insert_all(connection, table, values)
    if new.continuations:
        new.continuations.sort(key=lambda row: (row["key_id"], row["mark"]))
        connection.execute(_CONTINUE, new.continuations)


def _insert_all(connection: Connection, table: Table, values: Sequence[rows.Row]) -> None:
    """Insert all rows in one statement with one parameter, in a tenth of the time of a statement a row. Raises
    ValueError for a value that JSON would turn into text although it is none."""
    names = tuple(values[0])
    texts = [name for name in names if isinstance(table.columns[name].type, Text)]
    floats = [name for name in names if _of_floats(table.columns[name].type)]
    for row in values:
        for name in texts:
            if not isinstance(row[name], str | None):
                raise ValueError(f"{table.name}.{name} is not text but {type(row[name]).__name__}")
    for name in floats:
        values = [row | {name: _name_infinities(row[name])} for row in values]
    rows_json = json.dumps(values, ensure_ascii=False, default=str)
    connection.execute(_insert_missing(table.name, names), {"rows": rows_json})


def _of_floats(kind: Any) -> bool:
    return isinstance(kind, ARRAY) and isinstance(kind.item_type, Double)


def _name_infinities(numbers: Any) -> Any:
    """Replace floats that JSON cannot represent (the log of probability 0 is -inf) by their names, which PostgreSQL
    reads."""
    if not isinstance(numbers, list):
        return numbers
    return [str(each) if isinstance(each, float) and not isfinite(each) else each for each in numbers]


@lru_cache(maxsize=64)
def _insert_missing(table: str, names: tuple[str, ...]) -> TextClause:
    return query("insert_missing", table=sql.Identifier(table), columns=identifiers(names))


def insert_outcome(connection: Connection, outcome: Outcome) -> bool:
    """Insert an outcome, and with it the experience of the rollout's workers. Returns False where it, or another one
    under its idempotency key, is stored already."""
    statement = pg.insert(outcomes).on_conflict_do_nothing().returning(outcomes.c.id)
    added = connection.execute(statement, rows.outcome_row(outcome)).first()
    if added and outcome.judgement.value is not None:
        _credit(connection, outcome.rollout_id, outcome.judgement.value, outcome.created_at)
    return added is not None


def _credit(connection: Connection, rollout_id: str, value: float, judged_at: datetime) -> None:
    """Store what the judgement says of each step as experience, and delete the older experience of steps it says
    nothing about."""
    columns = (steps.c.step, steps.c.kind, steps.c.see, steps.c.reply, steps.c.task.is_(None))
    done = select(*columns).where(steps.c.rollout_id == rollout_id, steps.c.status == "done").order_by(steps.c.step)
    tried = [
        FinishedStep(step, kind, see, reply or "", alone) for step, kind, see, reply, alone in connection.execute(done)
    ]
    credit_of = credits(tried, value)
    doubtful = [step.index for step in tried if step.index not in credit_of]
    if doubtful:
        old = delete(experience).where(experience.c.rollout_id == rollout_id, experience.c.step.in_(doubtful))
        connection.execute(old.where(experience.c.at <= judged_at))
    for credit in sorted(set(credit_of.values())):
        alike = [index for index, own in credit_of.items() if own == credit]
        values = {"credited_id": rollout_id, "credit": credit, "credited_steps": alike, "judged_at": judged_at}
        connection.execute(_CREDIT, values)


def _credit_statement() -> Any:
    """Credit the finished steps of model workers among `credited_steps`; the latest judgement of a rollout counts."""
    latency_s = func.extract("epoch", steps.c.finished_at - steps.c.started_at)
    source = {
        "rollout_id": steps.c.rollout_id,
        "round": steps.c.round,
        "step": steps.c.step,
        "worker": steps.c.worker,
        "worker_version": steps.c.worker_version,
        "pool_name": rollouts.c.pool_name,
        "task_type": rollouts.c.task_type,
        "embedding": rollouts.c.task_embedding,
        "embedder": rollouts.c.task_embedder,
        "success": cast(bindparam("credit"), REAL),
        "cost_nano": steps.c.cost_nano,
        "latency_ms": cast(func.coalesce(latency_s * 1000, 0), Integer),
        "at": cast(bindparam("judged_at"), experience.c.at.type),
    }
    step_rows = select(*source.values()).select_from(steps.join(rollouts, rollouts.c.id == steps.c.rollout_id))
    step_rows = step_rows.where(steps.c.rollout_id == bindparam("credited_id"), steps.c.status == "done")
    step_rows = step_rows.where(
        steps.c.kind.in_(MODEL_KINDS), steps.c.step == any_(bindparam("credited_steps", type_=_INDICES))
    )
    step_rows = step_rows.order_by(steps.c.round, steps.c.step)
    new = pg.insert(experience).from_select(list(source), step_rows)
    return new.on_conflict_do_update(
        index_elements=list(experience.primary_key.columns),
        set_={"success": new.excluded.success, "at": new.excluded.at},
        where=experience.c.at <= new.excluded.at,
    )


_CREDIT = _credit_statement()


def _continue_statement() -> Any:
    """Store the marks of an answer; the latest answer under a mark counts."""
    new = pg.insert(continuations)
    return new.on_conflict_do_update(
        index_elements=list(continuations.primary_key.columns),
        set_={name: new.excluded[name] for name in ("worker", "rollout_id", "until")},
        where=continuations.c.until <= new.excluded.until,
    )


_CONTINUE = _continue_statement()
