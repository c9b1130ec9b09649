"""How `baton serve` sets the interpreter: other threads give way soon, and what is loaded is not searched again."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.cli.process import runtime
from tests.waiting import until


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    switch_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    yield
    sys.setswitchinterval(switch_s)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_a_thread_that_is_wanted_back_gives_way_within_a_millisecond() -> None:
    runtime.tune_switching()
    assert sys.getswitchinterval() <= 0.001


def test_garbage_collection_skips_loaded_objects_and_finds_later_ones() -> None:
    runtime.tune_garbage()
    assert gc.get_freeze_count() > 10_000
    ring: list[object] = []
    ring.append(ring)
    del ring
    assert gc.collect() >= 1


class Libc:
    """Records what is asked of madvise(2), and refuses every second block."""

    def __init__(self, _: object) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.argtypes: object = None

    @property
    def madvise(self) -> Libc:
        return self

    def __call__(self, address: int, size: int, advice: int) -> int:
        self.asked.append((address, size, advice))
        return -(len(self.asked) % 2)


def test_whole_blocks_of_anonymous_memory_get_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = Libc(None)
    monkeypatch.setattr("gateway.cli.process.runtime.ctypes.CDLL", lambda _: libc)
    with mmap.mmap(-1, 16 * runtime.PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert runtime.tune_pages() == len(libc.asked) // 2
    assert {(address % runtime.PAGE_BYTES, size, advice) for address, size, advice in libc.asked} == {
        (0, runtime.PAGE_BYTES, runtime.MADV_COLLAPSE)
    }
    last = first + 15 * runtime.PAGE_BYTES
    assert sum(first <= address <= last for address, _, _ in libc.asked) >= 15


def test_a_system_without_large_pages_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> None:
        raise OSError

    monkeypatch.setattr("gateway.cli.process.runtime.ctypes.CDLL", missing)
    assert runtime.tune_pages() == 0


async def test_pages_are_asked_for_once_requests_were_served(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def tune_pages() -> int:
        asked.append("once")
        return 1

    monkeypatch.setattr(runtime, "tune_pages", tune_pages)
    with runtime.large_pages(3600.0):
        await asyncio.sleep(0)
    with runtime.large_pages(0.0):
        await until(lambda: asked)
    assert asked == ["once"]


def large_pages_bytes() -> int:
    """The memory of this process that lies in large pages; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


def test_a_process_lives_on_with_what_its_system_gives() -> None:
    kept = [{n: n} for n in range(200_000)]
    pages = runtime.tune_pages()
    assert large_pages_bytes() >= pages * runtime.PAGE_BYTES // 2  # the kernel may split some again
    assert sum(one[n] for n, one in enumerate(kept)) == sum(range(200_000))
