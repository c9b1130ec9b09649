"""Recall: the judged steps of one organisation as arrays, and what they say of a question. Pure, and without I/O.

A step's likeness is the cosine of its question and this one, plus 1 for the same task type, scaled over the steps of
all workers asked about: 0 is their mean or less, 1 the nearest. From `NEAR` on a step counts, from `NEAREST` on in full
(tests/models/experience.py states it as formulas). Its weight is that times the reliability of its source.

No judge decides alone what many keys report: where several keys judged a worker on such tasks, one key has at most half
of the weight, once it has more than `KEY_WEIGHT`. Steps of other organisations count only where a pool shares them, and
together at most half of what one's own weigh, or `STRANGERS_FIRST` before there are any of one's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.core.loop.experience.belief import Trials, Vector, WorkerExperience, experience_of
from gateway.core.loop.experience.likeness import NEAR, NEAREST, SPREAD_MIN
from gateway.core.loop.experience.past import Past, Placed, TaskQuestion

KEY_WEIGHT = 50.0  # outcomes of one key on such tasks that count, however little the other keys report
STRANGERS_SHARE = 0.5  # of one's own evidence: what all of other organisations' may weigh beside it
STRANGERS_FIRST = 4.0  # outcomes that other organisations' evidence weighs before there is any of one's own


def recall(
    question: TaskQuestion, workers: Mapping[str, str], k: int, own: Past, pool: Past | None = None, org: str = ""
) -> Iterator[WorkerExperience]:
    """What is known of each worker on tasks like this one. The arguments are those of `trials_near`."""
    for worker, trials in trials_near(question, workers, k, own, pool, org):
        if (known := experience_of(worker, trials)) is not None:
            yield known


def trials_near(
    question: TaskQuestion, workers: Mapping[str, str], k: int, own: Past, pool: Past | None = None, org: str = ""
) -> Iterator[tuple[str, Trials]]:
    """Each worker's judged steps on tasks like this one, at most its latest `k` that count. `workers` maps names to
    versions: steps of other versions do not count. `pool`: what the pool shares, of which the steps of `org` are left
    out, because `own` has them."""
    placed = own.near(question, workers)
    shared = {} if pool is None else pool.near(question, workers, org)
    own_scale, strange_scale = _Scale.of(placed.values()), _Scale.of(shared.values())
    for worker in workers:
        trials = None
        if worker in placed:
            trials = _trials(placed[worker], own_scale, k)
        if worker in shared:
            trials = _beside(trials, _trials(shared[worker], strange_scale, k))
        if trials is not None:
            yield worker, trials.plain


class _Scale(NamedTuple):
    """Mean and spread of the similarities of all steps that were asked about."""

    mean: float
    spread: float

    @classmethod
    def of(cls, placed: Iterable[Placed]) -> _Scale:
        similar = [one.similar for one in placed]
        if not similar:
            return cls(0.0, 0.0)
        mean = sum(float(one.sum()) for one in similar) / sum(map(len, similar))
        return cls(mean, max(float(one.max()) for one in similar) - mean)

    def nearness(self, similar: Vector) -> Vector:
        """The weight of steps by their similarities: 0 up to NEAR, 1 from NEAREST on, and for all if all are equal."""
        if self.spread <= SPREAD_MIN:
            return np.ones(len(similar))
        return np.clip(((similar - self.mean) / self.spread - NEAR) / (NEAREST - NEAR), 0.0, 1.0)


class _Weighed(NamedTuple):
    """Trials, and when each was judged."""

    at: NDArray[np.int64]
    plain: Trials

    def scaled(self, near: float, wide: float) -> _Weighed:
        """With its weights times `near`, and those of its tasks of any kind times `wide`."""
        plain = self.plain
        wides = plain.wide_n * wide, plain.wide_right * wide
        scaled = Trials(plain.weight * near, plain.success, plain.cost_nano, plain.latency_ms, *wides)
        return self._replace(plain=scaled)


def _trials(placed: Placed, scale: _Scale, k: int) -> _Weighed:
    steps = placed.steps
    nearness = scale.nearness(placed.similar)
    near = np.flatnonzero(nearness)[:k]
    wide = bounded(steps.weight, steps.key)
    chosen = steps.of(near)
    weight = bounded(nearness[near] * chosen.weight, chosen.key)
    calls = _calls(chosen.cost, chosen.failed), _calls(chosen.ms, chosen.failed)
    wides = float(wide.sum()), float(wide @ steps.success)
    return _Weighed(chosen.at, Trials(weight, chosen.success, *calls, *wides))


def bounded(weight: Vector, keys: NDArray[np.int32]) -> Vector:
    """The weights of steps whose keys are `keys`, where the heaviest key has at most as much as all others together, or
    KEY_WEIGHT where those have less."""
    if not len(keys) or (keys == keys[0]).all():
        return weight
    _, of = np.unique(keys, return_inverse=True)
    totals = np.bincount(of, weight)
    heaviest = int(totals.argmax())
    most = max(KEY_WEIGHT, float(totals.sum() - totals[heaviest]))
    if totals[heaviest] <= most:
        return weight
    return np.where(of == heaviest, weight * (most / totals[heaviest]), weight)


def _calls(figures: Vector, failed: NDArray[np.bool_]) -> Vector:
    """The dollars or seconds of calls. One that failed tells nothing good: it counts as a mean one at least."""
    if not failed.any() or failed.all():
        return figures
    return np.where(failed, np.maximum(figures, figures[~failed].mean()), figures)


def _beside(own: _Weighed | None, strange: _Weighed) -> _Weighed:
    """One's own trials and those of others, newest first, the latter within their bound."""
    if own is None:
        return strange.scaled(_share(0.0, strange.plain.weight.sum()), _share(0.0, strange.plain.wide_n))
    near = _share(float(own.plain.weight.sum()), float(strange.plain.weight.sum()))
    strange = strange.scaled(near, _share(own.plain.wide_n, strange.plain.wide_n))
    at = np.concatenate([own.at, strange.at])
    newest = np.argsort(-at, kind="stable")

    def both(mine: Vector, theirs: Vector) -> Vector:
        return np.concatenate([mine, theirs])[newest]

    one, other = own.plain, strange.plain
    trials = Trials(
        both(one.weight, other.weight),
        both(one.success, other.success),
        both(one.cost_nano, other.cost_nano),
        both(one.latency_ms, other.latency_ms),
        one.wide_n + other.wide_n,
        one.wide_right + other.wide_right,
    )
    return _Weighed(at[newest], trials)


def _share(own: float, strange: float) -> float:
    """The factor that bounds the weight of others' evidence beside one's own."""
    most = STRANGERS_SHARE * own if own > 0 else STRANGERS_FIRST
    return min(1.0, most / strange) if strange > 0 else 1.0
