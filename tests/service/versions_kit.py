"""A gateway over the fakes whose conductor has versions: registry, engine, follower, shadow and watcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from gateway.core.policies.versions import Standing, State
from gateway.core.pool.workers import Price
from gateway.service.loop.conducting import ConductorPlanner, ConductorSettings
from gateway.service.policies.admin import PolicyAdmin
from gateway.service.policies.attendance import Attendance
from gateway.service.policies.shadow import ShadowedPlanner, ShadowLimits, Shadows
from gateway.service.policies.versions import PolicyVersions, VersionLimits
from gateway.service.policies.watcher import Watcher, WatchLimits
from gateway.service.ports.request import ConductorCall
from tests.fakes.conductor import Line
from tests.fakes.engine import FakeEngine
from tests.fakes.registry import FakeGateways, FakeRegistry
from tests.kit import Kit, TestClock, plan
from tests.policies import write_policy

PASSED = {"passed": True, "refusals": []}
FREE = Price(input_usd_per_mtok=Decimal(0), output_usd_per_mtok=Decimal(0))
PLAN = plan(("atlas", None, []))
AT_ONCE = VersionLimits(poll_s=0.01, check_s=0.0, unload_s=0.0)


@dataclass
class SpyPolicyMetrics:
    """Counts what is said of versions."""

    rollbacks: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    shadows: list[tuple[str, str]] = field(default_factory=list)

    def policy_standing(self, now: Standing, usable: Any) -> None:
        """Who serves is asked of Versions itself."""

    def policy_rolled_back(self, cause: str) -> None:
        self.rollbacks.append(cause)

    def policy_refused(self, version: str) -> None:
        self.refused.append(version)

    def policy_shadowed(self, version: str, result: str) -> None:
        self.shadows.append((version, result))


class Following(Kit):
    """`says`: version → what it plans (text or error); others plan one step on atlas."""

    def __init__(
        self,
        place: Path,
        says: Mapping[str, Line] | None = None,
        *,
        limits: VersionLimits = AT_ONCE,
        shadow: ShadowLimits | None = None,
        watch: WatchLimits | None = None,
        price: Price = FREE,
        gap_s: float = 0.0,
        wait_s: float = 0.5,
    ) -> None:
        super().__init__()
        self.says = dict(says or {})
        self.place = place
        self.registry = FakeRegistry(place / "policies")
        self.engine = FakeEngine(self._line, gap_s=gap_s)
        self.watched = SpyPolicyMetrics()
        clock = TestClock()
        self.versions = PolicyVersions(self.registry, self.engine, clock, self.watched, limits=limits)
        self.watcher = Watcher(self.versions, self.registry, clock, self.watched, watch or WatchLimits())
        self.gateways = FakeGateways()
        self.attendance = Attendance(
            *(self.gateways, self.registry, self.versions, clock), gateway="one", host="one:/data", wait_s=wait_s
        )
        self.policies = PolicyAdmin(self.registry, self.versions, self.watcher, self.attendance)
        settings = ConductorSettings("full", price, 2.0)
        learned = ConductorPlanner(self.engine.conductor, settings)
        self.shadows = Shadows(
            *(self.versions, learned, settings, self.budgets, self.journal, clock, self.watched),
            shadow or ShadowLimits(share=1.0, parallel=4),
        )
        rule = self.catalog._planners["baton/rule"][1]
        front = ShadowedPlanner(learned, self.shadows)
        self.catalog._planners |= {"baton": (front, rule), "baton/conductor": (front, rule)}
        self.catalog._versions = self.versions
        self.completer._admission._pick = self.versions.pick

    def _line(self, call: ConductorCall) -> Line:
        return self.says.get(call.model or "", PLAN)

    async def add(self, number: int, *states: State, percent: int = 100, **manifest: Any) -> str:
        """Publish a version and move it through `states`; the engine is not asked yet."""
        source = write_policy(self.registry.policies / f"conductor@{number}", str(number), (float(number),), **manifest)
        version = (await self.registry.publish(source, by="test", gate=PASSED)).id
        for state in states:
            if state == "canary":
                await self.registry.canary(version, percent, by="test")
            else:
                await self.registry.move(version, state, by="test")
        return version

    async def settle(self) -> None:
        """Follow until nothing is being loaded any more."""
        await self.versions.start(5.0)

    async def planned_by(self, n: int = 1, **body: Any) -> Sequence[str | None]:
        """Who planned each of `n` requests."""
        records = [(await self.serve(**body)).record for _ in range(n)]
        return [record.policy_version for record in records]


LIVE: tuple[State, ...] = ("shadow", "canary", "live")
CANARY: tuple[State, ...] = ("shadow", "canary")
