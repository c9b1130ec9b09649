"""The ledger beside the balances: what is on its way, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gateway.core.money.ledger import Balance
from gateway.service.money.drift import DriftWatch
from tests.kit import TestClock


class Sides:
    """The ledger and the balances of one scope, and what was done."""

    def __init__(self) -> None:
        self.ledger: dict[str, int] = {"key:k": 100}
        self.counted: dict[str, int] = {"key:k": 100}
        self.busy = False
        self.doubts = 0
        self.shown: list[float] = []

    async def posted_totals(self) -> Mapping[str, int] | None:
        return None if self.busy else dict(self.ledger)

    async def balances(self, scopes: Any) -> dict[str, Balance]:
        return {scope: Balance(self.counted[scope], 0) for scope in scopes}

    async def doubt(self) -> None:
        self.doubts += 1

    def figure(self, name: str, values: Any) -> None:
        assert name == "drift_usd"
        self.shown.append(values)


@pytest.fixture
def sides() -> Sides:
    return Sides()


@pytest.fixture
def watch(sides: Sides) -> DriftWatch:
    budgets: Any = sides
    return DriftWatch(budgets, sides, TestClock(), sides)


async def test_equal_sides_do_not_drift(watch: DriftWatch, sides: Sides) -> None:
    assert [await watch.look() for _ in range(4)] == [{}, {}, {}, {}]
    assert sides.shown == [0.0] * 4


async def test_what_is_on_its_way_is_no_drift(watch: DriftWatch, sides: Sides) -> None:
    for step in range(1, 8):  # under load the balances are always ahead of the ledger, or the other way round
        sides.counted["key:k"] = 100 + 10 * step
        sides.ledger["key:k"] = 100 + 10 * (step - 1)
        assert await watch.look() == {}
    for step in range(8, 15):
        sides.counted["key:k"] = 100 + 10 * (step - 1)
        sides.ledger["key:k"] = 100 + 10 * step
        assert await watch.look() == {}
    assert sides.doubts == 0


async def test_a_credit_is_no_drift(watch: DriftWatch, sides: Sides) -> None:
    await watch.look()
    sides.ledger["key:k"] = sides.counted["key:k"] = 40
    assert [await watch.look() for _ in range(3)] == [{}, {}, {}]


@pytest.mark.parametrize(("counted", "drift"), [(0, -100), (130, 30)])
async def test_a_difference_that_stays_is_shown_and_the_balances_are_given_up(
    watch: DriftWatch, sides: Sides, counted: int, drift: int
) -> None:
    await watch.look()
    sides.counted["key:k"] = counted
    looks = [await watch.look() for _ in range(4)]
    assert {"key:k": drift} in looks
    assert sides.doubts == 1
    assert max(sides.shown) == abs(drift) / 1e9


async def test_nothing_is_compared_while_another_gateway_reads(watch: DriftWatch, sides: Sides) -> None:
    sides.busy = True
    assert await watch.look() == {}
    assert sides.shown == []
