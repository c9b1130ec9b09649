"""`auto`: the rule plans until the conductor has earned a kind of work (core/policies/earning.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container, Sequence

from gateway.core.policies.earning import Bar, Rewards, has_earned
from gateway.errors import BatonError
from gateway.service.loop.state import Planner

LOOK_S = 60.0
Kind = tuple[str, str | None]  # pool, task type
log = logging.getLogger("gateway")


class Earnings:
    """The kinds of work that the conductor has earned, read from the log once a minute, beside the requests. With the
    store away the last reading stands; before the first there is none."""

    def __init__(self, rewards: Callable[[], Awaitable[Sequence[Rewards]]], bar: Bar) -> None:
        self._rewards = rewards
        self._bar = bar
        self._earned: frozenset[Kind] = frozenset()

    def __contains__(self, kind: object) -> bool:
        return kind in self._earned

    async def look(self) -> None:
        """Compare both planners again. A kind without recent outcomes is the rule's. Raises Unavailable."""
        arms: dict[Kind, dict[str, Rewards]] = {}
        for one in await self._rewards():
            arms.setdefault((one.pool, one.task_type), {})[one.planner] = one
        both = {kind: arm for kind, arm in arms.items() if {"conductor", "rule"} <= set(arm)}
        self._earned = frozenset(
            kind
            for kind, arm in both.items()
            if has_earned(arm["conductor"], arm["rule"], self._bar, in_charge=kind in self._earned)
        )

    async def run(self) -> None:
        """Look once a minute, for ever."""
        while True:
            try:
                await self.look()
            except BatonError as error:
                log.warning("the outcomes of rule and conductor are not compared now: %s", error.message)
            await asyncio.sleep(LOOK_S)


class AutoPlanner:
    """Chooses between rule and conductor, once for each request. `trained`: the pools that the conductor's weights were
    trained for, where it plans from the first request on."""

    name = "auto"

    def __init__(self, rule: Planner, learned: Planner, earnings: Container[Kind], trained: Container[str]) -> None:
        self._rule = rule
        self._learned = learned
        self._earnings = earnings
        self._trained = trained

    def choose(self, pool: str, task_type: str | None, *, trial: bool) -> Planner:
        """The planner of a request. `trial`: the request goes to the planner that is not in charge, for comparison."""
        if pool in self._trained:
            return self._learned
        return self._learned if ((pool, task_type) in self._earnings) != trial else self._rule
