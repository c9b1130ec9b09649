"""Which requests are there to learn from: trials explore, shares rise while the log has too little, never for
`train: false`."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, cast

import pytest

from gateway.core.log.rollout import RolloutRecord
from gateway.errors import Unavailable
from gateway.service.loop.routers import AutoPlanner
from gateway.service.loop.state import Planner
from gateway.service.policies.readiness import LOOK_AGAIN_S, LOOK_S, TRAINABLE_ENOUGH, Shortage
from gateway.service.request.catalog import Choice, Shares
from tests.records import a_rollout

DRAWS = 4_000


class Named:
    """A planner that is only asked for its name."""

    def __init__(self, name: str) -> None:
        self.name = name


RULE, LEARNED = cast(Planner, Named("rule")), cast(Planner, Named("conductor"))


def choice_of(earned: bool = False, trained: bool = False, planner: Any = None) -> Choice:
    record = a_rollout()
    kinds = {(record.org, record.pool_name, record.task_type)} if earned else set()
    auto = AutoPlanner(RULE, LEARNED, kinds, {record.pool_name} if trained else ())
    return Choice("baton", planner or auto, RULE, record.pool_name, ())


def drawn(shares: Shares, choice: Choice, record: RolloutRecord | None = None) -> dict[tuple[str, bool], float]:
    """(planner, explores) -> share of many requests."""
    record, counts = record or a_rollout(), dict[tuple[str, bool], float]()
    for seed in range(DRAWS):
        planner, explores = shares.planner_of(choice, record, Random(seed))
        counts[planner.name, explores] = counts.get((planner.name, explores), 0) + 1 / DRAWS
    return counts


def near(share: float) -> Any:
    return pytest.approx(share, abs=0.025)


def test_what_the_conductor_plans_on_trial_always_explores() -> None:
    found = drawn(Shares(0.1, 0.2), choice_of())
    assert found.keys() == {("conductor", True), ("rule", True), ("rule", False)}
    assert found["conductor", True] == near(0.2)
    assert found["rule", True] == near(0.8 * 0.1), "the rule keeps its own share"


def test_a_conductor_in_charge_explores_its_share_and_the_rule_on_trial_too() -> None:
    found = drawn(Shares(0.1, 0.2), choice_of(earned=True))
    assert found["conductor", True] == near(0.8 * 0.1)
    assert found["rule", False] == near(0.2 * 0.9)


def test_a_trained_conductor_is_on_no_trial() -> None:
    assert drawn(Shares(0.1, 1.0), choice_of(trained=True)) == {
        ("conductor", True): near(0.1),
        ("conductor", False): near(0.9),
    }


def test_the_shares_of_the_conductor_rise_while_the_log_is_short_and_fall_back() -> None:
    short = [True]
    shares = Shares(0.1, 0.1, 0.5, lambda: short[0])
    assert drawn(shares, choice_of())["conductor", True] == near(0.5)
    assert drawn(shares, choice_of())["rule", True] == near(0.5 * 0.1)
    assert drawn(shares, choice_of(trained=True))["conductor", True] == near(0.5)
    short[0] = False
    assert drawn(shares, choice_of())["conductor", True] == near(0.1)


def test_a_share_of_none_stays_none_and_a_larger_one_does_not_fall() -> None:
    assert drawn(Shares(0.0, 0.0, 0.5, lambda: True), choice_of()) == {("rule", False): near(1.0)}
    assert drawn(Shares(0.0, 0.8, 0.5, lambda: True), choice_of())["conductor", True] == near(0.8)


def test_what_may_not_train_neither_explores_nor_tries() -> None:
    shares, private = Shares(1.0, 1.0, 1.0, lambda: True), a_rollout(train=False)
    assert drawn(shares, choice_of(), private) == {("rule", False): near(1.0)}
    assert shares.planner_of(choice_of(planner=RULE), a_rollout(), None) == (RULE, False), (
        "a fixed worker draws nothing"
    )


class Counted:
    """The log's count of requests to train on."""

    def __init__(self, count: int | None) -> None:
        self.count = count
        self.away = False

    async def __call__(self, most: int) -> int | None:
        if self.away:
            raise Unavailable("the store is away", code="store_unavailable")
        return self.count if self.count is None else min(self.count, most)


async def test_the_log_is_short_from_the_first_outcome_until_there_is_enough() -> None:
    log = Counted(None)
    shortage = Shortage(log)
    assert (shortage.short, await shortage.look(), shortage.short) == (False, LOOK_S, False), "nothing was judged"
    log.count = 0
    assert (await shortage.look(), shortage.short) == (LOOK_S, True)
    log.count = TRAINABLE_ENOUGH
    assert (await shortage.look(), shortage.short) == (LOOK_AGAIN_S, False)


async def test_with_the_store_away_the_last_reading_stands() -> None:
    log = Counted(0)
    shortage = Shortage(log)
    await shortage.look()
    log.away = True
    watch = asyncio.create_task(shortage.run())
    await asyncio.sleep(0.05)
    assert not watch.done()
    assert shortage.short
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
