"""What a plan costs on the embedded runtime, and what a warm prefix saves (ADR 0022).

    python -m bench.engines.plan_runtime BASE_DIR [--threads 2] [--plans 24]

The prompts are of the `brief` profile: six workers with their experience, a request, the state of the round. Plans are
sampled at temperature 1 under the plan's schema, with the task cut out of it: a base without training writes endless
ones. Each line is one way to order the workers: at random for each request, or in one of six orders, in which every
worker stands at every place once; with the experience in the workers' lines, or none in them; and the second round of
a request whose first was planned before. CPU: seconds of all threads, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway.core.loop.plan import PlanLimits, plan_schema
from gateway.core.loop.prompt import render
from gateway.core.loop.shown import PromptInput, ShownExperience, ShownReply, ShownWorker
from policy.serve.engine import DecodeRequest, Engine
from policy.serve.runtime import Runtime
from policy.serve.tokens import Tokens

STEPS_MAX = 5
WORKERS = (
    ShownWorker("atlas", "All-round 7B model; short math, code and writing.", ("math", "code"), 1, 32_768, 3.0),
    ShownWorker("quill", "Chatty 8B model; summaries, rewriting and long letters.", ("writing",), 1, 8192, 6.0),
    ShownWorker("forge", "Large reasoning model; proofs and code in several files.", ("reasoning",), 4, 200_000, 25.0),
    ShownWorker("ember", "Fast small model for extraction, labels and short facts.", ("fast",), 1, 128_000, 0.6),
    ShownWorker("onyx", "Long-document model with a million tokens of context.", ("long",), 3, 1_000_000, 9.0),
    ShownWorker("chorus", "The majority answer of the replies it sees. Costs nothing.", ("vote",), 0, 8192, 0.1),
)
QUESTIONS = (
    "A train leaves at 9:14 and arrives at 13:02 after three stops of four minutes each. At what mean speed does it "
    "drive the 312 km? Give km/h with one decimal.",
    "Sort these words by the second letter, then by length: apple, bridge, candle, dozen, engine, forest.",
    "Who wrote the libretto of the opera that was first given in Prague in October 1787, and where did he die?",
    "Given a grid of 5 by 5 in which each row and column has exactly two stones, count the grids. End with the number.",
)
WAYS = {
    "random order": (True, True, 1),
    "six orders": (False, True, 1),
    "random order, no experience": (True, False, 1),
    "six orders, no experience": (False, False, 1),
    "second round": (True, True, 2),
}


def prompt_of(draw: random.Random, shuffled: bool, experience: bool) -> PromptInput:
    """A request over the six workers, in the order of the way."""
    first = draw.randrange(len(WORKERS))
    workers = [*WORKERS[first:], *WORKERS[:first]]
    if shuffled:
        draw.shuffle(workers)
    shown = [replace(one, experience=_experience(draw) if experience else None) for one in workers]
    question = f"{draw.randint(100, 999)}: {draw.choice(QUESTIONS)}"
    return PromptInput(({"role": "user", "content": question},), tuple(shown), STEPS_MAX, 1)


def _experience(draw: random.Random) -> ShownExperience:
    cost_nano, latency_ms = draw.randint(10**5, 10**7), draw.randint(300, 9000)
    return ShownExperience(draw.randint(3, 40), draw.random(), cost_nano, latency_ms)


def job_of(tokens: Tokens, prompt: PromptInput, seed: int) -> DecodeRequest:
    """The planning call, as the gateway makes it."""
    handles = tuple(worker.handle for worker in prompt.workers)
    schema = _without_task(plan_schema(PlanLimits(handles, STEPS_MAX, len(prompt.replies))))
    return DecodeRequest(tokens.encode_chat(render("brief", prompt)), schema, 1.0, 1.0, seed, 256)


def _without_task(schema: Any) -> Any:
    """The schema with `task` always null."""
    if isinstance(schema, list):
        return [_without_task(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: {"type": "null"} if key == "task" else _without_task(value) for key, value in schema.items()}


def jobs(tokens: Tokens, way: str, count: int) -> Iterator[tuple[DecodeRequest, bool]]:
    """The calls of one way; False for those that only warm up."""
    shuffled, experience, rounds = WAYS[way]
    draw = random.Random(way)
    for index in range(-2 * len(WORKERS), count):
        prompt = prompt_of(draw, shuffled, experience)
        yield job_of(tokens, prompt, index + 100), index >= 0 and rounds == 1
        if rounds == 2:
            reply = ShownReply(0, prompt.workers[0].handle, "82.1 km/h", ("agrees:0",))
            second = replace(prompt, round=2, steps_max=STEPS_MAX - 1, replies=(reply,))
            yield job_of(tokens, second, index + 900), index >= 0


def measure(engine: Engine, way: str, count: int) -> str:
    """One line of the table."""
    walls_ms, cpus_ms, prompts, plans = [], [], [], []
    for job, counted in jobs(engine.tokens, way, count):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        plan = list(engine.decode(job))
        if counted:
            walls_ms.append(1000 * (time.perf_counter() - wall_s))
            cpus_ms.append(1000 * (time.process_time() - cpu_s))
            prompts.append(len(job.prompt_ids))
            plans.append(len(plan))
    p50, p95 = statistics.median(walls_ms), statistics.quantiles(walls_ms, n=20)[-1]
    sizes = f"{statistics.median(prompts):.0f} + {statistics.median(plans):.0f}"
    return f"| {way} | {sizes} | {p50:.0f} | {p95:.0f} | {statistics.median(cpus_ms):.0f} |"


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("--threads", type=int, default=2, help="of one pass")
    parser.add_argument("--plans", type=int, default=24, help="a line")
    options = parser.parse_args(arguments)
    runtime = Runtime(options.base, options.threads)
    tokens = Tokens(options.base, runtime.shape)
    sys.stdout.write("| workers | tokens: prompt + plan | wall p50, ms | p95 | CPU p50, ms |\n|---|---|---|---|---|\n")
    for way in WAYS:
        sys.stdout.write(measure(Engine(runtime, tokens, threads=1), way, options.plans) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
