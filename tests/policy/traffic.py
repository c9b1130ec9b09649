"""Logged requests over a small recording, and candidates that plan by the kind of task."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.core.loop.plan import Plan, Step
from gateway.core.pool.workers import PoolFile
from gateway.service.loop.state import Planner, Situation
from policy.engines.directory import ConductorDirectory
from policy.environments.replay import ReplayEnvironment
from policy.evaluate import contest
from policy.gate import run
from policy.gate.traffic import requests as heldout
from policy.gate.traffic.requests import HeldOut, HeldOutRequest
from policy.statistics.baselines import OneRoundPlanner, by_name
from tests.policy.broken_policies import reworded_manifest
from tests.policy.dataset_rows import T0
from tests.policy.environments import SUMS, WORDS, lines
from tests.tiny_model import write_tiny_model

HALF = 12  # questions of each kind
# by candidate and kind of task: the workers in order, of which the last one answers
LAST: dict[str, dict[str, tuple[str, ...]]] = {
    "live": {SUMS: ("cheap",), WORDS: ("mid",)},
    "better": {SUMS: ("dear",), WORDS: ("mid",)},
    "worse": {SUMS: ("cheap",), WORDS: ("cheap",)},
    "dearer": {SUMS: ("dear", "cheap"), WORDS: ("dear", "mid")},
    "collapsed": {SUMS: ("mid",), WORDS: ("mid",)},
}


def request_of(row: Mapping[str, Any], index: int, **changes: Any) -> HeldOutRequest:
    filled: dict[str, Any] = {
        "id": row["id"],
        "created_at": T0 + timedelta(minutes=index),
        "key_id": "key1",
        "pool_name": "default",
        "kind": row["domain"],
        "group": row["id"],
        "messages": ({"role": "user", "content": row["question"]},),
        "params": {},
        "pool": (),
        "quality": None,
        "grader": "exact@1",
        "reference": row["gold"],
    }
    return HeldOutRequest(**(filled | changes))


def write_requests(path: Path, requests: list[HeldOutRequest]) -> Path:
    found = HeldOut(bound_from=T0, bound_keys=(), requests=tuple(requests), left_out={"tools": 2})
    heldout.write(path, found)
    return path


def questions(n: int = HALF) -> list[HeldOutRequest]:
    """The recording's questions in an order in which kinds take turns."""
    every = lines(n)
    turns = [row for pair in zip(every[:n], every[n:], strict=True) for row in pair]
    return [request_of(row, index) for index, row in enumerate(turns)]


def write_pool(path: Path, env: ReplayEnvironment) -> Path:
    specs = env.prompts("train", 1, 0)[0].pool
    pool = PoolFile(workers=specs, pools={"default": tuple(spec.name for spec in specs)})
    path.write_text(yaml.safe_dump(json.loads(pool.model_dump_json(exclude_none=True))))
    return path


class QuietEngine:
    """An engine that decodes nothing."""

    calls_max, plan_ms = 4, None


def planner(name: str) -> Planner:
    def choose(situation: Situation) -> Plan:
        named = LAST[name].get(situation.task_type or WORDS, ("mid",))
        return Plan(tuple(Step(spec.handle, None) for spec in by_name(situation, named)))

    return OneRoundPlanner(name, choose)


def directories(place: Path) -> dict[str, Path]:
    """Policy directories whose weights are noise, as training on traffic leaves them."""
    made = {}
    for seed, name in enumerate(LAST):
        path = write_tiny_model(place / name, seed=seed)
        made[name] = reworded_manifest(path, name=name, config={"env": "logged"})
    return made


def policies(directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The same, without an engine: each plans as its name says."""
    made = directories(directory)

    @asynccontextmanager
    async def opened(*_: Any) -> AsyncIterator[QuietEngine]:
        yield QuietEngine()

    for module in (contest, run):
        monkeypatch.setattr(module, "open_engine", opened)
    monkeypatch.setattr(ConductorDirectory, "planner", lambda self, *_: planner(self.manifest.name))
    return made
