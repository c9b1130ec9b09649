"""Drift of workers: the bound on false flags, and how soon a worse worker is flagged, both simulated."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from gateway.core.pool import drift
from gateway.core.pool.drift import Detector, DriftRules, SizeTail, Streams, upper_rate

RULES = DriftRules(reference=200, run_length=5_000)


def until_flagged(rate: Callable[[int], float], rng: random.Random, most: int) -> int | None:
    """Results after the reference until the flag; None if it does not come in `most`."""
    detector = Detector(RULES)
    for n in range(RULES.reference + most):
        if detector.add(float(rng.random() < rate(n))):
            return detector.results
    return None


@pytest.mark.parametrize("usual", [0.0, 0.05, 0.3, 0.7])
def test_an_unchanged_worker_is_flagged_no_oftener_than_promised(usual: float) -> None:
    """200 workers of 2,000 results each: by the bound 2,000 ÷ 5,000 of them might be flagged; fewer are."""
    rng = random.Random(f"still {usual}")
    flags = [until_flagged(lambda _: usual, rng, 2_000) for _ in range(200)]
    assert sum(flag is not None for flag in flags) / 200 <= 0.1


@pytest.mark.parametrize(
    ("usual", "worse", "within"), [(0.02, 0.3, 60), (0.1, 0.4, 90), (0.3, 0.6, 130), (0.5, 0.9, 100)]
)
def test_a_worse_worker_is_flagged_soon(usual: float, worse: float, within: int) -> None:
    rng = random.Random(f"worse {usual}")
    change = RULES.reference + 300
    delays = []
    for _ in range(60):
        found = until_flagged(lambda n: worse if n >= change else usual, rng, 2_000)
        assert found is not None
        delays.append(found - 300)
    delays.sort()
    assert delays[30] <= within
    assert delays[57] <= 2 * within  # 95 %


def test_the_bets_are_fair_where_nothing_changed() -> None:
    """The mean factor is 1 at the usual rate, and no factor is negative."""
    for usual in (0.01, 0.2, 0.9):
        for rise in drift.RISES:
            won, lost = (1 + rise / usual * (bad - usual) for bad in (1.0, 0.0))
            assert usual * won + (1 - usual) * lost == pytest.approx(1.0)
            assert lost >= 0


def test_the_usual_rate_is_the_upper_end_of_an_interval() -> None:
    assert 0.02 < upper_rate(0, 200) < 0.04
    assert upper_rate(100, 200) == pytest.approx(0.59, abs=0.01)
    assert upper_rate(200, 200) < 1


def test_sizes_are_judged_by_the_tail_of_the_reference() -> None:
    slow, short = SizeTail(100, above=True), SizeTail(100, above=False)
    assert [tail.result(float(n)) for n in range(100) for tail in (slow, short)] == [None] * 200
    assert (slow.bound, short.bound) == (89.0, 10.0)
    assert [slow.result(size) for size in (89.0, 90.0)] == [0.0, 1.0]
    assert [short.result(size) for size in (10.0, 9.0)] == [0.0, 1.0]


def results(rng: random.Random, n: int, wrong: float, seconds: float) -> Iterator[dict[drift.Signal, float]]:
    for _ in range(n):
        yield {"outcome": float(rng.random() < wrong), "slow": rng.expovariate(1 / seconds), "failed": 0.0}


def test_one_worker_is_flagged_by_its_signal_and_kind_of_task_and_begins_anew() -> None:
    rng, streams = random.Random(7), Streams(RULES)
    flags = []
    for each in results(rng, 600, 0.1, 1.0):
        flags += [*streams.add("atlas", "1", "code", each), *streams.add("ember", "1", "code", each)]
    assert flags == []
    for each in results(rng, 300, 0.6, 1.0):
        flags += [*streams.add("atlas", "1", "code", each), *streams.add("atlas", "1", "chat", each)]
    (flag,) = flags
    assert (flag.worker, flag.task_type, flag.signal) == ("atlas", "code", "outcome")
    assert flag.usual < 0.25 < flag.now
    assert flag.results - 400 < 100
    for each in results(rng, 300, 0.1, 5.0):
        flags += streams.add("ember", "1", "code", each)
    assert [one.signal for one in flags[1:]] == ["slow"]
    assert streams.flagged() == {("atlas", "outcome"): 1, ("ember", "slow"): 1}
    assert streams.forget("atlas") > 0
    assert streams.flagged() == {("ember", "slow"): 1}


def test_a_new_version_of_a_worker_begins_anew() -> None:
    rng, streams = random.Random(3), Streams(RULES)
    for wrong in (0.1, 0.9):
        for each in results(rng, 300, wrong, 1.0):
            list(streams.add("atlas", "1", "", each))
    assert streams.flagged() == {("atlas", "outcome"): 1}
    list(streams.add("atlas", "2", "", {"outcome": 1.0}))
    assert streams.flagged() == {}


def test_the_number_of_streams_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "STREAMS_MAX", 2)
    streams = Streams(DriftRules(reference=1, run_length=2))
    for name in ("a", "b", "c"):
        for bad in (0.0, *[1.0] * 200):
            list(streams.add(name, "1", "", {"failed": bad}))
    assert {worker for worker, _ in streams.flagged()} == {"a", "b"}
