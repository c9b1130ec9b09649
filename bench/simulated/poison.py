"""What false outcomes within one organisation cost. `python -m bench.simulated.poison`

Two workers of one price are right on 90 % and 40 % of the requests. The served memory and bandit choose, and each
request is judged at once, some falsely: by *chance* (a judge that errs, whoever asked), or on *purpose*: one of five
keys says of every reply of the good worker that it was wrong, and of the other that it was right; that key makes so
much of the requests. *Bounded* is the rule that no key weighs more than the median one (`recall.bounded`); *free* is
without it. Figures are shares of right answers over the last half of the requests, with the 95 % interval of the mean
over seeds.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Literal
from unittest.mock import patch
from uuid import UUID

import numpy as np

from gateway.core.loop.experience import recall
from gateway.core.loop.experience.bandit import Arm, decide
from gateway.core.loop.experience.belief import Vector
from gateway.core.loop.experience.past import JudgedStep, Past, TaskQuestion
from gateway.core.loop.experience.worth import Worth

SUCCESS = {"good": 0.9, "poor": 0.4}
WORKERS = dict.fromkeys(SUCCESS, "1")
REQUESTS, SEEDS, NEIGHBOURS, HONEST = 400, 30, 200, 4
SHARES = (0.0, 0.05, 0.2, 0.5, 0.8)
Lie = Literal["chance", "purpose"]


def right_share(lie: Lie, share: float, seed: int, requests: int = REQUESTS) -> float:
    """The share of right answers over the last half of the requests, of which `share` are judged falsely."""
    rng, past, right = np.random.default_rng([seed, round(100 * share)]), Past(), []
    for number in range(requests):
        known = {one.worker: one for one in recall.recall(TaskQuestion(None, None, ""), WORKERS, NEIGHBOURS, past)}
        arms = [Arm(name, name, 0.001, 1.0, known.get(name)) for name in SUCCESS]
        worker = arms[decide(arms, Worth(0.01), rng).chosen].worker
        right.append(float(rng.random() < SUCCESS[worker]))
        lies = rng.random() < share
        key = "eve" if lies and lie == "purpose" else f"key-{rng.integers(HONEST)}"
        said = right[-1] if not lies else 1 - right[-1] if lie == "chance" else float(worker == "poor")
        past.put([_step(number, key, worker, said)])
    return fmean(right[requests // 2 :])


def _step(number: int, key: str, worker: str, success: float) -> JudgedStep:
    place = str(UUID(int=(number + 1) << 64)), 1, 0, "org", key, "pool", worker, "1"
    figures = success, 100_000, 1_000, 1.0, "client", number, number
    return JudgedStep._make([*place, None, None, None, *figures])


def unbounded(weight: Vector, keys: object) -> Vector:
    """`recall.bounded` without the bound."""
    return weight


def measured(lie: Lie, share: float, seeds: Sequence[int], bounded: Callable[..., Vector]) -> str:
    """Mean and interval as text."""
    with patch.object(recall, "bounded", bounded):
        found = [right_share(lie, share, seed) for seed in seeds]
    half = 1.96 * stdev(found) / math.sqrt(len(found))
    return f"{100 * fmean(found):.1f} ± {100 * half:.1f} %"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.simulated.poison", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    seeds = range(parser.parse_args(argv).seeds)
    print("| false outcomes | by chance | by one key, bounded | by one key, free |\n|---:|---:|---:|---:|")
    for share in SHARES:
        cells = [measured("chance", share, seeds, recall.bounded)]
        cells += [measured("purpose", share, seeds, rule) for rule in (recall.bounded, unbounded)]
        print(f"| {share:.0%} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
