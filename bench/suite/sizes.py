"""How much is measured: `tiny` for tests, `modest` for a few minutes a part, `full` for the figures of a release."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """Counts and seconds of all parts. `rounds` times `seconds` for each cell of a table."""

    rounds: int = 4
    seconds: float = 1.2
    in_flight: int = 32
    crowd: int = 128  # in flight where refusals are counted
    plans_in_flight: int = 16
    plans_s: float = 5.0
    slowest_ms: int = 400  # the slowest of three steps; the merge takes half of it
    token_ms: float = 20.0  # of a conductor whose plan is read while it is decoded
    dispatches: int = 6  # such plans, and as many that come whole
    overload_s: float = 8.0
    overload_rounds: int = 3
    keys: int = 100_000
    workers: int = 500
    rollouts: int = 100_000
    asks: int = 20  # of each query of the console
    requests: int = 20_000  # over which memory is watched
    streams: int = 1000
    questions: int = 200  # of an environment, in training
    train_steps: int = 3  # of each engine, after one to warm up


TINY = Size(
    rounds=2, seconds=0.2, in_flight=4, crowd=8, plans_in_flight=2, plans_s=0.5, slowest_ms=20,
    token_ms=1.0, dispatches=1, overload_s=0.5, overload_rounds=1, keys=50, workers=8, rollouts=2000, requests=300,
    asks=2, streams=10, questions=4, train_steps=1,
)  # fmt: skip
SIZES = {
    "tiny": TINY,
    "modest": Size(),
    "full": Size(
        rounds=10,
        seconds=4.0,
        plans_s=15.0,
        dispatches=20,
        overload_s=60.0,
        overload_rounds=5,
        rollouts=1_000_000,
        requests=100_000,
    ),
}
