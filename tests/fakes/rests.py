"""A RestStore in memory, and a clock that a test moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from gateway.core.pool.breaker import Health
from gateway.errors import Unavailable
from gateway.service.ports.request import Clock


class MovedClock(Clock):
    """Time that passes only where the test adds to `s`."""

    def __init__(self) -> None:
        self.s = 1_000.0

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.s)

    def monotonic_s(self) -> float:
        return self.s


@dataclass
class FakeRestStore:
    """The port RestStore. `away`: it answers nobody."""

    stored: dict[str, Health] = field(default_factory=dict)
    away: bool = False

    async def exchange(self, changed: Mapping[str, Health]) -> Mapping[str, Health]:
        if self.away:
            raise Unavailable("the store is away")
        for name, health in changed.items():
            if name not in self.stored or self.stored[name].at_s < health.at_s:
                self.stored[name] = health
        return dict(self.stored)


@dataclass
class FakeRestMetrics:
    """The port RestMetrics."""

    began: list[tuple[str, str]] = field(default_factory=list)
    shown: dict[str, str] = field(default_factory=dict)

    def rested(self, worker: str, reason: str) -> None:
        self.began.append((worker, reason))

    def resting(self, reasons: Mapping[str, str]) -> None:
        self.shown = dict(reasons)
