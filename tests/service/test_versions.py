"""Versions in the request path: who plans, what a swap changes, and what happens when registry or engine go away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.core.policies.versions import Holder, Pick
from gateway.errors import ConductorError, Conflict, EngineDown, NotFound, VersionRefused
from gateway.service.policies.versions import PolicyVersions, VersionLimits
from tests.fakes.registry import FakeRegistry
from tests.kit import KEY, TestClock, ask
from tests.policies import write_policy, write_weights
from tests.service.versions_kit import CANARY, LIVE, Following
from tests.sizes import SLACK
from tests.waiting import until


async def test_the_live_version_plans_and_every_rollout_says_so(tmp_path: Path) -> None:
    kit = Following(tmp_path)
    await kit.add(1, *LIVE)
    await kit.settle()
    record = (await kit.serve()).record
    assert (record.policy_version, record.policy_assigned, record.fallback) == ("conductor@1", "conductor@1", None)
    assert [call.model for call in kit.engine.conductor.calls] == ["conductor@1"]


async def test_a_canary_plans_its_share_and_each_rollout_is_on_one_version(tmp_path: Path) -> None:
    kit = Following(tmp_path)
    await kit.add(1, *LIVE)
    await kit.add(2, *CANARY, percent=25)
    await kit.settle()
    runnings = [await kit.serve() for _ in range(60)]
    by = [running.record.policy_version for running in runnings]
    assert 3 <= by.count("conductor@2") <= 30
    assert by.count("conductor@1") == 60 - by.count("conductor@2")
    for running in runnings:
        assert kit.versions.pick(running.record.id) is not None
        assert kit.versions.pick(running.record.id).version == running.record.policy_version  # type: ignore[union-attr]


async def test_promotion_and_rollback_are_a_flip_with_nothing_to_load(tmp_path: Path) -> None:
    kit = Following(tmp_path)
    await kit.add(1, *LIVE)
    await kit.add(2, *CANARY)
    await kit.settle()
    loads = kit.engine.loads
    assert await kit.planned_by(2) == ["conductor@2"] * 2
    await kit.policies.promote("conductor@2", "key:a", "better")
    assert await kit.planned_by(2) == ["conductor@2"] * 2
    await kit.policies.rollback("conductor", "key:a", "worse")
    assert await kit.planned_by(2) == ["conductor@1"] * 2
    assert kit.engine.loads == loads


async def test_a_rollback_while_requests_run_leaves_each_on_the_version_it_began_with(tmp_path: Path) -> None:
    kit = Following(tmp_path, gap_s=0.02, limits=VersionLimits(poll_s=0.01, check_s=0.0, unload_s=60.0))
    await kit.add(1, *LIVE)
    await kit.add(2, *LIVE)
    await kit.settle()
    before = [await kit.start() for _ in range(5)]
    await kit.policies.rollback("conductor", "key:a", "worse")
    after = [await kit.start() for _ in range(5)]
    for running in (*before, *after):
        await running.finished.wait()
        assert (running.error, running.record.fallback) == (None, None)
    assert {running.record.policy_version for running in before} == {"conductor@2"}
    assert {running.record.policy_version for running in after} == {"conductor@1"}


async def test_a_version_can_be_asked_for_by_number_while_it_serves(tmp_path: Path) -> None:
    kit = Following(tmp_path)
    await kit.add(1, *LIVE)
    await kit.add(2, *LIVE)
    await kit.add(3, *CANARY, percent=1)
    await kit.add(4, "shadow")
    await kit.settle()
    for number in (1, 2, 3):
        body = ask(model=f"baton/conductor@{number}")
        assert await kit.planned_by(1, body=body) == [f"conductor@{number}"]
    assert {name for name in kit.catalog.models(KEY) if "@" in name} == {f"baton/conductor@{n}" for n in (1, 2, 3)}
    for unknown in ("baton/conductor@4", "baton/conductor@9", "baton/conductor@", "conductor@1"):
        with pytest.raises(NotFound, match="does not exist"):
            await kit.serve(ask(model=unknown))


async def test_another_gateway_follows_within_a_second(tmp_path: Path) -> None:
    kit = Following(tmp_path)
    await kit.add(1, *LIVE)
    await kit.add(2, *LIVE)
    await kit.settle()
    other = PolicyVersions(kit.registry, kit.engine, TestClock(), kit.watched)  # as configured
    await other.start(5.0)
    following = asyncio.create_task(other.run())
    assert other.pick("r") == Pick("conductor@2", "compact")
    await kit.policies.rollback("conductor", "key:a", "worse")
    await until(lambda: other.pick("r") == Pick("conductor@1", "compact"), 1.0 * SLACK)
    following.cancel()


async def test_while_the_registry_is_away_what_was_live_stays(tmp_path: Path) -> None:
    kit = Following(tmp_path)
    await kit.add(1, *LIVE)
    await kit.settle()
    kit.registry.away = True
    await kit.versions.sync()
    assert await kit.planned_by() == ["conductor@1"]
    assert await kit.versions.ready()


async def test_readiness_waits_for_every_version_that_serves(tmp_path: Path) -> None:
    kit = Following(tmp_path)
    assert not await kit.versions.ready()  # nothing was read yet
    await kit.add(1, *LIVE)
    await kit.versions.sync()
    assert not await kit.versions.ready()
    await kit.settle()
    assert await kit.versions.ready()
    kit.engine.restart()  # it has forgotten them
    await kit.versions.sync()
    assert not await kit.versions.ready()
    await kit.settle()
    assert await kit.versions.ready()
    assert await kit.planned_by() == ["conductor@1"]


async def test_an_engine_that_is_away_costs_no_readiness_and_no_request(tmp_path: Path) -> None:
    kit = Following(tmp_path, {"conductor@1": ConductorError("down", "gone", billable=False)})
    await kit.add(1, *LIVE)
    await kit.settle()
    kit.engine.down = True
    await kit.versions.sync()
    assert await kit.versions.ready()
    record = (await kit.serve()).record
    assert (record.status, record.fallback) == ("done", "conductor_down")
    assert record.policy_assigned == "conductor@1"  # so that the watcher counts it


async def test_a_version_that_an_engine_refuses_takes_no_part_and_live_goes_on(tmp_path: Path) -> None:
    kit = Following(tmp_path)
    await kit.add(1, *LIVE)
    await kit.add(2, *CANARY)
    write_weights(tmp_path / "policies" / "conductor@2" / "model.safetensors", (float("nan"),))
    await kit.settle()
    await kit.settle()
    assert await kit.planned_by(3) == ["conductor@1"] * 3
    assert (await kit.registry.get("conductor@2")).state == "retired"
    told = [event["what"] for event in await kit.registry.events("conductor@2")]
    assert told[:2] == ["rolled back", "refused"]
    assert (kit.watched.refused, kit.watched.rollbacks) == (["conductor@2"], ["refused"])


async def test_a_live_version_that_does_not_load_is_rolled_back(tmp_path: Path) -> None:
    kit = Following(tmp_path)
    await kit.add(1, *LIVE)
    await kit.settle()
    await kit.add(2, *LIVE)
    write_weights(tmp_path / "policies" / "conductor@2" / "model.safetensors", (float("inf"),))
    await kit.settle()
    await kit.settle()
    assert await kit.planned_by() == ["conductor@1"]
    assert (await kit.registry.get("conductor@1")).state == "live"


async def test_a_directory_that_lies_on_another_host_is_no_reason_to_roll_back(tmp_path: Path) -> None:
    kit = Following(tmp_path)
    await kit.add(1, *LIVE)
    await kit.add(2, *LIVE)
    (tmp_path / "policies" / "conductor@2" / "manifest.json").unlink()
    await kit.settle()
    assert await kit.planned_by() == ["conductor@1"]
    assert (await kit.registry.get("conductor@2")).state == "live"
    assert await kit.versions.ready()


async def test_a_version_trained_on_another_prompt_is_refused(tmp_path: Path) -> None:
    kit = Following(tmp_path)
    await kit.add(1, *LIVE)
    await kit.add(2, prompt_version="compact-0")
    await kit.settle()
    with pytest.raises(Conflict, match="trained on prompt compact-0, which this gateway does not render"):
        await kit.policies.shadow("conductor@2", "key:a", "")
    assert (await kit.registry.get("conductor@2")).state == "candidate"


async def test_an_operator_is_told_by_the_engine_before_anything_is_moved(tmp_path: Path) -> None:
    kit = Following(tmp_path)
    await kit.add(1, *LIVE)
    await kit.add(2)
    await kit.settle()
    write_weights(tmp_path / "policies" / "conductor@2" / "model.safetensors", (float("nan"),))
    with pytest.raises(VersionRefused, match="does not match its sha256"):
        await kit.policies.shadow("conductor@2", "key:a", "")
    kit.engine.down = True
    with pytest.raises(EngineDown):
        await kit.policies.shadow("conductor@2", "key:a", "")
    assert (await kit.registry.get("conductor@2")).state == "candidate"


async def test_retired_versions_are_unloaded_and_the_previous_one_is_not(tmp_path: Path) -> None:
    kit = Following(tmp_path)
    for number in (1, 2, 3):
        await kit.add(number, *LIVE)
        await kit.settle()
    for _ in range(3):
        await kit.versions.sync()
    assert await kit.engine.loaded() == {"conductor@2", "conductor@3"}


async def test_a_version_is_kept_loaded_while_a_request_may_be_on_its_way_to_it(tmp_path: Path) -> None:
    kit = Following(tmp_path, limits=VersionLimits(poll_s=0.01, check_s=0.0, unload_s=60.0))
    for number in (1, 2, 3):
        await kit.add(number, *LIVE)
        await kit.settle()
    assert await kit.engine.loaded() == {"conductor@1", "conductor@2", "conductor@3"}


async def test_swaps_that_are_faster_than_unloading_make_room_and_touch_nothing_that_serves(tmp_path: Path) -> None:
    kit = Following(tmp_path, limits=VersionLimits(poll_s=0.01, check_s=0.0, unload_s=60.0))
    for number in range(1, 8):  # the engine holds four
        await kit.add(number, *LIVE)
        await kit.settle()
        assert f"conductor@{number}" in await kit.engine.loaded()
        assert (await kit.registry.get(f"conductor@{number}")).state == "live"
    held = await kit.engine.loaded()
    assert {"conductor@6", "conductor@7"} < held
    assert held < {f"conductor@{number}" for number in range(4, 8)} | {"conductor@3"}


async def test_an_engine_full_of_what_serves_refuses_for_now_and_nobody_is_retired(tmp_path: Path) -> None:
    kit = Following(tmp_path)
    kit.engine._versions_max = 1
    await kit.add(1, *LIVE)
    await kit.settle()
    await kit.add(2, "shadow")
    await kit.versions.sync()
    await until(lambda: kit.watched.refused)
    assert await kit.engine.loaded() == {"conductor@1"}
    assert (await kit.registry.get("conductor@2")).state == "shadow"


@pytest.mark.parametrize("act", ["canary", "promote"])
async def test_a_move_that_is_not_allowed_is_told_before_anybody_is_waited_for(tmp_path: Path, act: str) -> None:
    kit = Following(tmp_path, wait_s=60.0)
    await kit.add(1)
    await kit.gateways.attend(Holder("other", "two:/data", {}))  # it loads shadows and what follows them
    percent = (25,) if act == "canary" else ()
    with pytest.raises(Conflict, match="a candidate is shadowed or retired") as refused:
        await asyncio.wait_for(getattr(kit.policies, act)("conductor@1", *percent, "key:a", ""), 5)
    assert refused.value.code == "illegal_move"
    assert kit.engine.loads == 0


async def test_a_slow_load_holds_up_no_rollback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Following(tmp_path)
    await kit.add(1, *LIVE)
    await kit.add(2, *LIVE)
    await kit.settle()
    loading = asyncio.Event()

    async def for_ever(version: str, directory: Path) -> None:
        loading.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(kit.engine, "load", for_ever)
    await kit.add(3, *CANARY)
    await kit.versions.sync()
    await loading.wait()
    await kit.policies.rollback("conductor@3", "key:a", "slow")
    await kit.policies.rollback("conductor@2", "key:a", "worse")
    assert await kit.planned_by() == ["conductor@1"]
    await kit.versions.close()


async def test_an_engine_of_one_version_serves_it_and_takes_no_part_share(tmp_path: Path) -> None:
    kit = Following(tmp_path, limits=VersionLimits(poll_s=0.01, check_s=0.0, unload_s=0.0, exclusive=True))
    await kit.add(1, *LIVE)
    await kit.add(2, "shadow")
    await kit.settle()
    assert await kit.engine.loaded() == {"conductor@1"}
    with pytest.raises(Conflict, match="holds one version at a time"):
        await kit.policies.canary("conductor@2", 5, "key:a", "")
    await kit.policies.canary("conductor@2", 100, "key:a", "")
    await kit.settle()
    how = kit.versions.pick("r")
    assert how is not None
    assert (how.version, how.by_name) == ("conductor@2", False)


async def test_following_survives_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Following(tmp_path)
    await kit.add(1, *LIVE)
    await kit.settle()
    real, calls = FakeRegistry.standing, 0

    async def broken(self: FakeRegistry, name: str) -> object:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise RuntimeError("a bug")
        return await real(self, name)

    monkeypatch.setattr(FakeRegistry, "standing", broken)
    running = asyncio.create_task(kit.versions.run())
    await kit.add(2, *LIVE)
    await until(lambda: kit.versions.holds("conductor@2"))
    running.cancel()


async def test_the_overview_says_who_serves_and_who_is_compared(tmp_path: Path) -> None:
    kit = Following(tmp_path)
    await kit.add(1, *LIVE)
    await kit.add(2, *CANARY, percent=5)
    await kit.settle()
    shown = await kit.policies.overview()
    assert [(one["version"], one["state"], one["percent"], one["held"]) for one in shown["data"]] == [
        ("conductor@2", "canary", 5, True),
        ("conductor@1", "live", None, True),
    ]
    assert [one["version"] for one in shown["compared"]] == ["conductor@2", "conductor@1"]
    assert shown["events"][0]["what"] == "canary"
    detail = await kit.policies.show("conductor@2")
    assert (detail["manifest"]["version"], detail["gate"]["passed"]) == ("2", True)


async def test_only_an_absolute_directory_is_published(tmp_path: Path) -> None:
    kit = Following(tmp_path)
    with pytest.raises(Exception, match="absolute path"):
        await kit.policies.publish(Path("here"), "key:a", "", {"passed": True}, False)
    source = write_policy(tmp_path / "source", "5")
    made = await kit.policies.publish(source, "key:a", "", {"passed": True}, False)
    assert (made["version"], made["state"], made["gated"]) == ("conductor@5", "candidate", True)
