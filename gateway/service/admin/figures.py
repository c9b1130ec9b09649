"""The gauges of the stores: holds, uncertain charges, budgets near their end, jobs, gradings, outcomes by version.

They are read beside the traffic, every `every_s` seconds. All gateways over one database show the same figures. While a
store is away its gauges keep their values, and `figures_read_seconds` stands still.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from gateway.core.money.ledger import Scope, key_of, key_scope, org_scope, windows
from gateway.errors import BatonError
from gateway.service.ports.admin import KeyRow, OrgRow
from gateway.service.ports.money import Budgets
from gateway.service.ports.request import Clock

log = logging.getLogger("gateway.figures")
EVERY_S = 15.0
BUDGET_STATES = ("set", "near", "spent")
NEAR_SHARE = 80  # percent of a budget that is spent or held
KEYS_MAX = 2_000  # whose budgets one reading looks up
LABELS: Mapping[str, tuple[str, ...]] = {
    "jobs": ("queued", "running", "done", "refused", "failed", "cancelled"),
    "gradings": ("waiting", "graded", "ungraded"),
    "outcomes": (),
    "source_agreement": (),
    "source_weight": (),
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

    async def key_budgets(
        self, limit: int, after: str = "", among: Collection[str] | None = None
    ) -> Sequence[KeyRow]: ...
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
        self._pages = BudgetPages(owners)
        self._counts: Counter[str] = Counter()  # of the pages since the first one
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
        if (states := await self._budget_states()) is not None:
            self._metrics.figure("budgets", states)
        self._metrics.figures_read(self._clock.now().timestamp())

    async def _budget_states(self) -> Mapping[str, float] | None:
        """How many budgets are set, near their end, and spent. A budget counts in each of them that it has reached.
        None while there are keys that were not looked at since the last answer."""
        page = await self._pages.next(self._clock.now())
        balances = await self._budgets.balances([scope.name for scope in page.scopes])
        if page.is_first:
            self._counts.clear()
        for scope in page.scopes:
            balance = balances[scope.name]
            used, limit = balance.posted_nano + balance.held_nano, scope.limit_nano or 0
            self._counts["set"] += 1
            self._counts["near"] += 100 * used >= NEAR_SHARE * limit
            self._counts["spent"] += used >= limit
        self._pages.turn(page)
        return {state: float(self._counts[state]) for state in BUDGET_STATES} if page.is_last else None


@dataclass(frozen=True, slots=True)
class BudgetPage:
    """Some of the windows with a limit. `is_first`, `is_last`: of one look at all of them. `key`: the last one of the
    page."""

    scopes: Sequence[Scope]
    is_first: bool
    is_last: bool
    key: str


class BudgetPages:
    """The windows with a limit of organisations and keys that are open: those of KEYS_MAX keys at a time, and then from
    the first key again. So one reading costs the same however many keys there are."""

    def __init__(self, owners: BudgetOwners) -> None:
        self._owners = owners
        self._after = ""  # the last key of the page before

    async def next(self, now: datetime) -> BudgetPage:
        """The next page, until `turn`. The first one has the organisations. Raises Unavailable."""
        keys = await self._owners.key_budgets(KEYS_MAX, self._after)
        orgs = () if self._after else await self._owners.org_list()
        is_last = len(keys) < KEYS_MAX
        scopes = [*_of_keys(keys, now), *_of_orgs(orgs, now)]
        return BudgetPage(scopes, not self._after, is_last, "" if is_last else keys[-1].public_id)

    def turn(self, page: BudgetPage) -> None:
        """Go on behind this page, which was read to its end."""
        self._after = page.key

    async def by_name(self, names: Collection[str], now: datetime) -> Sequence[Scope]:
        """The windows of these names, at most those of KEYS_MAX keys. Raises Unavailable."""
        ids = {key for name in names if (key := key_of(name)) is not None}
        keys = await self._owners.key_budgets(KEYS_MAX, among=ids) if ids else ()
        orgs = await self._owners.org_list() if len(ids) < len(names) else ()
        return [scope for scope in (*_of_keys(keys, now), *_of_orgs(orgs, now)) if scope.name in names]


def _of_keys(keys: Sequence[KeyRow], now: datetime) -> Iterator[Scope]:
    return (scope for row in keys for scope in _limited(key_scope(row.public_id), row, now))


def _of_orgs(orgs: Sequence[OrgRow], now: datetime) -> Iterator[Scope]:
    return (scope for org in orgs if org.closed_at is None for scope in _limited(org_scope(org.name), org, now))


def _limited(life: str, owner: KeyRow | OrgRow, now: datetime) -> list[Scope]:
    """The windows of an owner that have a limit."""
    limits = (owner.budget_nano, owner.budget_month_nano, owner.budget_day_nano)
    pairs = zip(windows(life, now), limits, strict=True)
    return [Scope(name, limit) for name, limit in pairs if limit is not None]
