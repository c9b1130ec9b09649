"""The whole loop for an instruct model, on recorded answers of real models: `make demo-instruct`, or

    python -m policy.recipes.instruct --base DIR --data FILE --prices FILE --workers a,b,c --out DIR

DIR is a base, such as `baton policy import smollm2 --out DIR` makes. Replay workers answer over HTTP what the recorded
models said; the engine (vLLM in `.venv-vllm`, or the embedded server) holds the base and its adapters; a gateway with
PostgreSQL, Redis and the worker of the jobs stands before both. The base becomes live. Every worker is asked some
training questions by name, and the outcomes are the gateway's first experience. Then three rounds, each a job (train,
gate, publish, shadow), a canary and a promotion, while requests go on:

1. `baton record` asks every worker the training questions, and a search over what they answered teaches the base.
2. GRPO on the recorded answers goes on from the live adapter.
3. GRPO on the log alone: applications ask, a share of plans is sampled to explore, and each request's grader judges.

Before the first round and after each one the live version answers the same held-out questions through the gateway.
Writes report.json, report.md and report.svg into --out after every round. Status 1 when a request failed or a step did
not do its part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import floor
from pathlib import Path

from gateway.core.policies.holdout import KEY_SHARE_APART
from gateway.errors import ConfigError
from gateway.files import write_atomic
from policy.environments.base import Split
from policy.environments.replay import ReplayEnvironment
from policy.gate.checks import thresholds_of
from policy.recipes.engines import EngineProcess
from policy.recipes.learning import NO_TORCH, has_torch, title
from policy.recipes.operator import Gradings, LearningRound, Operator
from policy.recipes.questions import RecordedQuestions
from policy.recipes.report import FILES, LearningReport
from policy.recipes.smol import PRACTISED, TAUGHT
from policy.recipes.stack import Gateway, RecipeFailed, gateway, output_of, program, temporary_directory
from policy.recipes.traffic import PolicyScore, Traffic
from policy.simulators.recordings import read_prices
from policy.train.settings import settings_of

SUITE, FIRST = 3, 4  # kinds of questions beside the rounds' own
POLICY = "conductor"
RECORDED = "Recorded answers of real models, replayed (docs/recorded.md); the conductor is a real language model."
PLAN_TIMEOUT_S = "120"  # of a model that shares two cores with its own training
GATE_USD_MAX = "100"
RECORD_USD_MAX = "1000"  # replayed: the dollars are those of the recording
SETTINGS = {
    "BATON_EXPLORE_SHARE": "0.9",  # of what applications ask; the held-out questions are never explored
    "BATON_EXPERIENCE_NEIGHBOURS": "50",  # as training and the gate show it
    "BATON_EXPERIENCE_TIMEOUT_S": "2",  # the machine also trains
    "BATON_SHADOW_SHARE": "0.2",
    "BATON_PLAN_TOKENS_MAX": "192",
    "BATON_CONDUCTOR_TIMEOUT_S": PLAN_TIMEOUT_S,
    "BATON_CONDUCTOR_OUTCOMES_MIN": "0",
    "BATON_WATCH_REQUESTS_MIN": "1000000",  # versions are rolled back by us alone
    "BATON_WATCH_LOOK_S": "2",
}
VLLM_OPTIONS = ["--max-model-len", "2048", "--max-lora-rank", "16"]
ADAPTER = ("lora_rank=16", "redraw_handles=true", "experience_share=1.0")
LESSONS = (*ADAPTER, *TAUGHT)  # what teaches SmolLM2 in half an hour (docs/results.md)
PRACTICE = (*ADAPTER, *PRACTISED, "dial_questions=20")
POOL_MIN = 3  # workers of the pools that lessons and practice are posed with; the largest has them all
LOGGED = ("lora_rank=16", "tokens_max=1000")


@dataclass(frozen=True, slots=True)
class Site:
    """What runs: the gateway, its data directory, and the pool file of the replay workers."""

    served: Gateway
    data: Path
    pool: Path


@contextmanager
def site(options: argparse.Namespace, directory: Path) -> Iterator[Site]:
    """Start replay workers, the engine and a gateway on them; end all with the block."""
    workers = [*(("--workers", options.workers) if options.workers else ())]
    recorded = [str(options.data), *workers]
    with program("replay", directory, "policy.simulators.replay", "serve", *recorded) as replayed:
        pool = directory / "pool.yaml"
        priced = ["pool", *recorded, "--base-url", replayed.url, "--prices", str(options.prices)]
        pool.write_text(output_of("policy.simulators.replay", *priced), encoding="utf-8")
        with engine(options, directory) as (conductor, settings):
            settings |= SETTINGS | {"BATON_TRAIN_PYTHON": sys.executable}
            with gateway(directory, conductor=conductor, pool=pool, settings=settings) as served:
                yield Site(served, directory / "data", pool)


@contextmanager
def engine(options: argparse.Namespace, directory: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Start vLLM on the base, if asked for; what BATON_CONDUCTOR is then, and the settings that go with it."""
    if options.engine == "embedded":
        yield str(options.base), {}
        return
    server = EngineProcess("vllm", options.base, directory, POLICY)
    server.options += [*VLLM_OPTIONS, *shlex.split(options.vllm)]
    try:
        took_s = server.start()
        print(f"  vLLM holds {options.base.name} after {took_s:.0f} s", file=sys.stderr, flush=True)
        free = {f"BATON_CONDUCTOR_{side}_USD_PER_MTOK": "0" for side in ("INPUT", "OUTPUT")}  # hardware of one's own
        settings = {"BATON_POLICY_ENGINE": "vllm-lora", "BATON_POLICY_ENGINE_BASE": str(options.base)}
        yield f"{server.url}/v1#{POLICY}", free | settings | {"BATON_POLICY_RANK_MAX": "16"}
    finally:
        server.stop()


