"""Weights travel through PostgreSQL: gateways with directories of their own, each with an engine of its own."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.engines.sealed import read_policy
from gateway.adapters.postgres.policies import policy_files
from gateway.adapters.postgres.policies.policy_files import PIECE_BYTES, Holders
from gateway.adapters.postgres.policies.registry import Registry
from gateway.core.policies.versions import Holder
from gateway.errors import Conflict, Unavailable, VersionRefused
from gateway.service.policies import attendance
from gateway.service.policies.admin import PolicyAdmin
from gateway.service.policies.attendance import Attendance
from gateway.service.policies.versions import PolicyVersions, VersionLimits
from gateway.service.policies.watcher import Watcher, WatchLimits
from tests.fakes.engine import FakeEngine
from tests.kit import TestClock
from tests.policies import write_policy
from tests.service.versions_kit import SpyPolicyMetrics
from tests.waiting import BOUND_S, until

PASSED = {"passed": True, "refusals": []}
AT_ONCE = VersionLimits(poll_s=0.01, check_s=0.0, unload_s=0.0)
LARGE = PIECE_BYTES // 4 * 2 + 10  # floats: two pieces and a rest


class Host:
    """A gateway's part that follows the registry, on a disk of its own."""

    def __init__(self, engine: AsyncEngine, place: Path, name: str, *, bytes_max: int = 1 << 30, wait_s: float = 0.5):
        clock, metrics = TestClock(), SpyPolicyMetrics()
        self.registry = Registry(engine, place / name / "policies", "", bytes_max)
        self.engine = FakeEngine()
        self.versions = PolicyVersions(self.registry, self.engine, clock, metrics, limits=AT_ONCE)
        named: Mapping[str, Any] = {"gateway": name, "host": f"{name}:/data", "wait_s": wait_s}
        self.attendance = Attendance(Holders(engine), self.registry, self.versions, clock, **named)
        watcher = Watcher(self.versions, self.registry, clock, metrics, WatchLimits())
        self.admin = PolicyAdmin(self.registry, self.versions, watcher, self.attendance)

    async def follow(self) -> None:
        await self.versions.start(5.0)
        await self.attendance.beat()


def two(engine: AsyncEngine, place: Path, **options: Any) -> tuple[Host, Host]:
    return Host(engine, place, "one", **options), Host(engine, place, "two", **options)


async def published(host: Host, place: Path, number: int, size: int = 2, **manifest: Any) -> str:
    source = write_policy(place / f"source-{number}", str(number), [float(number)] * size, **manifest)
    version = await host.registry.publish(source, by="test", gate=PASSED)
    shutil.rmtree(source)
    return version.id


async def test_another_host_fetches_what_one_published(pg_engine: AsyncEngine, tmp_path: Path) -> None:
    one, other = two(pg_engine, tmp_path)
    version = await published(one, tmp_path, 3, LARGE)
    await one.admin.shadow(version, "a", "")
    await other.follow()
    assert other.versions.holds(version)
    ours, theirs = (read_policy(host.registry.policies / version) for host in (one, other))
    assert ours.manifest == theirs.manifest
    assert await one.admin.canary(version, 100, "a", "") is not None
    assert [row["host"] for row in (await one.admin.overview())["gateways"]] == ["one:/data", "two:/data"]


async def test_the_answering_gateway_is_listed_as_it_stands_now(pg_engine: AsyncEngine, tmp_path: Path) -> None:
    one, _ = two(pg_engine, tmp_path)
    version = await published(one, tmp_path, 3)
    await one.attendance.beat()  # written before it held the version
    await one.admin.shadow(version, "a", "")
    await one.admin.canary(version, 100, "a", "")
    (row,) = (await one.admin.overview())["gateways"]
    assert row["held"] == {version: ""}


