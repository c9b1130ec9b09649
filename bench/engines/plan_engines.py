"""How far the engines that judge agree on the same logged plans, and how fast each of them is.

    python -m bench.engines.plan_engines --base DIR --adapter DIR --url http://127.0.0.1:8126/v1
        [--prompts 12] [--plans 5]

The embedded runtime samples plans of the base in the arena at temperature 1. Then it, torch and the server at --url (a
vLLM that serves the base) score the same plans with the base's weights and with the adapter's; printed is the
distribution of |Δ log-prob| against torch, over tokens and over plans, and the time that each took.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.core.loop.prompt import Profile
from gateway.service.loop.conducting import ConductorPlanner, ConductorSettings
from gateway.service.ports.request import Conductor, ConductorCall, ConductorChunk, ConductorEnd
from policy.dataset.rules import grammar_of
from policy.engines.choice import EngineChoice
from policy.engines.directory import ConductorDirectory, read_conductors
from policy.engines.opening import open_engine
from policy.engines.port import LoggedPlan, PlanEngine
from policy.environments.arena import ArenaEnvironment
from policy.environments.executor import FREE, UNHURRIED_S, Executor
from policy.environments.sampling import sample

REFERENCE = "torch"
Array = npt.NDArray[np.float64]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--url", required=True, help="a vLLM of the base, …/v1")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--plans", type=int, default=5, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=96, help="of a plan, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    text = json.dumps(asyncio.run(measure(options)), indent=2) + "\n"
    sys.stdout.write(text)
    if options.out:
        options.out.write_text(text)
    return 0


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of both policies."""
    conductors = read_conductors([options.base, options.adapter])
    plans, figures = await logged(conductors[options.base], options)
    for name, path in (("base", options.base), ("adapter", options.adapter)):
        scores, seconds = {}, {}
        for engine in ("embedded", REFERENCE, options.url):
            async with open_engine(conductors[path], EngineChoice(engine)) as opened:
                kind = engine if engine != options.url else "vllm"
                scores[kind], seconds[kind] = await timed(opened, plans)
        figures[name] = compared(scores, seconds, len(plans))
        sys.stderr.write(f"{name}: {json.dumps(figures[name])}\n")
    return figures


class SeededConductor(Conductor):
    """`ports.Conductor` that samples every plan with the same seed."""

    def __init__(self, conductor: Conductor, seed: int) -> None:
        self._conductor = conductor
        self._seed = seed

    async def decode(self, call: ConductorCall) -> AsyncIterator[ConductorChunk | ConductorEnd]:
        """As the port says."""
        async for item in self._conductor.decode(replace(call, sampling=replace(call.sampling, seed=self._seed))):
            yield item

    async def ready(self) -> bool:
        """As the port says."""
        return await self._conductor.ready()


async def logged(base: ConductorDirectory, options: argparse.Namespace) -> tuple[list[LoggedPlan], dict[str, Any]]:
    """Plans of the base as the gateway would log them."""
    environment = ArenaEnvironment(executor=Executor(rounds=1))
    prompts = environment.prompts("train", options.prompts, options.seed)
    profile: Profile = base.profile
    settings = ConductorSettings(profile, FREE, UNHURRIED_S, options.tokens, 1.0)
    async with open_engine(base, EngineChoice("embedded")) as engine:
        seeds = range(options.seed, options.seed + options.plans)
        planners = [ConductorPlanner(SeededConductor(engine, seed), settings) for seed in seeds]
        began_s = time.monotonic()
        episodes = await sample(environment, [(prompt, planners) for prompt in prompts], concurrency=engine.calls_max)
        seconds = time.monotonic() - began_s
    rounds = [episode.record.rounds[0] for episode in episodes.episodes]
    plans = [
        LoggedPlan(one.prompt_token_ids, one.plan_token_ids, one.decision_mask, grammar_of(one)[1], 1.0)
        for one in rounds
    ]
    lengths = [len(plan.plan_ids) for plan in plans]
    facts = {
        "plans": len(plans),
        "prompt_tokens_mean": float(np.mean([len(plan.prompt_ids) for plan in plans])),
        "plan_tokens_mean": float(np.mean(lengths)),
        "embedded_samples_plans_per_s": len(plans) / seconds,
    }
    return plans, facts


async def timed(engine: PlanEngine, plans: Sequence[LoggedPlan]) -> tuple[list[list[float]], float]:
    """The scores, and the seconds they took."""
    began_s = time.monotonic()
    scores = await engine.score(plans)
    return scores, time.monotonic() - began_s


def compared(scores: dict[str, list[list[float]]], seconds: dict[str, float], plans: int) -> dict[str, Any]:
    """|Δ| in nats against the reference, over the tokens that decide and over whole plans."""
    exact = scores[REFERENCE]
    figures: dict[str, Any] = {"plans_per_s": {kind: plans / spent for kind, spent in seconds.items()}}
    for kind, own in scores.items():
        if kind == REFERENCE:
            continue
        tokens = np.concatenate([np.abs(np.subtract(a, b))[np.array(b) < 0] for a, b in zip(own, exact, strict=True)])
        whole = np.array([abs(sum(a) - sum(b)) for a, b in zip(own, exact, strict=True)])
        figures[kind] = {"tokens": _spread(tokens), "plans": _spread(whole), "n_tokens": len(tokens)}
    return figures


def _spread(values: Array) -> dict[str, float]:
    return {"mean": float(values.mean()), "p99": float(np.quantile(values, 0.99)), "max": float(values.max())}


if __name__ == "__main__":
    sys.exit(main())
