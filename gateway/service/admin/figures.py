"""The gauges of the stores: holds, uncertain charges, budgets near their end, jobs, gradings, outcomes by version.

They are read beside the traffic, every `every_s` seconds. All gateways over one database show the same figures. While a
store is away its gauges keep their values, and `figures_read_seconds` stands still.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from gateway.core.money.ledger import Scope, key_scope, org_scope, windows
from gateway.errors import BatonError
from gateway.service.ports.admin import KeyRow, OrgRow
from gateway.service.ports.money import Budgets
from gateway.service.ports.request import Clock

log = logging.getLogger("gateway.figures")
EVERY_S = 15.0
NEAR_SHARE = 80  # percent of a budget that is spent or held
SCOPES_MAX = 2_000  # budgets that one reading looks up
LABELS: Mapping[str, tuple[str, ...]] = {
    "jobs": ("queued", "running", "done", "refused", "failed", "cancelled"),
    "gradings": ("waiting", "graded", "ungraded"),
    "outcomes": (),
    "reward": (),
    "version_requests": (),
}
Parts = Callable[[], Awaitable[Mapping[str, bool]]]


class FigureSource(Protocol):
    """Reads the figures of PostgreSQL."""

    async def figures(self, now: datetime) -> Sequence[tuple[str, str | None, float]]:
        """(gauge, value of its label or None, number). Raises Unavailable."""
        ...


class BudgetOwners(Protocol):
    """The owners of budgets. Both calls raise Unavailable."""

    async def key_budgets(self, limit: int) -> Sequence[KeyRow]: ...
    async def org_list(self) -> Sequence[OrgRow]: ...


class FigureMetrics(Protocol):
    """Takes the figures."""

    def figure(self, name: str, values: float | Mapping[str, float]) -> None:
        """Set a gauge, or its values by label."""
        ...

    def figures_read(self, at_s: float) -> None:
        """Note when the stores were read, in Unix seconds."""
        ...


class StoreGauges:
    """Reads the figures. `parts`: the health checks by name."""

    def __init__(
        self,
        source: FigureSource,
        owners: BudgetOwners,
        budgets: Budgets,
        parts: Parts,
        clock: Clock,
        metrics: FigureMetrics,
    ) -> None:
        self._source = source
        self._owners = owners
        self._budgets = budgets
        self._parts = parts
        self._clock = clock
        self._metrics = metrics

    async def run(self, every_s: float = EVERY_S) -> None:
        """Read for ever."""
        while True:
            try:
                await self.read()
            except BatonError as error:
                log.warning("the figures of the stores cannot be read now: %s", error.message)
            except Exception as bug:  # boundary: figures are not worth a gateway
                log.error("the figures of the stores cannot be read", exc_info=bug)
            await asyncio.sleep(every_s)

    async def read(self) -> None:
        """Read once. Raises Unavailable, MoneyUnavailable."""
        self._metrics.figure("up", await self._parts())
        labelled: dict[str, dict[str, float]] = {name: dict.fromkeys(labels, 0.0) for name, labels in LABELS.items()}
        for name, label, value in await self._source.figures(self._clock.now()):
            if label is None:
                self._metrics.figure(name, value)
            else:
                labelled[name][label] = value
        for name, values in labelled.items():
            self._metrics.figure(name, values)
        self._metrics.figure("budgets", await self._budget_states())
        self._metrics.figures_read(self._clock.now().timestamp())

    async def _budget_states(self) -> Mapping[str, float]:
        """How many budgets are set, near their end, and spent. A budget counts in each of them that it has reached."""
        states = {"set": 0.0, "near": 0.0, "spent": 0.0}
        scopes = await budget_scopes(self._owners, self._clock.now())
        balances = await self._budgets.balances([scope.name for scope in scopes])
        for scope in scopes:
            balance = balances[scope.name]
            used, limit = balance.posted_nano + balance.held_nano, scope.limit_nano or 0
            states["set"] += 1
            states["near"] += 100 * used >= NEAR_SHARE * limit
            states["spent"] += used >= limit
        return states


async def budget_scopes(owners: BudgetOwners, now: datetime) -> Sequence[Scope]:
    """The windows with a limit of keys and organisations that are open, at most SCOPES_MAX. Raises Unavailable."""
    keys, orgs = await owners.key_budgets(SCOPES_MAX), await owners.org_list()
    open_: list[tuple[str, KeyRow | OrgRow]] = []
    open_ += [(key_scope(row.public_id), row) for row in keys]
    open_ += [(org_scope(org.name), org) for org in orgs if org.closed_at is None]
    scopes = [scope for life, owner in open_ for scope in _limited(life, owner, now)]
    return scopes[:SCOPES_MAX]


def _limited(life: str, owner: KeyRow | OrgRow, now: datetime) -> list[Scope]:
    """The windows of an owner that have a limit."""
    limits = (owner.budget_nano, owner.budget_month_nano, owner.budget_day_nano)
    pairs = zip(windows(life, now), limits, strict=True)
    return [Scope(name, limit) for name, limit in pairs if limit is not None]
