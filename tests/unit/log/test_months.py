"""Months of the log are ranges of ids that leave no gap."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.log.events import uuid7
from gateway.core.log.months import Month

TIMES = st.datetimes(datetime(1971, 1, 2), datetime(9998, 1, 1), timezones=st.just(UTC))


@given(TIMES)
def test_an_id_is_within_the_month_of_its_time(at: datetime) -> None:
    month = Month.of(at)
    made = uuid7(int(at.timestamp() * 1000))
    assert month.first_id <= made < month.end_id
    assert month.start <= at < month.next.start


@given(TIMES)
def test_one_month_begins_where_the_other_ends(at: datetime) -> None:
    month = Month.of(at)
    assert month < month.next
    assert month.end_id == month.next.first_id
    last = month.next.start - timedelta(milliseconds=1)
    assert Month.of(last) == month
    assert uuid7(round(last.timestamp() * 1000)) < month.end_id


def test_a_year_ends_in_utc() -> None:
    late = datetime(2026, 12, 31, 23, 30, tzinfo=timezone(timedelta(hours=-1)))
    assert Month.of(late) == Month(2027, 1)
    assert Month(2026, 12).next == Month(2027, 1)
    assert Month(2026, 11).next == Month(2026, 12)
    assert Month(2026, 1).first_id == "019b76da-a800-0000-0000-000000000000"


@pytest.mark.parametrize("month", [Month(2026, 1), Month(2026, 12)])
def test_a_table_says_its_month(month: Month) -> None:
    assert Month.named(month.table("steps")) == month
    assert (str(Month(2026, 1)), Month(2026, 1).table("steps")) == ("2026-01", "steps_2026_01")


@pytest.mark.parametrize(
    "name", ["steps", "steps_rest", "steps_2026_13", "steps_2026_00", "steps_2026_1", "s_2026_11_x"]
)
def test_other_tables_are_of_no_month(name: str) -> None:
    assert Month.named(name) is None
