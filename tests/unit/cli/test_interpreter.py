"""How `baton serve` sets the interpreter: other threads give way soon, and what is loaded is not searched again."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from gateway.cli.process import runtime


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
