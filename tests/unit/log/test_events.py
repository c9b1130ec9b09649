"""Event records: one byte form, and its inverse."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.adapters.journal.segments import PAYLOAD_START
from gateway.adapters.postgres import rows, tables
from gateway.core.log.events import Event, canonical, parse
from gateway.core.log.rollout import RolloutRecord, RoundRecord, StepRecord, as_payload
from tests.records import a_rollout, rollout_event

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_parse_is_the_inverse_of_canonical(payload: dict[str, Any]) -> None:
    event = Event("id", "hold", 5, payload)
    assert parse(canonical(event)) == event


@given(st.permutations(["a", "b", "c", "d"]))
def test_equal_events_have_equal_bytes(order: list[str]) -> None:
    payload = {name: {"x": 1, "é": 2} for name in order}
    sorted_payload = {name: {"é": 2, "x": 1} for name in sorted(order)}
    assert canonical(Event("i", "hold", 1, payload)) == canonical(Event("i", "hold", 1, sorted_payload))


def test_lone_surrogates_and_nul_survive() -> None:
    event = Event("i", "hold", 1, {"text": "\ud800\x00é"})
    assert parse(canonical(event)).payload == {"text": "\ud800\x00é"}


def test_the_start_by_which_the_journal_finds_records() -> None:
    assert canonical(Event("i", "hold", 1, {"a": 1})).startswith(PAYLOAD_START)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"null", b"\xff", b'{"id":"i","kind":"hold","ts_us":1}', b"{"])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse(data)


@pytest.mark.parametrize(
    ("record", "table", "own"),
    [
        (RolloutRecord, tables.rollouts, {"task_embedding"}),
        (RoundRecord, tables.rounds, {"rollout_id"}),
        (StepRecord, tables.steps, {"rollout_id"}),
    ],
)
def test_every_field_of_a_record_has_its_column(record: Any, table: Any, own: set[str]) -> None:
    continued = {"answered_by", "marks", "facts"}  # in the table `continuations`
    elsewhere = {"rounds", "steps", "failures", *continued}  # failures in `experience`
    names = {field.name for field in fields(record)} - elsewhere
    expected = {f"{name[:-3]}_at" if name.endswith("_us") else name for name in names}
    assert {column.name for column in table.columns} == expected | own


def test_a_rollout_becomes_rows_with_exact_times() -> None:
    record = a_rollout()
    new = rows.event_rows(rollout_event(record))
    (rollout,) = new.rollouts
    assert rollout["created_at"].isoformat() == "2025-10-09T08:53:20.123456+00:00"
    assert new.steps[0]["rollout_id"] == record.id
    assert len(rollout["task_embedding"]) == 256
    assert rows.at(0) is rows.at(None) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"log_mode": "metadata"},
        {"request": {}},
        {"request": {"messages": [{"role": "user", "content": [3]}]}},
        {"request": {"messages": 7}},
    ],
)
def test_no_question_no_embedding(changes: dict[str, Any]) -> None:
    (rollout,) = rows.event_rows(rollout_event(a_rollout(**changes))).rollouts
    assert rollout["task_embedding"] is None


def test_the_question_of_a_child_loop_has_an_embedding() -> None:
    (rollout,) = rows.event_rows(rollout_event(a_rollout(depth=1))).rollouts
    assert any(rollout["task_embedding"])


def test_a_record_is_json() -> None:
    assert json.loads(json.dumps(as_payload(a_rollout())))["steps"][1]["see"] == [0]
