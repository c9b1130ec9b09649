"""The rule's bandit: belief, worth, propensities, and what it never does."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.loop.experience.bandit import Arm, decide, mean_success, order, posterior, utility
from gateway.core.loop.experience.belief import Trials, WorkerExperience, experience_of, runs_of
from gateway.core.loop.experience.worth import Worth, by_prices, preferred

WORTH = Worth(0.01)
outcomes = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=60)


def past(
    worker: str, newest_first: list[float], *, weight: float = 1.0, wide: tuple[float, float] = (0, 0)
) -> WorkerExperience:
    size = len(newest_first)
    trials = Trials(
        np.full(size, weight), np.array(newest_first), np.full(size, 1e6), np.full(size, 500.0), wide[0], wide[1]
    )
    made = experience_of(worker, trials)
    assert made is not None
    return made


def arm(worker: str, outcomes: list[float] | None = None, *, usd: float = 0.001, latency_s: float = 0.5) -> Arm:
    return Arm(worker, worker[0], usd, latency_s, None if outcomes is None else past(worker, outcomes))


def drawn(arms: list[Arm], times: int = 200, **more: float | bool) -> Counter[str]:
    rng = np.random.default_rng(3)
    more = {"explore_share": 0.1, **more}
    choices = [decide(arms, WORTH, rng, **more) for _ in range(times)]  # type: ignore[arg-type]
    return Counter(arms[one.chosen].worker for one in choices)


# ---------------------------------------------------------------- belief


@given(outcomes)
def test_the_runs_are_a_distribution_and_none_holds_more_than_the_evidence(newest_first: list[float]) -> None:
    weight = np.ones(len(newest_first))
    runs = runs_of(weight, np.array(newest_first))
    assert sum(run.share for run in runs) == pytest.approx(1)
    for run in runs:
        assert -1e-9 <= run.right <= sum(newest_first) + 1e-9
        assert run.right + run.wrong <= len(newest_first) + 1e-9


def test_a_fall_after_a_long_good_run_is_believed_within_fifteen_outcomes() -> None:
    good = [1.0] * 90 + [0.0] * 10
    mixed = [1.0, 0.0, 1.0, 0.0, 0.0]
    assert mean_success(past("a", good)) > 0.85
    assert mean_success(past("a", mixed * 3 + good)) < 0.6


def test_old_failures_are_not_forgotten_by_waiting() -> None:
    """Nothing but a newer outcome changes what is believed of a worker that never was right."""
    assert mean_success(past("a", [0.0] * 40)) < 0.08
    assert mean_success(past("a", [0.0] * 200)) < 0.05


@given(outcomes, st.floats(0.05, 1.0))
def test_evidence_that_weighs_less_moves_the_belief_less(newest_first: list[float], weight: float) -> None:
    prior = mean_success(None)
    full, part = mean_success(past("a", newest_first)), mean_success(past("a", newest_first, weight=weight))
    if len(set(newest_first)) == 1:
        assert abs(part - prior) <= abs(full - prior) + 1e-9


def test_without_weight_there_is_no_experience() -> None:
    empty = np.zeros(0)
    assert experience_of("a", Trials(empty, empty, empty, empty)) is None


def test_tasks_of_other_kinds_count_a_little() -> None:
    bad, good = past("a", [1.0], wide=(50, 0)), past("a", [1.0], wide=(50, 50))
    assert mean_success(bad) < mean_success(past("a", [1.0])) < mean_success(good)
    assert mean_success(past("a", [1.0] * 30, wide=(80, 0))) > 0.85


# ---------------------------------------------------------------- worth


def test_by_default_the_dearest_call_takes_a_tenth_off_a_right_answer() -> None:
    worth = by_prices([0.0001, 0.01])
    assert worth.penalty(0.01, 0.0) == pytest.approx(0.1)
    assert worth.penalty(0.0001, 0.0) == pytest.approx(0.001)
    assert worth.penalty(0.0, 3.0) == pytest.approx(0.05)
    assert worth.penalty(0.0, 1_000.0) == pytest.approx(0.1)


def test_the_dial_moves_worth_and_its_end_ignores_dollars_and_seconds() -> None:
    worth = Worth(0.01)
    penalties = [worth.at(place).penalty(0.001, 1.0) for place in range(10)]
    assert penalties == sorted(penalties, reverse=True)
    assert penalties[5] == worth.penalty(0.001, 1.0) == worth.at(None).penalty(0.001, 1.0)
    assert penalties[9] == 0.0
    assert worth.at(9).as_json() == {"usd": None, "seconds": None, "by": "request"}


def test_the_most_special_preference_counts() -> None:
    said = preferred(Worth(1.0), [("key", {"usd": 0.5}), ("settings", {"usd": 2.0, "seconds": 5.0})])
    assert (said.usd, said.seconds, said.by) == (0.5, 5.0, "key")
    assert said.penalty(0.0, 5.0) == 1.0  # whoever sets seconds lets them decide
    assert preferred(Worth(1.0), [("key", None), ("settings", {})]) == Worth(1.0)


# ---------------------------------------------------------------- decisions


@given(
    st.lists(st.one_of(st.none(), outcomes), min_size=1, max_size=6),
    st.integers(0, 2**32),
    st.floats(0, 1, exclude_max=True),  # a share of 1 never leaves the choice to the rule
)
def test_propensities_are_a_distribution_and_the_chosen_one_has_some(
    pasts: list[list[float] | None], seed: int, share: float
) -> None:
    arms = [arm(f"{at}", one) for at, one in enumerate(pasts)]
    decision = decide(arms, WORTH, np.random.default_rng(seed), explore_share=share)
    assert decision.chances is not None
    assert sum(decision.chances) == pytest.approx(1)
    assert decision.chances[decision.chosen] > 0
    data = decision.as_json()
    assert data["propensity"] == decision.chances[decision.chosen]
    assert all(0 <= one["low"] <= one["success"] <= one["high"] <= 1 for one in data["arms"])


def test_choices_have_the_frequencies_that_the_log_says() -> None:
    """Inverse propensities estimate the share of each arm without bias: over many decisions they sum to one."""
    arms = [arm("a", [1.0, 0.0, 1.0]), arm("b", [1.0, 1.0, 0.0, 0.0]), arm("c")]
    rng, share, total, times = np.random.default_rng(7), 0.3, np.zeros(3), 4_000
    for _ in range(times):
        explores = bool(rng.random() < share)
        decision = decide(arms, WORTH, rng, explores=explores, explore_share=share)
        assert decision.chances is not None
        total[decision.chosen] += 1 / decision.chances[decision.chosen]
    assert total / times == pytest.approx(np.ones(3), abs=0.1)


def test_speed_and_price_decide_between_equals_alone() -> None:
    equals = [arm("cheap", [1.0] * 30, usd=0.0001), arm("dear", [1.0] * 30, usd=0.001, latency_s=3.0)]
    assert drawn(equals)["cheap"] > 190
    unequal = [arm("cheap", [0.0] * 6, usd=0.0, latency_s=0.0), arm("dear", [1.0] * 6, usd=0.001, latency_s=30.0)]
    assert drawn(unequal)["dear"] == 200


def test_an_instant_free_worker_that_is_always_wrong_loses_its_share_within_ten_outcomes() -> None:
    arms = [arm("cheap", [0.0] * 8, usd=0.0, latency_s=0.0), arm("dear", usd=0.001, latency_s=2.0)]
    assert drawn(arms)["dear"] > 180


def test_an_exploring_request_tries_the_unknown_and_not_the_hopeless() -> None:
    good, hopeless = arm("good", [1.0, 1.0, 0.0] * 10), arm("hopeless", [0.0] * 30)
    assert drawn([good, hopeless, arm("new")], 20, explores=True) == Counter({"new": 20})
    assert drawn([good, hopeless], 20, explores=True) == Counter({"good": 20})


def test_the_order_is_that_of_expected_utility() -> None:
    arms = [arm("a", [0.0] * 5), arm("b", [1.0] * 5), arm("c")]
    assert [arms[at].worker for at in order(arms, WORTH)] == ["b", "c", "a"]
    assert utility(arms[1], Worth(math.inf, math.inf)) == mean_success(arms[1].past)


def test_without_an_exploring_share_the_draws_are_wider() -> None:
    """Nothing else corrects a false start then."""
    arms = [arm("unlucky", [0.0, 0.0]), arm("lucky", [1.0, 1.0, 0.0, 1.0])]
    assert drawn(arms, explore_share=0.0)["unlucky"] > 2 * drawn(arms)["unlucky"]


def test_one_arm_is_certain() -> None:
    decision = decide([arm("a")], WORTH, np.random.default_rng(0), explores=True, explore_share=0.1)
    assert (decision.chosen, decision.chances) == (0, (1.0,))


def test_an_unknown_worker_counts_as_two_right_of_three() -> None:
    assert posterior(None) == ((1.0, 2.0, 1.0),)
    assert mean_success(WorkerExperience("a", 4, 0.5, 0, 0)) == pytest.approx(4 / 7)
