"""Belief: what the judged steps of a worker on tasks like this one say about its next step. Pure.

Success is a posterior, not a mean: a mixture of Beta distributions over the run length, the number of newest steps
since the worker last changed (Adams & MacKay 2007, with one change looked for, at places that grow geometrically). A
worker that was right a hundred times and then fails ten times is believed to have changed, and the hundred stop
counting; a worker that always failed stays believed to fail, however old its failures are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HAZARD = 0.005  # the chance that a worker changes between two steps on tasks like this one
RUNS_GROWTH = 1.5  # run lengths that are looked at: each by this factor longer than the one before
SHARE_MIN = 0.01  # of a run length; those below are left out
CALL_HALF_LIFE = 20.0  # newer steps after which a step's seconds and dollars count half
Vector = NDArray[np.float64]


class RunLength(NamedTuple):
    """One hypothesis about a worker: with probability `share` its success is Beta(right + prior, wrong + prior)."""

    share: float
    right: float
    wrong: float


@dataclass(frozen=True, slots=True)
class Trials:
    """The judged steps of one worker on tasks like the question, newest first, as vectors of one length. `weight`: the
    likeness of its task times the reliability of its source, in (0, 1]. `success` in [0, 1]. `wide_n`, `wide_right`:
    the weight of all its steps of any kind, and of those that were right."""

    weight: Vector
    success: Vector
    cost_nano: Vector
    latency_ms: Vector
    wide_n: float = 0.0
    wide_right: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerExperience:
    """Figures of one worker on judged past tasks like this one. `runs`: the posterior of its success; empty: one run of
    `n` steps. `wide_n`, `wide_mean`: the same of its tasks of any kind."""

    worker: str
    n: int  # weight in outcomes: near ones of reliable sources count in full
    success_mean: float  # [0, 1]
    cost_nano_mean: int
    latency_ms_mean: int
    runs: tuple[RunLength, ...] = ()
    wide_n: float = 0.0
    wide_mean: float = 0.0

    @property
    def posterior(self) -> tuple[RunLength, ...]:
        """The runs, of which there is one at least."""
        right = self.n * self.success_mean
        return self.runs or (RunLength(1.0, right, self.n - right),)


def experience_of(worker: str, trials: Trials) -> WorkerExperience | None:
    """What the trials says of a worker; None where it has no weight."""
    total = float(trials.weight.sum())
    if total <= 0:
        return None
    runs = runs_of(trials.weight, trials.success)
    n = sum(run.share * (run.right + run.wrong) for run in runs)
    mean = sum(run.share * run.right / (run.right + run.wrong) for run in runs)
    fresh = trials.weight * 0.5 ** ((np.cumsum(trials.weight) - trials.weight) / CALL_HALF_LIFE)
    cost, latency = (float((fresh * each).sum() / fresh.sum()) for each in (trials.cost_nano, trials.latency_ms))
    wide = trials.wide_right / trials.wide_n if trials.wide_n else 0.0
    return WorkerExperience(
        worker, round(n), mean, round(cost), round(latency), runs=runs, wide_n=trials.wide_n, wide_mean=wide
    )


def runs_of(weight: Vector, success: Vector) -> tuple[RunLength, ...]:
    """The posterior over run lengths of weighted outcomes, newest first, the longest run first."""
    right, total = np.cumsum(weight * success), np.cumsum(weight)
    all_right, everything = float(right[-1]), float(total[-1])
    places = _places(len(weight))
    logs = [_log_marginal(all_right, everything - all_right) + everything * math.log1p(-HAZARD)]
    pairs = [(all_right, everything - all_right)]
    for place in places:
        newer_right, newer = float(right[place - 1]), float(total[place - 1])
        older_right, older = all_right - newer_right, everything - newer
        pairs.append((newer_right, newer - newer_right))
        prior = math.log(HAZARD) + newer * math.log1p(-HAZARD)
        logs.append(
            _log_marginal(newer_right, newer - newer_right) + _log_marginal(older_right, older - older_right) + prior
        )
    top = max(logs)
    # A place stands for all those up to the next one.
    widths = [1, *(after - place for place, after in pairwise([*places, len(weight)]))]
    shares = [width * math.exp(each - top) for width, each in zip(widths, logs, strict=True)]
    kept = [(share, pair) for share, pair in zip(shares, pairs, strict=True) if share >= SHARE_MIN * max(shares)]
    whole = sum(share for share, _ in kept)
    return tuple(RunLength(share / whole, *pair) for share, pair in kept)


def _places(length: int) -> Sequence[int]:
    places, at = [], 1.0
    while at < length:
        places.append(int(at))
        at = max(at + 1, at * RUNS_GROWTH)
    return places


def _log_marginal(right: float, wrong: float) -> float:
    """The log-probability of a sequence with these weights of right and wrong steps, its success uniform on [0, 1]."""
    right, wrong = max(0.0, right), max(0.0, wrong)
    return math.lgamma(right + 1) + math.lgamma(wrong + 1) - math.lgamma(right + wrong + 2)
