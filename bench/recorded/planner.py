"""A model that plans by prompt, on recorded answers: `full` beside `guided`, the prompt of before beside that of now.

    make planner-bench DATA=file.jsonl.gz PRICES=prices.json PLANNER=worker:gpt-5-mini POOL=deploy/pools/openai.yaml
    python -m bench.recorded.planner --data FILE --prices FILE
        --planner http://127.0.0.1:8000/v1#model --planner-price 0.15,0.6
    python -m bench.recorded.planner --data FILE --prices FILE --tokenizer tokenizer.json       the scripted stand-in

Both prompts plan the same questions, in the gateway's own loop with the rule router behind it. The workers answer from
the recording, so a step with a task of its own fails (nobody recorded that) and the rule answers: such plans are
counted. Keys come by reference, from the pool file or `--planner-key env:NAME`. `--planner-cap-usd` ends a prompt's run
before it could cost more. Without `--planner` a script plans that knows no work: one step on the dearest worker, the
reply shipped in the second round. It measures prompts and what they cost, not planning.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, get_args

from tokenizers import Tokenizer

from gateway.adapters.upstream.conductor.client import Structured
from gateway.core.log.rollout import RoundRecord
from gateway.core.loop.prompt import Profile
from gateway.core.loop.replies.errors import wilson
from gateway.core.money.amounts import Usage
from gateway.core.pool.workers import NANO_PER_USD, Price
from gateway.service.loop.conducting import ConductorPlanner, ConductorSettings
from gateway.service.loop.routers import RulePlanner
from gateway.service.ports.request import ConductorCall, ConductorChunk, ConductorEnd
from policy.environments.base import Episode, Prompt
from policy.environments.executor import Executor
from policy.environments.replay import ReplayEnvironment, caps_above
from policy.evaluate.endpoint import read_endpoints
from policy.evaluate.options import EvaluationOptions
from policy.reward import is_right
from policy.simulators.recordings import load, read_prices

PROMPTS: tuple[Profile, ...] = ("full", "guided")
Z = 1.96
PLAN_S = 600.0
Count = Callable[[str], int]


class ScriptedPlanner:
    """A planner that knows no work: one step on the dearest worker that it is shown, and then the reply as it is."""

    def __init__(self, count: Count) -> None:
        self._count = count

    async def decode(self, call: ConductorCall) -> AsyncIterator[ConductorChunk | ConductorEnd]:
        """A plan under the call's schema, with the tokens that a tokenizer counts."""
        prompt = call.messages[-1]["content"]
        offered = re.findall(r"^- (\w+): .*?price (\$*)", prompt, re.MULTILINE)
        steps: list[dict[str, Any]] = []
        if "\nReplies so far" not in prompt:
            steps = [{"worker": max(offered, key=lambda one: len(one[1]))[0], "task": None, "see": []}]
        why = {"why": "One question, one strong worker."} if "why" in call.schema["properties"] else {}
        text = json.dumps({**why, "steps": steps})
        yield ConductorChunk(text)
        prompt_tokens = sum(self._count(message["content"]) for message in call.messages)
        yield ConductorEnd("scripted", Usage(prompt_tokens, self._count(text)))

    async def ready(self) -> bool:
        """Always True."""
        return True


