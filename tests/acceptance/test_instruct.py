"""`make demo-instruct` with a tiny random base and made-up recordings: every part of the loop does its own.

The gate's thresholds are let go, for so small a base learns nothing; what is tested is base → record → lessons → GRPO →
gate → canary → live → a round from the log, with no failed request.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from policy.start.pretrained.seal import seal
from tests.jobs_kit import LET_GO
from tests.policy.environments import PRICES, lines
from tests.tiny_model import write_tiny_llama

pytestmark = [pytest.mark.train, pytest.mark.timeout(920)]
pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
RUN_S = 900.0


def test_a_base_goes_round_the_loop_three_times(tmp_path: Path) -> None:
    base = write_tiny_llama(tmp_path / "base")
    seal(base)
    data, prices = tmp_path / "recorded.jsonl", tmp_path / "prices.json"
    data.write_text("\n".join(map(json.dumps, lines(60))))
    prices.write_text(json.dumps(PRICES))
    words = ["--base", str(base), "--data", str(data), "--prices", str(prices), "--engine", "embedded"]
    words += ["--record", "40", "--rollouts", "48", "--canary", "8", "--n", "8", "--gate-n", "8", "--per-s", "1"]
    words += ["--experience", "10"]
    small = ["steps=1", "threads=1", "lora_rank=4"]
    words += [w for one in (*small, "prompts=4", "lessons=16") for w in ("--sft", one)]
    words += [w for one in (*small, "prompts=2", "samples=2", "plan_tokens=96") for w in ("--grpo", one)]
    words += [w for one in (*small, "requests_min=1") for w in ("--logged", one)]
    words += [w for name, value in LET_GO.items() for w in ("--gate", f"{name}={value}")]
    done = subprocess.run(
        [sys.executable, "-m", "policy.recipes.instruct", *words, "--out", str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [each["name"] for each in report["rounds"]] == [
        "base", "lessons from a search", "GRPO on recordings", "GRPO on the log",
    ]  # fmt: skip
    assert [each["job"] for each in report["rounds"]] == ["–", "done", "done", "done"]
    assert len({each["version"] for each in report["rounds"]}) == 4
    assert report["requests"]["failed"] == 0
    assert report["facts"]["record"]
    assert set(report["baselines"]) == {"fixed:cheap", "fixed:mid", "fixed:dear", "rule"}
