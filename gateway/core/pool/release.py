"""Whether a worker in quarantine has recovered: the sequential test of `drift.py`, turned round. Pure.

Each flag has a test. A probe's result x in [0, 1], 1 for bad, is bet against "the worker is still at least half as much
worse as it was when it was flagged": the mean of x is at least m = (usual + now) ÷ 2. The bets add up to the same kind
of e-detector, so a worker that is still that bad passes on average no sooner than after RUN_LENGTH probes, whenever one
looks. A test that has passed stays passed until its worker is released.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.core.pool.drift import RISES, Drift, Signal

RUN_LENGTH = 500  # probes of a worker that is still bad before it passes, on average and at least
MIDDLE_MIN, MIDDLE_MAX = 0.02, 0.98  # of m


@dataclass(slots=True)
class ReleaseTest:
    """The test of one flag. `bound`: the size beyond which a result of `slow`, `long` or `short` is bad."""

    task_type: str
    signal: Signal
    usual: float
    now: float
    bound: float | None = None
    probes: int = 0
    bad: float = 0.0
    passed: bool = False
    sums: list[float] = field(default_factory=lambda: [0.0] * len(RISES))

    @classmethod
    def of(cls, flag: Drift) -> ReleaseTest:
        """The test that a flag asks for."""
        return cls(flag.task_type, flag.signal, flag.usual, flag.now, flag.bound)

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> ReleaseTest:
        """The test as `as_json` wrote it."""
        return cls(**{**stored, "sums": list(stored["sums"])})

    def as_json(self) -> dict[str, Any]:
        """The test as JSON data."""
        return {name: getattr(self, name) for name in self.__slots__}

    @property
    def middle(self) -> float:
        """m: half way from usual to what was flagged."""
        return min(MIDDLE_MAX, max(MIDDLE_MIN, (self.usual + max(self.now, self.usual)) / 2))

    def add(self, bad: float) -> None:
        """Observe one probe."""
        self.probes += 1
        self.bad += bad
        room = 1.0 - self.middle
        for index, rise in enumerate(RISES):
            self.sums[index] = (self.sums[index] + 1.0) * (1.0 + rise / room * (1.0 - bad - room))
        self.passed = self.passed or sum(self.sums) / len(RISES) >= RUN_LENGTH

    def result(self, signals: Mapping[Signal, float]) -> float | None:
        """What a probe says for this flag, in [0, 1]; None where it says nothing. Sizes are compared with the bound."""
        value = signals.get(self.signal)
        if value is None or self.signal not in ("slow", "long", "short"):
            return value
        if self.bound is None:
            return None
        return float(value < self.bound) if self.signal == "short" else float(value > self.bound)
