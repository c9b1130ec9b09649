"""The spool on a real disk: group commit, torn tails, damage, full and failing disks, one writer per directory."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.adapters import segments
from gateway.adapters.segments import Position, encode, segment_path
from gateway.adapters.spool import Quiet, Spool, SpoolLimits
from gateway.core.events import Event, canonical, parse
from gateway.errors import ConfigError, SpoolFull, TooLarge, Unavailable
from tests.records import event

MORE = {"records_max": 10_000, "bytes_max": 2**30}
START = Position(0, 0)


class Watch(Quiet):
    def __init__(self) -> None:
        self.damage: list[tuple[str, int]] = []
        self.groups: list[int] = []

    def damaged(self, what: str, path: str, bytes_: int) -> None:
        self.damage.append((what, bytes_))

    def appended(self, records: int, bytes_: int, seconds: float) -> None:
        self.groups.append(records)


def an_event(n: int = 0, kind: Any = "settle", pad: int = 0) -> Event:
    return event(kind, {"hold_id": f"h{n}", "pad": "x" * pad})


async def spool_with(directory: Path, events: list[Event]) -> Path:
    """A closed journal of one segment holding `events`; returns the segment."""
    spool = await Spool.open(directory)
    await asyncio.gather(*(spool.append(one) for one in events))
    await spool.close()
    (number,) = segments.numbers(directory)
    return segment_path(directory, number)


async def all_of(spool: Spool, position: Position = START) -> list[Event]:
    found: list[Event] = []
    while (batch := await spool.read(position, **MORE)).payloads:
        found += [parse(payload) for payload in batch.payloads]
        position = batch.position
    return found


def then(function: Callable[..., Any], after: Callable[..., None]) -> Callable[..., Any]:
    """`function`, followed by `after` with the same positional arguments."""

    def both(*args: Any, **named: Any) -> Any:
        result = function(*args, **named)
        after(*args)
        return result

    return both


# ---------------------------------------------------------------- writing


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
    monkeypatch.setattr(os, "fdatasync", lambda fd: time.sleep(0.2))
    appending = asyncio.create_task(spool.append(an_event()))
    ticks = 0
    while not appending.done():
        await asyncio.sleep(0.005)
        ticks += 1
    await spool.close()
    assert ticks > 3


async def test_a_cancelled_appender_does_not_lose_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = await Spool.open(tmp_path)
    monkeypatch.setattr(os, "fdatasync", then(os.fdatasync, lambda *_: time.sleep(0.05)))
    tasks = [asyncio.create_task(spool.append(an_event(n))) for n in range(3)]
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
    appending = [asyncio.create_task(spool.append(an_event(n))) for n in range(10)]
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
        f"import pathlib; from gateway.adapters.segments import locked\nwith locked(pathlib.Path({str(tmp_path)!r})): 1"
    )
    other = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    assert other.returncode == 1
    assert "in use by another process" in other.stderr
    await spool.close()
    await (await Spool.open(tmp_path)).close()


# ---------------------------------------------------------------- after a crash


async def test_a_tail_torn_at_any_byte_is_cut(tmp_path: Path) -> None:
    events = [an_event(n) for n in range(3)]
    whole = (await spool_with(tmp_path / "made", events)).read_bytes()
    last = len(encode(canonical(events[-1])))
    for cut in range(len(whole) - last, len(whole)):
        for garbage in (b"", b"\x00" * 5, b"\xff" * (len(whole) - cut)):
            path = tmp_path / "cut.log"
            path.write_bytes(whole[:cut] + garbage)
            assert segments.cut_torn_tail(path) == cut + len(garbage) - (len(whole) - last)
            assert path.read_bytes() == whole[: len(whole) - last]
    path.write_bytes(whole)
    assert segments.cut_torn_tail(path) == 0
    assert path.read_bytes() == whole


async def test_after_a_torn_tail_the_journal_goes_on_and_says_so(tmp_path: Path) -> None:
    path = await spool_with(tmp_path, [an_event(n) for n in range(3)])
    os.truncate(path, path.stat().st_size - 3)
    watch = Watch()
    spool = await Spool.open(tmp_path, watch=watch)
    assert [what for what, _ in watch.damage] == ["torn"]
    await spool.append(an_event(9))
    assert [e.payload["hold_id"] for e in await all_of(spool)] == ["h0", "h1", "h9"]
    await spool.close()


@pytest.mark.parametrize("byte", [0, 2, 4, 7, 8, 20, 60])
async def test_a_flipped_bit_in_the_middle_is_damage_not_a_tail(tmp_path: Path, byte: int) -> None:
    events = [an_event(n) for n in range(5)]
    path = await spool_with(tmp_path, events)
    data = bytearray(path.read_bytes())
    at = sum(len(encode(canonical(one))) for one in events[:2])
    data[at + byte] ^= 0x10
    path.write_bytes(data)
    watch = Watch()
    spool = await Spool.open(tmp_path, watch=watch)
    await spool.append(an_event(9))
    batch = await spool.read(Position(0, 0), **MORE)
    assert batch.damaged
    assert (len(batch.payloads), batch.position) == (2, Position(1, at))
    end = await spool.set_aside(batch.position)
    assert watch.damage == [("corrupt", len(data) - at)]
    assert segment_path(tmp_path, 1, "bad").read_bytes() == bytes(data)
    assert [e.payload["hold_id"] for e in await all_of(spool, end)] == ["h9"]
    await spool.close()
    again = await Spool.open(tmp_path)
    await again.append(an_event(10))
    assert segments.numbers(tmp_path, "bad") == [1]
    assert min(segments.numbers(tmp_path)) > 1  # the number of a segment kept aside is not used again
    await again.close()


async def test_damage_in_the_segment_being_written(tmp_path: Path) -> None:
    watch = Watch()
    spool = await Spool.open(tmp_path, watch=watch)
    for n in range(3):
        await spool.append(an_event(n))
    with segment_path(tmp_path, 1).open("r+b") as file:
        file.write(b"\xff\xff")
    batch = await spool.read(Position(0, 0), **MORE)
    assert (batch.payloads, batch.damaged) == ([], True)
    end = await spool.set_aside(batch.position)
    await spool.append(an_event(3))
    assert [e.payload["hold_id"] for e in await all_of(spool, end)] == ["h3"]
    assert [what for what, _ in watch.damage] == ["corrupt"]
    await spool.close()


# ---------------------------------------------------------------- limits and failing disks


def failing(code: int) -> Callable[..., Any]:
    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fail


async def test_a_full_disk_refuses_and_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fatal: list[BaseException] = []
    spool = await Spool.open(tmp_path, on_fatal=fatal.append)
    await spool.append(an_event(0))
    write = os.write

    def half_then_full(fd: int, data: Any) -> int:
        if len(data) > 40:
            return write(fd, data[:40])
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half_then_full)
        with pytest.raises(SpoolFull):
            await spool.append(an_event(1))
    await spool.append(an_event(2))
    assert [e.payload["hold_id"] for e in await all_of(spool)] == ["h0", "h2"]
    assert fatal == []
    await spool.close()


async def test_a_disk_too_full_for_a_new_segment_refuses_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = await Spool.open(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing(errno.EDQUOT))
        with pytest.raises(SpoolFull):
            await spool.append(an_event(1))
    await spool.append(an_event(2))
    assert [e.payload["hold_id"] for e in await all_of(spool)] == ["h2"]
    await spool.close()


async def test_a_failed_fsync_ends_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fatal: list[BaseException] = []
    spool = await Spool.open(tmp_path, on_fatal=fatal.append)
    await spool.append(an_event(0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing(errno.EIO))
        results = await asyncio.gather(*(spool.append(an_event(n)) for n in range(3)), return_exceptions=True)
    assert all(isinstance(result, Unavailable) for result in results)
    with pytest.raises(Unavailable) as refused:
        await spool.append(an_event(4))
    assert refused.value.code == "journal_broken"
    assert len(fatal) == 1
    await spool.close()


async def test_a_writer_that_fails_unexpectedly_leaves_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fatal: list[BaseException] = []
    spool = await Spool.open(tmp_path, on_fatal=fatal.append)

    def explode(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(segments.Segment, "append", explode)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(spool.append(an_event()), 5)
    assert [type(error) for error in fatal] == [MemoryError]
    await spool.close()


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        (SpoolLimits(queue_records=2), SpoolFull),
        (SpoolLimits(queue_bytes=500), SpoolFull),
        (SpoolLimits(record_bytes=50), TooLarge),
        (SpoolLimits(total_bytes=500, reserve_bytes=0), SpoolFull),
    ],
)
async def test_every_bound_refuses(tmp_path: Path, limits: SpoolLimits, error: type[Exception]) -> None:
    spool = await Spool.open(tmp_path, limits)
    results = await asyncio.gather(*(spool.append(an_event(n)) for n in range(10)), return_exceptions=True)
    refused = [result for result in results if result is not None]
    assert refused
    assert all(type(result) is error for result in refused)
    assert len(await all_of(spool)) == 10 - len(refused)
    await spool.close()


async def test_a_filling_spool_refuses_new_holds_first(tmp_path: Path) -> None:
    spool = await Spool.open(tmp_path, SpoolLimits(total_bytes=1_000, reserve_bytes=600))
    await spool.append(an_event(0, "hold", pad=200))
    with pytest.raises(SpoolFull):
        await spool.append(an_event(1, "hold", pad=200))
    await spool.append(an_event(1, "rollout", pad=200))
    await spool.close()


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


async def test_a_mark_that_cannot_be_written_frees_the_disk_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = await Spool.open(tmp_path, SpoolLimits(segment_bytes=1))
    for n in range(2):
        await spool.append(an_event(n))
    monkeypatch.setattr(segments, "write_mark", failing(errno.ENOSPC))
    await spool.acknowledge(Position(2, 10))
    assert segments.numbers(tmp_path) == [2]
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
    waiting: Awaitable[None] = asyncio.ensure_future(spool.shipped())
    batch = await spool.read(Position(0, 0), **MORE)
    await spool.acknowledge(batch.position)
    await waiting
    await spool.close()
