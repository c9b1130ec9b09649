"""The reward: right and dear beats wrong and free, always; nothing is gained by spending."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.loop.prompt import DIAL, QUALITY_MAX
from gateway.core.loop.replies.verdicts import StepVerdict
from policy.reward import Faults, RewardSettings, at_quality, faults_of, penalty, reward, taught_dial

PLAIN = RewardSettings(cost_per_usd=10, latency_per_s=0.01, penalty_max=0.4, format_reward=0.1)
CENT = 10_000_000  # nano-dollars
amounts = st.integers(0, 10**15)
seconds = st.floats(0, 1e6)
outcomes = st.floats(0, 1)
weights = st.floats(0, 1e9)


CHECKED = RewardSettings(
    0, 0, 0.3, 0.1, missed_penalty=0.03, repaired_penalty=0.01, rejected_penalty=0.02, verdict_penalty_max=0.08
)
any_faults = st.builds(Faults, *[st.integers(0, 1000)] * 3)


@st.composite
def any_settings(draw: st.DrawFn) -> RewardSettings:
    cap = draw(st.floats(0, 0.5, exclude_max=True))
    share = draw(st.floats(0, 0.999))
    return RewardSettings(draw(weights), draw(weights), cap, (1 - cap) * share)


@st.composite
def settings_that_count_verdicts(draw: st.DrawFn) -> RewardSettings:
    cap, share = draw(st.floats(0, 0.5, exclude_max=True)), draw(st.floats(0, 0.999))
    form = (1 - cap) * share
    most = min(form, (1 - cap - form) * 0.999) * draw(st.floats(0, 1))
    missed = draw(weights)
    return RewardSettings(
        *(draw(weights), draw(weights), cap, form),
        missed_penalty=missed,
        repaired_penalty=missed * draw(st.floats(0, 1)),
        rejected_penalty=draw(weights),
        verdict_penalty_max=most,
    )


@pytest.mark.parametrize(
    ("parsed", "outcome", "cost_nano", "latency_s", "wanted"),
    [
        (False, 1.0, 0, 0.0, 0.0),
        (True, 0.0, 0, 0.0, 0.1),
        (True, 0.0, CENT, 9.0, 0.1),
        (True, 1.0, 0, 0.0, 1.0),
        (True, 1.0, CENT, 0.0, 0.9),
        (True, 1.0, CENT, 5.0, 0.85),
        (True, 1.0, 100 * CENT, 5.0, 0.6),
        (True, 0.5, CENT, 0.0, 0.5),
        (True, 0.25, 0, 0.0, 0.325),
    ],
)
def test_the_values(parsed: bool, outcome: float, cost_nano: int, latency_s: float, wanted: float) -> None:
    assert math.isclose(reward(parsed, outcome, cost_nano, latency_s, PLAIN), wanted)


def test_defaults_are_what_their_docstring_says() -> None:
    default = RewardSettings()
    assert math.isclose(penalty(2_500_000, 0, default), 0.05)
    assert math.isclose(penalty(15_000_000, 0, default), 0.3)
    assert math.isclose(penalty(0, 150, default), 0.3)


@given(any_settings(), amounts, seconds, amounts, seconds)
def test_right_and_dear_beats_wrong_and_free(
    settings: RewardSettings, dear: int, slow: float, cheap: int, fast: float
) -> None:
    right = reward(True, 1, dear, slow, settings)
    assert right > reward(True, 0, cheap, fast, settings)
    assert right >= 0.5
    assert right > reward(False, 1, 0, 0, settings) == 0


@pytest.mark.parametrize(
    ("outcome", "faults", "wanted"),
    [
        (1.0, Faults(), 1.0),
        (1.0, Faults(missed=1), 0.97),
        (1.0, Faults(repaired=1), 0.99),
        (1.0, Faults(rejected=1), 0.98),
        (1.0, Faults(1, 1, 2), 0.92),
        (1.0, Faults(9, 9, 9), 0.92),
        (0.0, Faults(missed=1), 0.07),
        (0.5, Faults(missed=1), 0.52),
    ],
)
def test_verdicts_take_something_off_a_plan_that_ran(outcome: float, faults: Faults, wanted: float) -> None:
    assert math.isclose(reward(True, outcome, 0, 0, CHECKED, faults), wanted)
    assert reward(True, outcome, 0, 0, PLAIN, faults) == reward(True, outcome, 0, 0, PLAIN)
    assert reward(False, outcome, 0, 0, CHECKED, faults) == 0.0


@given(settings_that_count_verdicts(), any_faults, any_faults, amounts, amounts, seconds)
def test_the_outcome_outweighs_every_verdict(
    settings: RewardSettings, many: Faults, few: Faults, dear: int, cheap: int, slow: float
) -> None:
    right = reward(True, 1, dear, slow, settings, many)
    assert right > reward(True, 0, cheap, 0.0, settings, few) >= 0
    assert right <= reward(True, 1, dear, slow, settings)


def test_a_verdict_counts_once_and_by_what_it_came_to() -> None:
    missed, kept, unchecked = (StepVerdict("r", 1, 0, "contract", accept) for accept in (False, True, None))
    mended = [StepVerdict("r", 1, 1, "contract", accept, repaired=True) for accept in (True, None)]
    rejected = StepVerdict("r", 1, 2, "verify", False, checker="check")
    nobody, accepted = (StepVerdict("r", 1, 2, "verify", accept) for accept in (False, True))
    assert faults_of([]) == Faults() == faults_of([kept, unchecked, nobody, accepted])
    assert faults_of([missed, kept, *mended, rejected, nobody]) == Faults(missed=1, repaired=2, rejected=1)


@given(any_settings(), outcomes, amounts, amounts, seconds, seconds)
def test_spending_and_waiting_never_pay(
    settings: RewardSettings, outcome: float, one: int, two: int, some_s: float, more_s: float
) -> None:
    cheap, dear = sorted((one, two))
    fast, slow = sorted((some_s, more_s))
    assert reward(True, outcome, cheap, fast, settings) >= reward(True, outcome, dear, fast, settings)
    assert reward(True, outcome, cheap, fast, settings) >= reward(True, outcome, cheap, slow, settings)


@given(any_settings(), outcomes, outcomes, amounts, seconds)
def test_more_right_never_pays_less(
    settings: RewardSettings, one: float, two: float, cost_nano: int, latency_s: float
) -> None:
    worse, better = sorted((one, two))
    low, high = (reward(True, outcome, cost_nano, latency_s, settings) for outcome in (worse, better))
    assert 0 <= low <= high <= 1


def test_below_the_cap_cheaper_is_strictly_better() -> None:
    assert reward(True, 1, CENT, 0, PLAIN) > reward(True, 1, 2 * CENT, 0, PLAIN)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"penalty_max": 0.5}, "penalty_max"),
        ({"penalty_max": -0.1}, "penalty_max"),
        ({"penalty_max": math.nan}, "penalty_max"),
        ({"format_reward": 0.7}, "format_reward"),
        ({"format_reward": -0.1}, "format_reward"),
        ({"cost_per_usd": -1.0}, "cost_per_usd"),
        ({"cost_per_usd": math.inf}, "cost_per_usd"),
        ({"latency_per_s": math.nan}, "latency_per_s"),
        ({"missed_penalty": -0.01}, "missed_penalty"),
        ({"rejected_penalty": math.inf}, "rejected_penalty"),
        ({"repaired_penalty": 0.01}, "repaired_penalty"),
        ({"missed_penalty": 0.01, "verdict_penalty_max": 0.11}, "verdict_penalty_max"),
        ({"missed_penalty": 0.01, "format_reward": 0.6, "verdict_penalty_max": 0.1}, "verdict_penalty_max"),
        ({"verdict_penalty_max": math.nan}, "verdict_penalty_max"),
        ({"dial": DIAL[1:]}, "dial"),
        ({"dial": DIAL[::-1]}, "dial"),
        ({"dial": (*DIAL[:-1], -1.0)}, "dial"),
        ({"dial": (math.inf, *DIAL[1:])}, "dial"),
        ({"dial": (math.nan, *DIAL[1:])}, "dial"),
    ],
)
def test_settings_that_could_prefer_a_wrong_answer_are_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RewardSettings(**wrong)


@pytest.mark.parametrize("outcome", [-0.01, 1.01, math.nan])
def test_an_outcome_outside_its_range_is_refused(outcome: float) -> None:
    with pytest.raises(ValueError, match="outcome"):
        reward(True, outcome, 0, 0, PLAIN)


@pytest.mark.parametrize(("cost_nano", "latency_s"), [(-1, 0.0), (0, -1.0), (0, math.nan), (0, math.inf)])
def test_impossible_costs_are_refused(cost_nano: int, latency_s: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        reward(True, 1, cost_nano, latency_s, PLAIN)


def test_the_dial_prices_a_dollar() -> None:
    prices = [at_quality(PLAIN, quality).cost_per_usd for quality in range(QUALITY_MAX + 1)]
    assert prices == sorted(prices, reverse=True)
    assert prices[0] == pytest.approx(2**8 * prices[8])
    assert prices[QUALITY_MAX] == 0
    assert at_quality(PLAIN, None) == PLAIN
    assert at_quality(PLAIN, 3).penalty_max == PLAIN.penalty_max


def test_a_dial_of_its_own_prices_a_dollar() -> None:
    own = tuple(float(2 * (QUALITY_MAX - place)) for place in range(QUALITY_MAX + 1))
    assert at_quality(RewardSettings(dial=own), 4).cost_per_usd == own[4]
    assert taught_dial({"settings": {"dial": list(own)}}) == own
    assert taught_dial({}) is taught_dial({"settings": None}) is taught_dial({"settings": {"dial": None}}) is None
