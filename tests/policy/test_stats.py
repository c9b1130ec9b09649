"""Statistics against values computed by hand, and intervals against the truth they should cover."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.statistics.stats import (
    Interval,
    aiq,
    apgr,
    binomial_two_sided,
    bootstrap_mean,
    bootstrap_ratios,
    cost_at_quality,
    cpt,
    frontier,
    mcnemar,
    routerarena_score,
)

# ---------------------------------------------------------------- intervals


def test_an_interval_is_the_values_and_reproducible() -> None:
    rows = [0.0, 1.0, 1.0, 1.0]
    found = bootstrap_mean(rows, seed=4)
    assert found.value == 0.75
    assert found.low < 0.75 < found.high <= 1
    assert found == bootstrap_mean(rows, seed=4)
    assert bootstrap_mean([0.5] * 9) == Interval(0.5, 0.5, 0.5)
    assert bootstrap_mean([3.0]) == Interval(3.0, 3.0, 3.0)


def test_a_ratio_weighs_by_its_denominators_and_may_not_exist() -> None:
    whole, none, partly = bootstrap_ratios([[1.0, 0, 1], [3.0, 0, 0]], [[2.0, 0, 2], [2.0, 0, 0]])
    assert whole.value == 1.0
    assert whole.low < 1.0 < whole.high
    assert all(math.isnan(x) for x in (none.value, none.low, none.high))
    assert partly == Interval(0.5, 0.5, 0.5)  # a resample may hold only the row that has no denominator


@pytest.mark.parametrize(
    ("top", "bottom", "clusters"),
    [([], [], None), ([[1]], [[1, 2]], None), ([[1], [2]], [[1], [1]], [0]), ([1], [1], None)],
)
def test_rows_that_do_not_match_are_refused(top: list[Any], bottom: list[Any], clusters: list[int] | None) -> None:
    with pytest.raises(ValueError, match="rows"):
        bootstrap_ratios(top, bottom, clusters)


def covers(clusters: bool) -> float:
    """Share of 95 % intervals that hold the true mean 0.5 when ten rows of a prompt share its luck."""
    rng, hits = np.random.default_rng(0), 0
    for trial in range(200):
        luck = rng.random(40) < 0.5
        rows = np.repeat(luck, 10).astype(float)
        labels = np.repeat([f"prompt-{n}" for n in range(40)], 10)
        found = bootstrap_mean(rows, labels if clusters else None, resamples=400, seed=trial)
        hits += found.low <= 0.5 <= found.high
    return hits / 200


def test_intervals_cover_the_truth_when_prompts_are_drawn_whole() -> None:
    assert 0.90 <= covers(clusters=True) <= 0.99
    assert covers(clusters=False) < 0.6


# ---------------------------------------------------------------- paired test


def test_mcnemar_by_hand() -> None:
    first = [True] * 9 + [False] + [True] * 5
    second = [False] * 9 + [True] + [True] * 5
    found = mcnemar(first, second)
    assert (found.only_first, found.only_second) == (9, 1)
    assert found.p == pytest.approx(2 * (1 + 10) / 1024)
    assert mcnemar(first, first).p == 1.0
    assert mcnemar([], []).p == 1.0
    assert binomial_two_sided(3, 3) == 1.0
    assert binomial_two_sided(0, 5) == binomial_two_sided(5, 0) == pytest.approx(2 / 32)
    assert binomial_two_sided(4_800, 5_200) == pytest.approx(math.erfc(399 / math.sqrt(2 * 10_000)), rel=5e-3)
    with pytest.raises(ValueError, match="equally long"):
        mcnemar([True], [True, False])


# ---------------------------------------------------------------- quality for cost


def test_the_frontier_drops_what_a_mixture_beats() -> None:
    x, y = frontier([1, 2, 3, 5, 4, 1], [0.2, 0.3, 0.8, 0.8, 0.5, 0.1])
    assert x.tolist() == [1, 3]
    assert y.tolist() == [0.2, 0.8]
    assert frontier([2.0], [0.4])[1].tolist() == [0.4]
    x, _ = frontier([0, 1, 2, 4], [0, 0.5, 0.7, 0.8])
    assert x.tolist() == [0, 1, 2, 4]
    for costs, qualities in (([], []), ([1], [1, 2]), ([math.nan], [1])):
        with pytest.raises(ValueError, match="finite costs"):
            frontier(costs, qualities)


hundredths = st.integers(0, 1_000).map(lambda n: n / 100)
points = st.lists(st.tuples(hundredths, hundredths), min_size=1, max_size=12)


@given(points)
def test_no_point_stands_above_the_frontier_and_it_is_concave(found: list[tuple[float, float]]) -> None:
    costs, qualities = zip(*found, strict=True)
    x, y = frontier(costs, qualities)
    assert (np.diff(x) > 0).all()
    assert (np.diff(y) > 0).all()
    assert set(zip(x.tolist(), y.tolist(), strict=True)) <= set(found)
    for cost, quality in found:
        assert quality <= np.interp(cost, x, y) + 1e-9
    assert (np.diff(np.diff(y) / np.diff(x)) <= 1e-9).all()


def test_aiq_by_hand() -> None:
    costs, qualities = [1.0, 3.0], [0.2, 0.8]
    assert aiq(costs, qualities, 1, 3) == pytest.approx(0.5)
    assert aiq(costs, qualities, 1, 5) == pytest.approx((0.5 * 2 + 0.8 * 2) / 4)  # flat to the end
    assert aiq(costs, qualities, 0, 3) == pytest.approx((0 + 0.5 * 2) / 3)  # nothing below the cheapest
    assert aiq(costs, qualities, 2, 3) == pytest.approx((0.5 + 0.8) / 2)
    assert aiq(costs, qualities, 1, 2) == pytest.approx((0.2 + 0.5) / 2)  # cut inside a mixture
    assert aiq([7.0], [1.0], 0, 5) == 0.0
    assert aiq([1.0], [0.6], 1, 9) == pytest.approx(0.6)
    for low, high in ((2, 2), (3, 1), (-1, 2), (0, math.inf)):
        with pytest.raises(ValueError, match="cost_min"):
            aiq(costs, qualities, low, high)


@given(points, points)
def test_a_policy_that_offers_more_never_scores_less(
    one: list[tuple[float, float]], more: list[tuple[float, float]]
) -> None:
    def score(rows: list[tuple[float, float]]) -> float:
        return aiq([cost for cost, _ in rows], [quality for _, quality in rows], 0.05, 10)

    assert score(one + more) >= score(one) - 1e-9


def test_cost_at_equal_quality() -> None:
    costs, qualities = [1.0, 3.0, 9.0], [0.2, 0.8, 0.9]
    assert cost_at_quality(costs, qualities, 0.5) == pytest.approx(2.0)
    assert cost_at_quality(costs, qualities, 0.85) == pytest.approx(6.0)
    assert cost_at_quality(costs, qualities, 0.1) == 1.0
    assert cost_at_quality(costs, qualities, 0.91) is None


def test_routellm_scores_by_hand() -> None:
    shares, accuracies = [0.5, 0.25], [0.9, 0.7]  # between weak 0.5 and strong 0.9
    area = 0.25 * (0.5 + 0.7) / 2 + 0.25 * (0.7 + 0.9) / 2 + 0.5 * 0.9
    assert apgr(shares, accuracies, 0.5, 0.9) == pytest.approx((area - 0.5) / 0.4)
    assert apgr([0, 1], [0.5, 0.9], 0.5, 0.9) == apgr([], [], 0.5, 0.9) == pytest.approx(0.5)  # a coin
    assert cpt(shares, accuracies, 0.5, 0.9, 0.5) == pytest.approx(0.25)
    assert cpt(shares, accuracies, 0.5, 0.9, 0.8) == pytest.approx(0.25 + 0.25 * 0.6)
    assert cpt(shares, accuracies, 0.5, 0.9, 0.2) == pytest.approx(0.1)
    assert cpt([0.0, 0.2], [0.6, 0.7], 0.5, 0.9, 0.25) == 0.0
    assert cpt([0.3, 0.6, 0.8], [0.8, 0.5, 0.8], 0.5, 0.9, 0.75) == pytest.approx(0.3)  # the first crossing
    assert cpt([1.0], [0.7], 0.5, 0.9, 0.8) == 1.0


def test_routellm_scores_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="no gap"):
        apgr([0.5], [0.7], 0.9, 0.9)
    with pytest.raises(ValueError, match="share of strong"):
        apgr([1.5], [0.7], 0.5, 0.9)
    with pytest.raises(ValueError, match="gap_share"):
        cpt([0.5], [0.7], 0.5, 0.9, 0.0)


def test_routerarena_by_hand() -> None:
    assert routerarena_score(0.8, 200) == 0.0
    assert routerarena_score(0.8, 5_000) == 0.0
    assert routerarena_score(0.0, 200) == 0.0
    assert routerarena_score(0.8, 0.0044) == routerarena_score(0.8, 0) == pytest.approx(1.1 * 0.8 / 1.08)
    middle = math.sqrt(200 * 0.0044)  # cheapness exactly one half
    assert routerarena_score(0.7, middle) == pytest.approx(1.1 * 0.7 * 0.5 / (0.07 + 0.5))
    for accuracy, cost in ((1.1, 1), (-0.1, 1), (0.5, -1), (0.5, math.nan)):
        with pytest.raises(ValueError, match="accuracy"):
            routerarena_score(accuracy, cost)
