"""The conductor in the box, made from nothing by the loop that every other version comes from: `make conductor`, or

    python -m policy.recipes.conductor --out DIR [--ship NAME]

1. **start**: a supervised warm start (`policy.start.synthetic`, docs/conductor.md).
2. **practice**: a gateway with that start as its conductor, the arena's workers, PostgreSQL, Redis and the worker of
   the jobs. A job samples in the arena (`baton train submit --env arena`); the gate judges what comes out beside the
   start, and it becomes live through a canary. Where it is refused, the run ends.
3. **traffic**: 24 applications ask the live version; most plans are sampled, every request names its grader.
4. **lesson**: a job learns from that log alone (`--env logged`), gate and canary as before. Where it is refused, the
   version before it stays.
5. **figures**: `policy evaluate` of the start and of what is live in the end, held-out phrasings, three staffs.

Each stage leaves its result in DIR and is passed over when that is there: the same command goes on after Ctrl-C or a
kill. `--ship NAME` copies the conductor to policy/shipped/NAME. Status 4 when the gate refuses the practised one.
**A simulator's figures** (docs/arena.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.files import write_atomic
from policy.environments.arena import ArenaEnvironment
from policy.environments.executor import Executor
from policy.recipes.learning import NO_TORCH, has_torch
from policy.recipes.operator import CANARY_PERCENT, EXIT_REFUSED, Gradings, Operator
from policy.recipes.questions import Questions
from policy.recipes.stack import ROOT, Gateway, RecipeFailed, gateway, program, replace_directory, run_program
from policy.recipes.traffic import Traffic
from policy.simulators.arena.workers import pool_yaml

SEED = 7
START = ("--name", "arena-start", "--version", "1", "--seed", str(SEED))
ROLLOUTS, GATE_N, FIGURES_N = 1_000, 1_200, 300
_ALWAYS = ("--name", "arena", "--set", f"seed={SEED}", "--set", "cost_per_usd=300")  # calls cost fractions of a cent
_ONE_PLAN = ("--set", "rounds=1")  # as it is served: every reply streams
PRACTICE = ("--env", "arena", *_ALWAYS, *_ONE_PLAN, "--version", "2", "--set", "temperature=1.4", "--set", "k_of_n=4-8")
LESSON = ("--env", "logged", *_ALWAYS, "--version", "3", "--set", "steps=1", "--set", "lr=3e-5")
KEY_SHARE = ("--key-share", "0.1")  # 24 applications ask by turns
PRACTICE_STEPS = 60
SETTINGS = {
    "BATON_EXPLORE_SHARE": "0.9",  # of the plans; what they were sampled with is in the log
    "BATON_PLAN_TOKENS_MAX": "192",  # a plan that is longer has lost its way
}
ARENA_SPEED = "10"  # divides the workers' simulated seconds
WAVE = 250  # requests between two looks at how far it is
SHIPPED = ROOT / "policy" / "shipped"
COMPARED = ("random-plan", "label", "oracle-plan")
STAFFS = ("standard", "held_out", "fresh")
EXPERIENCES: Mapping[str, tuple[str, ...]] = {"nothing": ("--experience", "0"), "truth": ("--true-experience",)}


@dataclass(frozen=True, slots=True)
class Places:
    """Paths in the directory of a run."""

    out: Path

    @property
    def start(self) -> Path:
        """The warm start."""
        return self.out / "start"

    @property
    def conductor(self) -> Path:
        """What came of the job."""
        return self.out / "conductor"

    def job(self, name: str) -> Path:
        """The id of a job and what it was given."""
        return self.out / f"{name}.json"

    @property
    def figures(self) -> Path:
        """What start and conductor reach."""
        return self.out / "figures.json"


def start(places: Places, python: str, steps: int | None) -> None:
    """The warm start, from its last checkpoint where there is one."""
    if (places.start / "manifest.json").exists():
        return
    more = ["--steps", str(steps)] if steps else []
    if places.start.with_name("start.work").joinpath("checkpoint.pt").exists():
        more.append("--resume")
    run_program(python, "policy.start.synthetic", "--out", str(places.start), *START, *more)


@contextmanager
def stage(places: Places, python: str) -> Iterator[tuple[Gateway, Path]]:
    """Workers, and a gateway on them whose conductor is the warm start; the gateway, and its data directory."""
    directory = places.out / "served"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "data" / "serve.json").unlink(missing_ok=True)  # of a gateway that was killed
    with program("arena", directory, "policy.simulators.arena", "serve", "--speed", ARENA_SPEED) as arena:
        pool = directory / "pool.yaml"
        pool.write_text(pool_yaml(arena.url), encoding="utf-8")
        settings = SETTINGS | {"BATON_TRAIN_PYTHON": python}
        with gateway(directory, conductor=str(places.start), pool=pool, settings=settings) as served:
            yield served, directory / "data"


async def teach(operator: Operator, rollouts: int) -> None:
    """Ask until `rollouts` requests of this directory's log have been judged."""
    questions = operator.questions.graded("train", rollouts, 0)
    done = operator.gradings.count()
    operator.traffic.tally.graded += done
    for at in range(done, rollouts, WAVE):
        await operator.traffic.ask_to_learn(f"traffic, {at} of {rollouts} asked", questions[at : at + WAVE])
    await operator.wait_for_grades()


