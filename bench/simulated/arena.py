"""Is the arena what it claims to be? Every single worker, a searched family of fixed workflows, and the oracle.

    python -m bench.simulated.arena --tasks 400          # exit status 1 when a promise of docs/arena.md is broken

The family: plans of up to five steps over the pool's workers, the `vote` tool and nothing else, the same plan for every
task. Searched exhaustively: all single workers; all ordered pairs and triples in a chain, each step seeing all before
it; all votes of three and four workers led by each. Then hill climbing from the best of those over general plans: any
worker, any `see`, any task text the arena knows. A workflow with a `self` step is a policy, not fixed: left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from random import Random
from typing import Any

from policy.simulators.arena.families.tasks import INSTRUCTIONS, Split, Task, grade, make_task
from policy.simulators.arena.oracle import STEPS_MAX, oracle_plan
from policy.simulators.arena.workers import HELD_OUT, STANDARD, ArenaWorker, Pool, with_builtins
from policy.simulators.arena.world import Run, run_plan

SINGLE_MAX, WORKFLOW_MAX, ORACLE_MIN, MULTI_STEP_MIN = 0.60, 0.75, 0.95, 0.40
KEEP = 12
TASKS_MAX = 1_000_000
Plan = Mapping[str, Any]


@dataclass(frozen=True)
class MeasureRow:
    """One row of the table: share right and dollars a task."""

    name: str
    right: float
    usd_per_task: float
    plan: Plan


def score(plan: Plan, tasks: Sequence[Task], pool: Pool) -> MeasureRow:
    """The same plan on every task."""
    runs = [run_plan(plan, task.text, pool) for task in tasks]
    return _result(_name(plan), tasks, runs, plan)


def oracle(tasks: Sequence[Task], pool: Pool, price_weight: float) -> MeasureRow:
    """The oracle's own plan for each task."""
    runs = [run_plan(oracle_plan(t.text, None, pool, price_weight=price_weight), t.text, pool) for t in tasks]
    return _result(f"oracle, price weight {price_weight:g}", tasks, runs, {})


def _result(name: str, tasks: Sequence[Task], runs: Sequence[Run], plan: Plan) -> MeasureRow:
    right = sum(grade(task, run.reply) for task, run in zip(tasks, runs, strict=True))
    return MeasureRow(name, right / len(tasks), sum(run.cost_nano for run in runs) / 1e9 / len(tasks), plan)


def chain(workers: Sequence[ArenaWorker]) -> Plan:
    """Each step sees all before it."""
    return {"steps": [{"worker": w.handle, "task": None, "see": "all" if i else []} for i, w in enumerate(workers)]}


def vote(voters: Sequence[ArenaWorker], tool: ArenaWorker) -> Plan:
    """All at once, then the majority."""
    steps: list[Plan] = [{"worker": w.handle, "task": None, "see": []} for w in voters]
    return {"steps": [*steps, {"worker": tool.handle, "task": None, "see": "all"}]}


def systematic(pool: Pool) -> Iterator[Plan]:
    """The part of the family that is searched exhaustively."""
    models = [worker for worker in pool if worker.kind == "openai"]
    tools = [worker for worker in pool if worker.kind == "tool"]
    for size in (1, 2, 3):
        yield from (chain(workers) for workers in permutations(models, size))
    yield from (chain([worker] * 2) for worker in models)
    for tool in tools:
        for size in (3, 4):
            for chosen in combinations(models, size):  # order beyond the first only breaks ties
                for leader in chosen:
                    yield vote([leader, *(worker for worker in chosen if worker is not leader)], tool)


def mutate(plan: Plan, pool: Pool, rng: Random) -> Plan:
    """One random change: swap a worker, a `see`, a task text; add a step; or drop one."""
    callable_ = [worker.handle for worker in pool if worker.kind != "self"]
    steps = [dict(step) for step in plan["steps"]]
    move = rng.choice(("worker", "see", "task", "add", "drop"))
    at = rng.randrange(len(steps))
    if move == "add" and len(steps) < STEPS_MAX:
        steps.append({"worker": rng.choice(callable_), "task": None, "see": "all"})
    elif move == "drop" and len(steps) > 1:
        steps.pop()
    elif move == "see":
        steps[at]["see"] = sorted(rng.sample(range(at), rng.randint(0, at)))
    elif move == "task":
        steps[at]["task"] = rng.choice((None, *INSTRUCTIONS))
    else:
        steps[at]["worker"] = rng.choice(callable_)
    return {"steps": steps}


