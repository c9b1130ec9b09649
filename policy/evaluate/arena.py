"""Offline evaluation in the arena, in one process: the conductor, the best fixed worker, random plans, the oracle.

Every figure is a simulator's (docs/arena.md). Pools: `standard` (the arena's eight workers), `held_out` (six workers
never met in training), `fresh` (a new random pool for every task). All have `vote` and `self`. Tasks: the held-out
phrasings. Plans run in `policy.simulators.arena.world`, child loops included; the conductor decodes greedily under the
same schema as in the gateway.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from gateway.core.loop.compose import step_messages
from gateway.core.loop.plan import PlanLimits, plan_schema, validate
from gateway.core.loop.prompt import PromptInput, ShownExperience, ShownWorker, price_tier, render
from gateway.core.policies.manifest import check_prompt
from gateway.errors import BatonError, ConfigError, PlanRefused
from policy.serve.engine import Engine, Job
from policy.serve.manifest import read_complete
from policy.serve.runtime import Runtime
from policy.serve.tokens import Tokens
from policy.simulators.arena.families.tasks import Split, Task, grade, make_task
from policy.simulators.arena.oracle import STEPS_MAX, oracle_plan
from policy.simulators.arena.workers import HELD_OUT, STANDARD, Pool, random_pool, with_builtins
from policy.simulators.arena.world import DEPTH_MAX, run_plan
from policy.start.synthetic.label import arena_label, needed_skills

Plan = Mapping[str, Any]
Planner = Callable[[str, str | None, Pool], Plan]
PLAN_TOKENS_MAX = 512
FRESH_WORKERS = (4, 8)
EXPERIENCE_N = 20  # outcomes behind an experience line


@dataclass(frozen=True)
class Row:
    """One policy on one set of tasks. Simulator figures."""

    pool: str
    policy: str
    right: float
    usd_per_1000: float
    steps: float  # worker calls a task, those of child loops included
    valid: float  # share of plans that validate; 1 for policies that cannot err


class Conducted:
    """The conductor as a planner: renders the prompt, decodes under the schema, validates. Counts refusals."""

    def __init__(self, directory: Path, experience: bool = False) -> None:
        if check_prompt(read_complete(directory).manifest, directory) != "compact":
            raise ConfigError(f"{directory}: this comparison shows the compact prompt; give weights that read it")
        runtime = Runtime(directory, intra_threads=1)
        self._engine = Engine(runtime, Tokens(directory, runtime.shape), threads=1)
        self._experience = experience
        self._rng = Random(0)
        self.plans = self.refused = 0
        self.seconds = 0.0

    def __call__(self, question: str, task: str | None, pool: Pool) -> Plan:
        """The plan of a child loop, whose conversation is what the gateway composes for the step."""
        return self.plan(question, task, pool, depth_left=int(any(worker.kind == "self" for worker in pool)))

    def plan(self, question: str, task: str | None, pool: Pool, depth_left: int) -> Plan:
        """Raises nothing: a refused plan is counted, and the first model worker gets the question."""
        order = self._rng.sample(pool, len(pool))
        conversation = step_messages([{"role": "user", "content": question}], task, [])
        workers = tuple(shown(worker, question, task, self._experience) for worker in order)
        prompt = PromptInput(conversation, workers, STEPS_MAX, depth_left)
        allowed = PlanLimits(tuple(worker.handle for worker in order), STEPS_MAX)
        text = self._decode(render("compact", prompt), plan_schema(allowed))
        self.plans += 1
        try:
            return validate(text, allowed).as_json()
        except PlanRefused:
            self.refused += 1
            first = next(worker for worker in order if worker.kind == "openai")
            return {"steps": [{"worker": first.handle, "task": None, "see": []}]}

    def _decode(self, messages: list[dict[str, str]], schema: Mapping[str, Any]) -> str:
        began_s = time.perf_counter()
        tokens = self._engine.tokens
        job = Job(tokens.encode_chat(messages), schema, 0.0, 1.0, 0, PLAN_TOKENS_MAX)
        data = b"".join(tokens.token_bytes(sampled.token) for sampled in self._engine.decode(job))
        self.seconds += time.perf_counter() - began_s
        return data.decode(errors="replace")

    def close(self) -> None:
        """Stop the engine's thread."""
        self._engine.close()


def shown(worker: Any, question: str, task: str | None, experience: bool) -> ShownWorker:
    """A worker as the gateway's pool file would show it; with `experience`, its true success on such questions."""
    latency_s = worker.latency_s(30)
    seen = _seen(worker, question, task) if experience and worker.kind == "openai" else None
    return ShownWorker(worker.handle, worker.description, worker.tags, price_tier(worker.price), 8192, latency_s, seen)


def _seen(worker: Any, question: str, task: str | None) -> ShownExperience:
    skills = sorted(needed_skills(question, task))
    useful = [worker.skills[skill] for skill in skills if skill in worker.skills]
    mean = sum(useful) / len(useful) if useful else 0.0
    return ShownExperience(EXPERIENCE_N, mean, 400_000, 300)


