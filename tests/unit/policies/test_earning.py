"""When the conductor has earned a kind of work, on drawn outcomes."""

from __future__ import annotations

import random

from gateway.core.policies.earning import Bar, Rewards, has_earned, lead

BAR = Bar()


def drawn(planner: str, n: int, right: float, seed: int) -> Rewards:
    total = float(sum(random.Random(f"{planner}{seed}{i}").random() < right for i in range(n)))
    return Rewards("default", None, planner, n, total, total)


def share(conductor: float, rule: float, n: int = 60, runs: int = 400) -> float:
    """The share of comparisons that put the conductor in charge."""
    arms = [(drawn("conductor", n, conductor, seed), drawn("rule", 10 * n, rule, seed)) for seed in range(runs)]
    return sum(has_earned(*pair, BAR, in_charge=False) for pair in arms) / runs


def test_an_equal_conductor_seldom_passes_and_a_better_one_does() -> None:
    assert share(0.6, 0.6) < 0.05
    assert share(0.5, 0.6) < 0.01
    assert share(0.85, 0.6) > 0.9


def test_too_few_requests_change_nothing() -> None:
    few, many = Rewards("p", None, "conductor", 29, 29, 29), Rewards("p", None, "rule", 300, 0, 0)
    assert not has_earned(few, many, BAR, in_charge=False)
    assert has_earned(few, many, BAR, in_charge=True)
    assert not has_earned(many, few, BAR, in_charge=False)


def test_agreement_of_a_few_is_not_certainty() -> None:
    right, wrong = Rewards("p", None, "conductor", 3, 3, 3), Rewards("p", None, "rule", 3, 2, 2)
    assert lead(right, wrong, 2) < 0


def test_one_in_charge_stays_until_its_mean_is_lower() -> None:
    rule = Rewards("p", None, "rule", 100, 50, 50)
    assert has_earned(Rewards("p", None, "conductor", 100, 50, 50), rule, BAR, in_charge=True)
    assert not has_earned(Rewards("p", None, "conductor", 100, 49, 49), rule, BAR, in_charge=True)
