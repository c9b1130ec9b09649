"""The breaker opens after failures in a row, probes one at a time, and closes on a success."""

from __future__ import annotations

from gateway.adapters.upstream.client import Breaker


class Time:
    """Seconds that only the test moves."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def failing(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        assert breaker.admit()
        breaker.fail()


def test_it_opens_only_after_failures_in_a_row() -> None:
    breaker = Breaker(failures_max=3, cool_down_s=10.0, now=Time())
    failing(breaker, 2)
    breaker.succeed()
    failing(breaker, 3)
    assert not breaker.admit()


def test_one_probe_after_the_cool_down_and_again_after_it_fails() -> None:
    time = Time()
    breaker = Breaker(failures_max=1, cool_down_s=10.0, now=time)
    failing(breaker, 1)
    time.now_s += 9.9
    assert not breaker.admit()
    time.now_s += 0.2
    assert breaker.admit()
    assert not breaker.admit()  # the probe is still out
    breaker.fail()
    assert not breaker.admit()
    time.now_s += 10.1
    assert breaker.admit()
    breaker.succeed()
    assert breaker.admit()
    assert breaker.admit()


def test_a_probe_that_is_abandoned_gives_its_place_back() -> None:
    time = Time()
    breaker = Breaker(failures_max=1, cool_down_s=1.0, now=time)
    failing(breaker, 1)
    time.now_s += 2.0
    assert breaker.admit()
    breaker.abandon()
    assert breaker.admit()
