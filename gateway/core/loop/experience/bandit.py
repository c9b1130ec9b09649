"""The bandit: which worker answers, by what is believed of each and what a right answer is worth. Pure.

The utility of a worker is its success less what its dollars and seconds take off a right answer (`worth.py`). The
choice is Thompson sampling (Thompson 1933; Russo et al. 2018): success is drawn from each worker's posterior `DRAWS`
times, and a worker is chosen with exactly the share of draws in which it is the best. So the log has the true
propensity of each choice. Draws are narrower than the posterior (Chapelle & Li 2011), so that a little evidence
commits, where an exploring share corrects a false start; without one they are the posterior's own.

The exploring share of requests goes to the worker whose trial is worth most: the expected gain over the best known one
on the next `HORIZON` tasks like this one, less what the trial costs (knowledge gradient: Gupta & Miescke 1996, Frazier
et al. 2008). Where no trial is worth its price, it goes to the best.

A worker of which nothing is known is reckoned with optimism in all terms: two right answers of three, the seconds of
its fastest fellow, and dollars by its own price.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gateway.core.loop.experience.belief import RunLength, WorkerExperience
from gateway.core.loop.experience.likeness import PRIOR_RIGHT, PRIOR_WRONG
from gateway.core.loop.experience.worth import Worth

DRAWS = 200  # so propensities are multiples of half a percent
SHARPNESS = 4.0  # by which evidence counts more in a draw than in the mean, where a share explores: half the deviation
HORIZON = 50.0
WIDE_MAX = 2.0  # outcomes that a worker's tasks of other kinds count for, at most
Z_95 = 1.959963984540054
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Arm:
    """A worker that may be chosen. `usd`, `latency_s`: expected of its call. `past`: None where nothing is known."""

    worker: str
    handle: str
    usd: float
    latency_s: float
    past: WorkerExperience | None = None


@dataclass(frozen=True, slots=True)
class ArmChoice:
    """A choice among arms. `chances`: the probability of each; None where the choice was not drawn."""

    planner: str
    worth: Worth
    arms: tuple[Arm, ...]
    chosen: int
    chances: tuple[float, ...] | None = None
    explored: bool = False

    def as_json(self) -> dict[str, Any]:
        """The decision as the log has it; `success`, `low` and `high` are the posterior mean and its 95 % interval."""
        arms = [
            _arm_json(arm, self.worth, None if self.chances is None else self.chances[at])
            for at, arm in enumerate(self.arms)
        ]
        drawn = {} if self.chances is None else {"propensity": self.chances[self.chosen]}
        return {
            "planner": self.planner,
            "worth": self.worth.as_json(),
            "explored": self.explored,
            "chosen": self.arms[self.chosen].worker,
            **drawn,
            "arms": arms,
        }


def posterior(past: WorkerExperience | None) -> tuple[RunLength, ...]:
    """The mixture of Beta(right, wrong) of a worker's success. A little of what it did on tasks of other kinds is part
    of the prior."""
    if past is None:
        return (RunLength(1.0, PRIOR_RIGHT, PRIOR_WRONG),)
    others = min(WIDE_MAX, max(0.0, past.wide_n - past.n))
    right, wrong = PRIOR_RIGHT + others * past.wide_mean, PRIOR_WRONG + others * (1 - past.wide_mean)
    return tuple(RunLength(share, right + r, wrong + w) for share, r, w in past.posterior)


def mean_success(past: WorkerExperience | None) -> float:
    """The posterior mean of a worker's success, in [0, 1]."""
    return _moments(posterior(past))[0]


def utility(arm: Arm, worth: Worth) -> float:
    """The expected utility of an arm, in right answers."""
    return mean_success(arm.past) - worth.penalty(arm.usd, arm.latency_s)


def order(arms: Sequence[Arm], worth: Worth) -> list[int]:
    """The indices of the arms by expected utility, the best first; ties to the later name."""
    return sorted(range(len(arms)), key=lambda at: (utility(arms[at], worth), arms[at].worker), reverse=True)


