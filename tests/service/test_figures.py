"""Budgets near their end: all keys are looked at, a page at a time, for the gauges and for alerts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gateway.core.access.audit import Act
from gateway.core.log.alerts import Alert
from gateway.core.money.ledger import Balance, key_of, key_scope, org_scope, user_scope, windows
from gateway.errors import MoneyUnavailable
from gateway.service.admin import figures
from gateway.service.admin.alerts import AlertSources
from gateway.service.admin.figures import BudgetPages, StoreGauges
from gateway.service.ports.admin import KeyRow, OrgRow
from tests.fakes.admin import FakeAdmin
from tests.fakes.budgets import FakeBudgets
from tests.fakes.store import FakeStore
from tests.kit import TestClock

CLOCK = TestClock()
ACT = Act("test")


class Spent(FakeBudgets):
    """Budgets of which `nano` is spent, by scope."""

    def __init__(self) -> None:
        super().__init__()
        self.nano: dict[str, int] = {}
        self.away = False

    async def balances(self, scopes: Sequence[str]) -> Mapping[str, Balance]:
        if self.away:
            raise MoneyUnavailable("Redis is away")
        return {scope: Balance(self.nano.get(scope, 0), 0) for scope in scopes}


class Gauges:
    """Takes figures."""

    def __init__(self) -> None:
        self.budgets: list[Mapping[str, float]] = []

    def figure(self, name: str, values: Any) -> None:
        if name == "budgets":
            self.budgets.append(values)

    def figures_read(self, at_s: float) -> None: ...


class Nothing:
    """No figures, and an outbox that keeps alerts by subject."""

    def __init__(self) -> None:
        self.stored: dict[str, Alert] = {}

    async def figures(self, now: object) -> Sequence[tuple[str, str | None, float]]:
        return ()

    async def store(self, batch: Sequence[Alert], now: object) -> int:
        self.stored |= {alert.subject: alert for alert in batch}
        return len(batch)


@pytest.fixture
async def admin(monkeypatch: pytest.MonkeyPatch) -> FakeAdmin:
    """Five keys with a budget of 100 for life, an organisation with one of 1,000 a day, and pages of two keys."""
    monkeypatch.setattr(figures, "KEYS_MAX", 2)
    admin = FakeAdmin(FakeStore())
    await admin.org_insert(OrgRow("acme", CLOCK.now(), budget_day_nano=1_000), ACT)
    for name in "abcde":
        await admin.key_insert(a_key(name), ACT)
    return admin


def a_key(name: str) -> KeyRow:
    limits = (100, None, None, None)
    return KeyRow(name, "data", name, b"d", 1, "acme", (), (), *limits, {}, "full", True, CLOCK.now())


async def test_the_gauges_are_of_all_keys_once_all_pages_were_read(admin: FakeAdmin) -> None:
    budgets, gauges = Spent(), Gauges()
    budgets.nano = {"key:a": 80, "key:e": 100, windows(org_scope("acme"), CLOCK.now())[2]: 1_000}

    async def parts() -> Mapping[str, bool]:
        return {}

    store = StoreGauges(Nothing(), admin, budgets, parts, CLOCK, gauges)
    for _ in range(2):
        await store.read()
    budgets.away = True
    with pytest.raises(MoneyUnavailable):
        await store.read()
    assert gauges.budgets == []
    budgets.away = False
    await store.read()  # the page that could not be read
    assert gauges.budgets == [{"set": 6.0, "near": 3.0, "spent": 2.0}]
    for _ in range(3):
        await store.read()
    assert gauges.budgets[1:] == gauges.budgets[:1]


async def test_every_key_is_told_of_and_one_that_refused_at_once(admin: FakeAdmin) -> None:
    budgets, outbox, exhausted = Spent(), Nothing(), {"key:e", windows(org_scope("acme"), CLOCK.now())[2]}
    budgets.nano = {"key:c": 60, "key:d": 60, "key:e": 90, windows(org_scope("acme"), CLOCK.now())[2]: 900}
    told: Any = {"flags": (), "exhausted": exhausted}
    sources = AlertSources(outbox, ("budget",), admin, budgets, CLOCK, alone=True, **told)  # type: ignore[arg-type]

    async def percents() -> dict[str, list[int]]:
        await sources.budgets()
        found: dict[str, list[int]] = {}
        for alert in outbox.stored.values():
            found.setdefault(alert.data["scope"].partition(":")[2], []).append(alert.data["percent"])
        return found

    day = f"acme:{CLOCK.now():%Y-%m-%d}"
    assert await percents() == {"e": [50, 80, 100], day: [50, 80, 100]}
    assert exhausted == set()
    assert (await percents())["c"] == [50]
    assert (await percents())["d"] == [50]


async def test_pages_begin_anew_when_keys_are_gone(admin: FakeAdmin) -> None:
    pages, seen = BudgetPages(admin), list[list[str]]()
    for _ in range(5):
        page = await pages.next(CLOCK.now())
        seen.append([scope.name for scope in page.scopes if scope.name.startswith("key:")])
        pages.turn(page)
        await admin.key_revoke("b", CLOCK.now(), ACT)
        await admin.key_revoke("e", CLOCK.now(), ACT)
    assert seen == [["key:a", "key:b"], ["key:c", "key:d"], [], ["key:a", "key:c"], ["key:d"]]


def test_the_key_of_a_scope() -> None:
    scopes = [*windows(key_scope("a"), CLOCK.now()), org_scope("key"), user_scope("key:a", "me")]
    assert [key_of(scope) for scope in scopes] == ["a", "a", "a", None, None]