class InstructLoop:
    """The rounds. `report` grows with each."""

    def __init__(self, options: argparse.Namespace, at: Site, traffic: Traffic, report: LearningReport) -> None:
        self._options, self._at, self._traffic, self._report = options, at, traffic, report
        names = [name for name in options.workers.split(",") if name]
        self._questions = RecordedQuestions(
            ReplayEnvironment.open(options.data, read_prices(options.prices), names), options.seed
        )
        self._suite = self._questions.graded("validation", options.n, SUITE)
        self._recorded = at.data / "recorded.jsonl"
        self._began_s = time.monotonic()

    async def run(self, gradings: Gradings) -> None:
        """Every stage. Raises RecipeFailed."""
        options = self._options
        operator = Operator(self._at.served, self._at.data, self._traffic, self._questions, gradings, self._logged())
        operator.per_s = options.per_s
        await self._begin(operator)
        await self._experience(operator)
        await self._record(operator)
        for number, (name, words) in enumerate(self._replayed(), start=1):
            title(name)
            summary = await operator.job_round(number, words, options.canary, self._suite, self._last)
            self._store(replace(summary, name=name))
        title("GRPO on the log")
        summary = await operator.round(3, options.rollouts, options.canary, self._suite, self._last)
        self._store(replace(summary, name="GRPO on the log"))

    @property
    def _last(self) -> PolicyScore:
        return self._report.rounds[-1].held_out

    async def _begin(self, operator: Operator) -> None:
        """Make the base live (a gateway that starts with it has done so), and score it beside the fixed workers and the
        rule."""
        title("The base")
        if self._options.engine == "vllm":
            await operator.baton("policy", "publish", str(self._options.base), "--force", "--why", "the base")
            version = await operator.newest()
            await operator.baton("policy", "shadow", version)
            await operator.baton("policy", "canary", version, "100")
            await operator.baton("policy", "promote", version)
        version = await operator.find_live()
        self._store(LearningRound(0, version, "–", await self._score(f"{version}, held-out questions"), name="base"))
        for policy in [*(f"fixed:{name}" for name in self._questions.environment.models), "rule"]:
            self._report.baselines[policy] = await self._score(policy, f"baton/{policy}")
        self._store()

    async def _score(self, what: str, policy: str = "baton") -> PolicyScore:
        return await self._traffic.score(what, self._suite, policy)

    async def _experience(self, operator: Operator) -> None:
        """Ask every worker the same training questions: what prompts show of the workers."""
        title("Experience")
        questions = self._questions.graded("train", self._options.experience, FIRST)
        for name in self._questions.environment.models:
            await self._traffic.ask_to_learn(f"experience with {name}", questions, f"baton/fixed:{name}")
        await operator.wait_for_grades()

    async def _record(self, operator: Operator) -> None:
        """Ask every worker the training questions, and those that the gate judges by."""
        title("Record")
        questions_file = self._at.data / "questions.jsonl"
        environment, options = self._questions.environment, self._options
        sizes: dict[Split, int] = {"train": options.record, "validation": options.gate_n}
        draws = [environment.prompts(split, min(n, environment.count(split)), 0) for split, n in sizes.items()]
        prompts = [prompt for part in draws for prompt in part]
        lines = [
            {"id": each.id, "question": each.messages[0]["content"], "gold": each.reference, "domain": each.category}
            for each in prompts
        ]
        questions_file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        words = [
            "record",
            "--questions",
            str(questions_file),
            "--pool-file",
            str(self._at.pool),
            "--out",
            str(self._recorded),
        ]
        _, output = await operator.baton(*words, "--usd-max", RECORD_USD_MAX, "--json")
        self._report.facts["record"] = json.loads(output.splitlines()[-1])

    def _replayed(self) -> list[tuple[str, list[str]]]:
        """The jobs on recorded answers: name and arguments."""
        options = self._options
        common = ["--env", "replay", "--data", str(self._recorded), "--prices", str(options.prices)]
        common += ["--set", f"seed={options.seed}", "--gate", self._gate()]
        workers = len(self._questions.environment.models)
        pools = f"k_of_n={min(POOL_MIN, workers)}-{workers}"
        chosen = [(*LESSONS, pools, *options.sft), (*PRACTICE, pools, *options.grpo)]
        sets = [[word for one in each for word in ("--set", one)] for each in chosen]
        return [
            ("lessons from a search", [*common, "--method", "sft", "--prompt", "ranked", *sets[0]]),
            ("GRPO on recordings", [*common, *sets[1]]),
        ]

    def _logged(self) -> list[str]:
        """Arguments of a job on the log. Its gate asks the latest requests again, of the workers behind the gateway."""
        sets = [word for one in (*LOGGED, *self._options.logged) for word in ("--set", one)]
        served, key = self._at.served, self._at.data / "gate.key"
        write_atomic(key, served.data_key, mode=0o600)
        access = ["--url", served.base_url, "--key-file", str(key), "--pool-file", str(self._at.pool)]
        gate = shlex.join([*access, "--usd-max", GATE_USD_MAX, "--held-out-share", str(self._options.held_out_share)])
        return [*sets, "--set", f"seed={self._options.seed}", "--gate", f"{self._gate()} {gate}"]

    def _gate(self) -> str:
        options = self._options
        sizes = ["--n", str(options.gate_n), "--draws", str(options.gate_draws)]
        sizes += ["--engine", options.gate_engine] if options.gate_engine else []
        return " ".join([*sizes, *(f"--set {one}" for one in options.gate)])

    def _store(self, summary: LearningRound | None = None) -> None:
        report, tally = self._report, self._traffic.tally
        report.rounds += [summary] if summary else []
        report.requests = {"sent": tally.sent, "failed": tally.failed, "retried": tally.retried}
        report.requests["fallbacks"] = tally.fallbacks
        report.seconds = time.monotonic() - self._began_s
        report.write(self._options.out)


