"""The spool on a real disk: group commit, segments, one writer per directory, and what the shipper asks of it."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable
from pathlib import Path

import pytest

from gateway.adapters.journal import segments
from gateway.adapters.journal.segments import Position, segment_path
from gateway.adapters.journal.spool import Spool, SpoolLimits
from gateway.errors import ConfigError, SpoolFull, Unavailable
from tests.spools import MORE, Watch, all_of, an_event, failing, spool_with, then
from tests.waiting import BOUND_S, until


async def test_concurrent_appends_share_an_fsync(tmp_path: Path) -> None:
    watch = Watch()
    spool = await Spool.open(tmp_path, watch=watch)
    await asyncio.gather(*(spool.append(an_event(n)) for n in range(500)))
    await spool.close()
    assert sum(watch.groups) == 500
    assert len(watch.groups) < 50


async def test_an_append_is_fsynced_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    sync = os.fdatasync

    def slow_sync(fd: int) -> None:
        time.sleep(0.02)
        sync(fd)
        steps.append("synced")

    monkeypatch.setattr(os, "fdatasync", slow_sync)
    monkeypatch.setattr(os, "write", then(os.write, lambda *_: steps.append("written")))
    spool = await Spool.open(tmp_path)
    steps.clear()
    await spool.append(an_event())
    steps.append("returned")
    await spool.close()
    assert [step for step in steps if step != "written"][:2] == ["synced", "returned"]


async def test_a_slow_disk_does_not_stop_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = await Spool.open(tmp_path)
    syncing, go, let_go = threading.Event(), threading.Event(), list[bool]()

    def slow_sync(fd: int) -> None:
        syncing.set()
        let_go.append(go.wait(BOUND_S))

    monkeypatch.setattr(os, "fdatasync", slow_sync)
    appending = asyncio.ensure_future(spool.append(an_event()))
    await until(syncing.is_set)  # in a thread of its own, or the loop would not get here
    assert not appending.done()
    go.set()
    await appending
    await spool.close()
    assert all(let_go)


async def test_a_cancelled_appender_does_not_lose_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = await Spool.open(tmp_path)
    monkeypatch.setattr(os, "fdatasync", then(os.fdatasync, lambda *_: time.sleep(0.05)))
    tasks = [asyncio.ensure_future(spool.append(an_event(n))) for n in range(3)]
    await asyncio.sleep(0)  # queued
    tasks[1].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    assert results[0] is results[2] is None
    assert [e.payload["hold_id"] for e in await all_of(spool)] == ["h0", "h1", "h2"]
    await spool.close()


async def test_segments_turn_over_and_are_read_in_order(tmp_path: Path) -> None:
    spool = await Spool.open(tmp_path, SpoolLimits(segment_bytes=2_000))
    for n in range(40):
        await spool.append(an_event(n, pad=100))
    assert len(segments.numbers(tmp_path)) > 3
    assert [e.payload["hold_id"] for e in await all_of(spool)] == [f"h{n}" for n in range(40)]
    await spool.close()


async def test_each_start_writes_a_segment_of_its_own(tmp_path: Path) -> None:
    for n in range(3):
        spool = await Spool.open(tmp_path)
        await spool.append(an_event(n))
        await spool.close()
    assert segments.numbers(tmp_path) == [1, 2, 3]
    assert oct(segment_path(tmp_path, 1).stat().st_mode)[-3:] == "600"


async def test_closing_writes_what_is_queued_and_refuses_the_rest(tmp_path: Path) -> None:
    spool = await Spool.open(tmp_path)
    appending = [asyncio.ensure_future(spool.append(an_event(n))) for n in range(10)]
    await asyncio.sleep(0)
    await spool.close()
    await asyncio.gather(*appending)
    with pytest.raises(Unavailable):
        await spool.append(an_event())
    await spool.close()
    again = await Spool.open(tmp_path)
    assert len(await all_of(again)) == 10
    await again.close()


async def test_one_process_per_directory(tmp_path: Path) -> None:
    spool = await Spool.open(tmp_path)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        await Spool.open(tmp_path)
    code = (
        "import pathlib; from gateway.adapters.journal.segments import locked\n"
        f"with locked(pathlib.Path({str(tmp_path)!r})): 1"
    )
    other = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    assert other.returncode == 1
    assert "in use by another process" in other.stderr
    await spool.close()
    await (await Spool.open(tmp_path)).close()


# ---------------------------------------------------------------- the shipper's side


async def test_acknowledging_marks_then_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = await Spool.open(tmp_path, SpoolLimits(segment_bytes=1))
    for n in range(3):
        await spool.append(an_event(n))
    order: list[str] = []
    monkeypatch.setattr(segments, "write_mark", then(segments.write_mark, lambda *_: order.append("mark")))
    monkeypatch.setattr(Path, "unlink", then(Path.unlink, lambda path: order.append(path.name)))
    batch = await spool.read(Position(3, 0), **MORE)
    await spool.acknowledge(batch.position)
    assert order == ["mark", "000000000001.log", "000000000002.log"]
    assert segments.read_mark(tmp_path) == spool.acknowledged == batch.position
    await spool.close()
    again = await Spool.open(tmp_path)
    assert await all_of(again, again.acknowledged) == []
    await again.shipped()
    await again.close()


async def test_the_mark_lags_and_is_written_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MARK_S", 3_600.0)
    spool = await Spool.open(tmp_path)
    ends = []
    for n in range(3):
        await spool.append(an_event(n))
        ends.append(spool.durable)
        await spool.acknowledge(spool.durable)
    assert segments.read_mark(tmp_path) == ends[0]
    assert spool.acknowledged == ends[-1]
    await spool.close()
    assert segments.read_mark(tmp_path) == ends[-1]


async def test_a_mark_that_cannot_be_written_frees_the_disk_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = await Spool.open(tmp_path, SpoolLimits(segment_bytes=1))
    for n in range(2):
        await spool.append(an_event(n))
    monkeypatch.setattr(segments, "write_mark", failing(errno.ENOSPC))
    await spool.acknowledge(Position(2, 10))
    assert segments.numbers(tmp_path) == [2]
    monkeypatch.setattr(segments, "MARK_S", 0.0)
    monkeypatch.setattr(segments, "write_mark", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        await spool.acknowledge(Position(2, 20))
    await spool.close()


@pytest.mark.parametrize(
    "mark", [b"", b"{", b"[]", b'{"segment": "x", "offset": 1}', b'{"segment": 1, "offset": 9999999}']
)
async def test_an_unusable_mark_ships_all_again(tmp_path: Path, mark: bytes) -> None:
    await spool_with(tmp_path, [an_event(0)])
    (tmp_path / "shipped").write_bytes(mark)
    spool = await Spool.open(tmp_path)
    assert len(await all_of(spool, spool.acknowledged)) == 1
    await spool.close()


async def test_reading_is_bounded_and_takes_one_record_at_least(tmp_path: Path) -> None:
    spool = await Spool.open(tmp_path)
    for n in range(5):
        await spool.append(an_event(n, pad=1_000))
    assert len((await spool.read(Position(0, 0), records_max=2, bytes_max=2**20)).payloads) == 2
    assert len((await spool.read(Position(0, 0), records_max=9, bytes_max=2_600)).payloads) == 2
    assert len((await spool.read(Position(0, 0), records_max=9, bytes_max=1)).payloads) == 1
    await spool.close()


async def test_waiting_for_the_shipper_is_bounded(tmp_path: Path) -> None:
    spool = await Spool.open(tmp_path, SpoolLimits(shipped_timeout_s=0.05))
    await spool.append(an_event())
    with pytest.raises(TimeoutError):
        await spool.shipped()
    spool.limits = SpoolLimits(shipped_timeout_s=60)
    waiting: Awaitable[None] = asyncio.ensure_future(spool.shipped())
    batch = await spool.read(Position(0, 0), **MORE)
    await spool.acknowledge(batch.position)
    await waiting
    await spool.close()


async def test_the_lag_is_the_age_of_the_oldest_record_that_is_not_shipped(tmp_path: Path) -> None:
    spool = await Spool.open(tmp_path)
    assert spool.lag_s == 0.0
    await spool.append(an_event(1))
    await asyncio.sleep(0.05)
    first_s = spool.lag_s
    assert first_s >= 0.05
    await asyncio.sleep(0.05)
    assert spool.lag_s > first_s, "it grows while nothing is shipped"
    await spool.acknowledge(spool.durable)
    assert spool.lag_s == 0.0
    await spool.append(an_event(2))
    await spool.close()
    again = await Spool.open(tmp_path)
    assert again.lag_s > 0.0, "what an earlier process left counts"
    await again.close()


async def test_there_is_room_until_the_journal_or_its_disk_is_full(tmp_path: Path) -> None:
    spool = await Spool.open(tmp_path, SpoolLimits(total_bytes=8_000, reserve_bytes=1_000))
    assert spool.has_room(1)
    assert not spool.has_room(spool.disk_free_bytes() * 2)
    while True:
        try:
            await spool.append(an_event(1, pad=500))
        except SpoolFull:
            break
    assert not spool.has_room(1)
    await spool.close()
