"""Command line of the arena: `python -m policy.simulators.arena serve | pool | tasks`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from policy.simulators.arena.families.tasks import Task, make_task
from policy.simulators.arena.server import ArenaSpeaker
from policy.simulators.arena.workers import HELD_OUT, STANDARD, Pool, pool_yaml
from policy.simulators.server import WorkerServer, serve

TASKS_MAX = 1_000_000


def with_failures(pool: Pool, wishes: Sequence[str]) -> Pool:
    """The pool with `worker:500:0.1` wishes granted. Raises ValueError naming the wish that makes no sense."""
    for wish in wishes:
        name, _, rest = wish.partition(":")
        status, _, rate = rest.partition(":")
        if name not in {worker.name for worker in pool} or status not in ("500", "429") or not _is_rate(rate):
            raise ValueError(f"--fail {wish}: write worker:500:RATE or worker:429:RATE with a rate from 0 to 1")
        change = {f"error_{status}_rate": float(rate)}
        pool = tuple(replace(w, **change) if w.name == name else w for w in pool)  # type: ignore[arg-type]
    return pool


def _is_rate(text: str) -> bool:
    try:
        return 0.0 <= float(text) <= 1.0
    except ValueError:
        return False


def task_line(task: Task) -> str:
    """One task as a JSON line."""
    names = ("id", "text", "answer", "grader", "family", "shape", "skills")
    fields = asdict(task)
    return json.dumps({key: fields[key] for key in names}, ensure_ascii=False) + "\n"


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    top = argparse.ArgumentParser(
        prog="python -m policy.simulators.arena", description="The arena: a simulator of workers."
    )
    commands = top.add_subparsers(dest="command", required=True)
    server = commands.add_parser("serve", help="serve every worker on one port until SIGTERM")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=int, default=0, help="0: a free one")
    server.add_argument("--port-file", type=Path, help="written once the socket listens")
    server.add_argument("--seed", type=int, default=0, help="another seed, other slips")
    server.add_argument("--speed", type=float, default=1.0, help="divides every simulated latency")
    server.add_argument("--fail", action="append", default=[], metavar="WORKER:STATUS:RATE", help="500s or 429s")
    pool = commands.add_parser("pool", help="print a pool.yaml")
    pool.add_argument("--base-url", required=True, help="where `serve` listens, e.g. http://127.0.0.1:8400")
    pool.add_argument("--untold", action="store_true", help="nothing said of what the models are good at")
    tasks = commands.add_parser("tasks", help="print tasks as JSON lines")
    tasks.add_argument("--n", "--tasks", type=int, default=300, dest="n")
    tasks.add_argument("--split", choices=("train", "held_out"), default="train")
    tasks.add_argument("--seed", type=int, default=0)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status (2: bad arguments)."""
    args = parser().parse_args(argv)
    if args.command == "pool":
        sys.stdout.write(pool_yaml(args.base_url, profile=not args.untold))
        return 0
    if args.command == "serve":
        return _serve(args)
    if not 1 <= args.n <= TASKS_MAX:
        sys.stderr.write(f"--n must be between 1 and {TASKS_MAX}\n")
        return 2
    for index in range(args.n):
        sys.stdout.write(task_line(make_task(args.seed + index, args.split)))
    return 0


def _serve(args: argparse.Namespace) -> int:
    try:
        pool = with_failures((*STANDARD, *HELD_OUT), args.fail)
        server = WorkerServer(ArenaSpeaker(pool, args.seed), args.speed)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    asyncio.run(serve(server.app(), args.host, args.port, args.port_file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
