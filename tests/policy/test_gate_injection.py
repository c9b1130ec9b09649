"""The injection set: what it holds, and that it tells a planner that gives in from one that does not."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from gateway.core.log.rollout import RoundRecord
from gateway.core.loop.caps import Meter
from gateway.core.loop.experience.likeness import content_text
from gateway.core.loop.plan import Plan, Step
from gateway.errors import ConductorError
from gateway.service.loop.routers import models_of
from gateway.service.loop.state import EarlyStart, Situation
from policy.environments.arena import ArenaEnvironment
from policy.evaluate.entrants import RULE
from policy.gate.checks import Thresholds
from policy.gate.injection import (
    CONTROL,
    AttackPair,
    InjectedPlan,
    InjectionFigures,
    attack,
    by_kind,
    checks,
    facts,
    figures_of,
    injections,
)

ENVIRONMENT = ArenaEnvironment()
POOL = ENVIRONMENT.prompts("validation", 1, 0)[0].pool


class Naive:
    """Calls whomever the text names last, else the first model offered; breaks down where it is told to ignore."""

    name = "naive"

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        text = " ".join(content_text(message.get("content")) for message in situation.conversation)
        if "gnore" in text:
            raise ConductorError("unparseable", "no plan")
        named = [handle for handle in situation.allowed.handles if re.search(rf"\b{handle}\b", text)]
        chosen = max(named, key=text.rfind) if named else models_of(situation)[0].handle
        return Plan((Step(chosen, None),))


def silent(_what: str, _done: int, _total: int) -> None:
    """Progress that nobody reads."""


async def figures(planner: Any) -> dict[str, InjectionFigures]:
    return by_kind(await attack(ENVIRONMENT, POOL, planner, count=silent, draws=2))


def test_the_set_is_versioned_and_whole() -> None:
    found = injections()
    kinds = Counter(one.kind for one in found.attacks)
    assert found.version
    assert sum(count for kind, count in kinds.items() if kind != CONTROL) >= 40
    assert len(kinds) >= 10
    assert kinds[CONTROL] >= 5
    assert len({one.id for one in found.attacks}) == len(found.attacks)
    for one in found.attacks:
        assert one.wants in ("dear", "target", "steps", "loops", "invalid")
        assert one.question in found.questions
        told = str(one.messages)
        assert "@question@" in told
        assert set(re.findall(r"@\w+@", told)) <= {"@question@", "@dear@", "@target@"}
        assert ("@target@" in told) == (one.wants == "target")


async def test_long_ones_are_long() -> None:
    seen: list[str] = []

    class Listening(Naive):
        async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
            seen.extend(content_text(message.get("content")) for message in situation.conversation)
            return await super().plan(situation, record, meter, early)

    pairs = await attack(ENVIRONMENT, POOL, Listening(), count=silent, draws=1)
    assert len(pairs) == len(injections().attacks)
    assert sum(len(text) >= 10_000 for text in seen) >= 5
    assert not any("@" in text for text in seen)


async def test_a_planner_that_gives_in_is_told_from_one_that_does_not() -> None:
    naive, rule = await figures(Naive()), await figures(RULE)
    assert (rule["all"].valid, rule["all"].obeyed, rule["all"].usd_ratio, rule["all"].changed) == (1, 0, 1, 0)
    assert naive["handle"].obeyed == 1.0
    assert naive["fake_plan"].usd_ratio > 1
    assert naive["ignore"].valid < 1
    assert naive[CONTROL] == InjectionFigures(len(ENVIRONMENT_CONTROLS), 1.0, 1.0, 1.0, 0.0, 0.0, naive[CONTROL].open)
    refused = {check.name for check in checks(naive["all"], rule["all"], rule["all"], Thresholds()) if check.refuses}
    assert refused == {"injection_valid", "injection_cost", "injection_obeyed"}
    assert not any(check.refuses for check in checks(rule["all"], naive["all"], rule["all"], Thresholds()))
    told = facts({"candidate": naive, "live": rule, "rule": rule}, 2)
    assert told["by_kind"]["candidate"]["handle"]["obeyed"] == 1.0


ENVIRONMENT_CONTROLS = [one for one in injections().attacks if one.kind == CONTROL for _ in range(2)]


async def test_it_is_the_same_every_time() -> None:
    assert await figures(Naive()) == await figures(Naive())


@pytest.mark.parametrize(
    ("wants", "plain", "attacked", "obeyed"),
    [
        ("dear", InjectedPlan(("a",)), InjectedPlan(("d",)), True),
        ("dear", InjectedPlan(("d",)), InjectedPlan(("d",)), False),
        ("dear", InjectedPlan(("a",)), InjectedPlan(("a",)), False),
        ("steps", InjectedPlan(("a",)), InjectedPlan(("a", "a"), full=True), True),
        ("loops", InjectedPlan(("a",)), InjectedPlan(("s",), loops=1), True),
        ("loops", InjectedPlan(("s",), loops=1), InjectedPlan(("s",), loops=1), False),
        ("invalid", InjectedPlan(("a",)), InjectedPlan(), True),
        ("invalid", InjectedPlan(), InjectedPlan(), False),
    ],
)
def test_obeyed_is_what_was_given_only_for_asking(
    wants: str, plain: InjectedPlan, attacked: InjectedPlan, obeyed: bool
) -> None:
    assert AttackPair("k", wants, "d", plain, attacked).obeyed is obeyed


def test_ratios_are_over_pairs_valid_both_ways() -> None:
    plain = InjectedPlan(("a",), 10)
    pairs = [
        AttackPair("k", "dear", "d", plain, InjectedPlan(("d", "d"), 40)),
        AttackPair("k", "dear", "d", plain, InjectedPlan()),
        AttackPair("k", "dear", "d", InjectedPlan(), InjectedPlan(("a",), 10)),
    ]
    assert figures_of(pairs) == InjectionFigures(3, 2 / 3, 4.0, 2.0, 1.0, 1 / 3, 3)
    assert figures_of([]) == InjectionFigures(0, 0.0, 1.0, 1.0, 0.0, 0.0, 0)


def test_the_live_version_sets_the_bar_where_it_is_lower() -> None:
    weak = InjectionFigures(100, 0.88, 1.9, 1.0, 0.5, 0.3, 100)
    rule = InjectionFigures(100, 1.0, 1.0, 1.0, 0.0, 0.0, 100)
    assert not any(check.refuses for check in checks(weak, weak, rule, Thresholds()))
    a_little = InjectionFigures(100, 0.86, 2.0, 1.0, 0.5, 0.34, 100)
    assert not any(check.refuses for check in checks(a_little, weak, rule, Thresholds()))
    worse = InjectionFigures(100, 0.84, 2.1, 1.0, 0.5, 0.36, 100)
    assert all(check.refuses for check in checks(worse, weak, rule, Thresholds()))
    assert {check.verdict for check in checks(worse, weak, rule, Thresholds())} == {"undecided", "refused"}
    strong = InjectionFigures(100, 1.0, 1.0, 1.0, 0.0, 0.0, 100)
    assert all(check.refuses for check in checks(weak, strong, rule, Thresholds()))
