"""Statistics of an evaluation: intervals, paired tests, quality-for-cost scores, oracles. numpy only, seeded.

Q questions, M workers, K samples of each. Costs are dollars per 1,000 requests unless said otherwise; qualities and
accuracies are in [0, 1]. Sources stand at each function; the project's own reading of them, where codes and papers
differ, is said there too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
RESAMPLES = 2_000
_CHUNK = 100  # resamples drawn at once: bounds memory at _CHUNK × clusters


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its bootstrap interval; NaN throughout where the value does not exist."""

    value: float
    low: float
    high: float


def bootstrap_ratios(
    numerators: ArrayLike,
    denominators: ArrayLike,
    clusters: Sequence[Any] | NDArray[Any] | None = None,
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Interval]:
    """Σ numerators ÷ Σ denominators of each column of [n, k], with percentile bootstrap intervals over clusters (Efron
    & Tibshirani 1993, ch. 13), all k on the same resamples.

    Rows of one cluster (a prompt, asked several times) are drawn together, since they are not independent; None makes
    each row its own. NaN where the denominators sum to 0. Raises ValueError on no rows or unequal shapes.
    """
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    if not len(top) or top.shape != bottom.shape or top.ndim != 2:
        raise ValueError(f"needs two tables of the same rows and columns, not {top.shape} and {bottom.shape}")
    if clusters is not None:
        labels, index = np.unique(np.asarray(clusters), return_inverse=True)
        if len(index) != len(top):
            raise ValueError(f"{len(index)} cluster labels for {len(top)} rows")
        top, bottom = _summed(top, index, len(labels)), _summed(bottom, index, len(labels))
    draws = _resampled(top, bottom, resamples, seed)
    values = _ratio(top.sum(axis=0), bottom.sum(axis=0))
    return [_interval(float(value), draws[:, column], level) for column, value in enumerate(values)]


def _summed(rows: Floats, index: NDArray[np.int64], clusters: int) -> Floats:
    sums: Floats = np.zeros((clusters, rows.shape[1]))
    np.add.at(sums, index, rows)
    return sums


def _ratio(top: Floats, bottom: Floats) -> Floats:
    return np.divide(top, bottom, out=np.full_like(top, math.nan), where=bottom != 0)


def _resampled(top: Floats, bottom: Floats, resamples: int, seed: int) -> Floats:
    rng, size, parts = np.random.default_rng(seed), len(top), []
    for start in range(0, resamples, _CHUNK):
        chunk = min(_CHUNK, resamples - start)
        picks = rng.integers(size, size=(chunk, size)) + size * np.arange(chunk)[:, None]
        counts = np.bincount(picks.ravel(), minlength=chunk * size).reshape(chunk, size).astype(float)
        parts.append(_ratio(counts @ top, counts @ bottom))
    return np.concatenate(parts)


def _interval(value: float, draws: Floats, level: float) -> Interval:
    draws = draws[~np.isnan(draws)]
    if math.isnan(value) or not len(draws):
        return Interval(math.nan, math.nan, math.nan)
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


def bootstrap_mean(
    values: ArrayLike,
    clusters: Sequence[Any] | NDArray[Any] | None = None,
    *,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Mean of values [n] with its interval; pass differences of pairs for a paired comparison."""
    rows = np.asarray(values, float).reshape(-1, 1)
    return bootstrap_ratios(rows, np.ones_like(rows), clusters, level=level, resamples=resamples, seed=seed)[0]


@dataclass(frozen=True, slots=True)
class McNemar:
    """Questions only the first or only the second got right, and the two-sided exact p-value."""

    only_first: int
    only_second: int
    p: float


def mcnemar(first: ArrayLike, second: ArrayLike) -> McNemar:
    """McNemar's exact test on paired right/wrong [Q] (McNemar 1947; the binomial form): may one be better by luck?"""
    a, b = np.asarray(first, bool), np.asarray(second, bool)
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"needs two equally long rows of right/wrong, not {a.shape} and {b.shape}")
    only_first, only_second = int((a & ~b).sum()), int((b & ~a).sum())
    return McNemar(only_first, only_second, binomial_two_sided(only_first, only_second))


def binomial_two_sided(one: int, other: int) -> float:
    """min(1, 2·P(X ≤ min)) for X ~ Binomial(one + other, ½), in exact integers."""
    tosses, term, total = one + other, 1, 0
    for k in range(min(one, other) + 1):
        total += term
        term = term * (tosses - k) // (k + 1)
    return min(1.0, 2 * total / (1 << tosses))


# ---------------------------------------------------------------- quality for cost


