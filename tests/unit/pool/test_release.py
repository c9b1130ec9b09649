"""Release by probes: how many a worker that recovered needs, and how seldom one that did not gets out; simulated."""

from __future__ import annotations

import random

import pytest

from gateway.core.pool.drift import Drift
from gateway.core.pool.identity import CHARS_MAX, identity_in
from gateway.core.pool.release import RUN_LENGTH, ReleaseTest

FLAG = Drift("atlas", "1", "code", "outcome", 0.15, 0.45, 80)


def until_passed(rate: float, rng: random.Random, most: int, flag: Drift = FLAG) -> int | None:
    test = ReleaseTest.of(flag)
    for n in range(1, most + 1):
        test.add(float(rng.random() < rate))
        if test.passed:
            return n
    return None


@pytest.mark.parametrize(
    ("usual", "worse", "now", "within"),
    [(0.15, 0.45, 0.1, 110), (0.05, 0.5, 0.02, 90), (0.1, 0.9, 0.1, 45), (0.3, 0.7, 0.25, 120)],
)
def test_a_worker_that_recovered_passes_soon(usual: float, worse: float, now: float, within: int) -> None:
    rng, flag = random.Random(f"well {usual} {worse}"), Drift("atlas", "1", "", "outcome", usual, worse, 80)
    took = sorted(until_passed(now, rng, 2_000, flag) or 2_000 for _ in range(100))
    assert took[50] <= within
    assert took[95] <= 3 * within


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_worker_that_is_still_worse_stays(share: float) -> None:
    """As bad as when it was flagged, none of 100 passes in 1,000 probes; half as much worse, the mean of the probes
    until it passes is at least the run length."""
    rng = random.Random(f"bad {share}")
    rate = FLAG.usual + share * (FLAG.now - FLAG.usual)
    took = [until_passed(rate, rng, 1_000) for _ in range(100)]
    if share == 1.0:
        assert took == [None] * 100
    assert sum(each or 1_000 for each in took) / 100 >= RUN_LENGTH


def test_a_bad_past_does_not_outweigh_a_recovery() -> None:
    """A thousand bad probes delay the release by no more than a few."""
    test = ReleaseTest.of(FLAG)
    for _ in range(1_000):
        test.add(1.0)
    for _ in range(40):
        test.add(0.0)
    assert test.passed


def test_a_test_is_stored_and_read_as_it_is() -> None:
    test = ReleaseTest.of(FLAG)
    for bad in (0.0, 1.0, 0.0):
        test.add(bad)
    again = ReleaseTest.read(test.as_json())
    assert again == test
    again.add(0.0)
    assert again != test


def test_a_probe_speaks_for_the_signals_that_it_has() -> None:
    assert ReleaseTest.of(FLAG).result({"failed": 1.0}) is None
    assert ReleaseTest.of(FLAG).result({"outcome": 1.0}) == 1.0
    slow, short = ReleaseTest("", "slow", 0.1, 0.5, 2.0), ReleaseTest("", "short", 0.1, 0.5, 20.0)
    assert [slow.result({"slow": seconds}) for seconds in (1.0, 3.0)] == [0.0, 1.0]
    assert [short.result({"short": tokens}) for tokens in (10.0, 30.0)] == [1.0, 0.0]
    assert ReleaseTest("", "slow", 0.1, 0.5).result({"slow": 3.0}) is None


def test_who_a_reply_says_it_is_of() -> None:
    reply = {"model": "m-2026-08-07", "system_fingerprint": "fp_1", "choices": []}
    assert identity_in(reply, "m") == {"model": "m-2026-08-07", "system_fingerprint": "fp_1"}
    assert identity_in({"model": "m", "system_fingerprint": None}, "m") == {}
    assert identity_in({}, None) == identity_in({"model": None}, None) == {}  # of a tool, say
    assert identity_in({"model": 7, "system_fingerprint": ["x"]}, "m") == {}
    odd = identity_in({"model": "é\n" + "x" * 500}, "m")["model"]
    assert (odd[:3], len(odd)) == ("??x", CHARS_MAX)
