"""How likely each worker was at each step of logged plans, with the weights that planned: `baton explain --weights`.

The log holds the log-prob of what was sampled and not of what was not. Here the engine that has the weights scores, for
every worker that the mask allowed, the tokens of its name where the plan names one, after the same tokens, under the
same mask and temperature. A name that begins another one has what the longer one leaves. The shares of one step add up
to 1; a name that tokens can spell in several ways counts by its usual spelling.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gateway.core.log.explain import loops
from gateway.core.log.rollout import RoundRecord
from gateway.errors import ConfigError
from policy.dataset.refusals import RowRefused
from policy.dataset.rules import grammar_of, token_fault
from policy.engines.choice import EngineChoice, add_engine
from policy.engines.directory import ConductorDirectory, read_conductors
from policy.engines.opening import open_engine, places_of_bases
from policy.engines.port import LoggedPlan, PlanEngine
from policy.serve.tokens import Tokens

WORKER = re.compile(rb'\{"worker":"((?:[^"\\]|\\.)*)"')  # of a step: a quote within a text has a backslash before it
OFF_MAX = 0.05  # nats a decision that other weights' figures differ by, at least; the same weights' do by rounding


@dataclass(frozen=True, slots=True)
class NamedWorker:
    """Where a plan names a worker: its tokens before the name, and those of each name that might stand there."""

    handle: str
    before: Sequence[int]
    spellings: Mapping[str, Sequence[int]]


def named_workers(tokens: Tokens, plan_ids: Sequence[int], handles: Sequence[str]) -> Iterator[NamedWorker]:
    """Each place of a plan that names a worker, in order."""
    pieces = [tokens.token_bytes(token) for token in plan_ids]
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    text = b"".join(pieces)
    for match in WORKER.finditer(text):
        begin, end = match.span(1)
        first = max(at for at, place in enumerate(ends) if place <= begin)
        torn = text[ends[first] : begin].decode()
        handle = json.loads(b'"' + text[begin:end] + b'"')
        spelt = {name: tokens.encode_text(torn + json.dumps(name, ensure_ascii=False)[1:-1]) for name in handles}
        yield NamedWorker(handle, plan_ids[:first], spelt)


def shares(sums: Mapping[str, float]) -> dict[str, float]:
    """The probability of each name, out of the log-prob of its tokens: those of a name that begins another one are of
    both. Adds up to 1. Raises RowRefused where none is possible."""
    reached = {name: math.exp(each) for name, each in sums.items()}
    alone: dict[str, float] = {}
    for name in sorted(reached, key=len, reverse=True):
        longer = sum(alone[other] for other in alone if other.startswith(name))
        alone[name] = max(0.0, reached[name] - longer)
    total = sum(alone.values())
    if not total:
        raise RowRefused("other_schema")
    return {name: alone[name] / total for name in sums}


async def probabilities(engine: PlanEngine, tokens: Tokens, planned: RoundRecord) -> list[dict[str, float]]:
    """For each step of a logged plan, how likely each allowed worker was. Raises ConfigError where other weights
    planned it, RowRefused where the log lacks what it takes."""
    if fault := token_fault(planned):
        raise RowRefused(fault)
    allowed, schema = grammar_of(planned)
    temperature, top_p = planned.sampling["temperature"], planned.sampling.get("top_p", 1.0)

    def call(ids: Sequence[int], decisions: Sequence[bool]) -> LoggedPlan:
        return LoggedPlan(planned.prompt_token_ids, ids, decisions, schema, temperature, top_p)

    [scored] = await engine.score([call(planned.plan_token_ids, planned.decision_mask)])
    _check(scored, planned)
    steps = []
    for place in named_workers(tokens, planned.plan_token_ids, allowed.handles):
        begin = len(place.before)
        spelt = place.spellings.values()
        plans = [call([*place.before, *ids], [False] * begin + [True] * len(ids)) for ids in spelt]
        sums = [sum(logprobs[begin:]) for logprobs in await engine.score(plans)]
        steps.append(shares(dict(zip(place.spellings, sums, strict=True))))
    return steps


def _check(scored: Sequence[float], planned: RoundRecord) -> None:
    """Raises ConfigError where the figures of the log are another policy's."""
    pairs = zip(scored, planned.plan_logprobs, planned.decision_mask, strict=True)
    off = [abs(ours - logged) for ours, logged, decides in pairs if decides]
    mean = sum(off) / max(1, len(off))
    if not mean <= OFF_MAX:
        raise ConfigError(
            f"round {planned.round}: these are not the weights that planned it: their log-probs are {mean:.2g} nats a "
            f"decision off the log's; give the directory of {planned.policy_version or 'its version'}"
        )


async def recomputed(
    tree: Mapping[str, Any], directory: ConductorDirectory, choice: EngineChoice
) -> list[dict[str, Any]]:
    """For each round of a rollout's tree that a conductor planned: the probabilities of its steps, or why they are
    `unknown`. Raises ConfigError, VersionRefused."""
    rows = []
    tokens = directory.tokens()
    async with open_engine(directory, choice) as engine:
        for loop in loops(tree):
            for raw in loop["rounds"]:
                planned = _round_of(raw)
                if planned.planner == "conductor" and planned.plan is not None:
                    rows.append(
                        {"rollout_id": loop["id"], "round": planned.round} | await _row(engine, tokens, planned)
                    )
    return rows


async def _row(engine: PlanEngine, tokens: Tokens, planned: RoundRecord) -> dict[str, Any]:
    try:
        return {"steps": await probabilities(engine, tokens, planned)}
    except RowRefused as error:
        return {"unknown": error.reason}


def _round_of(raw: Mapping[str, Any]) -> RoundRecord:
    return RoundRecord(**{each.name: raw[each.name] for each in fields(RoundRecord) if raw.get(each.name) is not None})


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments; the rollout comes as JSON on standard input."""
    parser.add_argument("--weights", type=Path, required=True, metavar="DIR", help="the policy directory that planned")
    add_engine(parser.add_argument_group("engine"))


def run(options: argparse.Namespace) -> int:
    """Print the rows as JSON. Raises ConfigError, VersionRefused."""
    try:
        tree = json.load(sys.stdin)
    except ValueError:
        raise ConfigError("standard input is no rollout: give what `baton rollouts show ID --json` prints") from None
    directory = read_conductors([options.weights], places_of_bases())[options.weights]
    choice = EngineChoice(options.engine, key=options.engine_key)
    sys.stdout.write(json.dumps(asyncio.run(recomputed(tree, directory, choice))) + "\n")
    return 0
