"""Whether a worker has become worse than it was: an anytime-valid sequential test on each stream of its results. Pure.

A stream is one signal of one worker version on one kind of task. Every signal is a number in [0, 1], 1 for bad. The
first `reference` results say what is usual: the upper end of their confidence interval is m0. After that, each result
x is bet against "the mean is at most m0" by factors 1 + λ(x − m0), whose expectation is then at most 1. The bets are
summed as a Shiryaev–Roberts e-detector M ← (M + 1)·factor, averaged over several λ. Then E[M_n] ≤ n, so a flag at
M ≥ N comes on average no sooner than after N results of a worker that is no worse, whenever one looks (Shin, Ramdas &
Rinaldo, "E-detectors: a nonparametric framework for sequential change detection", arXiv:2203.03532; bets as in
Waudby-Smith & Ramdas, arXiv:2010.09686). Nothing is assumed of the distribution of the results but its mean.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, NamedTuple, get_args

Signal = Literal["outcome", "failed", "refused", "slow", "long", "short"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)
RISES = (0.05, 0.1, 0.2, 0.4, 0.8)  # of the way from m0 to 1: the alternatives that are bet on
USUAL_MIN = 0.01  # of m0: a worker that never failed may fail once
LEVEL_Z = 2.6  # of m0: one-sided 99.5 % by Wilson's interval
TAIL = 0.1  # of the reference lies beyond a quantile
STREAMS_MAX = 10_000
WITNESSED = 50  # latest outcomes of one organisation about one stream
WITNESSES_MAX = 100  # organisations
OTHERS_MIN = 10  # outcomes of the others that can speak against those of one


@dataclass(frozen=True, slots=True)
class DriftRules:
    """`reference`: results that say what is usual. `run_length`: results of an unchanged worker between two false
    flags, on average and at least."""

    reference: int = 200
    run_length: int = 20_000


@dataclass(frozen=True, slots=True)
class Drift:
    """A flag: the signal was bad in at most `usual` of the results, and was in `now` of the last ones. `results`: since
    the reference. `bound`: the seconds or tokens beyond which a result of `slow`, `long` or `short` is bad."""

    worker: str
    version: str
    task_type: str
    signal: Signal
    usual: float
    now: float
    results: int
    bound: float | None = None


class Judged(NamedTuple):
    """The outcome of one step: `success` in [0, 1], `at`: when it was judged, `org`: whose it is."""

    worker: str
    version: str
    task_type: str | None
    success: float
    at: datetime
    org: str = ""


@dataclass(slots=True)
class Detector:
    """The test on one stream."""

    rules: DriftRules
    seen: int = 0
    flagged: bool = False
    usual: float = 0.0
    _bad: float = 0.0
    _sums: list[float] = field(default_factory=lambda: [0.0] * len(RISES))
    _recent: float = 0.0

    @property
    def now(self) -> float:
        """The mean of the last results, the latest ones weighing most."""
        return self._recent

    @property
    def results(self) -> int:
        """Results since the reference."""
        return max(0, self.seen - self.rules.reference)

    def renew(self) -> None:
        """Begin the test again with the same reference, without the flag."""
        self._sums, self._recent, self.flagged = [0.0] * len(RISES), self.usual, False
        self.seen = min(self.seen, self.rules.reference)

    def add(self, bad: float) -> bool:
        """Observe one result in [0, 1]. Return whether this one raises the flag, which then stays."""
        self.seen += 1
        if self.seen <= self.rules.reference:
            self._bad += bad
            if self.seen == self.rules.reference:
                self.usual = self._recent = max(USUAL_MIN, upper_rate(self._bad, self.seen))
            return False
        self._recent += (bad - self._recent) / min(50, self.results)
        room = self.usual
        for index, rise in enumerate(RISES):  # λ = rise ÷ m0: the growth-optimal bet against that alternative
            self._sums[index] = (self._sums[index] + 1.0) * (1.0 + rise / room * (bad - room))
        was, self.flagged = self.flagged, self.flagged or sum(self._sums) / len(RISES) >= self.rules.run_length
        return self.flagged and not was


def upper_rate(bad: float, n: int, z: float = LEVEL_Z) -> float:
    """The upper end of Wilson's interval for a rate of `bad` in `n` (1927)."""
    share = bad / n
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return min(1 - 1e-9, (share + z * z / (2 * n) + spread) / (1 + z * z / n))


