"""The registry on a real PostgreSQL and a real disk: what is whole, what is refused, and what an accident leaves."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import shutil
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.engines.files import check
from gateway.adapters.postgres import rows
from gateway.adapters.postgres.database import connected
from gateway.adapters.postgres.inserts import insert_rows
from gateway.adapters.postgres.policies import policy_files
from gateway.adapters.postgres.policies.registry import Registry
from gateway.adapters.postgres.store import PostgresStore
from gateway.core.log.rollout import close_record
from gateway.core.policies.watch import SERVER_FAULTS
from gateway.errors import BadRequest, Conflict, Unavailable, VersionRefused
from tests.policies import write_policy, write_weights
from tests.postgres_server import PostgresServer
from tests.records import T0_US, a_rollout, a_round, an_outcome, event, new_id, rollout_event

PASSED = {"passed": True, "refusals": []}


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> AsyncIterator[Registry]:
    async with connected(database_url) as engine:
        yield Registry(engine, tmp_path / "data" / "policies")


def directories(registry: Registry) -> list[str]:
    return sorted(path.name for path in registry.policies.glob("*")) if registry.policies.exists() else []


async def publish(registry: Registry, source: Path, **more: Any) -> str:
    return (await registry.publish(source, by="job:1", **({"gate": PASSED} | more))).id


async def live(registry: Registry, source: Path) -> str:
    version = await publish(registry, source)
    await registry.move(version, "shadow", by="a")
    await registry.canary(version, 5, by="a")
    await registry.move(version, "live", by="a")
    return version


# ---------------------------------------------------------------- directories


async def test_publishing_copies_the_directory(registry: Registry, tmp_path: Path) -> None:
    source = write_policy(tmp_path / "source", "7", parent="conductor@3", rollouts=120)
    (source / "notes.txt").write_text("not in the manifest")
    version = await registry.publish(source, by="a", gate=PASSED)
    place = registry.directory(version)
    assert place == tmp_path / "data" / "policies" / "conductor@7"
    assert sorted(path.name for path in place.iterdir()) == ["config.json", "manifest.json", "model.safetensors"]
    assert (version.parent, version.manifest["rollouts"], version.directory) == ("conductor@3", 120, "conductor@7")
    shutil.rmtree(source)
    assert check(place).manifest.version == "7"
    assert directories(registry) == ["conductor@7"]


async def test_a_copy_says_the_number_it_was_given(registry: Registry, tmp_path: Path) -> None:
    await publish(registry, write_policy(tmp_path / "a", "1"))
    assert await publish(registry, write_policy(tmp_path / "b", "1", (5.0,))) == "conductor@2"
    served = json.loads((registry.policies / "conductor@2" / "manifest.json").read_text())
    assert served["version"] == "2"
    assert (await registry.get("conductor@2")).manifest["version"] == "1"  # as its maker called it


def _break(source: Path, how: str) -> None:
    manifest = json.loads((source / "manifest.json").read_text())
    weights = source / "model.safetensors"
    if how in ("nan", "inf", "torn"):
        if how == "torn":
            weights.write_bytes(weights.read_bytes()[:-3])
        else:
            write_weights(weights, (1.0, float(how)))
        manifest["sha256"]["model.safetensors"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    elif how == "flipped":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    elif how == "gone":
        weights.unlink()
    elif how == "prompt":
        manifest["prompt_hash"] = "0" * 64
    elif how == "outside":
        manifest["sha256"]["../model.safetensors"] = manifest["sha256"]["model.safetensors"]
    elif how == "nothing":
        manifest["sha256"] = {}
    (source / "manifest.json").write_text("{" if how == "no json" else json.dumps(manifest))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("nan", "not_finite"),
        ("inf", "not_finite"),
        ("torn", "torn"),
        ("flipped", "checksum"),
        ("gone", "missing"),
        ("prompt", "prompt"),
        ("outside", "manifest"),
        ("nothing", "manifest"),
        ("no json", "manifest"),
    ],
)
async def test_a_bad_directory_is_refused_by_name_and_leaves_nothing(
    registry: Registry, tmp_path: Path, how: str, reason: str
) -> None:
    source = write_policy(tmp_path / "source", "7")
    _break(source, how)
    with pytest.raises(VersionRefused) as refused:
        await publish(registry, source)
    assert refused.value.reason == reason
    assert str(source) in refused.value.message
    assert ".incoming" not in refused.value.message
    assert directories(registry) == []
    assert list(await registry.list()) == []


async def test_a_directory_that_is_not_there(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(VersionRefused, match="there is no such directory"):
        await publish(registry, tmp_path / "nowhere")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
async def test_a_disk_that_cannot_take_it_leaves_nothing(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    source = write_policy(tmp_path / "source", "7")

    def full(*_: Any) -> None:
        raise OSError(number, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfileobj", full)
        with pytest.raises(Unavailable, match="nothing was published") as refused:
            await publish(registry, source)
    assert ("make room" in refused.value.message) == (number == errno.ENOSPC)
    assert directories(registry) == []
    assert await publish(registry, source) == "conductor@7"


async def test_a_data_directory_that_is_a_file(database_url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with connected(database_url) as engine:
        registry = Registry(engine, tmp_path / "file" / "policies")
        with pytest.raises(Unavailable, match="nothing was published"):
            await publish(registry, write_policy(tmp_path / "source", "7"))


async def test_a_publication_that_dies_midway_registers_nothing_and_is_cleared_by_the_next(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL goes away when the directory has its name already: nothing is registered, and nothing in the way."""
    source = write_policy(tmp_path / "source", "7")
    real = policy_files.settle

    def settle_then_lose(incoming: Any, target: Path) -> None:
        real(incoming, target)
        (target / "left over").write_text("of the first try")
        raise Unavailable("the registry is not available")

    with monkeypatch.context() as patched:
        patched.setattr(policy_files, "settle", settle_then_lose)
        with pytest.raises(Unavailable):
            await publish(registry, source)
    assert list(await registry.list()) == []
    assert await publish(registry, source) == "conductor@7"
    assert directories(registry) == ["conductor@7"]
    assert not (registry.policies / "conductor@7" / "left over").exists()


