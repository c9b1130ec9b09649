"""How soon the rule finds the right worker, in simulation with the served planner. `python -m bench.simulated.bandits`

Workers have a true success, a latency and a price. Each request is planned by `RulePlanner` from the experience that
`experience_of` makes of the outcomes so far, and judged at once. **Right** are the workers whose true utility, by the
worth that the rule derives from the prices, is within `NEAR` of the best one's. Counted are the outcomes until `SHARE`
of the next `WINDOW` requests go to them.

Parts: `grid` (two workers, all pairs of success, latency and price), `many` (2 to 20 workers), `drop`, `newcomer`,
`regret` (beside UCB1, Thompson sampling with known costs, and a budgeted linear bandit in the manner of ParetoBandit).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gateway.core.log.rollout import RoundRecord
from gateway.core.loop.caps import Caps, Meter
from gateway.core.loop.experience.belief import Trials, WorkerExperience, experience_of
from gateway.core.loop.experience.worth import Worth
from gateway.core.loop.plan import PlanLimits
from gateway.core.pool.workers import NANO_PER_USD, Price, WorkerSpec
from gateway.files import write_atomic
from gateway.service.loop.routers import USAGE_GUESS, RulePlanner, listed_worth
from gateway.service.loop.state import Situation, Stakes
from policy.recipes.report import write_block

SUCCESSES = (0.0, 0.25, 0.5, 0.9, 1.0)
LATENCIES_S = (0.0, 0.06, 0.3, 3.0)
RATIOS = (1, 10, 100)  # of the second worker's price to the first's
NEAR, SHARE, WINDOW = 0.05, 0.9, 50
OUTCOMES_MAX = 400
REGRET_REQUESTS = 300
COMMAND = "python -m bench.simulated.bandits"
NEIGHBOURS = 200  # as BATON_EXPERIENCE_NEIGHBOURS
CHEAP_USD = 0.0001  # a typical call of the cheapest worker
EXPLORE = 0.1
Choose = Callable[["World", int], int]


@dataclass(frozen=True, slots=True)
class Truth:
    """What a worker really is: its success in [0, 1], the seconds and dollars of a call."""

    success: float
    latency_s: float
    usd: float


@dataclass(slots=True)
class World:
    """A pool with its truth, and the outcomes so far, newest first. `joined`: the request from which the last worker is
    there; `changed`: (request, success) from which the first worker is another."""

    truths: Sequence[Truth]
    seed: int
    joined: int = 0
    changed: tuple[int, float] | None = None
    specs: list[WorkerSpec] = field(default_factory=list)
    outcomes: list[list[float]] = field(default_factory=list)
    past: dict[str, WorkerExperience] = field(default_factory=dict)
    worth: Worth = field(init=False)
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.specs = [_spec(at, truth) for at, truth in enumerate(self.truths)]
        self.outcomes = [[] for _ in self.truths]
        self.worth = listed_worth(self.specs)
        self.rng = np.random.default_rng(self.seed)

    def offered(self, request: int) -> int:
        """The number of workers that a request may use."""
        return len(self.specs) - (request < self.joined)

    def success(self, worker: int, request: int) -> float:
        """The true success of a worker at a request."""
        changed = worker == 0 and self.changed is not None and request >= self.changed[0]
        return self.changed[1] if changed and self.changed is not None else self.truths[worker].success

    def utility(self, worker: int, request: int) -> float:
        """The true utility of a worker at a request."""
        truth = self.truths[worker]
        return self.success(worker, request) - self.worth.penalty(truth.usd, truth.latency_s)

    def right(self, request: int) -> set[int]:
        """The workers that are near the best."""
        utilities = [self.utility(at, request) for at in range(self.offered(request))]
        return {at for at, one in enumerate(utilities) if one >= max(utilities) - NEAR}

    def judge(self, worker: int, request: int) -> None:
        """Add an outcome of a worker."""
        truth, own = self.truths[worker], self.outcomes[worker]
        own.insert(0, float(self.rng.random() < self.success(worker, request)))
        newest = np.array(own[:NEIGHBOURS])
        size, name = len(newest), self.specs[worker].name
        nano, ms = np.full(size, truth.usd * NANO_PER_USD), np.full(size, truth.latency_s * 1000)
        past = experience_of(name, Trials(np.ones(size), newest, nano, ms, len(own), sum(own)))
        if past is not None:
            self.past[name] = past


def _spec(at: int, truth: Truth) -> WorkerSpec:
    # A price of the prompt alone, so that the listed price of a typical call is the true one.
    listed = Decimal(str(round(truth.usd / USAGE_GUESS.prompt_tokens * 1_000_000, 6)))
    price = Price(input_usd_per_mtok=listed, output_usd_per_mtok=Decimal(0))
    return WorkerSpec(
        name=f"w{at}", handle=f"h{at}", kind="openai", url="http://127.0.0.1:1/v1", model="m", price=price
    )


class Rule:
    """The served rule. `explore_share`: of the requests."""

    def __init__(self, explore_share: float = EXPLORE) -> None:
        self._share = explore_share
        self._planner = RulePlanner()

    def __call__(self, world: World, request: int) -> int:
        specs = tuple(world.specs[: world.offered(request)])
        situation = Situation(
            pool="default",
            conversation=(),
            workers=specs,
            shown=(),
            experience=world.past,
            replies=(),
            allowed=PlanLimits(handles=tuple(spec.handle for spec in specs), steps_max=1),
            round=1,
            depth_left=0,
            timeout_s=60.0,
            explore=bool(world.rng.random() < self._share),
            stakes=Stakes(self._share),
            rollout_id=f"{world.seed} {request}",
        )
        record = RoundRecord(1, "rule")
        planning = self._planner.plan(situation, record, Meter(0, Caps()), _nothing)
        try:
            planning.send(None)  # it waits for nothing, and an event loop a request would be most of the time
        except StopIteration as planned:
            return int(planned.value.steps[0].worker[1:])
        raise AssertionError("the rule waited")


def _nothing(step: Any) -> None:
    """No step starts early."""


# ---------------------------------------------------------------- other bandits


def ucb1(world: World, request: int) -> int:
    """UCB1 (Auer et al. 2002) on true utilities' observations: the mean of success less the known penalty, plus the
    bonus sqrt(2 ln t / n)."""
    scores = []
    for at in range(world.offered(request)):
        own, truth = world.outcomes[at], world.truths[at]
        bonus = math.sqrt(2 * math.log(max(2, request + 1)) / len(own)) if own else math.inf
        mean = sum(own) / len(own) if own else 0.0
        scores.append(mean - world.worth.penalty(truth.usd, truth.latency_s) + bonus)
    return int(np.argmax(scores))


def thompson(world: World, request: int) -> int:
    """Thompson sampling with a uniform prior and known costs."""
    draws = []
    for at in range(world.offered(request)):
        own, truth = world.outcomes[at], world.truths[at]
        draw = world.rng.beta(1 + sum(own), 1 + len(own) - sum(own))
        draws.append(draw - world.worth.penalty(truth.usd, truth.latency_s))
    return int(np.argmax(draws))


def pareto(world: World, request: int) -> int:
    """LinUCB without features and with forgetting 0.997, less the price at a pacing weight, as in ParetoBandit (2025),
    whose weight is set here by what a right answer is worth: no budget binds."""
    scores = []
    for at in range(world.offered(request)):
        own, truth = world.outcomes[at], world.truths[at]
        weights = 0.997 ** np.arange(len(own))
        n = float(weights.sum()) + 1.0
        mean = float((weights * np.array(own)).sum()) / n
        scores.append(mean + math.sqrt(1 / n) - world.worth.penalty(truth.usd, truth.latency_s))
    return int(np.argmax(scores))


BANDITS: dict[str, Callable[[], Choose]] = {
    "rule": Rule,
    "rule, no exploring": partial(Rule, 0.0),
    "UCB1": lambda: ucb1,
    "Thompson, known costs": lambda: thompson,
    "LinUCB with forgetting": lambda: pareto,
}


# ---------------------------------------------------------------- measures


def outcomes_until(world: World, choose: Choose, start: int = 0) -> int | None:
    """Run a world until `SHARE` of the latest `WINDOW` requests from `start` on went to a right worker, and return the
    outcomes before these; None: not within OUTCOMES_MAX."""
    hits: list[bool] = []
    for request in range(start + OUTCOMES_MAX + WINDOW):
        worker = choose(world, request)
        if request >= start:
            hits.append(worker in world.right(request))
            if len(hits) >= WINDOW and sum(hits[-WINDOW:]) >= SHARE * WINDOW:
                return len(hits) - WINDOW
        world.judge(worker, request)
    return None


def regret(world: World, choose: Choose, requests: int) -> float:
    """Right answers lost to the best worker, dollars and seconds reckoned in."""
    lost = 0.0
    for request in range(requests):
        worker = choose(world, request)
        best = max(world.utility(at, request) for at in range(world.offered(request)))
        lost += best - world.utility(worker, request)
        world.judge(worker, request)
    return lost


def cells() -> list[tuple[Truth, Truth]]:
    """The grid: every pair of successes, latencies and price ratios. In half of the pairs the right one is the dear."""
    return [
        (Truth(one, fast, CHEAP_USD), Truth(other, slow, CHEAP_USD * ratio))
        for one, other in product(SUCCESSES, SUCCESSES)
        for fast, slow in product(LATENCIES_S, LATENCIES_S)
        for ratio in RATIOS
    ]


def crowd(size: int, seed: int) -> list[Truth]:
    """Workers drawn from the grid's values."""
    rng = np.random.default_rng([size, seed])
    usd = CHEAP_USD * 10 ** rng.uniform(0, 2, size)
    return [
        Truth(float(s), float(t), float(u))
        for s, t, u in zip(rng.choice(SUCCESSES, size), rng.choice(LATENCIES_S, size), usd, strict=True)
    ]