def search(tasks: Sequence[Task], pool: Pool, climbs: int, screen_tasks: int, seed: int = 0) -> list[MeasureRow]:
    """The best fixed workflows found, best first. Each is tried on `screen_tasks` first, and on all if it does well."""
    rng = Random(seed)
    screen = tasks[:screen_tasks]
    plans = sorted((score(plan, screen, pool) for plan in systematic(pool)), key=_worst_last)[:KEEP]
    best = sorted((score(result.plan, tasks, pool) for result in plans), key=_worst_last)
    for _ in range(climbs):
        start = rng.choice(best[:4])
        tried = mutate(start.plan, pool, rng)
        if score(tried, screen, pool).right < 0.9 * start.right:
            continue
        result = score(tried, tasks, pool)
        if all((result.right, result.usd_per_task) != (known.right, known.usd_per_task) for known in best):
            best = sorted([*best, result], key=_worst_last)[:KEEP]
    return best


def _worst_last(result: MeasureRow) -> tuple[float, float]:
    return -result.right, result.usd_per_task


def _name(plan: Plan) -> str:
    def one(index: int, step: Mapping[str, Any]) -> str:
        sees = "*" if step["see"] == "all" else ",".join(map(str, step["see"]))
        return str(step["worker"]) + (f"({sees})" if sees and index else "") + ("!" if step["task"] else "")

    return " ".join(one(i, step) for i, step in enumerate(plan["steps"]))


@dataclass(frozen=True)
class Measure:
    """All the figures, and whether the promises hold."""

    tasks: int
    multi_step: float
    child: float
    singles: list[MeasureRow]
    workflows: list[MeasureRow]
    oracles: list[MeasureRow]

    @property
    def broken(self) -> list[str]:
        """The promises that do not hold, in words."""
        checks = (
            (max(r.right for r in self.singles) <= SINGLE_MAX, f"a single worker solves over {SINGLE_MAX:.0%}"),
            (max(r.right for r in self.workflows) < WORKFLOW_MAX, f"a fixed workflow reaches {WORKFLOW_MAX:.0%}"),
            (max(r.right for r in self.oracles) > ORACLE_MIN, f"the oracle stays under {ORACLE_MIN:.0%}"),
            (self.multi_step >= MULTI_STEP_MIN, f"under {MULTI_STEP_MIN:.0%} of tasks need two or more steps"),
            (self.child > 0, "no task wants a child loop"),
        )
        return [words for holds, words in checks if not holds]


def measure(pool: Pool, n: int, split: Split, seed: int, climbs: int = 400, screen_tasks: int = 60) -> Measure:
    """All figures over `n` tasks with seeds from `seed` on."""
    tasks = [make_task(seed + i, split) for i in range(n)]
    singles = [score(chain([w]), tasks, pool) for w in pool if w.kind == "openai"]
    return Measure(
        tasks=n,
        multi_step=sum(task.shape != "single" for task in tasks) / n,
        child=sum(task.shape == "child" for task in tasks) / n,
        singles=sorted(singles, key=lambda r: -r.right),
        workflows=search(tasks, pool, climbs, screen_tasks),
        oracles=[oracle(tasks, pool, 0.0), oracle(tasks, pool, 30.0)],
    )


def table(result: Measure) -> str:
    """The figures as text."""
    lines = [
        f"{result.tasks} tasks; {result.multi_step:.1%} need two or more steps, {result.child:.1%} want a child loop",
        f"{'policy':<56} {'right':>7} {'$ per 1,000':>12}",
    ]
    for row in (*result.singles, *result.workflows[:3], *result.oracles):
        lines.append(f"{row.name:<56} {row.right:>7.1%} {1000 * row.usd_per_task:>12.3f}")
    lines += [f"BROKEN: {words}" for words in result.broken] or ["all promises hold"]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures; 1 where a promise of the arena is broken."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulated.arena", description="What the arena promises, measured."
    )
    parser.add_argument("--pool", choices=("arena", "heldout"), default="arena")
    parser.add_argument("--climbs", type=int, default=400, help="steps of the search for fixed workflows")
    parser.add_argument("--tasks", type=int, default=400)
    parser.add_argument("--split", choices=("train", "held_out"), default="train")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if not 1 <= options.tasks <= TASKS_MAX:
        parser.error(f"--tasks must be between 1 and {TASKS_MAX}")
    pool = with_builtins(STANDARD if options.pool == "arena" else HELD_OUT)
    result = measure(pool, options.tasks, options.split, options.seed, options.climbs)
    sys.stdout.write(table(result))
    return 1 if result.broken else 0


if __name__ == "__main__":
    sys.exit(main())
