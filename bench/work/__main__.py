"""Policies before and after a change of the gateway, on three kinds of work, with graders that run or read replies.

    git worktree add --detach /tmp/before 6684d30
    python -m bench.work --arm before=/tmp/before --arm after=. [--n 96] [--learn 48] [--seed 0]

Short answers (arithmetic, grader `numeric`), code (functions with unit tests, grader `python`, which runs them in the
jail) and prose (briefings from notes, grader `judge`, which asks a scripted critic that errs). One gateway for each
arm, with its own PostgreSQL and Redis; scripted workers over HTTP with known error rates, the same replies for every
arm. An arm learns from outcomes of `baton/vote`, then every policy gets the same tasks, then their outcomes are sent
and what was credited is read from the log. **Simulated workers: no figure here speaks of a real model.** Dollars and
calls are those of the gateway, with checks by a judge; `builtin:python` costs nothing here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import httpx

from bench.database import Database
from bench.work.figures import differences, grader_notes, records, row_of, table
from bench.work.gateways import Arm
from bench.work.measure import Bench, Measured, Truth
from bench.work.tasks import WorkTask
from bench.work.workers import KINDS, ScriptedWorkers, make_tasks
from gateway.files import write_atomic
from policy.recipes.stack import Gateway, program, temporary_directory
from policy.recipes.traffic import OK, REQUEST_S
from policy.simulators.server import WorkerServer, serve

N_MAX = 10_000
JUDGE_ERRS = 0.1


def measured(options: argparse.Namespace) -> list[Measured]:
    """All arms, one after the other."""
    results: list[Measured] = []
    with ExitStack() as held:
        directory = held.enter_context(temporary_directory())
        words = [str(word) for name in ("n", "learn", "seed", "judge_errs") for word in _given(options, name)]
        workers = held.enter_context(program("workers", directory, "bench.work", "worker", *words))
        for arm in options.arm:
            with arm.served(directory, workers.url) as served:
                database = Database(served.database_url)
                try:
                    print(f"{arm.name}: {arm.checkout}", file=sys.stderr, flush=True)
                    results += asyncio.run(_arm(arm, served, database, workers.url, options))
                finally:
                    database.close()
    return results


def _given(options: argparse.Namespace, name: str) -> tuple[str, object]:
    return f"--{name.replace('_', '-')}", getattr(options, name)


async def _arm(
    arm: Arm, served: Gateway, database: Database, workers_url: str, options: argparse.Namespace
) -> list[Measured]:
    async with httpx.AsyncClient(timeout=REQUEST_S) as http:
        bench = Bench(arm, served, http, Truth(http, workers_url), database)
        results: list[Measured] = []
        for kind in options.kinds.split(","):
            learned, tasks = _tasks(kind, options)
            results += await bench.run(kind, learned, tasks)
        return results


def _tasks(kind: str, options: argparse.Namespace) -> tuple[list[WorkTask], list[WorkTask]]:
    """The tasks to learn from, and those of the policies."""
    every = make_tasks(kind, range(options.learn + options.n), options.seed)
    return every[: options.learn], every[options.learn :]


def work(options: argparse.Namespace) -> None:
    """Serve the scripted workers until SIGTERM."""
    tasks = [task for kind in KINDS for part in _tasks(kind, options) for task in part]
    speaker = ScriptedWorkers(tasks, options.seed, options.judge_errs)
    asyncio.run(serve(WorkerServer(speaker).app(), "127.0.0.1", options.port, options.port_file))


def report(results: Sequence[Measured], options: argparse.Namespace) -> None:
    """Print the tables, and write the figures where asked."""
    rows = [row_of(one) for one in results]
    print(f"\n{table(rows)}\n\n{records(results)}\n")
    for first, second in zip(options.arm, options.arm[1:], strict=False):
        print(f"{second.name} less {first.name}\n\n{differences(results, first.name, second.name)}\n")
    notes = [*grader_notes(rows), f"Requests that failed: {sum(row.errors for row in rows)}."]
    print("\n".join(notes), flush=True)
    if options.out:
        about = {"n": options.n, "learn": options.learn, "seed": options.seed, "judge_errs": options.judge_errs}
        body = {"about": about, "notes": notes, "rows": [asdict(row) for row in rows]}
        write_atomic(options.out, json.dumps(body, indent=2) + "\n")


def _arm_of(text: str) -> Arm:
    name, _, path = text.partition("=")
    if not name or not (Path(path) / "gateway").is_dir():
        raise argparse.ArgumentTypeError(f"`{text}` is not NAME=CHECKOUT with a directory that has `gateway`")
    return Arm(name, Path(path))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.work", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=("measure", "worker"), default="measure")
    parser.add_argument("--arm", type=_arm_of, action="append", help="NAME=CHECKOUT; several; default: after=.")
    parser.add_argument("--n", type=int, default=96, help="tasks of each kind, for every policy")
    parser.add_argument("--learn", type=int, default=48, help="judged tasks of each kind beforehand")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--judge-errs", type=float, default=JUDGE_ERRS, help="share of wrong verdicts of the critic")
    parser.add_argument("--out", type=Path, help="write the figures as JSON too")
    parser.add_argument("--port", type=int, default=0, help="of `worker`")
    parser.add_argument("--port-file", type=Path, help="of `worker`")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 1 when a request failed, 130 after Ctrl-C. `worker`: serve the scripted workers."""
    parser = _parser()
    options = parser.parse_args(argv)
    if not 1 <= options.n <= N_MAX or not 1 <= options.learn <= N_MAX or not 0 <= options.judge_errs <= 1:
        parser.error(f"--n and --learn are 1 to {N_MAX}, --judge-errs 0 to 1")
    if unknown := [kind for kind in options.kinds.split(",") if kind not in KINDS]:
        parser.error(f"no kind of work `{unknown[0]}`; there are {', '.join(KINDS)}")
    options.arm = options.arm or [Arm("after", Path())]
    try:
        if options.command == "worker":
            work(options)
            return 0
        results = measured(options)
    except KeyboardInterrupt:
        return 130
    report(results, options)
    return int(any(each.status != OK for one in results for each in one.requests))


if __name__ == "__main__":
    sys.exit(main())
