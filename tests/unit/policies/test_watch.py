"""When a version is worse: each figure catches what it is for, and equal versions are left alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.loop.replies.errors import wilson
from gateway.core.policies.watch import Figures, Margins, judge

MARGINS = Margins()
GOOD = Figures("conductor@1", 400, 396, 4, 200, 160.0, 160.0, 400 * 2_000_000, 400 * 5e12)


def with_(**changes: Any) -> Figures:
    known = {name: getattr(GOOD, name) for name in Figures.__slots__}
    return Figures(**{**known, "version": "conductor@2", **changes})


def test_the_same_figures_are_not_worse() -> None:
    assert judge(with_(), GOOD, MARGINS) is None


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"requests": 40, "valid": 0, "cost_nano_sum": 0, "cost_nano_square_sum": 0.0}, "validity"),
        ({"requests": 100, "valid": 80, "cost_nano_sum": 0, "cost_nano_square_sum": 0.0}, "validity"),
        ({"failed": 60}, "errors"),
        ({"outcome_sum": 110.0, "outcome_square_sum": 110.0}, "outcome"),
        ({"cost_nano_sum": 400 * 4_000_000, "cost_nano_square_sum": 400 * 1.7e13}, "cost"),
    ],
)
def test_each_figure_catches_what_it_is_for(changes: dict[str, Any], cause: str) -> None:
    verdict = judge(with_(**changes), GOOD, MARGINS)
    assert verdict is not None
    assert verdict.cause == cause
    assert "against" in verdict.said
    assert judge(GOOD, with_(**changes), MARGINS) is None  # the other way round it is better


@pytest.mark.parametrize(
    ("by_org", "worse"),
    [
        ({"acme": (200, 110.0)}, True),  # nobody else says anything
        ({"eve": (60, 10.0), "acme": (140, 100.0)}, True),  # the others say so too, if less loudly
        ({"eve": (90, 20.0), "acme": (110, 90.0)}, False),  # it is eve alone
        ({"eve": (195, 107.0), "acme": (5, 3.0)}, True),  # the others said too little
    ],
)
def test_outcomes_of_one_organisation_alone_take_no_version_back(by_org: Any, worse: bool) -> None:
    live = replace(GOOD, outcomes_by_org={"eve": (60, 50.0), "acme": (140, 110.0)})
    found = judge(with_(outcome_sum=110.0, outcome_square_sum=110.0, outcomes_by_org=by_org), live, MARGINS)
    assert (found is not None and found.cause == "outcome") is worse


def test_a_little_worse_is_let_be() -> None:
    assert judge(with_(valid=390, failed=9, outcome_sum=155.0, outcome_square_sum=155.0), GOOD, MARGINS) is None
    assert judge(with_(cost_nano_sum=400 * 2_800_000), GOOD, MARGINS) is None


@pytest.mark.parametrize("requests", [0, 1, 29])
def test_little_is_not_enough(requests: int) -> None:
    few = Figures("conductor@2", requests, 0, requests, requests, 0.0, 0.0, requests * 10**9, requests * 1e18)
    assert judge(few, GOOD, MARGINS) is None
    assert judge(with_(valid=0), Figures("conductor@1", requests, requests), MARGINS) is None


def test_nothing_costs_more_than_nothing_by_a_share() -> None:
    free = with_(version="conductor@1", cost_nano_sum=0, cost_nano_square_sum=0.0)
    assert judge(with_(), free, MARGINS) is None


def test_wilson_is_the_published_interval() -> None:
    assert wilson(81, 263, 1.959964) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998, table I
    assert wilson(0, 20, 1.959964) == pytest.approx((0.0, 0.1611), abs=1e-4)


def false_alarms(trials: int, requests: int, step: int, seed: int) -> int:
    """Of `trials` canaries that equal the live version, how many are rolled back over all looks at growing figures."""
    draw = random.Random(seed)
    alarms = 0
    for _ in range(trials):
        sides = [Figures("conductor@1"), Figures("conductor@2")]
        for _ in range(0, requests, step):
            sides = [_seen(one, step, draw) for one in sides]
            if judge(sides[1], sides[0], MARGINS):
                alarms += 1
                break
    return alarms


def _seen(before: Figures, n: int, draw: random.Random) -> Figures:
    """`n` more requests of a version with 97 % valid plans, 2 % failures, 70 % right, and costs spread tenfold."""
    costs = [round(10 ** draw.uniform(5.5, 6.5)) for _ in range(n)]
    right = float(sum(draw.random() < 0.7 for _ in range(n)))
    return Figures(
        before.version,
        before.requests + n,
        before.valid + sum(draw.random() < 0.97 for _ in range(n)),
        before.failed + sum(draw.random() < 0.02 for _ in range(n)),
        before.judged + n,
        before.outcome_sum + right,
        before.outcome_square_sum + right,
        before.cost_nano_sum + sum(costs),
        before.cost_nano_square_sum + sum(cost * cost for cost in costs),
    )


def test_two_equal_versions_are_seldom_told_apart_however_often_one_looks() -> None:
    assert false_alarms(trials=400, requests=2_000, step=50, seed=7) <= 4  # 1 in 100, over 40 looks each


def test_a_version_that_is_right_less_often_is_found_in_some_hundred_outcomes() -> None:
    draw = random.Random(5)
    needed = []
    for _ in range(50):
        n = right = 0
        while True:
            n, right = n + 10, right + sum(draw.random() < 0.45 for _ in range(10))
            worse = Figures("conductor@2", n, n, 0, n, float(right), float(right))
            live = Figures("conductor@1", 2_000, 2_000, 0, 2_000, 1_400.0, 1_400.0)
            if judge(worse, live, MARGINS):
                break
        needed.append(n)
    assert sorted(needed)[25] <= 120  # median, from 0.70 to 0.45
