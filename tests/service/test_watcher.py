"""Automatic rollback: which two versions are compared, over what time, and what follows."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gateway.core.policies.watch import Figures
from gateway.errors import Conflict
from gateway.service.policies.watcher import WatchLimits
from tests.service.versions_kit import CANARY, LIVE, Following
from tests.waiting import until

GOOD = Figures("", 400, 396, 4, 200, 160.0, 160.0, 400 * 2_000_000, 400 * 5e12)
BAD = replace(GOOD, valid=300)


async def trial(place: Path, second: Any, first: Figures = GOOD, **more: Any) -> Following:
    """Version 1 live with `first`, version 2 as the canary with `second`."""
    kit = Following(place, **more)
    await kit.add(1, *LIVE)
    await kit.add(2, *CANARY, percent=5)
    await kit.settle()
    kit.registry.told = {"conductor@1": replace(first, version="conductor@1")}
    kit.registry.told["conductor@2"] = replace(second, version="conductor@2")
    return kit


async def test_a_canary_that_is_worse_is_retired_and_the_audit_says_why(tmp_path: Path) -> None:
    kit = await trial(tmp_path, BAD)
    verdict = await kit.watcher.look()
    assert verdict is not None
    assert verdict.cause == "validity"
    event = (await kit.registry.events("conductor@2"))[0]
    assert (event["what"], event["who"], event["detail"]) == ("rolled back", "watcher", {"cause": "validity"})
    assert event["why"].startswith("validity: plans used: 0.750 against 0.990")
    assert event["why"].endswith("worse than conductor@1")
    assert kit.watched.rollbacks == ["validity"]
    assert await kit.planned_by(5) == ["conductor@1"] * 5
    assert await kit.watcher.look() is None


async def test_a_canary_that_is_as_good_goes_on(tmp_path: Path) -> None:
    kit = await trial(tmp_path, GOOD)
    assert await kit.watcher.look() is None
    assert (await kit.registry.get("conductor@2")).state == "canary"


async def test_a_fresh_live_version_that_is_worse_gives_way_to_the_one_before(tmp_path: Path) -> None:
    kit = await trial(tmp_path, BAD)
    await kit.policies.promote("conductor@2", "key:a", "hope")
    assert await kit.planned_by() == ["conductor@2"]
    verdict = await kit.watcher.look()
    assert verdict is not None
    assert await kit.planned_by() == ["conductor@1"]
    assert await kit.watcher.look() is None  # what came back is not on trial


async def test_after_its_probation_a_live_version_is_let_be(tmp_path: Path) -> None:
    kit = await trial(tmp_path, BAD, watch=WatchLimits(probation_s=0.001))
    await kit.policies.promote("conductor@2", "key:a", "hope")
    await asyncio.sleep(0.01)  # more than its probation
    assert await kit.watcher.look() is None


async def test_a_restored_version_is_not_compared_with_an_older_one(tmp_path: Path) -> None:
    kit = await trial(tmp_path, GOOD)
    await kit.policies.promote("conductor@2", "key:a", "")
    await kit.add(3, *LIVE)
    long_ago = timedelta(hours=1)
    for name in ("conductor@1", "conductor@2"):
        known = kit.registry.versions[name]
        kit.registry.versions[name] = replace(known, changed_at=known.changed_at - long_ago)
    await kit.versions.sync()
    await kit.policies.rollback("conductor", "key:a", "")
    now = kit.versions.standing
    assert (now.live and now.live.id, now.previous and now.previous.id) == ("conductor@2", "conductor@1")
    assert kit.watcher.pair() is None


async def test_two_watchers_roll_back_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = await trial(tmp_path, BAD)

    async def beaten(*_: Any, **__: Any) -> None:
        raise Conflict("conductor@2 is retired")

    monkeypatch.setattr(kit.registry, "rollback", beaten)
    assert await kit.watcher.look() is None
    assert kit.watched.rollbacks == []


async def test_the_comparison_covers_the_time_before_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = await trial(tmp_path, GOOD, watch=WatchLimits(window_s=600.0, latest=77))
    asked: dict[str, tuple[datetime, int]] = {}

    async def figures(version: str, *, since: datetime, until: datetime | None, latest: int) -> Figures:
        asked[version] = (since, latest)
        return Figures(version)

    monkeypatch.setattr(kit.registry, "figures", figures)
    canary = kit.versions.standing.canary
    assert canary is not None
    await kit.watcher.look()
    assert asked["conductor@2"] == (canary.created_at, 77)
    since, latest = asked["conductor@1"]
    assert latest == 77
    assert timedelta(0) <= canary.changed_at - timedelta(seconds=600) - since < timedelta(seconds=60)


async def test_watching_goes_on_when_the_registry_was_away(tmp_path: Path) -> None:
    kit = await trial(tmp_path, BAD, watch=WatchLimits(look_s=0.01))
    kit.registry.away = True
    running = asyncio.create_task(kit.watcher.run())
    await asyncio.sleep(0.05)  # a few looks
    assert not running.done()
    kit.registry.away = False
    await until(lambda: kit.watched.rollbacks)
    running.cancel()
