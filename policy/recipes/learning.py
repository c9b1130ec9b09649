"""The learning loop on real parts: `make demo-learning`, or

    python -m policy.recipes.learning --rounds 1 --rollouts 512 --out DIR

Starts the arena's simulated workers, of whose skills the pool file says nothing, and a gateway with the shipped
conductor, PostgreSQL, Redis and the worker of the jobs. Then, round by round: applications ask over the OpenAI API, a
share of plans is sampled to explore, and the grader that each request names judges the reply; `baton train submit
--env logged` trains on that log alone and the gate judges what comes out; a candidate that passes plans in the
shadow, gets 25 % of requests, and becomes live, while requests go on. After each round the live version answers the
same held-out questions through the gateway. At the end the last version is rolled back, timed. No experience is shown
to any policy, so that what is learnt is in the weights. **A simulator's figures** (docs/arena.md).

`--defaults` changes nothing that a new user has not changed: one key, the gateway's own exploration, the shipped
conductor with experience and workers that are described, and the trainer and the gate as they come.

Writes report.json, report.md and report.svg into --out (default: a temporary directory), after every round: Ctrl-C
loses nothing that is finished, and ends every process. Status 1 if nothing was gained, a request failed or a step did
not do its part.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from policy.environments.arena import ArenaEnvironment, Staff
from policy.environments.executor import Executor
from policy.environments.sampling import sample
from policy.recipes.operator import Gradings, LearningRound, Operator
from policy.recipes.questions import Questions
from policy.recipes.report import FILES, LearningReport, write_block
from policy.recipes.stack import Gateway, RecipeFailed, gateway, program, temporary_directory
from policy.recipes.traffic import APPLICATIONS, PolicyScore, Traffic
from policy.simulators.arena.workers import STANDARD, pool_yaml

NO_TORCH = "learning needs torch: `scripts/install train` (or `make train-env`) puts it into .venv"
SETTINGS = {
    "BATON_EXPLORE_SHARE": "0.9",  # of what applications ask; the held-out questions are never explored
    "BATON_EXPERIENCE_NEIGHBOURS": "1",  # too few outcomes to show: no experience in prompts
    "BATON_SHADOW_SHARE": "1",
    "BATON_PLAN_TOKENS_MAX": "192",  # a plan that is longer has lost its way
    "BATON_WATCH_LOOK_S": "2",
}
ARENA_SPEED = "4"  # divides the workers' simulated seconds
SUITE, CANARY, SPARE = 3, 4, 5  # kinds of questions beside the rounds' own
GATE = "--env arena --staff untold --experience 0 --n {n} --train-n 100 --draws 1"
THRESHOLDS = (  # another --gate NAME=VALUE comes after them
    "margin=0.08",  # what a few hundred questions can tell
    "kl_max=8",  # the cold start is not worth staying near: triage may not keep the learner from leaving it
    "mean_weight_min=0.3",
    "mean_weight_max=3",
    "ess_share_min=0.02",
    "attacked_valid_min=0.9",  # 50 attacks, each once
    "attacked_valid_drop_max=0.1",
    "attacked_usd_ratio_max=3",
    "parse_drop_max=0.1",  # the rule plans a request whose plan is not valid, and the gain counts that
)
FAR = "log_kl_requests=0"  # a step may go far from a cold start, however few the requests
PICTURE = "learning-demo.svg"
KEY_SHARE = "0.1"  # 24 applications; also of the few rows that validate
SIMULATOR = "Simulated workers and generated tasks (docs/arena.md): no figure here speaks of a real model."


@contextmanager
def stage(directory: Path, python: str, defaults: bool = False) -> Iterator[tuple[Gateway, Path]]:
    """Workers and a gateway on them; the gateway, and its data directory."""
    with program("arena", directory, "policy.simulators.arena", "serve", "--speed", ARENA_SPEED) as arena:
        pool = directory / "pool.yaml"
        pool.write_text(pool_yaml(arena.url, profile=defaults), encoding="utf-8")
        settings = {"BATON_TRAIN_PYTHON": python} | ({} if defaults else SETTINGS)
        with gateway(directory, pool=pool, settings=settings) as served:
            yield served, directory / "data"


async def oracle(questions: Questions, n: int) -> PolicyScore:
    """The best plan known for each held-out question, carried out in this process."""
    prompts, environment = questions.prompts("validation", n, SUITE), questions.environment
    episodes = await sample(environment, [(prompt, [environment.oracle(prompt)]) for prompt in prompts])
    return PolicyScore.of(
        [each.outcome for each in episodes.episodes], [each.cost_nano / 1e9 for each in episodes.episodes]
    )


async def run(options: argparse.Namespace, served: Gateway, data: Path, report: LearningReport) -> None:
    """Run all rounds and the rollback; `report` grows with each. Raises RecipeFailed."""
    began_s = time.monotonic()
    staff: Staff = "standard" if options.defaults else "untold"
    questions = Questions(ArenaEnvironment(staff=staff, executor=Executor(rounds=1)), options.seed)
    suite, gradings = questions.graded("validation", options.n, SUITE), Gradings(served.database_url)
    train = train_words(options)

    def keep(traffic: Traffic) -> None:
        tally = traffic.tally
        report.requests = {"sent": tally.sent, "failed": tally.failed, "retried": tally.retried}
        report.requests["fallbacks"] = tally.fallbacks
        report.seconds = time.monotonic() - began_s
        report.write(options.out)

    try:
        async with Traffic.open(served, 1 if options.defaults else APPLICATIONS) as traffic:
            operator = Operator(served, data, traffic, questions, gradings, train, bars=True)
            live = await operator.find_live()
            was = await traffic.score(f"cold start, held-out: {live}", suite)
            report.rounds.append(LearningRound(0, live, "–", was))
            keep(traffic)
            for number in range(1, options.rounds + 1):
                title(f"Round {number} of {options.rounds}")
                summary = await operator.round(number, options.rollouts, options.canary, suite, was)
                was = summary.held_out
                report.rounds.append(summary)
                keep(traffic)
            title("Comparison")
            names = [*(f"fixed:{worker.name}" for worker in STANDARD), "rule"]
            report.baselines |= await traffic.compare("every worker alone, and the rule", suite, names)
            report.baselines["oracle"] = await oracle(questions, options.n)
            if operator.live != live:
                title("Rollback")
                last = operator.live
                version, took_s = await operator.roll_back(questions.graded("train", 100, SPARE))
                report.rollback = {"from": last, "to": version, "seconds": took_s}
            keep(traffic)
    finally:
        gradings.close()


def train_words(options: argparse.Namespace) -> list[str]:
    """Arguments of `baton train submit` after the log's."""
    settings = [f"seed={options.seed}", *options.set]
    bounds = [*options.gate]
    if options.defaults:
        gate, log = ["--env arena"], []
    else:
        settings, bounds = [FAR, *settings], [*THRESHOLDS, *bounds]
        gate = [GATE.format(n=options.gate_n)]
        log = ["--validation-share", str(options.validation_share), "--key-share", KEY_SHARE]
    words = [word for one in settings for word in ("--set", one)]
    return [*words, *log, "--gate", " ".join([*gate, *(f"--set {one}" for one in bounds)])]