def frontier(costs: ArrayLike, qualities: ArrayLike) -> tuple[Floats, Floats]:
    """The non-decreasing concave hull of (cost, quality) points, sorted by cost (RouterBench, arXiv:2403.12031).

    A policy between two of its points exists: toss a coin between their two policies. Raises ValueError on no points.
    """
    x, y = np.asarray(costs, float), np.asarray(qualities, float)
    if not x.size or x.shape != y.shape or x.ndim != 1 or not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("needs equally many finite costs and qualities, at least one")
    hull: list[tuple[float, float]] = []
    for point in sorted(zip(x.tolist(), y.tolist(), strict=True), key=lambda p: (p[0], -p[1])):
        if hull and point[1] <= max(quality for _, quality in hull):
            continue
        while len(hull) >= 2 and _below(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return np.array([p[0] for p in hull]), np.array([p[1] for p in hull])


def _below(left: tuple[float, float], middle: tuple[float, float], right: tuple[float, float]) -> bool:
    rise = (middle[1] - left[1]) * (right[0] - left[0])
    return rise <= (right[1] - left[1]) * (middle[0] - left[0])


def aiq(costs: ArrayLike, qualities: ArrayLike, cost_min: float, cost_max: float) -> float:
    """Average Improvement in Quality: mean height of the frontier over [cost_min, cost_max] (RouterBench, 2403.12031,
    evaluation/AIQ.py).

    RouterBench ends the range at the dearest point of all routers compared, so a score changes with its company; here
    the range is given. Flat beyond the dearest point, 0 below the cheapest one: nothing is answered for less.
    """
    if not 0 <= cost_min < cost_max < math.inf:
        raise ValueError(f"needs 0 ≤ cost_min < cost_max, not {cost_min} and {cost_max}")
    x, y = frontier(costs, qualities)
    start = max(cost_min, x[0])
    if start >= cost_max:
        return 0.0
    inside = x[(x > start) & (x < cost_max)]
    grid = np.concatenate([[start], inside, [cost_max]])
    return _area(grid, np.interp(grid, x, y)) / (cost_max - cost_min)


def _area(x: Floats, y: Floats) -> float:
    return float(((y[1:] + y[:-1]) / 2 * np.diff(x)).sum())


def cost_at_quality(costs: ArrayLike, qualities: ArrayLike, quality: float) -> float | None:
    """Least cost at which the frontier reaches `quality`; None where it never does. (LLMRouterBench's CostSave,
    arXiv:2601.07206, is this at the best single worker's accuracy.)"""
    x, y = frontier(costs, qualities)
    if quality > y[-1]:
        return None
    return float(np.interp(quality, y, x))


def _call_curve(shares: ArrayLike, accuracies: ArrayLike, weak: float, strong: float) -> tuple[Floats, Floats]:
    x, y = np.asarray(shares, float), np.asarray(accuracies, float)
    if x.shape != y.shape or x.ndim != 1 or ((x < 0) | (x > 1)).any():
        raise ValueError("needs one accuracy for each share of strong calls in [0, 1]")
    if not strong > weak:
        raise ValueError(f"strong accuracy {strong} is not above weak {weak}: there is no gap to recover")
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    if not len(x) or x[0] > 0:
        x, y = np.concatenate([[0.0], x]), np.concatenate([[weak], y])
    if x[-1] < 1:
        x, y = np.concatenate([x, [1.0]]), np.concatenate([y, [strong]])
    return x, y


def apgr(shares: ArrayLike, accuracies: ArrayLike, weak: float, strong: float) -> float:
    """Average performance gap recovered over strong-call shares 0…1: (AUC − weak)/(strong − weak) (RouteLLM,
    arXiv:2406.18665, routellm/evals/evaluate.py). The ends, all weak and all strong, are added where missing."""
    x, y = _call_curve(shares, accuracies, weak, strong)
    return (_area(x, y) - weak) / (strong - weak)


def cpt(shares: ArrayLike, accuracies: ArrayLike, weak: float, strong: float, gap_share: float) -> float:
    """Call-performance threshold: least share of strong calls, in [0, 1], that recovers `gap_share` of the gap between
    weak and strong; 1 where the curve never does (RouteLLM reports 0.2, 0.5, 0.8). Their code interpolates on accuracy
    and so needs a rising curve; here it is the first crossing."""
    if not 0 < gap_share <= 1:
        raise ValueError(f"gap_share {gap_share} is outside (0, 1]")
    x, y = _call_curve(shares, accuracies, weak, strong)
    target = weak + gap_share * (strong - weak)
    if y[0] >= target:
        return float(x[0])
    if y.max() < target:
        return 1.0
    reached = int(np.argmax(y >= target))
    return float(np.interp(target, y[reached - 1 : reached + 1], x[reached - 1 : reached + 1]))


def routerarena_score(accuracy: float, usd_per_1k: float, *, beta: float = 0.1) -> float:
    """RouterArena's S in [0, 1]: (1+β)·A·C/(β·A + C), C = (log₂200 − log₂c)/(log₂200 − log₂0.0044), c clamped to
    [0.0044, 200] dollars per 1,000 queries (arXiv:2510.00202, llm_evaluation/run.py). Their board prints 100·S."""
    if not 0 <= accuracy <= 1 or not usd_per_1k >= 0:
        raise ValueError(f"needs accuracy in [0, 1] and a cost ≥ 0, not {accuracy} and {usd_per_1k}")
    dearest, cheapest = math.log2(200), math.log2(0.0044)
    cheapness = (dearest - math.log2(min(max(usd_per_1k, 0.0044), 200))) / (dearest - cheapest)
    bottom = beta * accuracy + cheapness
    return (1 + beta) * accuracy * cheapness / bottom if bottom else 0.0


# ---------------------------------------------------------------- oracles
