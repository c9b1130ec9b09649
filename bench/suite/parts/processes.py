"""One process beside two (`baton serve --processes`) on the same two cores, and beside two and four with a share of a
core for each process that serves and its shipper, so that client, worker, PostgreSQL and Redis have what they need."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.cost import DATA_SERVERS, processes_of
from bench.suite.baton import USER, baton, shipped
from bench.suite.cores import ALL, NoQuota, limited, on
from bench.suite.rounds import Arm, Cell, interleave, ratios, say, summary
from bench.suite.sizes import Size
from policy.recipes.stack import program

ARMS = {"one": 1, "two": 2, "four": 4}  # processes
ONE = "one"
FREE = 2  # arms that are measured freely too
CORES = frozenset(sorted(ALL)[:2])
REST = ALL - CORES or ALL
CELL = "many"
SHARE = 0.15  # of a core: four of them leave more than two thirds of two cores to all else


def measure(directory: Path, size: Size) -> dict[str, Any]:
    """Start all, measure in turns: first freely, then with shares."""
    with ExitStack() as held:
        with on(REST):
            upstream = held.enter_context(program("upstream", directory, "bench.suite.upstream"))
        arms, groups = [], list[list[int]]()
        for name, processes in ARMS.items():
            settings = {"BATON_PROCESSES": str(processes)}
            place = directory / name
            own = held.enter_context(baton(place, upstream.url, settings=settings, cores=CORES, rest=REST))
            arms.append(Arm(name, own.target("mock"), own.pid, partial(shipped, own.served)))
            groups += serving(own.pid, processes)
        cell = Cell(CELL, 2 * size.in_flight, USER)
        with on(REST):
            rows = asyncio.run(interleave(arms[:FREE], [cell], size.rounds, size.seconds))
        about: dict[str, Any] = {"in_flight": cell.in_flight, "cores": len(CORES), "shared": REST == ALL}
        try:
            with limited(groups, SHARE), on(REST):
                about["shares"] = {
                    "share": SHARE,
                    "rows": asyncio.run(interleave(arms, [cell], size.rounds, size.seconds)),
                }
        except NoQuota as error:
            about["no_shares"] = str(error)
            say(f"  no shares of a core: {error}")
    return {"rows": rows, **about}


def serving(pid: int, processes: int) -> list[list[int]]:
    """The processes of a gateway that serve, each with its shipper."""
    tops = [pid] if processes == 1 else _children(pid)
    return [group for top in tops if (group := _without_stores(top))]


def _children(pid: int) -> list[int]:
    """proc(5): each thread lists the processes that it started."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for each in lists for child in each.read_text(encoding="ascii").split()]


def _without_stores(pid: int) -> list[int]:
    return [each for each, name in processes_of(pid).items() if not name.startswith(DATA_SERVERS)]


def figures(raw: dict[str, Any]) -> dict[str, Any]:
    """Medians, and the ratios to one process; with shares of a core too, where the machine gives them."""
    about: dict[str, Any] = {name: raw[name] for name in ("in_flight", "cores", "shared", "no_shares") if name in raw}
    about |= {"medians": summary(raw["rows"]), "ratios": ratios(raw["rows"], ONE)}
    if shares := raw.get("shares"):
        rows = shares["rows"]
        about["shares"] = {"share": shares["share"], "medians": summary(rows), "ratios": ratios(rows, ONE)}
    return about
