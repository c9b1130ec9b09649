"""From a fresh gateway to a gated retraining on its own traffic, at its defaults: how many judged requests it takes.

What `baton train submit` says on the way is printed; docs/jobs.md has it. The workers are the arena's, and so is the
gate; the conductor is the shipped one."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from policy.environments.arena import ArenaEnvironment
from policy.environments.executor import Executor
from policy.recipes.operator import Gradings, Operator
from policy.recipes.questions import Questions
from policy.recipes.stack import Gateway, gateway, program, temporary_directory
from policy.recipes.traffic import Traffic
from policy.simulators.arena.workers import pool_yaml

pytestmark = [pytest.mark.long, pytest.mark.train, pytest.mark.timeout(3020)]
pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "policy" / "shipped" / "arena-3"
CHUNK, JUDGED_MAX = 100, 2_000
SPEED = "20"
SETTINGS = {"BATON_DEFAULT_POLICY": "auto", "BATON_TRAIN_PYTHON": sys.executable}
NOT_TRAINABLE = 1
WAYS: dict[str, tuple[str, list[str]]] = {
    "the conductor plans": ("embedded", []),
    "the rule plans": ("none", ["--init", str(SHIPPED)]),
}


@contextmanager
def stage(directory: Path, conductor: str) -> Iterator[tuple[Gateway, Path]]:
    """A fresh gateway on the arena's workers."""
    with program("arena", directory, "policy.simulators.arena", "serve", "--speed", SPEED) as arena:
        pool = directory / "pool.yaml"
        pool.write_text(pool_yaml(arena.url, profile=conductor != "none"), encoding="utf-8")
        with gateway(directory, conductor=conductor, pool=pool, settings=SETTINGS) as served:
            yield served, directory / "data"


async def climb(served: Gateway, data: Path, init: list[str]) -> dict[str, Any]:
    """Ask and judge until a job lacks nothing, then train and gate. What was said at 0 requests, and every 500."""
    questions = Questions(ArenaEnvironment(executor=Executor(rounds=1)), 5)
    asked, judged, said, gradings = questions.graded("train", JUDGED_MAX, 1), 0, {}, Gradings(served.database_url)
    words = ["train", "submit", "--env", "logged", *init]
    try:
        async with Traffic.open(served, 1) as traffic:
            operator = Operator(served, data, traffic, questions, gradings, ())
            while True:
                status, text = await operator.baton(*words, "--check", good=(0, NOT_TRAINABLE))
                if status == 0 or judged % 500 == 0:
                    said[judged] = text
                if status == 0 or judged >= JUDGED_MAX:
                    break
                await traffic.ask_to_learn(f"{judged} so far", asked[judged : judged + CHUNK])
                await operator.wait_for_grades()
                judged += CHUNK
            assert status == 0, said
            _, submitted = await operator.baton(*words, "--json")
            await operator.baton("train", "status")
            status, job = await operator.follow(str(json.loads(submitted)["id"]))
            return {"judged": judged, "said": said, "status": status, "job": job}
    finally:
        gradings.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_fresh_gateway_reaches_a_gated_retraining(way: str) -> None:
    conductor, init = WAYS[way]
    with temporary_directory() as directory, stage(directory, conductor) as (served, data):
        found = asyncio.run(climb(served, data, init))
        report = json.loads(Path(found["job"]["report"]).read_text())
    checks = [(one["name"], one["verdict"], one["figure"]) for part in report["parts"] for one in part["checks"]]
    lines = [f"\n{way}: {found['judged']} judged requests; the job is {found['job']['state']}: {found['job']['error']}"]
    lines += [f"at {judged}: {text}" for judged, text in found["said"].items()]
    sys.stderr.write("\n".join([*lines, *map(str, checks), ""]))
    assert found["judged"] <= JUDGED_MAX
    assert found["job"]["stage"] in ("gate", "publish", "shadow"), "it was trained, and judged"
    assert report["parts"], "and the gate has measured it"