async def test_postgres_away_in_the_middle_publishes_nothing(
    registry: Registry, pg_server: PostgresServer, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_policy(tmp_path / "source", "7")
    await registry.list()
    real = policy_files.settle

    def settle_and_shut(incoming: Any, target: Path) -> None:
        real(incoming, target)
        pg_server.shut(database_url)

    with monkeypatch.context() as patched:
        patched.setattr(policy_files, "settle", settle_and_shut)
        with pytest.raises(Unavailable):
            await publish(registry, source)
    pg_server.reopen(database_url)
    assert list(await registry.list()) == []
    assert await publish(registry, source) == "conductor@7"


async def test_many_at_once_get_numbers_of_their_own(registry: Registry, tmp_path: Path) -> None:
    sources = [write_policy(tmp_path / f"s{n}", "1", (float(n + 1),)) for n in range(6)]
    made = await asyncio.gather(*(publish(registry, source) for source in sources))
    assert sorted(made) == [f"conductor@{n}" for n in range(1, 7)]
    assert directories(registry) == sorted(made)


# ---------------------------------------------------------------- states


async def test_two_promotions_at_once_leave_one_live(registry: Registry, tmp_path: Path) -> None:
    one = await live(registry, write_policy(tmp_path / "a", "1"))
    two = await publish(registry, write_policy(tmp_path / "b", "2", (3.0,)))
    await registry.move(two, "shadow", by="a")
    await registry.canary(two, 100, by="a")
    results = await asyncio.gather(*(registry.move(two, "live", by=f"p{n}") for n in range(3)), return_exceptions=True)
    assert sum(isinstance(result, Conflict) for result in results) == 2
    states = {version.id: version.state for version in await registry.list()}
    assert states == {one: "retired", two: "live"}


async def test_the_database_itself_allows_one_live_version(registry: Registry, pg_engine: Any, tmp_path: Path) -> None:
    await live(registry, write_policy(tmp_path / "a", "1"))
    await publish(registry, write_policy(tmp_path / "b", "2", (3.0,)))
    for change in ("state = 'live'", "state = 'canary'", "percent = 5", "state = 'canary', percent = 7"):
        with pytest.raises(DBAPIError):
            async with pg_engine.begin() as connection:
                await connection.execute(text(f"UPDATE policy_versions SET {change} WHERE number = 2"))  # noqa: S608


@pytest.mark.parametrize(
    "attempt", ["UPDATE policy_events SET who = 'me'", "DELETE FROM policy_events", "TRUNCATE policy_events"]
)
async def test_the_audit_is_append_only(
    registry: Registry, pg_engine: AsyncEngine, tmp_path: Path, attempt: str
) -> None:
    await live(registry, write_policy(tmp_path / "a", "1"))
    before = await registry.events("conductor")
    with pytest.raises(DBAPIError, match="append-only"):
        async with pg_engine.begin() as connection:
            await connection.execute(text(attempt))
    assert await registry.events("conductor") == before
    assert [event["what"] for event in before] == ["promoted", "canary", "shadowed", "published"]


async def test_long_reasons_are_refused(registry: Registry, tmp_path: Path) -> None:
    version = await publish(registry, write_policy(tmp_path / "a", "1"))
    with pytest.raises(BadRequest, match="why"):
        await registry.move(version, "shadow", by="a", why="x" * 2001)


# ---------------------------------------------------------------- the first version


async def test_a_first_start_makes_what_it_came_with_live(registry: Registry, tmp_path: Path) -> None:
    shipped = write_policy(tmp_path / "shipped", "1")
    first = await registry.seed(shipped)
    assert (first.id, first.state, first.previous) == ("conductor@1", "live", None)
    assert await registry.seed(shipped) == first
    assert [one["what"] for one in await registry.events("conductor")] == ["seeded", "published"]
    newer = write_policy(tmp_path / "newer", "2", (9.0,))
    assert (await registry.seed(newer)).id == "conductor@1"  # a release does not push its conductor on anybody
    assert directories(registry) == ["conductor@1"]


async def test_a_directory_named_by_hand_goes_live_once_and_a_rollback_sticks(
    registry: Registry, tmp_path: Path
) -> None:
    await registry.seed(write_policy(tmp_path / "shipped", "1"))
    mine = write_policy(tmp_path / "mine", "1", (9.0,))
    second = await registry.seed(mine, insist=True)
    assert (second.id, second.state, second.previous) == ("conductor@2", "live", 1)
    await registry.rollback("conductor", by="a", why="worse")
    assert (await registry.seed(mine, insist=True)).id == "conductor@1"


async def test_a_live_version_whose_prompt_is_gone_makes_room(
    registry: Registry, tmp_path: Path, pg_engine: AsyncEngine
) -> None:
    await registry.seed(write_policy(tmp_path / "old", "1"))
    async with pg_engine.begin() as connection:  # as after an upgrade that renders another prompt
        await connection.execute(
            text("""UPDATE policy_versions SET manifest = jsonb_set(manifest, '{prompt_hash}', '"old"')""")
        )
    first = await registry.seed(write_policy(tmp_path / "new", "2", (9.0,)))
    assert (first.id, first.previous) == ("conductor@2", None)
    assert (await registry.get("conductor@1")).state == "retired"


# ---------------------------------------------------------------- figures


async def test_figures_are_what_the_log_says(registry: Registry, pg_engine: AsyncEngine, tmp_path: Path) -> None:
    def request(after_s: float, **changes: Any) -> Any:
        return a_rollout(
            created_us=T0_US + int(after_s * 1_000_000), policy_assigned="conductor@7", steps=[], **changes
        )

    counted = [
        request(1, cost_nano=10, status="done"),
        request(2, cost_nano=20, status="done", fallback="conductor_unparseable"),
        request(3, cost_nano=30, status="done", fallback="worker_timeout"),
        request(4, cost_nano=5_000_000_000, status="failed"),
    ]
    # its server hung or was away, whatever the weights would have planned
    hung = [request(1.5, cost_nano=999, status="failed", fallback=fault) for fault in SERVER_FAULTS]
    others = [
        request(5, cost_nano=999, policy_requested="baton/conductor@7"),
        request(6, cost_nano=999, depth=1, parent_id=counted[0].id),
        request(-9_000, cost_nano=999),
        a_rollout(created_us=T0_US + 7_000_000, policy_assigned="conductor@8", steps=[]),
    ]
    new = rows.Rows()
    for record in (*counted, *hung, *others):
        new.extend(rows.event_rows(rollout_event(record)))
    async with pg_engine.begin() as connection:
        await connection.run_sync(insert_rows, new)
    store = PostgresStore(pg_engine)
    for value, at_s in ((0.0, 1), (1.0, 2)):  # the latest judgement stands
        at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=at_s)
        await store.outcome_insert(an_outcome(counted[0].id, value, created_at=at))
    since = rows.EPOCH + timedelta(microseconds=T0_US)
    found = await registry.figures("conductor@7", since=since, until=None, latest=100)
    assert (found.requests, found.valid, found.failed, found.judged) == (4, 3, 1, 1)
    assert (found.outcome_sum, found.outcome_square_sum) == (1.0, 1.0)
    assert found.outcomes_by_org == {"acme": [1, 1.0]}
    assert found.cost_nano_sum == 5_000_000_060
    assert found.cost_nano_square_sum == pytest.approx(25e18)
    assert (await registry.figures("conductor@7", since=since, until=None, latest=2)).requests == 2
    until = since + timedelta(seconds=2.5)
    assert (await registry.figures("conductor@7", since=since, until=until, latest=9)).cost_nano_sum == 30
    assert (await registry.figures("conductor@9", since=since, until=None, latest=9)).requests == 0