def grid_cell(seeds: int, cell: tuple[Truth, Truth]) -> list[int | None]:
    """Outcomes until the right worker leads, one for each seed."""
    return [outcomes_until(World(cell, seed), Rule()) for seed in range(seeds)]


def many(seeds: int, size: int) -> list[int | None]:
    """The same for drawn pools of a size."""
    return [outcomes_until(World(crowd(size, seed), seed), Rule()) for seed in range(seeds)]


def drop(seeds: int, before: int) -> list[int | None]:
    """Outcomes until a worker that falls from 0.9 to 0.4 after `before` outcomes has lost its share to one of 0.75."""
    truths = (Truth(0.9, 0.3, CHEAP_USD), Truth(0.75, 0.3, CHEAP_USD))
    return [outcomes_until(World(truths, seed, changed=(before, 0.4)), Rule(), before) for seed in range(seeds)]


def newcomer(seeds: int, before: int) -> list[int | None]:
    """Outcomes until a newcomer of 0.97 leads beside one of 0.8 with `before` outcomes."""
    truths = (Truth(0.8, 0.3, CHEAP_USD), Truth(0.97, 0.3, CHEAP_USD))
    return [outcomes_until(World(truths, seed, joined=before), Rule(), before) for seed in range(seeds)]


def regrets(seeds: int, requests: int, name: str) -> dict[str, float]:
    """Mean regret of a bandit on the grid's corners and on pools of eight."""
    pairs = [
        (Truth(a, 0.3, CHEAP_USD), Truth(b, 0.3, CHEAP_USD * r)) for a in SUCCESSES for b in SUCCESSES for r in (1, 10)
    ]
    two = [
        regret(World(pair, seed), BANDITS[name](), requests) for pair in pairs for seed in range(max(1, seeds // 10))
    ]
    eight = [regret(World(crowd(8, seed), seed), BANDITS[name](), requests) for seed in range(seeds)]
    return {
        "two": float(np.mean(two)),
        "two_worst": max(two),
        "eight": float(np.mean(eight)),
        "eight_worst": max(eight),
    }


def figures(values: Iterable[int | None]) -> dict[str, Any]:
    """Median, 90th percentile and number of those that never came, which are null in the JSON."""
    every = [math.inf if one is None else float(one) for one in values]
    p90 = float(np.quantile(every, 0.9, method="higher"))
    return {"runs": len(every), "median": _or_null(median(every)), "p90": _or_null(p90), "never": every.count(math.inf)}


def _or_null(value: float) -> float | None:
    return None if math.isinf(value) else value


def measure(seeds: int, run: Callable[[partial[Any], Sequence[Any]], list[Any]]) -> dict[str, Any]:
    """All parts. `run` maps a function over its last arguments, in order."""
    every = cells()
    ran = run(partial(grid_cell, seeds), every)
    sizes, ages = (2, 3, 4, 6, 8, 12, 16, 20), (20, 50, 100, 200)
    slow = [(cell, figures(values)) for cell, values in zip(every, ran, strict=True)]
    slow.sort(key=lambda pair: (pair[1]["never"], pair[1]["median"] or 0.0), reverse=True)
    body: dict[str, Any] = {
        "seeds": seeds,
        "grid": figures(one for values in ran for one in values) | {"cells": len(every)},
        "cells_never": sum(all(one is None for one in values) for values in ran),
        "slowest": [{"cell": [asdict(one) for one in cell], **what} for cell, what in slow[:10]],
    }
    for name, part, values in (("many", many, sizes), ("drop", drop, ages), ("newcomer", newcomer, ages)):
        body[name] = dict(zip(map(str, values), map(figures, run(partial(part, seeds), values)), strict=True))
    body["regret"] = dict(zip(BANDITS, run(partial(regrets, seeds, REGRET_REQUESTS), list(BANDITS)), strict=True))
    return body


def markdown(body: dict[str, Any]) -> str:
    """The tables of docs/results.md."""
    grid, lines = body["grid"], ["| pools | runs | median | 90 % of runs | never in 400 |", "|---|---:|---:|---:|---:|"]
    rows = [(f"two workers, {grid['cells']} cells", grid)]
    rows += [(f"{size} workers, drawn", one) for size, one in body["many"].items()]
    rows += [(f"0.9 falls to 0.4 after {age}", one) for age, one in body["drop"].items()]
    rows += [(f"a newcomer of 0.97 beside 0.8 with {age}", one) for age, one in body["newcomer"].items()]
    lines += [
        f"| {name} | {one['runs']:,} | {_cell(one['median'])} | {_cell(one['p90'])} | {one['never']} |"
        for name, one in rows
    ]
    lines += ["", "| bandit | two workers | worst | eight workers | worst |", "|---|---:|---:|---:|---:|"]
    for name, one in body["regret"].items():
        lines.append(
            f"| {name} | {one['two']:.2f} | {one['two_worst']:.1f} | {one['eight']:.2f} | {one['eight_worst']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def _cell(value: float | None) -> str:
    return "never" if value is None else f"{value:g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts, show progress, and write one JSON file and its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into that page's block")
    parser.add_argument("--out", type=Path, default=Path("build/bandits.json"))
    options = parser.parse_args(argv)
    with ProcessPoolExecutor(options.processes) as pool:

        def run(work: partial[Any], values: Sequence[Any]) -> list[Any]:
            results = []
            for at, one in enumerate(pool.map(work, values), 1):
                results.append(one)
                if at % 50 == 0 or at == len(values):
                    print(f"{work.func.__name__}: {at} of {len(values)}", file=sys.stderr, flush=True)
            return results

        body = measure(options.seeds, run)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(options.out, json.dumps(body, indent=1).encode())
    sys.stdout.write(markdown(body))
    if options.write is not None:
        write_block(options.write, COMMAND, markdown(body))
    return 0


if __name__ == "__main__":
    sys.exit(main())