async def test_a_swap_waits_for_every_gateway_and_names_who_lacks_it(pg_engine: AsyncEngine, tmp_path: Path) -> None:
    one, other = two(pg_engine, tmp_path)
    version = await published(one, tmp_path, 3)
    await other.attendance.beat()
    await one.admin.shadow(version, "a", "")
    with pytest.raises(Conflict, match=r"conductor@3 is not held by 1 gateway.*two:/data: has not read of it") as lack:
        await one.admin.canary(version, 100, "a", "")
    assert lack.value.code == "gateways_lack"
    assert (await one.registry.get(version)).state == "shadow"
    await other.follow()
    await one.admin.canary(version, 100, "a", "")
    other.engine.restart()
    await other.attendance.close()  # it stops: nobody waits for it any more
    assert (await one.admin.promote(version, "a", ""))["state"] == "live"


async def test_a_version_that_is_too_large_stays_and_is_found_when_it_comes(
    pg_engine: AsyncEngine, tmp_path: Path
) -> None:
    one, other = two(pg_engine, tmp_path, bytes_max=100)
    version = await published(one, tmp_path, 3, 500)
    await one.admin.shadow(version, "a", "")
    await other.follow()
    assert "neither on this host nor in PostgreSQL" in other.versions.report()[version]
    with pytest.raises(Conflict, match="set BATON_POLICIES_URL"):
        await one.admin.canary(version, 100, "a", "")
    shutil.copytree(one.registry.policies / version, other.registry.policies / version)
    other.versions._again_s.clear()
    other.versions._refused.clear()
    await until(lambda: _held(other, version))
    await other.attendance.beat()
    assert (await one.admin.canary(version, 100, "a", ""))["percent"] == 100


async def _held(host: Host, version: str) -> bool:
    await host.versions.sync()
    return host.versions.holds(version)


async def test_weights_from_before_are_shared_by_the_gateway_that_has_them(
    pg_engine: AsyncEngine, tmp_path: Path
) -> None:
    one, other = two(pg_engine, tmp_path)
    version = await published(one, tmp_path, 3)
    async with pg_engine.begin() as connection:
        await connection.execute(text("TRUNCATE policy_blobs, policy_pieces"))
    await one.admin.shadow(version, "a", "")
    await other.follow()
    assert not other.versions.holds(version)
    await one.attendance.share()
    other.versions._again_s[version] = 0.0
    await until(lambda: _held(other, version))
    assert other.versions.report() == {version: ""}


async def test_a_torn_copy_is_not_loaded_and_nothing_is_left_of_it(pg_engine: AsyncEngine, tmp_path: Path) -> None:
    one, other = two(pg_engine, tmp_path)
    version = await one.registry.get(await published(one, tmp_path, 3, LARGE))
    async with pg_engine.begin() as connection:
        await connection.execute(text("UPDATE policy_pieces SET data = 'torn'::bytea WHERE n = 1"))
    with pytest.raises(VersionRefused, match="does not match its sha256") as refused:
        await other.registry.place(version)
    assert refused.value.reason == "missing"
    assert list(other.registry.policies.iterdir()) == []
    torn = write_policy(tmp_path / "torn", "4")
    digest = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(VersionRefused, match="does not match its sha256"):
        await one.registry._shelf.store(torn, {"config.json": digest})
    assert await one.registry._shelf.lacks({digest}) == {digest}


