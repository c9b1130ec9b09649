"""Which scopes a request draws on, and when a window is over."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.access.keys import Allowance, Organisation, Principal
from gateway.core.money.ledger import (
    SCOPE_CHARS_MAX,
    SCOPES_MAX,
    Scope,
    check_hold,
    is_past,
    key_scope,
    org_scope,
    scopes_of,
    user_scope,
    windows,
)

NOW = datetime(2026, 11, 20, 23, 30, tzinfo=UTC)
WHO = Principal("YV9lJ8GAVdUR", "data", "app", "acme", (), budget_nano=7, budget_day_nano=3)


def test_organisation_and_key_are_counted_in_every_window_limited_or_not() -> None:
    assert scopes_of(WHO, "ann", NOW) == (
        Scope("org:acme", None),
        Scope("org:acme:2026-11", None),
        Scope("org:acme:2026-11-20", None),
        Scope("key:YV9lJ8GAVdUR", 7),
        Scope("key:YV9lJ8GAVdUR:2026-11", None),
        Scope("key:YV9lJ8GAVdUR:2026-11-20", 3),
    )


def test_end_users_are_counted_where_something_limits_them() -> None:
    org = Organisation(Allowance(month_nano=9), Allowance(life_nano=5))
    who = replace(WHO, per_user=Allowance(day_nano=1, month_nano=2), organisation=org)
    users = [scope for scope in scopes_of(who, "ann@example.com", NOW) if scope.name.startswith("user:")]
    assert [scope.limit_nano for scope in users] == [5, 2, 1]
    assert users[0].name == user_scope("org:acme", "ann@example.com")
    assert users[0].name.startswith("user:org.acme:")
    assert users[2].name == user_scope("key:YV9lJ8GAVdUR", "ann@example.com") + ":2026-11-20"
    assert not any("ann" in scope.name for scope in users)
    assert len({user_scope(key_scope(key), user) for key in ("a", "b") for user in ("x", "y", None)}) == 6
    check_hold(1, 1, scopes_of(replace(who, budget_month_nano=1), None, NOW))
    every = Allowance(1, 1, 1)
    most = replace(who, per_user=every, organisation=Organisation(every, every))
    assert len(scopes_of(most, "x" * 10_000, NOW)) == 12 <= SCOPES_MAX


def test_months_and_days_are_those_of_utc() -> None:
    tokyo = datetime(2026, 12, 1, 8, 0, tzinfo=timezone(timedelta(hours=9)))
    assert windows("key:k", tokyo) == ("key:k", "key:k:2026-11", "key:k:2026-11-30")


@pytest.mark.parametrize(
    ("scope", "past"),
    [
        ("key:k", False),
        ("key:k:2026-11", False),
        ("key:k:2026-12", False),
        ("key:k:2026-10", True),
        ("key:k:2026-11-20", False),
        ("key:k:2026-11-21", False),
        ("key:k:2026-11-19", False),  # what was held yesterday may be settled today
        ("key:k:2026-11-18", True),
        ("org:a-2026-10", False),
    ],
)
def test_a_window_is_past_a_day_after_it_was_over(scope: str, past: bool) -> None:
    assert is_past(scope, NOW) is past


def test_the_month_before_is_kept_on_the_first_day_of_the_next() -> None:
    first = datetime(2026, 12, 1, 0, 5, tzinfo=UTC)
    assert not is_past("key:k:2026-11", first)
    assert is_past("key:k:2026-11", first + timedelta(days=1))


@given(st.text(min_size=1, max_size=128), st.text(min_size=1, max_size=128))
def test_no_organisations_name_is_taken_for_another_or_its_window(one: str, other: str) -> None:
    try:
        names = [org_scope(name) for name in (one, other)]
    except UnicodeEncodeError:  # half a surrogate pair is no name that a database could hold
        return
    assert (names[0] == names[1]) is (one == other)
    assert names[0] not in windows(names[1], NOW)[1:]
    assert not is_past(names[0], NOW)
    assert len(windows(names[0], NOW)[2]) <= SCOPE_CHARS_MAX or len(one) > 80
