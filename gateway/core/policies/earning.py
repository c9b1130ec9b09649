"""When the conductor has earned a kind of work: its judged requests against the rule's, by organisation, pool
and task type. Pure.

The reward of a request is what the rule maximises, without its term for speed: the weighted outcome less the weighted
dollars of the whole request, planning included. Under `auto` a random share of requests goes to the planner that is not
in charge, so both means are over the same kind of requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rewards:
    """The judged requests of one organisation, pool and task type (None: requests without one) that one planner planned
    first. What one organisation reports never decides who plans for another."""

    pool: str
    task_type: str | None
    planner: str  # conductor | rule
    n: int
    reward_sum: float
    square_sum: float  # of the rewards
    org: str = ""

    @property
    def mean(self) -> float:
        """The mean reward. Undefined without a request."""
        return self.reward_sum / self.n

    @property
    def mean_variance(self) -> float:
        """Variance of the mean, with a reward of 0 and a reward of 1 added: agreement of a few is not certainty."""
        n, total, squares = self.n + 2, self.reward_sum + 1, self.square_sum + 1
        return max(0.0, squares / n - (total / n) ** 2) / n


@dataclass(frozen=True, slots=True)
class Bar:
    """`outcomes_min`: the judged requests of each planner before the two are compared. `z`: standard errors by which
    the conductor must lead; 2 lets a conductor that is no better pass in one comparison of 44."""

    outcomes_min: int = 30
    z: float = 2.0


def lead(conductor: Rewards, rule: Rewards, z: float) -> float:
    """Lower end of Welch's interval for the mean reward of the conductor less that of the rule."""
    return conductor.mean - rule.mean - z * math.sqrt(conductor.mean_variance + rule.mean_variance)


def has_earned(conductor: Rewards, rule: Rewards, bar: Bar, *, in_charge: bool) -> bool:
    """Whether the conductor plans this kind of work. It takes charge when its lead is surely above 0, and then stays in
    charge until its mean falls below the rule's. A planner with too few requests changes nothing."""
    if min(conductor.n, rule.n) < bar.outcomes_min:
        return in_charge
    return conductor.mean >= rule.mean if in_charge else lead(conductor, rule, bar.z) > 0
