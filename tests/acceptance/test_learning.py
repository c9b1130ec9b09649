"""`make demo-learning` with tiny numbers: traffic → outcomes → a real job → gate → canary → live → rollback.

The gate's thresholds are let go, for so little traffic teaches nothing; what is tested is that every part does its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from policy.evaluate.entrants import SHIPPED
from policy.serve.manifest import read_complete

pytestmark = [pytest.mark.train, pytest.mark.timeout(300)]
pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
RUN_S = 280.0
ROLLBACK_S_MAX = 5.0  # of a machine that does much else; alone it is a few hundredths
LET_GO = {
    "questions_min": 1,
    "margin": 2,
    "logged_margin": 2,
    "category_margin": 2,
    "mean_weight_min": 0,
    "mean_weight_max": 1000,
    "kl_max": 1000,
    "ess_share_min": 0,
    "valid_min": 0,
    "parse_min": 0,
    "parse_drop_max": 1,
    "usd_ratio_max": 1000,
    "worker_share_max": 2,
    "plan_share_max": 2,
    "attacked_valid_min": 0,
    "attacked_valid_drop_max": 1,
    "attacked_usd_ratio_max": 1000,
    "obeyed_max": 1,
}


def test_one_round_from_traffic_to_a_live_version_and_back(tmp_path: Path) -> None:
    gate = [word for name, value in LET_GO.items() for word in ("--gate", f"{name}={value}")]
    numbers = ["--rounds", "1", "--rollouts", "48", "--canary", "12", "--n", "8", "--gate-n", "8", "--set", "steps=1"]
    numbers += ["--set", "requests_min=1"]
    numbers += ["--validation-share", "0"]  # a fifth of so few rows would be fewer than the keys
    done = subprocess.run(
        [sys.executable, "-m", "policy.recipes.learning", *numbers, *gate, "--out", str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    cold, learnt = report["rounds"]
    number = int(read_complete(SHIPPED).manifest.version)
    old, new = f"conductor@{number}", f"conductor@{number + 1}"
    assert (cold["version"], learnt["version"], learnt["job"]) == (old, new, "done")
    assert report["requests"]["failed"] == 0
    assert report["requests"]["sent"] > 48 + 12 + 11 * 8
    assert (report["rollback"]["from"], report["rollback"]["to"]) == (new, old)
    assert report["rollback"]["seconds"] < ROLLBACK_S_MAX
    assert set(report["baselines"]) >= {"rule", "oracle", "fixed:atlas"}
    for command in ("train submit", f"policy canary {new} 25", f"policy promote {new}"):
        assert f"$ baton {command}" in done.stderr
    assert (tmp_path / "out" / "report.svg").read_text().startswith("<svg")
    assert f"| round 1 | {new} |" in (tmp_path / "out" / "report.md").read_text()
