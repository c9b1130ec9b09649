"""How good the experience of workers is, and how long it takes to look it up. `python -m bench.simulated.experience`

In the arena (a simulator: docs/arena.md) the truth is known. `--outcomes` tasks in the phrasings of training each go to
one worker drawn at random, alone, and are judged. Then, for 300 other tasks, each worker's experience is taken

    then      over its 50 most similar steps, as Baton did at first
    hashing   as `core.loop.experience.recall` says
    meaning   the same with the default embedder

and compared with how often that worker alone is right on such a task. *Kind*: share of what counted that was of the
task's own kind. *Shown*: share of workers that are shown with experience at all. *Error*: mean absolute difference
between the success shown and the true one.

`--rows N` fills a real PostgreSQL with N judged steps of seven workers, and times how a process reads them into its
memory, and how it looks them up there, instead.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import text

from bench.serving import percentile
from gateway.adapters.host.clock import SystemClock
from gateway.adapters.postgres.database import async_engine
from gateway.adapters.postgres.evidence.remembered import PostgresPast
from gateway.core.loop.experience.likeness import HASHED, Embedding, embed
from gateway.core.loop.experience.meaning import TABLE_FILE, by_meaning
from gateway.core.loop.experience.past import TaskQuestion
from gateway.files import shipped
from gateway.service.loop.experience.memory import ExperienceMemory
from policy.recipes.stack import gateway, temporary_directory
from policy.simulators.arena.families.tasks import Split, Task, grade, make_task
from policy.simulators.arena.workers import STANDARD, ArenaWorker, with_builtins
from policy.simulators.arena.world import run_plan
from tests.models.experience import likeness, nearness

ASKED = 300
K_THEN, K_NOW = 50, 200
LEAST = 0.5  # sum of a worker's weights below which nothing is shown of it
TIMED, SEEDS_APART = 200, 10_000_000
POOL = with_builtins(STANDARD)
Floats = NDArray[np.float64]
_FILL = """
INSERT INTO experience (rollout_id, round, step, worker, worker_version, pool_name, embedding, embedder, success,
  cost_nano, latency_ms, at, org)
VALUES (CAST(:id AS uuid), 1, 0, :worker, '1', 'bench', CAST(CAST(:embedding AS real[]) AS vector), 'hashing', :success,
  100000, 100, now() - make_interval(secs => :ago), 'bench')
"""


@dataclass(frozen=True, slots=True)
class Past:
    """Judged steps, oldest first."""

    tasks: Sequence[Task]
    vectors: Floats
    workers: NDArray[np.int64]
    right: Floats


def learned(outcomes: int, embedding: Embedding = HASHED) -> Past:
    """Tasks in training phrasings, each judged on a single worker."""
    rng = Random("bench experience")
    tasks = [make_task(seed) for seed in range(outcomes)]
    who = [rng.randrange(len(STANDARD)) for _ in tasks]
    right = [_alone(STANDARD[worker], task) for worker, task in zip(who, tasks, strict=True)]
    return Past(tasks, np.array([embedding.embed(task.text) for task in tasks]), np.array(who), np.array(right))


def _alone(worker: ArenaWorker, task: Task) -> float:
    return grade(task, run_plan({"steps": [{"worker": worker.handle, "task": None, "see": []}]}, task.text, POOL).reply)


def truth(worker: ArenaWorker, task: Task) -> float:
    """Return how often this worker alone is right on such a task: 0 if the task needs more than one step."""
    return worker.skills.get(task.skills[0], 0.0) if task.shape in ("single", "vote") else 0.0


def weights_then(similar: Floats, past: Past) -> Floats:
    """1 for each worker's K_THEN most similar steps."""
    weights = np.zeros(len(similar))
    for worker in range(len(STANDARD)):
        own = np.flatnonzero(past.workers == worker)
        weights[own[np.argsort(-similar[own], kind="stable")[:K_THEN]]] = 1.0
    return weights


def weights_now(similar: Floats, past: Past) -> Floats:
    """Weigh by nearness, as `core.loop.experience.recall` does."""
    alike = np.array(likeness(similar.tolist()))
    weights = np.zeros(len(similar))
    for worker in range(len(STANDARD)):
        counted = 0
        for index in np.flatnonzero(past.workers == worker)[::-1].tolist():
            near = nearness(alike[index])
            if near > 0 and counted < K_NOW:
                weights[index] = near
                counted += 1
    return weights


