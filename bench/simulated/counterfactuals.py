"""How often a counterfactual's 95 % interval holds the truth, on logs whose truth is known.

`python -m bench.simulated.counterfactuals [--replications N]` prints a Markdown table. Each row is one way in which a
worker came by its chances (core/log/counterfactual.py), by its true success and the number of judged requests:

    even P       every request gives the worker the chance P
    between      chances spread evenly, whatever the request
    right where  kinds of request that the log does not tell apart: the worker is likelier where it is right more often
    wrong where  the reverse: it is likelier where it is right less often
    bandit       two workers under Thompson sampling that learns from the log as it grows, a tenth at random
    graded       chances spread evenly, judgements between 0 and 1
    sampled      plans of a conductor, of which the log has the chance of the drawn one alone

`held`: the share of intervals that hold the truth, of those that were given; `given`: the share of logs that got one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from gateway.core.log.counterfactual import JudgedPlan, had_it_gone_to

WORKER, OTHER = "this", "other"
STEPS = 12  # chances and kinds that a spread has
SUCCESSES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.97)
NUMBERS = (80, 240, 800)
EXPLORE = 0.1
Draw = np.random.Generator
Log = tuple[list[JudgedPlan], float]


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the table. `held`, `given`: numbers of `replications` logs. `width`: of the intervals, the mean."""

    design: str
    success: float
    number: int
    replications: int
    given: int
    held: int
    width: float


def spread(low: float, high: float) -> Callable[[Draw, int], np.ndarray]:
    """Chances between two bounds, each as often as another."""
    return lambda draw, number: low + (high - low) * (draw.integers(0, STEPS, number) + 0.5) / STEPS


def independent(low: float, high: float, *, grades: bool = False, known: bool = True) -> Callable[..., Log]:
    """Logs whose chances say nothing of the success."""

    def log(draw: Draw, success: float, number: int) -> Log:
        chances = spread(low, high)(draw, number)
        return _log(draw, chances, np.full(number, success), grades=grades, known=known), success

    return log


def dependent(low: float, high: float, slope: float, *, known: bool = True) -> Callable[..., Log]:
    """Logs in which the success goes with the chance, or against it."""

    def log(draw: Draw, success: float, number: int) -> Log:
        place = np.arange(STEPS) / (STEPS - 1)
        kinds = np.clip(success + slope * (place - 0.5), 0, 1)
        which = draw.integers(0, STEPS, number)
        return _log(draw, low + (high - low) * place[which], kinds[which], known=known), float(kinds.mean())

    return log


def two_kinds(often: float, seldom: float, gap: float) -> Callable[..., Log]:
    """Logs of two kinds of request: the worker's chance is `often` where it is better by `gap`, else `seldom`."""

    def log(draw: Draw, success: float, number: int) -> Log:
        kinds = np.clip([success + gap / 2, success - gap / 2], 0, 1)
        which = draw.integers(0, 2, number)
        return _log(draw, np.array([often, seldom])[which], kinds[which]), float(kinds.mean())

    return log


def bandit(other: float) -> Callable[..., Log]:
    """Logs of Thompson sampling over two workers, by normal approximations of their Beta posteriors."""

    def log(draw: Draw, success: float, number: int) -> Log:
        truth, right, wrong, plans = np.array([success, other]), np.ones(2), np.ones(2), []
        for _ in range(number):
            total = right + wrong
            mean, variance = right / total, right * wrong / (total**2 * (total + 1))
            better = 0.5 * math.erfc((mean[1] - mean[0]) / math.sqrt(2 * variance.sum()))
            chance = EXPLORE / 2 + (1 - EXPLORE) * better
            taken = int(draw.random() >= chance)
            value = int(draw.random() < truth[taken])
            right[taken] += value
            wrong[taken] += 1 - value
            plans.append(_plan(chance, tried=not taken, value=value, known=True))
        return plans, success

    return log


def _log(
    draw: Draw, chances: np.ndarray, success: np.ndarray, *, grades: bool = False, known: bool = True
) -> list[JudgedPlan]:
    values = draw.beta(3 * success, 3 * (1 - success)) if grades else draw.random(len(chances)) < success
    tried = draw.random(len(chances)) < chances
    each = zip(chances.tolist(), tried.tolist(), values.tolist(), strict=True)
    return [_plan(chance, tried=taken, value=value, known=known) for chance, taken, value in each]


def _plan(chance: float, *, tried: bool, value: float, known: bool) -> JudgedPlan:
    probability = chance if tried else 1 - chance
    chances = {WORKER: chance, OTHER: 1 - chance} if known else None
    return JudgedPlan(WORKER if tried else OTHER, probability, float(value), chances)


DESIGNS: Mapping[str, Callable[[Draw, float, int], Log]] = {
    "even 0.5": independent(0.5, 0.5),
    "even 0.1": independent(0.1, 0.1),
    "between 0.05 and 0.95": independent(0.05, 0.95),
    "between 0.02 and 0.3": independent(0.02, 0.3),
    "right where likely, 0.05 to 0.95": dependent(0.05, 0.95, 0.6),
    "wrong where likely, 0.05 to 0.95": dependent(0.05, 0.95, -0.6),
    "right where likely, 0.8 or 0.1": two_kinds(0.8, 0.1, 0.4),
    "wrong where likely, 0.1 or 0.8": two_kinds(0.1, 0.8, 0.4),
    "bandit, the other 0.7": bandit(0.7),
    "graded, 0.05 to 0.95": independent(0.05, 0.95, grades=True),
    "sampled, 0.1 to 0.9": independent(0.1, 0.9, known=False),
    "sampled, right where likely": dependent(0.1, 0.9, 0.6, known=False),
}


def cell(design: str, success: float, number: int, replications: int, seed: int = 0) -> Cell:
    """Estimates on so many logs of one design."""
    draw = np.random.default_rng([seed, number, round(success * 1000), list(DESIGNS).index(design)])
    given = held = 0
    width = 0.0
    for _ in range(replications):
        plans, truth = DESIGNS[design](draw, success, number)
        found = had_it_gone_to(WORKER, plans)
        if "unknown" in found:
            continue
        given += 1
        held += found["low"] <= truth <= found["high"]
        width += found["high"] - found["low"]
    return Cell(design, success, number, replications, given, held, width / max(1, given))


def row(one: Cell) -> str:
    """A row of the table."""
    held = f"{one.held / one.given:.3f}" if one.given else "–"
    share = one.given / one.replications
    return f"| {one.design} | {one.success:g} | {one.number} | {held} | {share:.2f} | {one.width:.2f} |"


def main() -> None:
    """Print the table, and the share of all intervals that held the truth."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n", maxsplit=1)[0])
    parser.add_argument("--replications", type=int, default=1000, help="logs of each row")
    parser.add_argument("--only", default="", help="designs whose name begins so")
    options = parser.parse_args()
    print("| chances | success | requests | held | given | width |\n|---|---|---|---|---|---|")
    given = held = 0
    for design, success, number in product(DESIGNS, SUCCESSES, NUMBERS):
        if design.startswith(options.only):
            one = cell(design, success, number, options.replications)
            given, held = given + one.given, held + one.held
            print(row(one), flush=True)
    print(f"\n{held / max(1, given):.4f} of {given} intervals held the truth")


if __name__ == "__main__":
    main()