def title(text: str) -> None:
    """A heading on stderr."""
    print(f"\n== {text}", file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    arguments = argparse.ArgumentParser(
        prog="python -m policy.recipes.learning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument("--defaults", action="store_true", help="one key, and every setting as it comes")
    arguments.add_argument("--rounds", type=int, default=1, help="default 1")
    arguments.add_argument(
        "--rollouts", type=int, help="requests of a round's traffic; default 512, 2,400 with --defaults"
    )
    arguments.add_argument("--canary", type=int, default=60, help="requests while a version has 25 %% of them")
    arguments.add_argument("--n", type=int, default=150, help="held-out questions")
    arguments.add_argument("--gate-n", type=int, default=200, help="questions of the gate's held-out run, other ones")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument(
        "--validation-share", type=float, default=0.2, help="of the rows: the gate's, not the trainer's"
    )
    arguments.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="settings of the trainer")
    arguments.add_argument("--gate", action="append", default=[], metavar="NAME=VALUE", help="thresholds of the gate")
    arguments.add_argument(
        "--gain-min", type=float, help="status 1 unless the gain is above; default 0, any with --defaults"
    )
    arguments.add_argument("--write", type=Path, metavar="PAGE", help="put table and picture into that page")
    arguments.add_argument("--python", default=sys.executable, help="with torch, for training; default this one")
    arguments.add_argument("--out", type=Path, help="where the report goes")
    return arguments


def has_torch(python: str) -> bool:
    """Whether that interpreter can train."""
    if python == sys.executable:
        return find_spec("torch") is not None
    return subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode == 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0, 1 when something did not do its part, 2 without torch, 130 after Ctrl-C."""
    options = parser().parse_args(argv)
    options.rollouts = options.rollouts or (2400 if options.defaults else 512)
    if options.gain_min is None:
        options.gain_min = -math.inf if options.defaults else 0.0
    if min(options.rounds, options.rollouts, options.canary, options.n, options.gate_n) < 1:
        parser().error("--rounds, --rollouts, --canary, --n and --gate-n are at least 1")
    if not has_torch(options.python):
        print(NO_TORCH, file=sys.stderr)
        return 2
    options.out = options.out or Path(tempfile.mkdtemp(prefix="baton-learning-"))
    about = {name: str(value) for name, value in vars(options).items()}
    report, status = LearningReport(about, SIMULATOR), 0
    try:
        with temporary_directory() as directory, stage(directory, options.python, options.defaults) as (served, data):
            asyncio.run(run(options, served, data, report))
    except KeyboardInterrupt:
        status = 130
    except RecipeFailed as broken:
        print(broken, file=sys.stderr)
        status = 1
    if report.rounds:
        print("\n".join(["", report.table(), "", *report.notes(), str(options.out / FILES[0])]), flush=True)
    if options.write and not status:
        picture = options.write.with_name(PICTURE)
        picture.write_text((options.out / FILES[-1]).read_text(encoding="utf-8"), encoding="utf-8")
        notes = "\n".join(f"- {note}" for note in report.notes())
        write_block(options.write, "make demo-learning", f"{report.table()}\n\n{notes}")
    return status or int(report.requests.get("failed", 1) > 0 or report.gain <= options.gain_min)


if __name__ == "__main__":
    sys.exit(main())
