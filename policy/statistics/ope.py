"""Off-policy estimates: what a new policy would have earned, from the old one's logs. Triage only (DESIGN §7).

n logged plans, one row each. A weight is π_new/π_logged over the plan's *decision* tokens: over all tokens, free task
text makes every weight ~0 and the estimates worthless while ESS still reads 100 % (measured). Estimators: IPS (Horvitz
& Thompson 1952), clipped IPS (Ionides 2008), SNIPS (Swaminathan & Joachims 2015), DM, DR (Dudík et al. 2011, arXiv
1103.4601), SWITCH-DR (Wang et al. 2017, 1612.01205), ESS (Kish 1965).

Each estimator is a ratio of two sums of per-row terms, so one bootstrap by prompt serves all. No estimate stands
without its verdict: `E[w] = 1` holds for any pair of policies where the log has support, and in our trials the mean
weight caught every bad round that SNIPS and ESS missed. numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policy.statistics.stats import RESAMPLES, Floats, Interval, bootstrap_ratios

LOG_WEIGHT_MAX = 50.0  # e^50 squared still is a finite double


@dataclass(frozen=True, slots=True)
class OpeSettings:
    """Bounds of the estimators and of the verdict."""

    clip: float = 10.0  # largest weight in clipped IPS and DR
    switch: float = 10.0  # SWITCH-DR trusts the reward model alone above this weight
    mean_weight_min: float = 0.85
    mean_weight_max: float = 1.15
    ess_min: float = 200.0  # rows
    ess_share_min: float = 0.10
    level: float = 0.95
    resamples: int = RESAMPLES


@dataclass(frozen=True, slots=True)
class LoggedSample:
    """Logs and what the new policy says of them. Raises ValueError on unequal lengths or numbers that are none.

    rewards [n]; weights_log [n]: log π_new/π_logged over decision tokens (−inf: the new policy never does this);
    q_logged [n]: the reward model at the logged plan; q_new [n]: its mean over the new policy's plans for that prompt;
    prompts [n]: labels, rows of one prompt are not independent.
    """

    rewards: Floats
    weights_log: Floats
    q_logged: Floats
    q_new: Floats
    prompts: Sequence[Any] | NDArray[Any]

    def __post_init__(self) -> None:
        if not len(self.rewards):
            raise ValueError("no logged rows to estimate from; widen the filter of the export")
        for name in ("rewards", "weights_log", "q_logged", "q_new", "prompts"):
            column = getattr(self, name)
            if len(column) != len(self.rewards):
                raise ValueError(f"`{name}` has {len(column)} rows where `rewards` has {len(self.rewards)}")
            if name not in ("prompts", "weights_log") and not np.isfinite(column).all():
                raise ValueError(f"`{name}` holds a number that is not finite")
        if not (self.weights_log < math.inf).all():
            raise ValueError("`weights_log` holds NaN or +inf: the log lacks a behaviour log-prob there; drop the row")

    @property
    def weights(self) -> Floats:
        """π_new/π_logged [n]. Never floored: a weight of nothing must count as nothing."""
        return np.asarray(np.exp(np.minimum(self.weights_log, LOG_WEIGHT_MAX)))


@dataclass(frozen=True, slots=True)
class OffPolicyReport:
    """`refused` is empty where the estimates may be used; each entry is one reason, in words."""

    rows: int
    behaviour: Interval  # what the logged policy earned
    mean_weight: Interval
    weight_max: float
    ess: float
    kl: float  # KL(logged‖new), nats a plan: mean of −log w; inf where the new policy never does what was logged
    estimates: dict[str, Interval]
    refused: tuple[str, ...]


def terms(logged: LoggedSample, settings: OpeSettings) -> dict[str, tuple[Floats, Floats]]:
    """Numerator and denominator of each estimator a row [n]; the estimate is Σ numerators ÷ Σ denominators."""
    weights, ones = logged.weights, np.ones(len(logged.rewards))
    clipped = np.minimum(weights, settings.clip)
    trusted = np.where(weights <= settings.switch, weights, 0.0)
    surprise = logged.rewards - logged.q_logged
    return {
        "ips": (weights * logged.rewards, ones),
        "ips_clipped": (clipped * logged.rewards, ones),
        "snips": (weights * logged.rewards, weights),
        "dm": (logged.q_new, ones),
        "dr": (logged.q_new + clipped * surprise, ones),
        "switch_dr": (logged.q_new + trusted * surprise, ones),
    }


def effective_sample_size(weights_log: Floats) -> float:
    """(Σw)²/Σw² (Kish), the rows an unweighted sample would need for the same variance. It does not change when all
    weights shrink together, so it must never be read without the mean weight. 0 where all weights are 0."""
    top = float(np.max(weights_log))
    if top == -math.inf:
        return 0.0
    weights = np.exp(weights_log - top)
    return float(weights.sum() ** 2 / (weights**2).sum())


def refusals(rows: int, mean_weight: float, ess: float, settings: OpeSettings) -> tuple[str, ...]:
    """Return the reasons why no estimate from these logs may be used; empty where estimates may be used."""
    reasons = []
    if not settings.mean_weight_min <= mean_weight <= settings.mean_weight_max:
        bounds = f"[{settings.mean_weight_min}, {settings.mean_weight_max}]"
        reasons.append(
            f"mean weight {mean_weight:.3f} is outside {bounds}: the new policy does what the log has none of; collect "
            "logs nearer to it"
        )
    ess_least = max(settings.ess_min, settings.ess_share_min * rows)
    if ess < ess_least:
        reasons.append(f"effective sample size {ess:.0f} of {rows} rows is under {ess_least:.0f}: collect more logs")
    return tuple(reasons)


def estimate(logged: LoggedSample, settings: OpeSettings | None = None, *, seed: int = 0) -> OffPolicyReport:
    """All estimators with their intervals, bootstrapped by prompt, and the verdict on whether to believe them."""
    settings = settings or OpeSettings()
    weights, ess, ones = logged.weights, effective_sample_size(logged.weights_log), np.ones(len(logged.rewards))
    columns = {"behaviour": (logged.rewards, ones), "mean_weight": (weights, ones), **terms(logged, settings)}
    results = bootstrap_ratios(
        np.column_stack([top for top, _ in columns.values()]),
        np.column_stack([bottom for _, bottom in columns.values()]),
        logged.prompts,
        level=settings.level,
        resamples=settings.resamples,
        seed=seed,
    )
    intervals = dict(zip(columns, results, strict=True))
    behaviour, mean_weight = intervals.pop("behaviour"), intervals.pop("mean_weight")
    return OffPolicyReport(
        rows=len(logged.rewards),
        behaviour=behaviour,
        mean_weight=mean_weight,
        weight_max=float(weights.max()),
        ess=ess,
        kl=float(-logged.weights_log.mean()),
        estimates=intervals,
        refused=refusals(len(logged.rewards), mean_weight.value, ess, settings),
    )


class RewardTable:
    """The reward model: mean logged reward by key, backed off from the most specific key seen often enough.

    A row has one key per level, most specific first, e.g. (domain, workers, access), (domain, last worker), domain.
    Fit it on other prompts than those it is asked about (`fold_of`), or DM repeats the log to itself.
    """

    def __init__(self, keys: Sequence[Sequence[Hashable]], rewards: Floats, count_min: int = 3) -> None:
        if not len(rewards):
            raise ValueError("a reward model needs at least one logged row")
        self._overall = float(np.mean(rewards))
        self._count_min = count_min
        self._sums: dict[tuple[int, Hashable], tuple[float, int]] = {}
        for row, paid in zip(keys, rewards, strict=True):
            for level, key in enumerate(row):
                total, count = self._sums.get((level, key), (0.0, 0))
                self._sums[level, key] = (total + float(paid), count + 1)

    def value(self, keys: Sequence[Hashable]) -> float:
        """Expected reward of a plan with these keys; the overall mean where no level was seen `count_min` times."""
        for level, key in enumerate(keys):
            total, count = self._sums.get((level, key), (0.0, 0))
            if count >= self._count_min:
                return total / count
        return self._overall


def fold_of(prompts: Sequence[Any] | NDArray[Any], folds: int, seed: int = 0) -> NDArray[np.int64]:
    """A fold 0…folds−1 for each row [n], the same for all rows of a prompt."""
    _, index = np.unique(np.asarray(prompts), return_inverse=True)
    order = np.random.default_rng(seed).permutation(int(index.max()) + 1 if len(index) else 0)
    return np.asarray(order[index] % folds, dtype=np.int64)