def decide(
    arms: Sequence[Arm], worth: Worth, rng: np.random.Generator, *, explores: bool = False, explore_share: float = 0.0
) -> ArmChoice:
    """Draw an arm. `explores`: this request is of the exploring share, which `explore_share` is of all like it."""
    if len(arms) == 1:
        return ArmChoice("rule", worth, tuple(arms), 0, (1.0,))
    posteriors = [posterior(arm.past) for arm in arms]
    penalty = np.array([worth.penalty(arm.usd, arm.latency_s) for arm in arms])
    utility = _draws(posteriors, SHARPNESS if explore_share else 1.0, rng) - penalty
    chances = np.bincount(utility.argmax(axis=1), minlength=len(arms)) / DRAWS
    trial = _worth_trying(posteriors, penalty.tolist())
    chosen = trial if explores else int(np.searchsorted(chances.cumsum(), rng.random(), side="right"))
    marginal = (1 - explore_share) * chances
    marginal[trial] += explore_share
    return ArmChoice("rule", worth, tuple(arms), chosen, tuple(marginal.tolist()), explores)


def _worth_trying(posteriors: Sequence[Sequence[RunLength]], penalty: Sequence[float]) -> int:
    """The arm whose trial is worth most; the best one if no other is worth its price. The expected gain is that of a
    normal of the posterior's mean and variance."""
    moments = [_moments(runs) for runs in posteriors]
    means = [mean - less for (mean, _), less in zip(moments, penalty, strict=True)]
    best = means.index(max(means))
    trial, most = best, 0.0
    for at, (mean, (_, variance)) in enumerate(zip(means, moments, strict=True)):
        if at == best:
            continue
        behind, deviation = means[best] - mean, math.sqrt(variance)
        z = behind / deviation
        gain = deviation * math.exp(-z * z / 2) / math.sqrt(2 * math.pi) - behind * math.erfc(z / math.sqrt(2)) / 2
        if gain * HORIZON - behind > most:
            trial, most = at, gain * HORIZON - behind
    return trial


def _moments(runs: Sequence[RunLength]) -> tuple[float, float]:
    """The mean and the variance of a mixture of Beta distributions."""
    mean = second = 0.0
    for share, right, wrong in runs:
        n = right + wrong
        mean += share * right / n
        second += share * right * (right + 1) / (n * (n + 1))
    return mean, max(1e-12, second - mean * mean)


def _draws(posteriors: Sequence[Sequence[RunLength]], sharpness: float, rng: np.random.Generator) -> Floats:
    """Draws of each arm's success from its sharpened posterior, as (DRAWS, arms)."""
    right, wrong = np.empty((DRAWS, len(posteriors))), np.empty((DRAWS, len(posteriors)))
    for at, runs in enumerate(posteriors):
        table = np.array(runs)
        which = np.searchsorted(table[:-1, 0].cumsum(), rng.random(DRAWS), side="right") if len(runs) > 1 else 0
        right[:, at] = PRIOR_RIGHT + sharpness * (table[which, 1] - PRIOR_RIGHT)
        wrong[:, at] = PRIOR_WRONG + sharpness * (table[which, 2] - PRIOR_WRONG)
    return rng.beta(right, wrong)


def _arm_json(arm: Arm, worth: Worth, chance: float | None) -> dict[str, Any]:
    runs = posterior(arm.past)
    mean, variance = _moments(runs)
    half = Z_95 * math.sqrt(variance)
    n = sum(share * (r + w) for share, r, w in arm.past.posterior) if arm.past else 0.0
    right = sum(share * r for share, r, _ in arm.past.posterior) if arm.past else 0.0
    figures = {
        "n": n,
        "right": right,
        "success": mean,
        "low": max(0.0, mean - half),
        "high": min(1.0, mean + half),
        "latency_s": arm.latency_s,
        "usd": arm.usd,
        "utility": mean - worth.penalty(arm.usd, arm.latency_s),
    }
    rounded = {name: float(f"{figure:.4g}") for name, figure in figures.items()}
    return {"worker": arm.worker, "handle": arm.handle, **rounded, **({} if chance is None else {"propensity": chance})}
