"""The spool after crashes and on failing disks: torn tails, damage, no space, fsync errors, every bound."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from gateway.adapters.journal import segments
from gateway.adapters.journal.segments import Position, encode, segment_path
from gateway.adapters.journal.spool import Spool, SpoolLimits
from gateway.core.log.events import canonical
from gateway.errors import SpoolFull, TooLarge, Unavailable
from tests.spools import MORE, Watch, all_of, an_event, failing, spool_with
from tests.waiting import BOUND_S


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
    size = len(encode(canonical(events[2])))
    assert batch.lost is not None
    assert (len(batch.payloads), batch.position) == (2, Position(1, at))
    assert (batch.lost.size, batch.lost.end) == (size, at + size)
    end = await spool.set_aside(batch.position)
    assert (end, watch.damage) == (Position(1, at + size), [("corrupt", size)])
    assert segment_path(tmp_path, 1, "bad").read_bytes() == bytes(data)
    assert [e.payload["hold_id"] for e in await all_of(spool, end)] == ["h3", "h4", "h9"]
    await spool.close()
    again = await Spool.open(tmp_path)
    await again.append(an_event(10))
    assert segments.numbers(tmp_path, "bad") == [1]
    assert segments.numbers(tmp_path) == [1, 2, 3]  # the number of a segment kept aside is not used again
    await again.close()


async def test_damage_in_the_segment_being_written(tmp_path: Path) -> None:
    watch = Watch()
    spool = await Spool.open(tmp_path, watch=watch)
    for n in range(3):
        await spool.append(an_event(n))
    with segment_path(tmp_path, 1).open("r+b") as file:
        file.write(b"\xff\xff")
    batch = await spool.read(Position(0, 0), **MORE)
    assert batch.lost is not None
    assert (batch.payloads, "h0" in batch.lost.about) == ([], True)  # its header alone is damaged
    end = await spool.set_aside(batch.position)
    await spool.append(an_event(3))
    assert [e.payload["hold_id"] for e in await all_of(spool, end)] == ["h1", "h2", "h3"]
    assert [what for what, _ in watch.damage] == ["corrupt"]
    await spool.close()


# ---------------------------------------------------------------- limits and failing disks


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
        await asyncio.wait_for(spool.append(an_event()), BOUND_S)
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
    spool = await Spool.open(tmp_path, SpoolLimits(total_bytes=1_000, reserve_bytes=250))
    await spool.append(an_event(0, "hold", pad=400))
    with pytest.raises(SpoolFull):
        await spool.append(an_event(1, "hold", pad=200))
    await spool.append(an_event(1, "rollout", pad=200))
    await spool.close()
