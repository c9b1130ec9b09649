"""The inserts that the shipper, the store and the grading worker share: rows of the log, outcomes and their credit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import isfinite
from typing import Any

import msgspec
from psycopg import sql
from sqlalchemy import (
    ARRAY,
    Connection,
    Double,
    Table,
    Text,
    TextClause,
)
from sqlalchemy.dialects import postgresql as pg

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.conversations import append_turns
from gateway.adapters.postgres.credit import credit_tree
from gateway.adapters.postgres.database import identifiers, query
from gateway.adapters.postgres.tables import (
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

Statement = Callable[[str, tuple[str, ...]], TextClause]  # of a table's name and those of columns


def insert_rows(connection: Connection, new: rows.Rows) -> None:
    """Insert the rows that are not stored yet, in the order of their primary keys, so that two writers cannot
    deadlock."""
    for table in (rollouts, rounds, steps, ledger, gradings, policy_shadows):
        values = getattr(new, table.name)
        if values:
            key = [column.name for column in table.primary_key.columns]
            values.sort(key=lambda row, key=key: tuple(row[name] for name in key))
            _insert_all(connection, table, values, _insert_missing)
    if new.continuations:
        _insert_all(connection, continuations, latest(new.continuations), _insert_continuations)
    if new.experience:
        failed = sorted(new.experience, key=lambda row: (row["rollout_id"], row["round"], row["step"]))
        _insert_all(connection, experience, failed, _insert_missing)
    append_turns(connection, new.turns)


def latest(marks: Sequence[rows.Row]) -> list[rows.Row]:
    """Of the continuations under one mark the one that counts longest, or the later of two that count as long: one
    statement changes a row once. In the order of their primary keys."""
    kept: dict[tuple[str, str], rows.Row] = {}
    for row in marks:
        key = row["key_id"], row["mark"]
        if key not in kept or kept[key]["until"] <= row["until"]:
            kept[key] = row
    return [kept[key] for key in sorted(kept)]


def _insert_all(connection: Connection, table: Table, values: Sequence[rows.Row], statement: Statement) -> None:
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
    rows_json = msgspec.json.encode(values, enc_hook=str)
    connection.execute(statement(table.name, names), {"rows": rows_json.decode()})


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


@lru_cache(maxsize=64)
def _insert_continuations(table: str, names: tuple[str, ...]) -> TextClause:
    return query("insert_continuations", table=sql.Identifier(table), columns=identifiers(names))


def insert_outcome(connection: Connection, outcome: Outcome) -> bool:
    """Insert an outcome, and with it the experience of the rollout's workers. Returns False where it, or another one
    under its idempotency key, is stored already."""
    statement = pg.insert(outcomes).on_conflict_do_nothing().returning(outcomes.c.id)
    added = connection.execute(statement, rows.outcome_row(outcome)).first()
    if added and outcome.judgement.value is not None:
        credit_tree(connection, outcome.rollout_id)
    return added is not None
