"""What a look at a journal record's bytes may spare: never a text that PostgreSQL would refuse."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.adapters.postgres.rows import clean, event_rows, needs_cleaning
from gateway.core.log.events import canonical, parse
from tests.records import a_rollout, event, rollout_event

ODD = st.sampled_from(["\x00", "\ud800", "\udfff", "\\", "u0000", "\ud7c0"])
TEXT = st.lists(st.characters() | ODD, max_size=6).map("".join)
NUMBER = st.integers() | st.floats() | st.sampled_from([float("nan"), float("inf"), float("-inf")])
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(TEXT, JSON, max_size=4))
def test_a_record_that_needs_no_cleaning_is_not_changed_by_it(payload: dict[str, Any]) -> None:
    record = canonical(event("settle", payload))
    if not needs_cleaning(record):
        kept = parse(record).payload
        assert clean(kept) == kept


def test_ordinary_records_need_none_and_their_rows_are_the_same() -> None:
    one = rollout_event(a_rollout())
    assert not needs_cleaning(canonical(one))
    assert event_rows(parse(canonical(one)), is_clean=True) == event_rows(parse(canonical(one)))


def test_each_thing_that_a_database_refuses_is_seen() -> None:
    for value in ("a\x00", "\ud800", "\udfff", float("nan"), float("inf"), float("-inf")):
        assert needs_cleaning(canonical(event("settle", {"is": [value]})))