def counter(path: Path | None) -> Count:
    """Count tokens by a tokenizer.json; bytes ÷ 4 without one."""
    if path is None:
        return lambda text: -(-len(text.encode()) // 4)
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


@asynccontextmanager
async def planner_of(options: argparse.Namespace, profile: Profile) -> AsyncIterator[ConductorPlanner]:
    """The planner under that prompt. Raises ConfigError, ConductorError."""
    if options.planner is None:
        prompt_usd, plan_usd = (options.planner_price or "0.15,0.6").split(",")
        price = Price.model_validate({"input_usd_per_mtok": prompt_usd, "output_usd_per_mtok": plan_usd})
        yield ConductorPlanner(ScriptedPlanner(counter(options.tokenizer)), ConductorSettings(profile, price, PLAN_S))
        return
    asked = EvaluationOptions(
        out=Path("unused.json"),
        policies=(options.planner,),
        data=options.data,
        prices=options.prices,
        planner_key=options.planner_key,
        planner_price=options.planner_price,
        planner_calls=options.calls,
        planner_timeout_s=options.timeout_s,
        planner_prompt=profile,
        pool_file=options.pool_file,
    )
    (endpoint,) = (await read_endpoints(asked)).values()
    endpoint = replace(endpoint, profile=profile, tokens_max=options.tokens_max or endpoint.tokens_max)
    if options.structured:
        endpoint = replace(endpoint, structured=options.structured)
    async with endpoint.open() as planner:
        yield planner


async def episodes_of(options: argparse.Namespace, profile: Profile) -> list[Episode]:
    """Every question, planned under that prompt; fewer where the dollars of the cap are spent."""
    recordings = load(options.data, tuple(filter(None, options.workers.split(","))))
    executor = Executor(caps_above(recordings), rounds=options.rounds, fallback=RulePlanner(draws=False))
    environment = ReplayEnvironment(recordings, read_prices(options.prices), executor=executor)
    prompts = environment.prompts("validation", options.n, options.seed)
    slots = asyncio.Semaphore(options.calls)
    episodes: list[Episode] = []
    async with planner_of(options, profile) as planner:

        async def run(prompt: Prompt) -> None:
            async with slots:
                if sum(map(planning_nano, episodes)) < options.planner_cap_usd * NANO_PER_USD:
                    episodes.append(await environment.episode(prompt, planner))

        await asyncio.gather(*map(run, prompts))
    return episodes


def calls_of(episode: Episode) -> list[RoundRecord]:
    """The planning calls of an episode, child loops included."""
    records = (episode.record, *episode.children)
    return [one for record in records for one in record.rounds if one.planner == "conductor"]


def planning_nano(episode: Episode) -> int:
    """Nano-dollars of its planning calls."""
    return sum(one.cost_nano for one in calls_of(episode))


def figures(episodes: Sequence[Episode]) -> dict[str, Any]:
    """What the bench reports of one prompt. Dollars are per 1,000 questions, intervals 95 % (Wilson)."""
    calls = [one for episode in episodes for one in calls_of(episode)]
    n, right = len(episodes), sum(is_right(episode.outcome) for episode in episodes)
    valid = sum(one.refusal is None for one in calls)
    plans = [one.plan for one in calls if one.plan is not None]
    own_tasks = sum(any(step["task"] is not None for step in plan["steps"]) for plan in plans)
    usd_1k = 1_000 / NANO_PER_USD / n
    planning = sum(map(planning_nano, episodes))
    return {
        "questions": n,
        "right": (right / n, *wilson(right, n, Z)),
        "planning_calls": len(calls),
        "valid": (valid / len(calls), *wilson(valid, len(calls), Z)),
        "refusals": Counter(one.refusal for one in calls if one.refusal),
        "flags": Counter(flag for one in calls for flag in one.flags),
        "prompt_tokens": median(one.prompt_tokens for one in calls),
        "plan_tokens": median(one.completion_tokens for one in calls),
        "rounds": len(calls) / n,
        "steps": fmean(episode.steps for episode in episodes),
        "plans_with_own_tasks": own_tasks / max(1, len(plans)),
        "planner_usd_per_1k": planning * usd_1k,
        "workers_usd_per_1k": (sum(episode.cost_nano for episode in episodes) - planning) * usd_1k,
    }


def row(name: str, one: dict[str, Any]) -> str:
    """One prompt's row of the table."""
    share = "{0:.3f} ({1:.3f} to {2:.3f})".format
    names = ", ".join(f"{name} {count}" for name, count in sorted((one["refusals"] + one["flags"]).items()))
    cells = [name, share(*one["valid"]), f"{one['prompt_tokens']:.0f}", f"{one['plan_tokens']:.0f}"]
    cells += [f"{one['rounds']:.2f}", f"{one['steps']:.2f}", f"{one['plans_with_own_tasks']:.2f}", share(*one["right"])]
    cells += [f"{one['planner_usd_per_1k']:.3f}", f"{one['workers_usd_per_1k']:.3f}", names or "none"]
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| prompt | plans valid | prompt tokens | plan tokens | plans | steps | own tasks | right | planner $/1k "
    "| workers $/1k | refusals, flags |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="bench.recorded.planner", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="recorded answers, .jsonl or .jsonl.gz")
    parser.add_argument("--prices", type=Path, required=True, help="JSON, model → dollars per million tokens")
    parser.add_argument("--workers", default="", help="only these models, comma-separated")
    parser.add_argument("--planner", help="worker:NAME or http://…/v1#MODEL; without: the scripted stand-in")
    parser.add_argument("--pool-file", type=Path, help="pool file that has the worker, with its key by reference")
    parser.add_argument("--planner-key", help="of a planner by URL, env:NAME or file:PATH")
    parser.add_argument("--planner-price", help="INPUT,OUTPUT in dollars per million tokens")
    parser.add_argument("--planner-cap-usd", type=float, default=1.0, help="dollars of planning per prompt, about")
    parser.add_argument("--structured", choices=get_args(Structured), help="how plans are constrained; default: asked")
    parser.add_argument("--tokens-max", type=int, help="tokens of a plan; default: as serving gives it")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="seconds of one plan")
    parser.add_argument("--calls", type=int, default=4, help="plans asked at once")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json that counts the stand-in's tokens")
    parser.add_argument("--prompts", default=",".join(PROMPTS), help="of full, guided")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--n", type=int, default=60, help="questions")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(words)


async def main(options: argparse.Namespace) -> None:
    """Print a row for each prompt."""
    name = options.planner or "the scripted stand-in"
    print(f"{name}, {options.n} questions of {options.data.name}, seed {options.seed}\n")
    print(HEAD)
    for profile in PROMPTS:
        if profile in options.prompts.split(","):
            print(row(profile, figures(await episodes_of(options, profile))), flush=True)


if __name__ == "__main__":
    asyncio.run(main(arguments(sys.argv[1:])))