async def run(options: argparse.Namespace, at: Site, report: LearningReport) -> None:
    """Run the loop on a running site. Raises RecipeFailed."""
    gradings = Gradings(at.served.database_url)
    try:
        async with Traffic.open(at.served) as traffic:
            await InstructLoop(options, at, traffic, report).run(gradings)
    finally:
        gradings.close()


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    arguments = argparse.ArgumentParser(
        prog="python -m policy.recipes.instruct",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument("--base", type=Path, required=True, help="the policy directory of a base")
    arguments.add_argument("--data", type=Path, required=True, help="recorded answers")
    arguments.add_argument("--prices", type=Path, required=True, help="JSON: model → dollars per million tokens")
    arguments.add_argument("--workers", default="", help="comma-separated models; all by default")
    arguments.add_argument("--engine", choices=("vllm", "embedded"), default="vllm")
    arguments.add_argument("--vllm", default="", metavar="WORDS", help="more options of vLLM, as one")
    arguments.add_argument("--record", type=int, default=300, help="training questions that every worker is asked")
    arguments.add_argument(
        "--experience", type=int, default=150, help="training questions that teach what workers can do"
    )
    arguments.add_argument("--rollouts", type=int, default=400, help="requests of the traffic that round 3 learns from")
    arguments.add_argument(
        "--held-out-share", type=float, default=0.35, help="the latest of them that its gate asks again, unseen"
    )
    arguments.add_argument("--canary", type=int, default=24, help="requests while a version has 25 %% of them")
    arguments.add_argument("--per-s", type=float, default=0.2, help="requests a second while a job runs")
    arguments.add_argument("--n", type=int, default=100, help="held-out questions")
    arguments.add_argument("--gate-n", type=int, default=100, help="questions of the gate's held-out run")
    arguments.add_argument("--gate-draws", type=int, default=1, help="orders of the pool for each attack of the gate")
    arguments.add_argument("--gate-engine", default="", metavar="NAME", help="of the gates; torch where a GPU is")
    arguments.add_argument("--seed", type=int, default=0)
    for name, what in (("sft", "round 1"), ("grpo", "round 2"), ("logged", "round 3")):
        arguments.add_argument(
            f"--{name}", action="append", default=[], metavar="NAME=VALUE", help=f"settings of {what}"
        )
    arguments.add_argument("--gate", action="append", default=[], metavar="NAME=VALUE", help="thresholds of the gate")
    arguments.add_argument("--out", type=Path, help="where the report goes")
    return arguments


def shortage(options: argparse.Namespace) -> str:
    """Why round 3 would have too few requests, known before the first; empty where it has enough."""
    held_out = floor(options.rollouts * options.held_out_share)
    least = min(thresholds_of(options.gate).questions_min, options.gate_n)
    learnt = floor((options.rollouts - held_out) * float(SETTINGS["BATON_EXPLORE_SHARE"]) * (1 - KEY_SHARE_APART))
    wanted = settings_of("logged", (*LOGGED, *options.logged)).requests_min
    if held_out >= least and learnt >= wanted:
        return ""
    return (
        f"--rollouts {options.rollouts}: about {learnt} of them train and {held_out} are held out, where round 3 needs "
        f"{wanted} (--logged requests_min=N) and {least} (--gate-n, --gate questions_min=N); give more, or lower these"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0, 1 when something did not do its part, 2 without torch, 130 after Ctrl-C."""
    options = parser().parse_args(argv)
    if not has_torch(sys.executable):
        print(NO_TORCH, file=sys.stderr)
        return 2
    try:
        missing = shortage(options)
    except ConfigError as error:
        missing = error.message
    if missing:
        print(missing, file=sys.stderr)
        return 1
    options.out = options.out or Path(tempfile.mkdtemp(prefix="baton-instruct-"))
    report, status = LearningReport({name: str(value) for name, value in vars(options).items()}, RECORDED), 0
    try:
        with temporary_directory() as directory, site(options, directory) as at:
            asyncio.run(run(options, at, report))
    except KeyboardInterrupt:
        status = 130
    except RecipeFailed as broken:
        print(broken, file=sys.stderr)
        status = 1
    if report.rounds:
        print("\n".join(["", report.table(), "", *report.notes(), str(options.out / FILES[0])]), flush=True)
    return status or int(report.requests.get("failed", 1) > 0)


if __name__ == "__main__":
    sys.exit(main())