async def test_a_disk_that_is_full_is_one_line(
    pg_engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two(pg_engine, tmp_path)
    version = await one.registry.get(await published(one, tmp_path, 3))

    def full(file: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gateway.adapters.postgres.policies.policy_files._sync", full)
    with pytest.raises(Unavailable, match="No space left on device; make room"):
        await other.registry.place(version)
    assert list(other.registry.policies.iterdir()) == []


async def test_old_files_of_retired_versions_go(pg_engine: AsyncEngine, tmp_path: Path) -> None:
    one, _ = two(pg_engine, tmp_path)
    kept, gone = [await published(one, tmp_path, number) for number in (3, 4)]
    await one.registry.move(gone, "retired", by="a")
    assert await one.registry.sweep(100) == 0  # a week must pass
    async with pg_engine.begin() as connection:
        await connection.execute(text("UPDATE policy_blobs SET created_at = created_at - interval '8 days'"))
    assert await one.registry.sweep(100) == 1  # its weights; both have the same config.json
    lacking = [await one.registry._shelf.lacks(set(_files(await one.registry.get(name)))) for name in (kept, gone)]
    assert [len(digests) for digests in lacking] == [0, 1]
    assert await one.registry.share(await one.registry.get(gone))
    assert await one.registry._shelf.lacks(set(_files(await one.registry.get(gone)))) == set()


async def test_pieces_of_an_upload_that_was_broken_off_go(pg_engine: AsyncEngine, tmp_path: Path) -> None:
    one, _ = two(pg_engine, tmp_path)
    kept = await one.registry.get(await published(one, tmp_path, 3, LARGE))
    async with pg_engine.begin() as connection:
        await connection.execute(text("INSERT INTO policy_pieces VALUES ('dead', 0, 'x'), ('goes on', 0, 'x')"))
    assert await one.registry.sweep(100) == 0
    async with pg_engine.begin() as connection:
        await connection.execute(text("UPDATE policy_pieces SET data = 'y' WHERE sha256 = 'goes on'"))
    assert await one.registry.sweep(100) == 1
    async with pg_engine.begin() as connection:
        left = set(await connection.scalars(text("SELECT sha256 FROM policy_pieces")))
    assert left == {"goes on", *_files(kept)}


async def test_an_upload_whose_pieces_were_swept_is_no_file(
    pg_engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = two(pg_engine, tmp_path)
    shelf = one.registry._shelf
    home = write_policy(tmp_path / "weights", "3")
    digest = hashlib.sha256((home / "config.json").read_bytes()).hexdigest()
    lock = policy_files._lock

    async def late(connection: AsyncConnection, of: str) -> None:
        if of == digest and not shelf._unfinished:
            await shelf._sweep_unfinished(9)
            assert await shelf._sweep_unfinished(9) == 1
        await lock(connection, of)

    monkeypatch.setattr(policy_files, "_lock", late)
    with pytest.raises(Unavailable, match="uploaded again"):
        await shelf.store(home, {"config.json": digest})
    assert await shelf.lacks({digest}) == {digest}
    monkeypatch.undo()
    assert await shelf.store(home, {"config.json": digest})
    assert await shelf.lacks({digest}) == set()


async def test_a_version_that_is_here_waits_for_no_fetch(pg_engine: AsyncEngine, tmp_path: Path) -> None:
    one, _ = two(pg_engine, tmp_path)
    version = await one.registry.get(await published(one, tmp_path, 3))
    async with one.registry._fetching:  # another version is on its way
        assert await asyncio.wait_for(one.registry.place(version), BOUND_S) == one.registry.directory(version)


async def test_a_gateway_counts_as_running_while_it_uploads(
    pg_engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = two(pg_engine, tmp_path)
    version = await published(one, tmp_path, 3)
    await one.admin.shadow(version, "a", "")
    await one.follow()
    uploading, beats = asyncio.Event(), list[str]()

    async def for_ever(version: Any) -> bool:
        uploading.set()
        return await asyncio.Event().wait()

    async def attend(holder: Holder) -> None:
        beats.extend(["while it uploads"] if uploading.is_set() else [])

    monkeypatch.setattr(one.registry, "share", for_ever)
    monkeypatch.setattr(one.attendance._gateways, "attend", attend)
    monkeypatch.setattr(attendance, "BEAT_S", 0.001)
    running = asyncio.create_task(one.attendance.run())
    try:
        await until(lambda: len(beats) > 2)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _files(version: Any) -> list[str]:
    return list(version.manifest["sha256"].values())


async def test_gateways_come_and_go(pg_engine: AsyncEngine) -> None:
    holders = Holders(pg_engine)
    for held in ({"conductor@1": "is loading it"}, {"conductor@1": ""}):
        await holders.attend(Holder("a", "one:/data", held))
    await holders.attend(Holder("b", "two:/data", {}))
    async with pg_engine.begin() as connection:
        await connection.execute(text("UPDATE policy_gateways SET seen_at = now() - interval '1 hour' WHERE id = 'b'"))
    assert await holders.attending(10.0) == [Holder("a", "one:/data", {"conductor@1": ""})]
    await holders.leave("a")
    assert [one.id for one in await holders.attending(7200.0)] == ["b"]
