"""A worker's breaker: what opens it, how long it stays open, what closes it."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.pool.breaker import (
    HEALTHY,
    TERMS,
    TRY_S,
    Fault,
    Health,
    RestRules,
    abandoned,
    failed,
    fault_of,
    newer,
    succeeded,
    tried,
)
from gateway.errors import (
    ContractMissed,
    UpstreamError,
    UpstreamInvalid,
    UpstreamProtocol,
    UpstreamRateLimited,
    UpstreamRefused,
    UpstreamTimeout,
)

RULES = RestRules(failures_max=3, rest_s=10.0, rest_s_max=600.0)
HOUR_S = 3_600.0


def fails(health: Health, fault: Fault, now_s: float, retry_after_s: float | None = None) -> Health:
    """The breaker after a call that left and failed at once."""
    return failed(health, fault, now_s, now_s, RULES, retry_after_s)


def asked_in(duration_s: float, fault: Fault, retry_after_s: float | None, every_s: float = 0.5) -> int:
    """How often a worker that answers every call so is asked by requests that come every so many seconds."""
    health, calls, now_s = HEALTHY, 0, 1_000.0
    end_s = now_s + duration_s
    while now_s < end_s:
        if not health.holds(now_s):
            health, calls = (
                fails(tried(health, now_s) if health.rests else health, fault, now_s, retry_after_s),
                calls + 1,
            )
        now_s += every_s
    return calls


def error(status: int | None = None, *, dispatched: bool = True, retryable: bool = False) -> UpstreamError:
    return UpstreamError("it failed", upstream_status=status, dispatched=dispatched, retryable=retryable)


def hasty() -> UpstreamTimeout:
    late = UpstreamTimeout("too late")
    late.hasty = True
    return late


@pytest.mark.parametrize(
    ("raised", "fault"),
    [
        (error(500), "failed"),
        (error(401), "key"),
        (error(402), "unpaid"),
        (error(403), "forbidden"),
        (UpstreamRefused("no such model", upstream_status=404), "missing"),
        (UpstreamRateLimited("slow down", upstream_status=429), "rate_limited"),
        (error(529), "overloaded"),
        (error(408), "failed"),
        (error(407), "failed"),
        (error(302), "failed"),
        (error(200), "failed"),  # with an error object instead of a reply
        (UpstreamProtocol("cut"), "broken"),
        (error(retryable=True), "failed"),  # an error object inside a stream
        (error(dispatched=False, retryable=True), "unreachable"),
        (UpstreamTimeout("too late"), "silent"),
    ],
)
def test_a_fault_of_the_worker_has_its_name(raised: UpstreamError, fault: Fault) -> None:
    assert fault_of(raised, alive=False) == fault


@pytest.mark.parametrize(
    "raised",
    [
        UpstreamRefused("bad body", upstream_status=400),
        UpstreamRefused("too large", upstream_status=413),
        UpstreamRefused("the prompt is too long", upstream_status=500),
        error(409),
        UpstreamRefused("not JSON", dispatched=False),
        UpstreamRateLimited("too many calls wait here", dispatched=False),
        UpstreamTimeout("no free place in time", dispatched=False),
        hasty(),
        UpstreamInvalid("not of its shape", retryable=True),
        ContractMissed("misses its contract", retryable=True),
        error(dispatched=False),
    ],
)
def test_what_a_request_causes_is_no_fault_of_the_worker(raised: UpstreamError) -> None:
    assert fault_of(raised, alive=False) is None


def test_a_worker_that_speaks_to_anybody_is_slow_and_not_silent() -> None:
    assert fault_of(UpstreamTimeout("too late"), alive=True) == "slow"


def test_every_fault_has_its_terms() -> None:
    assert set(TERMS) == set(get_args(Fault))


@pytest.mark.parametrize("fault", get_args(Fault))
def test_it_opens_at_once_or_after_three_failures_in_a_row(fault: Fault) -> None:
    health, needed = HEALTHY, 1 if TERMS[fault].at_once else 3
    for number in range(1, needed + 1):
        health = fails(health, fault, 100.0)
        assert health.holds(100.0) == (number == needed)
    assert health.state(100.0) == "resting"
    assert health.left_s(100.0) == 10.0 * TERMS[fault].rests


def test_a_success_between_begins_the_count_anew() -> None:
    health = fails(fails(HEALTHY, "failed", 1.0), "failed", 2.0)
    health = fails(succeeded(health, 3.0, 3.0), "failed", 4.0)
    assert not health.holds(4.0)


def test_zero_failures_switch_it_off() -> None:
    assert failed(HEALTHY, "key", 1.0, 1.0, RestRules(failures_max=0)) == HEALTHY


def test_after_the_rest_one_call_tries_it_and_the_next_rest_is_twice_as_long() -> None:
    health = fails(HEALTHY, "rate_limited", 100.0)
    assert (health.state(109.9), health.state(110.0)) == ("resting", "due")
    health = tried(health, 110.0)
    assert health.holds(111.0)  # for the others
    assert not health.holds(110.0 + TRY_S)  # a try whose process died is not waited for
    assert not abandoned(health, 111.0).holds(111.0)
    again = fails(health, "rate_limited", 112.0)
    assert again.left_s(112.0) == 20.0
    assert succeeded(health, 110.0, 112.0).state(112.0) == "closed"


def test_the_vendors_word_is_the_first_rest_and_the_least_of_the_next() -> None:
    health = fails(HEALTHY, "rate_limited", 100.0, retry_after_s=2.0)
    assert health.left_s(100.0) == 2.0
    health = fails(tried(health, 102.0), "rate_limited", 102.0, retry_after_s=2.0)
    assert (health.left_s(102.0), health.told_s) == (20.0, 104.0)
    health = fails(tried(health, 122.0), "rate_limited", 122.0, retry_after_s=900.0)
    assert health.left_s(122.0) == 900.0
    assert fails(HEALTHY, "rate_limited", 100.0, retry_after_s=0.0).left_s(100.0) == 1.0


def test_calls_that_left_before_do_not_double_the_rest() -> None:
    health = fails(HEALTHY, "rate_limited", 100.0)
    assert failed(health, "failed", 99.0, 103.0, RULES) == health
    prolonged = failed(health, "rate_limited", 99.0, 103.0, RULES, 60.0)
    assert (prolonged.rests, prolonged.until_s, prolonged.told_s) == (1, 163.0, 163.0)


def test_a_call_that_left_before_ends_a_rest_only_where_it_shows_life() -> None:
    silent = fails(HEALTHY, "silent", 100.0)
    assert succeeded(silent, 90.0, 105.0).state(105.0) == "closed"
    limited = fails(HEALTHY, "rate_limited", 100.0)
    assert succeeded(limited, 90.0, 105.0) == limited
    assert succeeded(limited, 104.0, 105.0).state(105.0) == "closed"


@pytest.mark.parametrize("retry_after_s", [None, 0.0, 1.0, 20.0, 60.0, 600.0])
def test_a_worker_over_its_limit_for_an_hour_is_asked_fifteen_times_at_most(retry_after_s: float | None) -> None:
    assert asked_in(HOUR_S, "rate_limited", retry_after_s) <= 15


@pytest.mark.parametrize("fault", ["silent", "slow", "failed", "unreachable", "missing"])
def test_one_that_hangs_or_is_dead_costs_one_call_a_minute(fault: Fault) -> None:
    assert 55 <= asked_in(HOUR_S, fault, None) <= 60 + RULES.failures_max + 3


@pytest.mark.parametrize("fault", [fault for fault in get_args(Fault) if not TERMS[fault].lasting])
def test_one_that_recovers_is_back_within_a_minute(fault: Fault) -> None:
    health, now_s = HEALTHY, 0.0
    for _ in range(30):
        health = fails(health, fault, now_s)
        now_s = max(now_s, health.until_s)
    assert health.left_s(health.began_s) == 60.0


faults = st.sampled_from(get_args(Fault))
waits = st.none() | st.floats(0.0, HOUR_S)
steps = st.lists(
    st.tuples(st.floats(0.01, 2_000.0), st.floats(0.0, 100.0), st.none() | st.tuples(faults, waits)), max_size=40
)


@given(steps=steps)
def test_whatever_happens_a_rest_ends(steps: list[tuple[float, float, tuple[Fault, float | None] | None]]) -> None:
    """Each step: seconds that pass, how long ago the call left, and how it ended."""
    health, now_s = HEALTHY, 1_000.0
    for passed_s, ago_s, end in steps:
        now_s += passed_s
        left_s, before = now_s - ago_s, health
        if end is None:
            health = succeeded(health, left_s, now_s)
        else:
            health = failed(health, end[0], left_s, now_s, RULES, end[1])
        assert health.state(now_s) != "due" or before.state(now_s) == "due"  # a rest that begins is in the future
        assert health.left_s(now_s) <= max(RULES.rest_s_max, HOUR_S, before.left_s(now_s))
        assert health.rests <= before.rests + 1
        assert not health.holds(health.until_s + TRY_S)
        assert (health.rests == 0) == (health.fault is None)
        assert newer(before, health) is health or health.at_s == before.at_s
    assert succeeded(health, now_s, now_s).state(now_s) == "closed"
