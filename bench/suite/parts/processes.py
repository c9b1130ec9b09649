"""One process and two (`baton serve --processes`), side by side on the same two cores."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.suite.baton import USER, baton, shipped
from bench.suite.cores import ALL, on
from bench.suite.rounds import Arm, Cell, interleave, ratios, summary
from bench.suite.sizes import Size
from policy.recipes.stack import program

ONE, TWO = "one", "two"
CORES = frozenset(sorted(ALL)[:2])
REST = ALL - CORES or ALL
CELL = "many"


def measure(directory: Path, size: Size) -> dict[str, Any]:
    """Start both, measure in turns."""
    with ExitStack() as held:
        with on(REST):
            upstream = held.enter_context(program("upstream", directory, "bench.suite.upstream"))
        arms = []
        for name, processes in ((ONE, 1), (TWO, 2)):
            settings = {"BATON_PROCESSES": str(processes)}
            place = directory / name
            own = held.enter_context(baton(place, upstream.url, settings=settings, cores=CORES, rest=REST))
            arms.append(Arm(name, own.target("mock"), own.pid, partial(shipped, own.served)))
        with on(REST):
            rows = asyncio.run(interleave(arms, [Cell(CELL, 2 * size.in_flight, USER)], size.rounds, size.seconds))
    return {"rows": rows, "in_flight": 2 * size.in_flight, "cores": len(CORES), "shared": REST == ALL}


def figures(raw: dict[str, Any]) -> dict[str, Any]:
    """Medians, and the ratios to one process."""
    about = {name: raw[name] for name in ("in_flight", "cores", "shared")}
    return about | {"medians": summary(raw["rows"]), "ratios": ratios(raw["rows"], ONE)}