async def job_of(operator: Operator, places: Places, name: str, words: Sequence[str]) -> dict[str, Any]:
    """Follow the job of that name to its end: the one that was begun, or a new one. Raises RecipeFailed if the begun
    one has other arguments."""
    file = places.job(name)
    if file.exists():
        begun = json.loads(file.read_text(encoding="utf-8"))
        if begun["words"] != list(words):
            raise RecipeFailed(f"{file} is of a job with other arguments; remove it to submit a new one")
        _, output = await operator.baton("train", "status", begun["id"], "--json")
        if json.loads(output)["state"] in ("failed", "cancelled"):
            await operator.baton("train", "resume", begun["id"])
    else:
        begun = {"id": await operator.submit(words), "words": list(words)}
        write_atomic(file, json.dumps(begun) + "\n")
    _, job = await operator.follow(begun["id"])
    for report in ("gate.json", "gate.md"):
        shutil.copyfile(operator.data / "jobs" / job["id"] / report, places.out / f"{name}-{report}")
    return job


async def release(operator: Operator, version: str, why: str) -> None:
    """Make it live, through a canary; nothing where it is already."""
    if await operator.find_live() == version:
        return
    _, output = await operator.baton("policy", "list", "--json")
    if {row["version"]: row["state"] for row in json.loads(output)["data"]}[version] == "shadow":
        await operator.baton("policy", "canary", version, str(CANARY_PERCENT), "--why", why)
    await operator.baton("policy", "promote", version, "--why", why)


async def run_loop(options: argparse.Namespace, places: Places, served: Gateway, data: Path) -> None:
    """Practice, traffic, lesson. Raises RecipeFailed, and GateRefused with the gate's words."""
    questions = Questions(ArenaEnvironment(executor=Executor(rounds=1)), SEED)
    gradings = Gradings(served.database_url)
    gate = ("--gate", shlex.join(["--env", "arena", "--n", str(options.gate_n), *options.gate]))
    more = [word for one in options.set for word in ("--set", one)]
    try:
        async with Traffic.open(served) as traffic:
            operator = Operator(served, data, traffic, questions, gradings, ())
            steps = ("--set", f"steps={options.steps}")
            job = await job_of(operator, places, "practice", [*PRACTICE, *steps, *more, *gate])
            if job["state"] == "refused":
                raise GateRefused(job["error"])
            best, version = job, job["version"]
            if not places.job("lesson").exists():
                await release(operator, version, "it has practised")
                await teach(operator, options.rollouts)
            job = await job_of(operator, places, "lesson", [*LESSON, "--policy-version", version, *KEY_SHARE, *gate])
            if job["state"] != "refused":
                best = job
                await release(operator, job["version"], "it has learnt from traffic")
            replace_directory(data / "jobs" / best["id"] / "candidate", places.conductor)
    finally:
        gradings.close()


