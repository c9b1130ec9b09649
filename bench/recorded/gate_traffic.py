"""The gate on the user's own requests, over recorded answers of real models: what it passes, refuses, spends and saves.

    python -m bench.recorded.gate_traffic --data FILE.jsonl.gz --prices prices.json --out DIR

Starts replay workers and a gateway on them, both over HTTP, and asks `--n` recorded questions as an application would,
with their kind and their grader in the metadata. Then four candidates are put to the gate beside a live version. Their
policy directories are real and their weights are noise: in place of the weights a script plans, one plan for each kind
of task, so that it is known beforehand what each candidate is. The first gate gets a cap that is too small, and goes on
with a larger one. All share one file of stored replies.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from bench.recorded.replay_serving import Recorded, drawn, load
from gateway.core.loop.plan import Plan, Step
from gateway.core.pool.workers import VOTE_URL
from gateway.service.loop.routers import single
from gateway.service.loop.state import Planner, Situation
from policy.__main__ import main as main_of_policy
from policy.engines.directory import ConductorDirectory
from policy.evaluate import contest
from policy.gate import run
from policy.recipes.stack import Gateway, gateway, output_of, program, temporary_directory
from policy.statistics.baselines import OneRoundPlanner
from tests.tiny_model import write_tiny_model

GPT4O, MINI, FLASH = "gpt-4o-2024-05-13", "gpt-4o-mini-2024-07-18", "gemini-1.5-flash"
HAIKU, QWEN = "claude-3-haiku-20240307", "Qwen2-72B-Instruct"
WORKERS = (GPT4O, MINI, FLASH, HAIKU, QWEN)
VOTE = "vote"
GSM, MATH, CRUX = "gsm8k", "math_l5", "cruxeval"
PLANS: Mapping[str, Mapping[str, tuple[str, ...]]] = {  # the last one named answers
    "live": {GSM: (FLASH,), MATH: (QWEN,), CRUX: (HAIKU,)},
    "better": {GSM: (MINI, QWEN, FLASH, VOTE), MATH: (MINI,), CRUX: (MINI,)},
    "worse": {GSM: (FLASH,), MATH: (HAIKU,), CRUX: (HAIKU,)},
    "dearer": {GSM: (GPT4O, FLASH), MATH: (GPT4O, QWEN), CRUX: (GPT4O, HAIKU)},
    "collapsed": {GSM: (MINI,), MATH: (MINI,), CRUX: (MINI,)},
}
SETTINGS = {"BATON_DEFAULT_POLICY": "rule"}  # no conductor is needed to log requests
IN_FLIGHT = 8


@dataclass(frozen=True, slots=True)
class Judged:
    """One gate: its exit status, its report (empty where it stopped), its last line on standard error, and seconds."""

    name: str
    status: int
    report: Mapping[str, Any]
    words: str
    seconds: float


# ---------------------------------------------------------------- policies


def write_policies(directory: Path) -> dict[str, Path]:
    """The directories, each with weights of its own."""
    made = {}
    for seed, name in enumerate(PLANS):
        made[name] = write_tiny_model(directory / name, seed=seed)
        path = made[name] / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"name": name, "config": {"env": "logged"}}))
    return made


def scripted(name: str) -> Planner:
    """What stands in for the weights: the plan of a candidate for the kind of task."""

    def choose(situation: Situation) -> Plan:
        workers = PLANS[name].get(situation.task_type or "", (MINI,))
        handles = {VOTE if spec.url == VOTE_URL else spec.name: spec.handle for spec in situation.workers}
        votes = tuple(range(len(workers) - 1))
        steps = (
            Step(handles[worker], None, votes if worker == VOTE else ()) for worker in workers if worker in handles
        )
        return Plan(tuple(steps)) if set(workers) & set(handles) else single(situation.workers[0])

    return OneRoundPlanner(name, choose)


class ScriptedEngine:
    """An engine that decodes nothing."""

    calls_max, plan_ms = 8, None


@asynccontextmanager
async def open_script(*_: Any) -> AsyncIterator[ScriptedEngine]:
    """As `policy.engines.opening.open_engine`."""
    yield ScriptedEngine()


# ---------------------------------------------------------------- traffic


async def ask_all(served: Gateway, questions: Sequence[Recorded]) -> None:
    """Ask every question once, as an application that names its kind and its grader. Raises SystemExit on a failure."""
    gate = asyncio.Semaphore(IN_FLIGHT)
    headers = {"authorization": f"Bearer {served.data_key}"}
    async with httpx.AsyncClient(base_url=f"{served.base_url}/", headers=headers, timeout=120.0) as client:

        async def one(question: Recorded) -> None:
            tags = {"task_type": question.domain, "grader": "exact", "reference": question.gold[:500]}
            body = {"model": "baton/rule", "messages": [{"role": "user", "content": question.question}]}
            async with gate:
                reply = await client.post("chat/completions", json={**body, "metadata": tags})
            if reply.status_code != 200:
                raise SystemExit(f"the gateway answered {reply.status_code}: {reply.text[:300]}")

        await asyncio.gather(*(one(question) for question in questions))


# ---------------------------------------------------------------- gates


def run_gate(name: str, policies: Mapping[str, Path], place: Path, served: Gateway, pool: Path, cap: str) -> Judged:
    """One candidate beside the live version."""
    out = place / f"{name}.json"
    words = ["gate", "--candidate", str(policies[name]), "--out", str(out), "--live", str(policies["live"])]
    words += ["--env", "logged", "--database-url", served.database_url, "--url", served.base_url]
    words += ["--key-file", str(place / "key"), "--pool-file", str(pool), "--usd-max", cap, "--draws", "1"]
    words += ["--replies", str(place / "replies.jsonl"), "--held-out-share", "0.3"]
    began_s, output = time.monotonic(), io.StringIO()
    with redirect_stderr(output):
        status = main_of_policy(words)
    report = json.loads(out.read_text()) if status in (0, 4) else {}
    sys.stderr.write(output.getvalue())
    return Judged(name, status, report, output.getvalue().strip().splitlines()[-1], time.monotonic() - began_s)


def line_of(one: Judged) -> str:
    """A row of the table."""
    if not one.report:
        return f"| `{one.name}` | stopped | {one.words} |"
    [held] = [part["facts"] for part in one.report["parts"] if part["name"] == "held-out run"]
    row, money = one.report["evaluation"]["policies"]["candidate"], held["money"]
    gain = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*held["gains"]["live"])
    by_kind = {kind: each["gains"]["live"] for kind, each in held["task_kinds"].items()}
    kinds = ", ".join("{} {:+.3f} [{:+.3f}, {:+.3f}]".format(kind, *interval) for kind, interval in by_kind.items())
    verdict = "passed" if one.report["passed"] else ", ".join(f"`{each['name']}`" for each in one.report["refusals"])
    spent = f"${float(money['spent_usd']):.3f}, {money['calls_made']} calls"
    saved = f"${float(money['saved_usd']):.3f}, {money['calls_stored']} calls"
    figures = f"{row['accuracy']:.3f} | {row['usd_per_1k']:.3f} | {gain} | {kinds}"
    return f"| `{one.name}` | {figures} | {verdict} | {spent} | {saved} | {one.seconds:.0f} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 1 where a verdict is not the expected one."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.recorded.gate_traffic", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--data", type=Path, required=True, help="JSONL of recorded answers, may be .gz")
    parser.add_argument("--prices", type=Path, required=True, help="JSON: model → dollars per million tokens")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="policies and reports")
    parser.add_argument("--n", type=int, default=1_000, help="requests that are logged")
    parser.add_argument("--usd-max", default="8.00", help="the cap of each gate")
    parser.add_argument("--small-cap", default="1.50", help="the cap that the first gate runs into")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    options.data, options.prices = options.data.resolve(), options.prices.resolve()
    questions, _ = drawn(load(options.data, WORKERS), options.n, 0, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        for module in (contest, run):
            stack.enter_context(patch.object(module, "open_engine", open_script))
        stack.enter_context(patch.object(ConductorDirectory, "planner", lambda self, *_: scripted(self.manifest.name)))
        judged = _judged(options, questions, write_policies(options.out / "policies"))
    head = ["candidate", "right", "$ per 1,000", "over live", "by kind", "verdict", "spent", "saved", "s"]
    print("\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *map(line_of, judged)]))
    verdicts = {one.name: one.status for one in judged[1:]}
    return 0 if verdicts == {"better": 0, "worse": 4, "dearer": 4, "collapsed": 4} else 1


def _judged(options: argparse.Namespace, questions: Sequence[Recorded], policies: Mapping[str, Path]) -> list[Judged]:
    models = ",".join(WORKERS)
    with temporary_directory() as directory:
        serve = ("policy.simulators.replay", "serve", str(options.data), "--workers", models)
        with program("replay", directory, *serve) as replay:
            pool = directory / "pool.yaml"
            words = ("pool", str(options.data), "--prices", str(options.prices), "--workers", models)
            pool.write_text(output_of("policy.simulators.replay", *words, "--base-url", replay.url))
            with gateway(directory, pool=pool, conductor="none", settings=SETTINGS) as served:
                (directory / "key").write_text(served.data_key)
                asyncio.run(ask_all(served, questions))
                time.sleep(5.0)  # the journal ships twice a second
                caps = [("better", options.small_cap), *((name, options.usd_max) for name in PLANS if name != "live")]
                judged = [run_gate(name, policies, directory, served, pool, cap) for name, cap in caps]
                for report in directory.glob("*.json"):
                    shutil.copy(report, options.out)
                for page in directory.glob("*.md"):
                    shutil.copy(page, options.out)
                return judged


if __name__ == "__main__":
    sys.exit(main())
