"""Training on real workers behind a gateway's HTTP API: the dollar cap ends the run with what was learnt."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

pytest.importorskip("torch", reason="the train extra is not installed")

from gateway.core.money.amounts import usd_to_nano
from policy.environments.replay import ReplayEnvironment
from policy.serve.manifest import read_complete
from policy.train.run.checkpoint import SPENT
from tests.integration.test_api import Served, served
from tests.policy.environments import PRICES, lines, recorded
from tests.policy.test_environments_live import kit_for

pytestmark = pytest.mark.train

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "policy" / "shipped" / "arena-3"


@pytest.fixture
def replay(tmp_path: Path) -> ReplayEnvironment:
    return recorded(tmp_path / "r.jsonl", lines(12))


@pytest.fixture
async def gateway(replay: ReplayEnvironment, tmp_path: Path) -> AsyncIterator[Served]:
    async with served(kit_for(replay, tmp_path / "r.jsonl")) as running:
        yield running


def files(folder: Path, gateway: Served, replay: ReplayEnvironment) -> list[str]:
    """The arguments that say what is asked of whom."""
    prompts = replay.prompts("train", 12, 0)
    asked = [{"id": one.id, "messages": list(one.messages), "reference": one.reference} for one in prompts]
    (folder / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    (folder / "key").write_text(gateway.data_key + "\n")
    workers = [spec.model_dump(mode="json", exclude_none=True) for spec in prompts[0].pool]
    for worker in workers:
        if worker["name"] in PRICES:
            worker["price"] = PRICES[worker["name"]]
    names = [spec.name for spec in prompts[0].pool]
    (folder / "pool.yaml").write_text(yaml.safe_dump({"workers": workers, "pools": {"default": names}}))
    return ["--url", f"{gateway.url}/v1", "--key-file", str(folder / "key"), "--pool-file", str(folder / "pool.yaml"),
            "--prompts", str(folder / "questions.jsonl")]  # fmt: skip


async def test_the_cap_ends_a_live_run_with_a_checkpoint_and_a_directory(
    gateway: Served, replay: ReplayEnvironment, tmp_path: Path
) -> None:
    out, more = tmp_path / "out", files(tmp_path, gateway, replay)
    arguments = ["-m", "policy", "train", "--env", "live", "--init", str(SHIPPED), "--out", str(out), *more,
                 "--usd-max", "0.06", "--episode-usd-max", "0.05", "--set=steps=500", "--set=prompts=2",
                 "--set=samples=3", "--set=rounds=1"]  # fmt: skip
    running = await asyncio.create_subprocess_exec(sys.executable, *arguments, cwd=ROOT, stderr=asyncio.subprocess.PIPE)
    _, said = await running.communicate()
    assert running.returncode == 0, said.decode()
    assert read_complete(out).manifest.rollouts > 0
    work = tmp_path / "out.work"
    assert (work / "checkpoint").is_file()
    spent = int((work / SPENT).read_text())
    assert usd_to_nano("0.005") < spent <= usd_to_nano("0.06")
    told = [json.loads(text) for text in (work / "metrics.jsonl").read_text().splitlines()]
    assert 0 < len(told) < 500
    assert told[-1]["spent_usd"] == pytest.approx(spent / 1e9)
