"""How long a plan is waited for, learnt from past plans."""

from __future__ import annotations

from gateway.service.loop.conducting import PATIENCE_FACTOR, TIMES_MAX, TIMES_MIN, Patience


def after(*times_s: float) -> float:
    patience = Patience(10.0, 1.0)
    for seconds in times_s:
        patience.took(seconds)
    return patience.limit_s()


def test_until_enough_plans_came_it_waits_the_longest() -> None:
    assert after() == 10.0
    assert after(*[0.1] * (TIMES_MIN - 1)) == 10.0


def test_then_a_multiple_of_what_nearly_all_took() -> None:
    assert after(*[0.5] * TIMES_MIN) == PATIENCE_FACTOR * 0.5
    assert after(*[0.5] * 96, *[9.0] * 4) == PATIENCE_FACTOR * 0.5


def test_within_its_bounds() -> None:
    assert after(*[0.01] * TIMES_MIN) == 1.0
    assert after(*[8.0] * TIMES_MIN) == 10.0


def test_a_server_that_became_slower_is_waited_for_again() -> None:
    assert after(*[0.5] * TIMES_MAX, *[2.0] * (TIMES_MAX // 2)) == PATIENCE_FACTOR * 2.0
