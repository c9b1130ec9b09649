"""What goes wrong in the middle of training, or before it: a full disk, a directory that is no base, another base."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.engines.policies import write_adapter
from policy.__main__ import main
from policy.start.pretrained.seal import seal
from tests.policy.test_engines import no_template, reseal_files, wrong_hash
from tests.small_disk import FULL, no_file_over
from tests.tiny_model import write_tiny_llama, write_tiny_model

pytestmark = pytest.mark.train
torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "policy" / "shipped" / "arena-3"
SETTINGS = {"steps": 3, "prompts": 2, "samples": 4, "observed": 0, "candidates": 20, "checkpoint_steps": 1, "lr": 1e-3}


def command(init: Path, out: Path, *more: str) -> list[str]:
    settings = [f"--set={name}={value}" for name, value in SETTINGS.items()]
    return ["train", "--env", "arena", "--init", str(init), "--out", str(out), *settings, *more]


def spawned(words: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "policy", *words], cwd=ROOT, stderr=subprocess.DEVNULL)


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_a_disk_that_is_full_in_the_middle_of_a_checkpoint_leaves_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    assert main(command(SHIPPED, whole)) == 0
    running, saved = spawned(command(SHIPPED, out)), tmp_path / "out.work" / "checkpoint"
    while not saved.is_file():
        assert running.poll() is None
        time.sleep(0.01)
    running.kill()
    running.wait()
    before = saved.read_bytes()
    with no_file_over(len(before) // 2):
        assert main(command(SHIPPED, out, "--resume")) == 1
    said = last_line(capsys)
    assert said.startswith(f"{saved}: cannot be written ({FULL}); free some space and run again with --resume")
    assert saved.read_bytes() == before
    assert not out.exists()
    assert main(command(SHIPPED, out, "--resume")) == 0
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.parametrize("merge", [True, False])
def test_a_disk_that_is_full_as_the_result_is_written_leaves_no_part_of_it(
    merge: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All weights, of which the checkpoint has but the adapter; and an adapter, after a checkpoint that was written."""
    out, lora = tmp_path / "out", ["--set=lora_rank=2", "--set=lora_merge=true"]
    words = command(SHIPPED, out, *lora[: 2 if merge else 1])
    if merge:
        with no_file_over(2_000_000):
            assert main(words) == 1
    else:
        assert main(words) == 0
        shutil.rmtree(out)
        with no_file_over(20_000):
            assert main([*words, "--resume"]) == 1
    said = last_line(capsys)
    assert f"cannot be written ({FULL}); " in said
    assert "run again with --resume" in said
    assert [path.name for path in tmp_path.iterdir()] == ["out.work"]
    assert main([*words, "--resume"]) == 0
    assert (out / "manifest.json").is_file()


def test_metrics_that_cannot_be_written_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with no_file_over(100):
        assert main(command(SHIPPED, tmp_path / "out")) == 1
    said = last_line(capsys)
    assert said.startswith(f"{tmp_path / 'out.work' / 'metrics.jsonl'}: cannot be written ({FULL}); free some space")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fault", ["no template", "wrong hash", "another base"])
def test_training_does_not_begin_with_a_bad_directory(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    complaint = {"no template": "no usable chat template", "wrong hash": "does not match its sha256"}
    if fault == "another base":
        tiny = write_tiny_model(tmp_path / "tiny")
        init = write_adapter(tiny, tmp_path / "adapter", 1)
        write_tiny_model(tiny, seed=1)
    else:
        init = write_tiny_llama(tmp_path / "base")
        names = seal(init).manifest.sha256
        if fault == "no template":
            no_template(init)
            reseal_files(init, names)
        else:
            wrong_hash(init)
    assert main(command(init, tmp_path / "out")) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert complaint.get(fault, "an adapter of tiny") in said[0]
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "out.work").iterdir())


def test_a_manifest_is_written_last(tmp_path: Path) -> None:
    assert main(command(SHIPPED, tmp_path / "out", "--set=steps=1")) == 0
    directory = tmp_path / "out"
    manifest = directory / "manifest.json"
    newest = max(directory.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert newest == manifest
    assert set(json.loads(manifest.read_text())["sha256"]) < {path.name for path in directory.iterdir()}
