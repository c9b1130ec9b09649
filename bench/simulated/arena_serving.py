"""Policies on held-out arena tasks, through a running gateway: accuracy, dollars, steps, overhead.

    python -m bench.simulated.arena_serving --n 300                        starts a gateway of its own and ends it
    python -m bench.simulated.arena_serving --n 300 --gateway .baton/serve.json

First `--learn` tasks of the train split go to `baton/rule` and are judged (POST /v1/outcomes), so that rule and
conductor have experience to read; then every policy gets the same held-out tasks. **The arena is a simulator**
(docs/arena.md): a figure says how well a policy plans in that world, and nothing about real models. Own gateways run
with BATON_EXPLORE_SHARE=0: plans are decoded greedily. On a gateway of yours the explored share is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.serving import Run, report, run
from policy.recipes.stack import Gateway, gateway, temporary_directory
from policy.recipes.traffic import Question
from policy.simulators.arena.families.tasks import Split, grade, make_task

GREEDY = {"BATON_EXPLORE_SHARE": "0"}
N_MAX = 100_000
SIMULATOR = "Simulated workers and generated tasks (docs/arena.md): no figure here speaks of a real model."


def questions(n: int, split: Split, seed: int) -> list[Question]:
    """Arena tasks as questions. A policy gets the text of a task and not its type."""
    tasks = [make_task(seed + index, split) for index in range(n)]
    return [Question(task.id, task.text, partial(grade, task)) for task in tasks]


@contextmanager
def served_at(facts: Path | None, conductor: str, pool: Path | None = None) -> Iterator[Gateway]:
    """Use the gateway named on the command line, or run one while the block lasts."""
    if facts is not None:
        yield Gateway.read(facts)
        return
    with (
        temporary_directory() as directory,
        gateway(directory, conductor=conductor, pool=pool, settings=GREEDY) as served,
    ):
        yield served


def add_common(parser: argparse.ArgumentParser) -> None:
    """Arguments of both serving benches."""
    parser.add_argument("--gateway", type=Path, help="serve.json of a running gateway; without: one of our own")
    parser.add_argument(
        "--conductor", default="embedded", help="of a gateway of our own (as `baton serve --conductor`)"
    )
    parser.add_argument("--n", type=int, default=300, help="questions per policy")
    parser.add_argument("--policies", default="", help="comma-separated models; default: all fixed, rule, conductor")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures as JSON too")


def check_common(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program with a message if a value is out of range."""
    if not 1 <= options.n <= N_MAX or not 0 <= options.learn <= N_MAX or not 1 <= options.concurrency <= 256:
        parser.error(f"--n is 1 to {N_MAX}, --learn 0 to {N_MAX}, --concurrency 1 to 256")


def names(text: str) -> list[str]:
    """A comma-separated argument."""
    return [name.strip() for name in text.split(",") if name.strip()]


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 1 when a rollout is missing in PostgreSQL, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulated.arena_serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_common(parser)
    parser.add_argument("--learn", type=int, default=400, help="judged train tasks of baton/rule beforehand")
    options = parser.parse_args(argv)
    check_common(parser, options)
    learning = questions(options.learn, "train", options.seed)
    held_out = questions(options.n, "held_out", options.seed)
    wanted = Run("bench arena", learning, held_out, names(options.policies), options.concurrency)
    try:
        with served_at(options.gateway, options.conductor) as served:
            outcome = asyncio.run(run(served, wanted))
    except KeyboardInterrupt:
        return 130
    about = {"bench": "arena", "n": options.n, "learn": options.learn, "seed": options.seed}
    report(outcome.rows, [SIMULATOR, *outcome.notes()], options.out, about | {"concurrency": options.concurrency})
    return 0 if outcome.stored == outcome.sent else 1


if __name__ == "__main__":
    sys.exit(main())
