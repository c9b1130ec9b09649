"""How much of a gain comes from routing, from voting and from stopping: programs of each family on recorded questions.

    python -m bench.recorded.programs --data FILE --prices FILE [--workers a,b,…] [--splits 20]

Every split draws a quarter of the questions anew to be judged on; programs are searched on the rest at each place of
the quality dial. Figures are means over the splits, each with the standard error of its difference to the best single
worker of the same split (chosen on its training part).
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import fmean, stdev

from policy.environments.executor import Executor
from policy.environments.replay import ReplayEnvironment
from policy.simulators.recordings import read_prices
from policy.start.recorded.programs import Program, ProgramWorth, gives, search
from policy.statistics import tuning
from policy.statistics.tuning import Observation

SHOWN = (2, 4, 6, 7, 8, 9)  # positions of the dial
TAUGHT = "as it is taught: all three, a budget at one place"
Chosen = Callable[[str], Program]  # by category


def _best(worth: ProgramWorth, weight: float, fits: Callable[[Program], bool], *, routed: bool) -> Chosen:
    """The best program that fits: one for each category, or one for all."""
    gained = worth.utility(weight) if routed else (worth.outcome - weight * worth.usd)
    allowed = [at for at, program in enumerate(worth.programs) if fits(program)]
    if routed:
        best = {
            name: worth.programs[max(allowed, key=lambda at: float(gained[at, column]))]
            for column, name in enumerate(worth.categories)
        }
        return lambda category: best[category]
    one = worth.programs[max(allowed, key=lambda at: float(gained[at].sum()))]
    return lambda category: one


FAMILIES: dict[str, tuple[Callable[[Program], bool], bool]] = {
    "one worker": (lambda p: len(p.first) == 1, False),
    "routing: a worker for each kind": (lambda p: len(p.first) == 1, True),
    "voting: the same workers always": (lambda p: not p.enough, False),
    "stopping: the same cascade always": (lambda _: True, False),
    "routing and voting": (lambda p: not p.enough, True),
    "all three": (lambda _: True, True),
}


def main() -> None:
    """Search and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prices", type=Path, required=True)
    parser.add_argument("--workers", default="")
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--usd-per-1k-max", type=float, default=5.0)
    options = parser.parse_args()
    names = tuple(name for name in options.workers.split(",") if name)
    environment = ReplayEnvironment.open(options.data, read_prices(options.prices), names, executor=Executor(rounds=1))
    prompts = [p for split in ("train", "validation") for p in environment.prompts(split, environment.count(split), 0)]
    observed = asyncio.run(tuning.observe(environment, prompts))
    print("| what | " + " | ".join(f"dial {quality}" for quality in SHOWN) + " |")
    print("|---|" + "---|" * len(SHOWN))
    rows = {name: [Cell() for _ in SHOWN] for name in (*FAMILIES, TAUGHT)}
    within = Cell()
    for split in range(options.splits):
        train, judged = _split(observed, split)
        worth = search(train)
        weights = worth.prices(options.usd_per_1k_max / 1000)
        base = _judged(_best(worth, 0.0, FAMILIES["one worker"][0], routed=False), judged)[0]
        for name, (fits, routed) in FAMILIES.items():
            for cell, quality in zip(rows[name], SHOWN, strict=True):
                cell.add(*_judged(_best(worth, weights[quality], fits, routed=routed), judged), base)
        dial = worth.dial(weights, options.usd_per_1k_max / 1000)
        for cell, quality in zip(rows[TAUGHT], SHOWN, strict=True):
            cell.add(*_judged(dial[quality].__getitem__, judged), base)
        place = worth.affordable(dial, options.usd_per_1k_max / 1000)
        within.add(*_judged(dial[place].__getitem__, judged), base)
    for name, cells in rows.items():
        print(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    over = sum(usd > options.usd_per_1k_max for usd in within.usd)
    print(f"\nas it comes, at most ${options.usd_per_1k_max:.2f}: {within}; dearest {max(within.usd):.2f}, {over} over")


class Cell:
    """Share right, gain on the best single worker, and dollars: means over splits. The error of the gain is that of the
    choice of the split: splits overlap, so it says nothing of new questions."""

    def __init__(self) -> None:
        self.right: list[float] = []
        self.usd: list[float] = []
        self.gain: list[float] = []

    def add(self, right: float, usd: float, base: float) -> None:
        self.right.append(right)
        self.usd.append(usd)
        self.gain.append(right - base)

    def __str__(self) -> str:
        if not self.right:
            return "–"
        error = stdev(self.gain) / len(self.gain) ** 0.5 if len(self.gain) > 1 else 0.0
        return f"{fmean(self.right):.3f} ({fmean(self.gain):+.3f} ± {error:.3f}) ${fmean(self.usd):.2f}"


def _split(observed: Sequence[Observation], number: int) -> tuple[list[Observation], list[Observation]]:
    order = Random(f"split {number}").sample(list(observed), len(observed))
    cut = len(order) // 4
    return order[cut:], order[:cut]


def _judged(chosen: Chosen, judged: Sequence[Observation]) -> tuple[float, float]:
    """Mean outcome, and dollars per 1,000."""
    results = [gives(chosen(each.category), each) for each in judged]
    return fmean(result.outcome for result in results), fmean(result.cost_nano for result in results) / 1e6


if __name__ == "__main__":
    main()