def fixed(handle: str) -> Planner:
    """Always the same worker."""
    return lambda _question, _task, _pool: {"steps": [{"worker": handle, "task": None, "see": []}]}


def random_plans(seed: int) -> Planner:
    """A random valid plan: 1 to STEPS_MAX steps, any worker, any earlier steps seen. A child loop gets one step."""
    rng = Random(seed)

    def plan(_question: str, _task: str | None, pool: Pool) -> Plan:
        size = rng.randint(1, STEPS_MAX)
        see = [sorted(rng.sample(range(index), rng.randint(0, index))) for index in range(size)]
        return {
            "steps": [{"worker": rng.choice(pool).handle, "task": None, "see": see[index]} for index in range(size)]
        }

    return plan


def reading(question: str, task: str | None, pool: Pool) -> Plan:
    """The warm start's label for this very prompt: the best that reading what is shown can give."""
    return arena_label(question, task, [shown(worker, question, task, False) for worker in pool], STEPS_MAX)


def evaluate(name: str, pools: Sequence[Pool], tasks: Sequence[Task], policy: str, planner: Planner) -> Row:
    """Plan and run every task once, each over the pool beside it."""
    began = (planner.plans, planner.refused) if isinstance(planner, Conducted) else (0, 0)
    right, cost_nano, calls = 0.0, 0, 0
    for task, pool in zip(tasks, pools, strict=True):
        if isinstance(planner, Conducted):
            plan = planner.plan(task.text, None, pool, DEPTH_MAX)
        else:
            plan = planner(task.text, None, pool)
        run = run_plan(plan, task.text, pool, planner=planner)
        right += grade(task, run.reply)
        cost_nano += run.cost_nano
        calls += run.calls
    valid = 1.0
    if isinstance(planner, Conducted):
        valid = 1.0 - (planner.refused - began[1]) / (planner.plans - began[0])
    n = len(tasks)
    return Row(name, policy, right / n, cost_nano / 1e6 / n, calls / n, valid)


def pools_for(name: str, n: int, seed: int) -> list[Pool]:
    """One pool a task. Raises KeyError on an unknown name."""
    if name == "fresh":
        rng = Random(f"evaluate {seed}")
        return [random_pool(rng, rng.randint(*FRESH_WORKERS)) for _ in range(n)]
    return [with_builtins({"standard": STANDARD, "held_out": HELD_OUT}[name])] * n


def compare(name: str, conducted: Sequence[tuple[str, Conducted]], n: int, split: Split, seed: int) -> list[Row]:
    """All policies on `n` tasks over one kind of pool."""
    tasks = [make_task(seed + index, split) for index in range(n)]
    pools = pools_for(name, n, seed)
    planners: list[tuple[str, Planner]] = [
        *conducted,
        ("random valid plan", random_plans(seed)),
        ("reading rule (the label)", reading),
        ("oracle", oracle_plan),
    ]
    rows = [evaluate(name, pools, tasks, policy, planner) for policy, planner in planners]
    if name != "fresh":
        singles = [evaluate(name, pools, tasks, f"fixed {w.handle}", fixed(w.handle)) for w in pools[0] if w.skills]
        rows.append(max(singles, key=lambda row: row.right))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as text, with the line that says what the figures are."""
    lines = ["simulator figures (policy/arena): they say nothing about real models"]
    lines.append(f"{'pool':<10} {'policy':<28} {'right':>7} {'$ per 1,000':>12} {'calls':>6} {'valid':>6}")
    for row in rows:
        lines.append(
            f"{row.pool:<10} {row.policy:<28} {row.right:>7.1%} {row.usd_per_1000:>12.3f} {row.steps:>6.2f} "
            f"{row.valid:>6.3f}"
        )
    return "\n".join(lines) + "\n"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m policy.evaluate.arena", description="Compare policies offline.")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="policy directory")
    parser.add_argument("--tasks", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1_000_000, help="of the first task; tasks take seeds from here on")
    parser.add_argument("--split", choices=("train", "held_out"), default="held_out", help="which phrasings")
    parser.add_argument("--pools", nargs="+", default=["standard", "held_out", "fresh"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Print the table; 0, or 2 when the model cannot be loaded."""
    options = parse(arguments)
    try:
        conducted = [
            ("conductor", Conducted(options.model)),
            ("conductor + experience", Conducted(options.model, True)),
        ]
    except BatonError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    rows: list[Row] = []
    for name in options.pools:
        rows += compare(name, conducted, options.tasks, options.split, options.seed)
    sys.stdout.write(table(rows))
    plain = conducted[0][1]
    sys.stdout.write(f"{plain.plans} plans, {1000 * plain.seconds / plain.plans:.1f} ms a plan\n")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    for _, planner in conducted:
        planner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
