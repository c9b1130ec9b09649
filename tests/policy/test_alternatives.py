"""What else a plan might have named, recomputed with the weights that planned it, against plans that were sampled."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.admin.rollouts import put_recomputed
from gateway.core.log.rollout import RoundRecord
from gateway.core.loop.plan import PlanLimits, decision_mask, plan_schema, schema_hash
from gateway.errors import ConfigError
from gateway.service.ports.request import ConductorCall, ConductorChunk, Sampling
from policy.dataset.refusals import RowRefused
from policy.dataset.rules import SAMPLING_OFF
from policy.engines.alternatives import named_workers, probabilities, shares
from policy.engines.choice import EngineChoice
from policy.engines.directory import read_conductors
from policy.engines.opening import open_engine
from policy.engines.port import PlanEngine, sampled
from policy.evaluate.entrants import SHIPPED

HANDLES = ("atlas", "atlas-mini", "quill", "forge")  # one begins like another
LIMITS = PlanLimits(HANDLES, 2)
PROMPT = [{"role": "user", "content": "atlas: \nquill: \nforge:\natlas-mini:\n[user]\n> Write a poem"}]  # it wavers
UNUSUAL = 0.05  # of plans spell a name in unusual tokens
SAMPLES = 300
DIRECTORY = read_conductors([SHIPPED])[SHIPPED]


@pytest.fixture
async def engine() -> AsyncIterator[PlanEngine]:
    async with open_engine(DIRECTORY, EngineChoice("embedded", 1)) as opened:
        yield opened


def call(seed: int, **sampling: Any) -> ConductorCall:
    values = {"temperature": 1.0, "tokens_max": 160, **sampling}
    return ConductorCall(PROMPT, plan_schema(LIMITS), Sampling(seed=seed, **values), 60.0)


async def planned_by(engine: PlanEngine, seed: int = 1) -> RoundRecord:
    """A plan as the gateway logs it."""
    asked = call(seed)
    ids: list[int] = []
    texts: list[str] = []
    logprobs: list[float] = []
    prompt: tuple[int, ...] = ()
    async for item in engine.decode(asked):
        if isinstance(item, ConductorChunk):
            ids += item.token_ids
            texts += item.tokens
            logprobs += item.logprobs
        else:
            prompt = item.prompt_token_ids
    return RoundRecord(
        1,
        "conductor",
        prompt_token_ids=list(prompt),
        plan_token_ids=ids,
        plan_logprobs=logprobs,
        decision_mask=decision_mask(texts),
        plan=json.loads("".join(texts).removesuffix("<|im_end|>")),
        sampling={name: next(iter(off)) for name, off in SAMPLING_OFF.items()} | asdict(asked.sampling),
        schema_hash=schema_hash(asked.schema),
        allowed=LIMITS.as_json(),
    )


async def test_the_shares_are_those_of_sampled_plans(engine: PlanEngine) -> None:
    first, *_ = await probabilities(engine, DIRECTORY.tokens(), await planned_by(engine))
    assert sum(first.values()) == pytest.approx(1.0)
    plans = [(await sampled(engine, call(seed, tokens_max=24))).text for seed in range(SAMPLES)]
    names = Counter(text.removeprefix('{"steps":[{"worker":"').partition('"')[0] for text in plans)
    assert sum(names[handle] for handle in HANDLES) == SAMPLES
    assert min(first["atlas"], first["quill"]) > 0.2, "the test says nothing if one worker is sure"
    for handle, share in first.items():
        error = sqrt(share * (1 - share) / SAMPLES)
        assert names[handle] / SAMPLES == pytest.approx(share, abs=4 * error + UNUSUAL), handle


async def test_a_plan_s_own_workers_are_at_their_places(engine: PlanEngine) -> None:
    planned = await planned_by(engine)
    places = list(named_workers(DIRECTORY.tokens(), planned.plan_token_ids, HANDLES))
    assert [place.handle for place in places] == [step["worker"] for step in (planned.plan or {})["steps"]]
    for place in places:
        begin, spelt = len(place.before), place.spellings[place.handle]
        assert list(place.before) == planned.plan_token_ids[:begin]
        assert list(spelt) == planned.plan_token_ids[begin : begin + len(spelt)]


def test_a_name_that_begins_another_has_what_that_one_leaves() -> None:
    logs = {name: math.log(share) for name, share in {"a": 0.8, "a-b": 0.5, "a-b-c": 0.1, "d": 0.1}.items()}
    found = shares(logs)
    assert found == pytest.approx({"a": 0.3 / 0.9, "a-b": 0.4 / 0.9, "a-b-c": 0.1 / 0.9, "d": 0.1 / 0.9})
    with pytest.raises(RowRefused):
        shares({"a": -math.inf})


async def test_other_weights_are_refused(engine: PlanEngine) -> None:
    planned = await planned_by(engine)
    pairs = zip(planned.plan_logprobs, planned.decision_mask, strict=True)
    wrong = [logprob - 1 if decides else logprob for logprob, decides in pairs]
    with pytest.raises(ConfigError, match="not the weights that planned"):
        await probabilities(engine, DIRECTORY.tokens(), replace(planned, plan_logprobs=wrong))
    with pytest.raises(RowRefused, match="no_tokens"):
        await probabilities(engine, DIRECTORY.tokens(), replace(planned, plan_token_ids=[]))


async def test_the_command_reads_a_rollout_and_the_explanation_takes_it(engine: PlanEngine) -> None:
    planned = await planned_by(engine)
    routed = {"round": 2, "planner": "rule"}
    tree = {"id": "r", "depth": 0, "rounds": [asdict(planned), routed], "children": []}
    done = run(json.dumps(tree))
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["rollout_id"], row["round"]) for row in rows] == [("r", 1)]
    chosen = (planned.plan or {})["steps"][0]["worker"]
    bounds = [{"handle": h, "chosen": h == chosen, "probability": {"at_least": 0, "at_most": 1}} for h in HANDLES]
    why = {"decisions": [{"rollout_id": "r", "round": 1, "steps": [{"alternatives": bounds}]}]}
    put_recomputed(why, rows)
    assert sum(one["probability"] for one in bounds) == pytest.approx(1.0, abs=1e-5)
    assert {one["source"] for one in bounds} == {"recomputed"}
    put_recomputed(why, [{"rollout_id": "r", "round": 1, "unknown": "no_tokens"}])
    assert why["decisions"][0]["not_recomputed"] == "no_tokens"


def test_what_is_no_rollout_is_one_line() -> None:
    done = run("nothing")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "baton rollouts show" in done.stderr


def run(text: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "policy", "alternatives", "--weights", str(SHIPPED), "--engine", "embedded"]
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, cwd=root)