def figures(
    past: Past, split: Split, weigh: Any, least: float, embedding: Embedding = HASHED
) -> tuple[float, float, float]:
    """(share of the same kind, share of workers shown, mean absolute error of what is shown)."""
    kinds = np.array([task.family for task in past.tasks])
    pure, shown, errors = [], [], []
    for seed in range(ASKED):
        task = make_task(SEEDS_APART + seed, split)
        weights = weigh(past.vectors @ np.array(embedding.embed(task.text)), past)
        pure.append(float(weights[kinds == task.family].sum() / weights.sum()))
        for index, worker in enumerate(STANDARD):
            own = weights * (past.workers == index)
            shown.append(float(own.sum() >= least))
            if shown[-1]:
                errors.append(abs(float(own @ past.right / own.sum()) - truth(worker, task)))
    return fmean(pure), fmean(shown), fmean(errors)


def table(outcomes: Sequence[int]) -> str:
    """Compare the look-up then and now, by words and by meaning, on known and on new phrasings."""
    meaning = by_meaning(shipped(TABLE_FILE))
    looks = (
        ("then", weights_then, 1.0, HASHED),
        *((name, weights_now, LEAST, one) for name, one in (("hashing", HASHED), ("meaning", meaning))),
    )
    lines = ["| outcomes | phrasings | | kind | shown | error |", "|---:|---|---|---:|---:|---:|"]
    for n in outcomes:
        pasts = {one.name: learned(n, one) for one in (HASHED, meaning)}
        for split, label in (("train", "seen"), ("held_out", "new")):
            for when, weigh, least, one in looks:
                kind, shown, error = figures(pasts[one.name], split, weigh, least, one)  # type: ignore[arg-type]
                lines.append(f"| {n:,} | {label} | {when} | {kind:.0%} | {shown:.0%} | {error:.2f} |")
    return "\n".join(lines)


# ---------------------------------------------------------------- how long it takes


async def timed(database_url: str, rows: int) -> tuple[float, list[float]]:
    """Time how long `rows` judged steps of seven workers are read, and TIMED look-ups among them, in milliseconds."""
    engine = async_engine(database_url, statement_timeout_s=600.0)
    memory = ExperienceMemory(PostgresPast(engine), SystemClock(), bytes_max=2**30, stale_s=3600.0, timeout_s=600.0)
    rng = Random("bench rows")
    workers = {f"worker-{n}": "1" for n in range(7)}
    filled: list[dict[str, Any]] = [
        {
            "id": str(uuid.UUID(int=rng.getrandbits(128))),
            "worker": f"worker-{n % 7}",
            "embedding": embed(make_task(n).text),
            "success": rng.random(),
            "ago": rows - n,
        }
        for n in range(rows)
    ]
    try:
        async with engine.begin() as connection:
            await connection.execute(text("SET LOCAL session_replication_role = replica"))  # rollouts are not needed
            await connection.execute(text(_FILL), filled)
            await connection.execute(text("ANALYZE experience"))
        times = []
        for n in range(TIMED + 1):
            vector = np.array(embed(make_task(SEEDS_APART + n, "held_out").text), np.float32)
            began_s = time.perf_counter()
            await memory.near("bench", TaskQuestion(None, vector, HASHED.name), workers, K_NOW)
            times.append((time.perf_counter() - began_s) * 1000)
        return times[0], times[1:]
    finally:
        await engine.dispose()


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or the times."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulated.experience",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--outcomes", type=int, nargs="+", default=[400, 1600], help="judged tasks to learn from")
    parser.add_argument("--rows", type=int, help="time the query among so many instead")
    options = parser.parse_args(argv)
    if options.rows is None:
        print(table(options.outcomes))
        return 0
    with temporary_directory() as directory, gateway(directory) as served:
        read_ms, times = asyncio.run(timed(served.database_url, options.rows))
    fast, slow = percentile(times, 0.5), percentile(times, 0.95)
    print(f"{options.rows} rows: read in {read_ms:.0f} ms; a look-up: median {fast:.2f} ms, 95 % {slow:.2f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
