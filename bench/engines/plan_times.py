"""How long a policy on a server takes for a plan: to the first step that may start, and to the end of the plan.

    python -m bench.engines.plan_times --policy DIR --url http://127.0.0.1:8126/v1 --data FILE --prices FILE
        [--model conductor] [--quality 8] [--at-once 1,16,64] [--n 100] [--warm 20] [--out FILE]

The server is asked as the gateway asks it, streamed and under the plan's grammar, with the prompts of recorded
questions; the recorded workers answer at once. A step may start when another one follows it, the last one when the plan
has ended. The first `--warm` questions of each run are not counted: they fill the server's prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.core.loop.reader import PlanReader
from gateway.core.money.amounts import Usage
from gateway.service.loop.conducting import ConductorPlanner, ConductorSettings
from gateway.service.ports.request import Conductor, ConductorCall, ConductorChunk, ConductorEnd
from policy.engines.directory import ConductorDirectory, read_conductors
from policy.engines.endpoint import client_of
from policy.environments.base import Episode, Prompt
from policy.environments.executor import FREE, UNHURRIED_S, Executor
from policy.environments.replay import ReplayEnvironment
from policy.environments.sampling import sample
from policy.simulators.recordings import read_prices

PLAN_TOKENS = 96


@dataclass(frozen=True, slots=True)
class PlanTime:
    """One planning call, in milliseconds from its request."""

    first_ms: float
    plan_ms: float
    usage: Usage


class TimedConductor(Conductor):
    """`ports.Conductor` that notes how long each plan of another took."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor
        self.times: list[PlanTime] = []

    async def decode(self, call: ConductorCall) -> AsyncIterator[ConductorChunk | ConductorEnd]:
        """As the port says."""
        began_s, first_ms, reader = time.perf_counter(), 0.0, PlanReader()
        async for item in self._conductor.decode(call):
            now_ms = 1000 * (time.perf_counter() - began_s)
            if isinstance(item, ConductorEnd):
                self.times.append(PlanTime(first_ms or now_ms, now_ms, item.usage))
            else:
                reader.feed(item.text)
                first_ms = first_ms or (now_ms if reader.opened > 1 else 0.0)
            yield item

    async def ready(self) -> bool:
        """As the port says."""
        return await self._conductor.ready()


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Figures by how many plans are asked at once."""
    directory = read_conductors([options.policy])[options.policy]
    environment = ReplayEnvironment.open(
        options.data,
        read_prices(options.prices),
        tuple(filter(None, options.workers.split(","))),
        executor=Executor(rounds=options.rounds),
    )
    prompts = environment.prompts("train", options.n + options.warm, options.seed)
    return {
        str(calls): await run(options, directory, environment, prompts, calls)
        for calls in map(int, options.at_once.split(","))
    }


async def run(
    options: argparse.Namespace,
    directory: ConductorDirectory,
    environment: ReplayEnvironment,
    prompts: Sequence[Prompt],
    calls: int,
) -> dict[str, Any]:
    """Every question once, `calls` at a time. Raises ConductorError."""
    client = client_of(options.url, options.model, None)
    timed = TimedConductor(client)
    settings = ConductorSettings(
        directory.profile, FREE, UNHURRIED_S, PLAN_TOKENS, options.temperature, options.quality, trained=True
    )
    planner = ConductorPlanner(timed, settings)
    try:
        await sample(environment, [(prompt, [planner]) for prompt in prompts[: options.warm]], concurrency=calls)
        timed.times.clear()
        began_s = time.perf_counter()
        counted = [(prompt, [planner]) for prompt in prompts[options.warm :]]
        episodes = (await sample(environment, counted, concurrency=calls)).episodes
        return figures(timed.times, episodes, time.perf_counter() - began_s)
    finally:
        await client.close()


def figures(times: Sequence[PlanTime], episodes: Sequence[Episode], seconds: float) -> dict[str, Any]:
    """Medians and 99th percentiles over planning calls; tokens and plans a second of the whole run."""
    tokens = sum(one.usage.completion_tokens for one in times)
    return {
        "questions": len(episodes),
        "plans": len(times),
        "valid": sum(episode.parsed for episode in episodes) / len(episodes),
        "prompt_tokens": statistics.median(one.usage.prompt_tokens for one in times),
        "plan_tokens": statistics.median(one.usage.completion_tokens for one in times),
        "first_ms": _spread([one.first_ms for one in times]),
        "plan_ms": _spread([one.plan_ms for one in times]),
        "plans_per_s": round(len(times) / seconds, 2),
        "tokens_per_s": round(tokens / seconds, 1),
    }


def _spread(values_ms: Sequence[float]) -> dict[str, float]:
    hundredths = statistics.quantiles(values_ms, n=100, method="inclusive")
    return {"p50": round(hundredths[49], 1), "p99": round(hundredths[98], 1)}


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="bench.engines.plan_times", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policy", type=Path, required=True, metavar="DIR", help="whose prompt the server is sent")
    parser.add_argument("--url", required=True, help="the server, …/v1")
    parser.add_argument("--model", default="conductor", help="the policy's name there")
    parser.add_argument("--data", type=Path, required=True, help="recorded answers, .jsonl or .jsonl.gz")
    parser.add_argument("--prices", type=Path, required=True, help="JSON, model → dollars per million tokens")
    parser.add_argument("--workers", default="", help="only these models, comma-separated")
    parser.add_argument("--quality", type=int, help="place of the dial")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", default="1,16,64", metavar="N,…", help="planning calls in flight, a run each")
    parser.add_argument("--n", type=int, default=100, help="questions of a run")
    parser.add_argument("--warm", type=int, default=20, help="questions before them that are not counted")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Measure and print."""
    options = arguments(words)
    text = json.dumps(asyncio.run(measure(options)), indent=2) + "\n"
    sys.stdout.write(text)
    if options.out:
        options.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