class GateRefused(RecipeFailed):
    """The gate refused the candidate; the message is its reason."""


def ship(places: Places, name: str) -> None:
    """Copy the conductor to policy/shipped. Paths in its manifest become relative to the run's directory."""
    target = SHIPPED / name
    replace_directory(places.conductor, target)
    manifest = target / "manifest.json"
    write_atomic(manifest, manifest.read_text(encoding="utf-8").replace(f"{places.out}/", ""))


def figures(places: Places, python: str, n: int) -> None:
    """Start and conductor on held-out phrasings, shown no experience and the true one; the reports in one file."""
    reports: dict[str, Any] = {}
    directories = (places.start, places.conductor)
    policies = [word for name in (*map(str, directories), *COMPARED) for word in ("--policy", name)]
    for staff in STAFFS:
        for shown, experience in EXPERIENCES.items():
            out = places.out / f"figures-{staff}-{shown}.json"
            words = ("--env", "arena", "--staff", staff, "--rounds", "1", "--n", str(n), "--out", str(out))
            run_program(python, "policy", "evaluate", *words, *experience, *policies)
            reports[f"{staff}, {shown} shown"] = json.loads(out.read_text(encoding="utf-8"))
    write_atomic(places.figures, json.dumps(reports, indent=2) + "\n")


def parser() -> argparse.ArgumentParser:
    """The arguments. Their defaults are the recipe; others make another conductor."""
    arguments = argparse.ArgumentParser(
        prog="python -m policy.recipes.conductor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument("--out", type=Path, required=True, metavar="DIR", help="of the run; a short path")
    arguments.add_argument("--ship", metavar="NAME", help="copy what comes out to policy/shipped/NAME")
    arguments.add_argument("--start-steps", type=int, metavar="N", help="of the warm start (default: its own)")
    arguments.add_argument("--rollouts", type=int, default=ROLLOUTS, help="requests of the traffic")
    arguments.add_argument("--steps", type=int, default=PRACTICE_STEPS, help="of the practice")
    arguments.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="more settings of the practice"
    )
    arguments.add_argument("--gate", nargs="+", default=[], metavar="WORD", help="more arguments of the gate")
    arguments.add_argument("--gate-n", type=int, default=GATE_N, help="held-out questions of the gate")
    arguments.add_argument("--n", type=int, default=FIGURES_N, help="held-out tasks of the figures")
    arguments.add_argument("--python", default=sys.executable, help="with torch, for training; default this one")
    return arguments


def run_stages(options: argparse.Namespace, places: Places) -> None:
    """All stages, or those that are left. Raises RecipeFailed."""
    start(places, options.python, options.start_steps)
    if not (places.conductor / "manifest.json").exists():
        with stage(places, options.python) as (served, data):
            asyncio.run(run_loop(options, places, served, data))
    if not places.figures.exists():
        figures(places, options.python, options.n)
    if options.ship:
        ship(places, options.ship)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0, 1 when a stage did not do its part, 2 without torch, 4 when the gate refuses, 130 after Ctrl-C."""
    options = parser().parse_args(argv)
    if min(options.rollouts, options.steps, options.gate_n, options.n) < 1:
        parser().error("--rollouts, --steps, --gate-n and --n are at least 1")
    if not has_torch(options.python):
        print(NO_TORCH, file=sys.stderr)
        return 2
    places = Places(options.out.resolve())
    places.out.mkdir(parents=True, exist_ok=True)
    try:
        run_stages(options, places)
    except KeyboardInterrupt:
        return 130
    except RecipeFailed as broken:
        print(broken, file=sys.stderr)
        return EXIT_REFUSED if isinstance(broken, GateRefused) else 1
    print(places.conductor)
    return 0


if __name__ == "__main__":
    sys.exit(main())
