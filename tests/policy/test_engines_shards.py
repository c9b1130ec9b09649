"""TRL in two processes that accelerate launches, over gloo: whole weights in each (DDP), or in shards (FSDP2)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the train extra is not installed")
pytest.importorskip("trl", reason="the trl extra is not installed")

from policy.serve.manifest import read_complete  # noqa: E402
from policy.train.engines.rows import EngineSettings, read_rows  # noqa: E402
from policy.train.engines.trl_trainer import train_with_trl  # noqa: E402
from tests.policy.engine_toys import load, logged, write_export  # noqa: E402
from tests.tiny_model import write_tiny_model  # noqa: E402

pytestmark = [pytest.mark.train, pytest.mark.trl, pytest.mark.timeout(600)]
CONFIGS = Path(__file__).parents[2] / "deploy" / "accelerate"
SETTINGS = EngineSettings(
    steps=6, rows_per_step=32, rows_per_device=32, learning_rate=1e-3, baseline="batch", warmup_share=0.0
)
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("shards") / "model", heads=2, heads_kv=1, layers=1)


@pytest.fixture(scope="module")
def data(model_dir: Path) -> Path:
    return write_export(logged(load(model_dir), 80, masked=False), model_dir.with_name("rows.parquet"))


def launched(module: str, data: Path, init: Path, out: Path, environ: Mapping[str, str]) -> tuple[Any, str]:
    """Run the command in two processes; what it prints, and its standard error."""
    given = {"data": data, "init": init, "out": out, "version": "toy@1"}
    settings = {name: getattr(SETTINGS, name) for name in ("steps", "rows_per_step", "learning_rate", "baseline")}
    settings |= {"rows_per_device": 8, "warmup_share": 0.0}
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / "cpu.yaml")),
        *("-m", module, "engines", "trl"),
        *(word for name, value in given.items() for word in (f"--{name}", str(value))),
        *(word for name, value in settings.items() for word in ("--set", f"{name}={value}")),
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    told = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert told.returncode == 0, told.stderr[-2000:]
    return json.loads(told.stdout), told.stderr


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "shards"])
def test_two_processes_take_the_same_steps_as_one(tmp_path: Path, model_dir: Path, data: Path, sharded: bool) -> None:
    module = "tests.policy.fsdp_cpu" if sharded else "policy"
    two, said = launched(module, data, model_dir, tmp_path / "two", FSDP if sharded else {})
    assert two["processes"] == 2
    shards = [line for line in said.splitlines() if line.startswith("shards:")]
    assert shards == (["shards: 15 of 15 parameters"] * 2 if sharded else [])
    one = train_with_trl(read_rows(data, SETTINGS), model_dir, tmp_path / "one", SETTINGS, work=tmp_path / "work")
    assert one is not None
    lines = [json.loads(line) for line in (tmp_path / "two.work" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    for mine, theirs in zip(one.log, steps, strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], abs=1e-4)
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-2)
    assert steps[0]["loss"] == pytest.approx(one.log[0]["loss"], abs=1e-6)
    before, after, other = (load(path).state_dict() for path in (model_dir, tmp_path / "one", tmp_path / "two"))
    for name, weights in after.items():
        assert torch.allclose(weights, other[name], atol=3e-4), name
    assert max(float((after[name] - before[name]).abs().max()) for name in after) > 3e-3
    assert read_complete(tmp_path / "two").manifest.id == "toy@1"
