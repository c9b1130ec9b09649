"""Interleaved rounds: each cell of a table is measured for all arms one after the other, in an order that turns by one
each round, so that whatever else the machine does falls on all alike. Ratios are taken within a round."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.cost import Used, used
from bench.suite.client import Crowd, Target

WARM_UP_S = 1.0
METRICS = ("p50_ms", "p99_ms", "per_s", "cpu_us", "data_us")
NOTHING = Used(0.0, 0.0, 0.0)
Row = dict[str, Any]


async def nothing() -> None:
    """What most arms have to finish after a cell."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One way of load: so many requests in flight, the first of them spread over `spread_s`, with these properties of
    the body."""

    name: str
    in_flight: int
    more: Mapping[str, Any] = field(default_factory=dict)
    spread_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Arm:
    """What is compared. `pid`: its process, None where its processor time is not measured. `settle`: waits until work
    that a cell left behind is done. `requests`: sent in turns instead of the one that `target` makes."""

    name: str
    target: Target
    pid: int | None = None
    settle: Callable[[], Awaitable[None]] = nothing
    requests: Sequence[bytes] = ()


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


async def interleave(arms: Sequence[Arm], cells: Sequence[Cell], rounds: int, seconds: float) -> list[Row]:
    """All cells of all arms, `rounds` times for `seconds` each, after a warm-up of each."""
    crowds = {
        (arm.name, cell.name): Crowd(arm.target.address, arm.requests or [arm.target.request(**cell.more)])
        for arm in arms
        for cell in cells
    }
    for arm in arms:
        for cell in cells:
            await crowds[arm.name, cell.name].closed(cell.in_flight, min(WARM_UP_S, seconds))
        await arm.settle()
    rows = []
    for number in range(rounds):
        for cell in cells:
            for arm in turned(arms, number):
                row = await _cell(arm, cell, crowds[arm.name, cell.name], seconds)
                rows.append({"round": number, **row})
        say(f"  round {number + 1} of {rounds}")
    for crowd in crowds.values():
        crowd.close()
    return rows


async def _cell(arm: Arm, cell: Cell, crowd: Crowd, seconds: float) -> Row:
    before = NOTHING if arm.pid is None else used(arm.pid)
    replies = await crowd.closed(cell.in_flight, seconds, cell.spread_s)
    await arm.settle()
    spent = NOTHING if arm.pid is None else used(arm.pid).since(before)
    served = replies.took_ms.get(200, [])
    row = {"arm": arm.name, "cell": cell.name, "asked": replies.requests, "refused": replies.requests - len(served)}
    row |= {"p50_ms": percentile(served, 0.5), "p99_ms": percentile(served, 0.99), "per_s": replies.per_s}
    each = 1e6 / max(1, replies.requests)
    row |= {"cpu_us": spent.tree_s * each, "data_us": spent.data_s * each}
    return row | ({"examples": replies.examples} if replies.examples else {})


def turned(arms: Sequence[Arm], number: int) -> Sequence[Arm]:
    """The arms from another one on in each round."""
    turn = number % len(arms)
    return (*arms[turn:], *arms[:turn])


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; 0 where there are no values."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0


def summary(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """Arm → cell → medians over rounds of METRICS, and the sums of what was asked and refused."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for arm, cell in dict.fromkeys((row["arm"], row["cell"]) for row in rows):
        own = [row for row in rows if (row["arm"], row["cell"]) == (arm, cell)]
        figures = {name: rounded(statistics.median(row[name] for row in own)) for name in METRICS}
        figures |= {name: sum(row[name] for row in own) for name in ("asked", "refused")}
        found.setdefault(arm, {})[cell] = figures
    return found


def ratios(rows: Sequence[Row], base: str) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Arm → cell → metric → [median, least, most] over rounds of its ratio to the arm `base` in the same round. A
    ratio to nothing is left out, and `base` itself. Less than nothing counts as nothing: a server process that has
    ended takes its processor time with it."""
    own = {(row["arm"], row["cell"], row["round"]): row for row in rows}
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for arm, cell in dict.fromkeys((row["arm"], row["cell"]) for row in rows if row["arm"] != base):
        for metric in METRICS:
            pairs = [(row[metric], own[base, cell, at]) for (a, c, at), row in own.items() if (a, c) == (arm, cell)
                     and (base, cell, at) in own]  # fmt: skip
            values = [max(0.0, mine) / its[metric] for mine, its in pairs if its[metric] > 0]
            if values and any(values):
                spread = [statistics.median(values), min(values), max(values)]
                found.setdefault(arm, {}).setdefault(cell, {})[metric] = [rounded(value) for value in spread]
    return found


def rounded(value: float) -> float:
    """Three significant digits: more says nothing on a machine with other work."""
    return float(f"{value:.3g}")