async def test_a_rollout_is_assigned_to_the_version_that_was_asked_first() -> None:
    refused = a_round(1, policy_version="conductor@2", refusal="slow", plan=None)
    record = a_rollout(rounds=[refused, a_round(2, planner="rule", policy_version=None)])
    close_record(record, T0_US)
    assert (record.policy_assigned, record.policy_version, record.policy_used) == ("conductor@2", None, "rule")


async def test_shadow_plans_are_counted(registry: Registry, pg_engine: AsyncEngine) -> None:
    new = rows.Rows()
    for refusal, agrees in ((None, True), (None, False), ("slow", None)):
        payload: dict[str, Any] = {"rollout_id": new_id(), "version": "conductor@2", "refusal": refusal}
        payload |= {"live_version": "conductor@1", "agrees": agrees, "latency_ms": 3.0, "live_latency_ms": 2.0}
        payload |= {"prompt_tokens": 10, "completion_tokens": 4, "cost_nano": 7}
        new.extend(rows.event_rows(event("shadow", payload)))
    async with pg_engine.begin() as connection:
        await connection.run_sync(insert_rows, new)
        await connection.run_sync(insert_rows, new)  # shipped twice, stored once
    assert await registry.shadowed("conductor@2") == {
        **{"n": 3, "refused": 1, "agreed": 1},
        **{"latency_ms_mean": 3.0, "cost_nano": 21},
    }
    assert (await registry.shadowed("conductor@1"))["n"] == 0