@dataclass(slots=True)
class SizeTail:
    """Turns a size (seconds, tokens) into results: whether it lies in the tail of the reference's sizes."""

    reference: int
    above: bool
    _sizes: list[float] = field(default_factory=list)
    bound: float | None = None

    def result(self, size: float) -> float | None:
        """1 in the tail, 0 outside; None while sizes of the reference are collected."""
        if self.bound is None:
            self._sizes.append(size)
            if len(self._sizes) == self.reference:
                ordered = sorted(self._sizes)
                at = round((1 - TAIL if self.above else TAIL) * (self.reference - 1))
                self.bound, self._sizes = ordered[at], []
            return None
        return float(size > self.bound) if self.above else float(size < self.bound)


class Witnesses:
    """The latest outcomes of each organisation about each stream: no organisation alone can say that a worker has
    become worse for all, where the others say that it has not."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, str, str], dict[str, deque[float]]] = {}

    def add(self, worker: str, version: str, task_type: str, org: str, bad: float) -> None:
        """Observe one outcome, 1 for bad."""
        if len(self._latest) >= STREAMS_MAX:
            self._latest.clear()
        latest = self._latest.setdefault((worker, version, task_type), {})
        if org not in latest and len(latest) >= WITNESSES_MAX:
            latest.pop(next(iter(latest)))
        latest.setdefault(org, deque(maxlen=WITNESSED)).append(bad)

    def disagree(self, flag: Drift) -> bool:
        """Whether the outcomes of all organisations but one, if there are a few, are no worse than usual."""
        latest = self._latest.get((flag.worker, flag.version, flag.task_type), {})
        for org in latest:
            others = [bad for name, results in latest.items() if name != org for bad in results]
            if len(others) >= OTHERS_MIN and sum(others) / len(others) <= flag.usual:
                return True
        return False


class Streams:
    """All streams of a gateway, at most STREAMS_MAX; further ones are not watched."""

    def __init__(self, rules: DriftRules) -> None:
        self._rules = rules
        self._detectors: dict[tuple[str, str, str, Signal], Detector] = {}
        self._tails: dict[tuple[str, str, str, Signal], SizeTail] = {}
        self._versions: dict[str, str] = {}

    def add(self, worker: str, version: str, task_type: str, signals: Mapping[Signal, float]) -> Iterator[Drift]:
        """Observe the signals of one result; `slow` in seconds, `long` and `short` in tokens, the others in [0, 1].
        A worker with another version begins anew. Yields the flags that it raises."""
        if self._versions.setdefault(worker, version) != version:
            self.forget(worker)
            self._versions[worker] = version
        for signal, value in signals.items():
            key = (worker, version, task_type, signal)
            detector = self._detectors.get(key)
            if detector is None:
                if len(self._detectors) >= STREAMS_MAX:
                    continue
                detector = self._detectors[key] = Detector(self._rules)
            bad = self._bad(key, value)
            if bad is not None and detector.add(bad):
                tail = self._tails.get(key)
                bound = None if tail is None else tail.bound
                yield Drift(worker, version, task_type, signal, detector.usual, detector.now, detector.results, bound)

    def flagged(self) -> Mapping[tuple[str, Signal], int]:
        """(worker, signal) → its kinds of task that are flagged."""
        counts: dict[tuple[str, Signal], int] = {}
        for (worker, _, _, signal), detector in self._detectors.items():
            if detector.flagged:
                counts[worker, signal] = counts.get((worker, signal), 0) + 1
        return counts

    def renew(self, worker: str, version: str, signals: Collection[Signal]) -> None:
        """Begin the tests of a worker's flagged streams again, compared with the same reference as before."""
        for (name, of, _, signal), detector in self._detectors.items():
            if (name, of) == (worker, version) and signal in signals and detector.flagged:
                detector.renew()

    def forget(self, worker: str, signals: Collection[Signal] = SIGNALS) -> int:
        """Begin anew with a worker: what it does from now on is usual. Return the number of its streams."""
        gone = [key for key in self._detectors if key[0] == worker and key[3] in signals]
        for key in gone:
            del self._detectors[key]
            self._tails.pop(key, None)
        return len(gone)

    def _bad(self, key: tuple[str, str, str, Signal], value: float) -> float | None:
        signal = key[3]
        if signal not in ("slow", "long", "short"):
            return min(1.0, max(0.0, value))
        tail = self._tails.get(key)
        if tail is None:
            tail = self._tails[key] = SizeTail(self._rules.reference, above=signal != "short")
        return tail.result(value)
