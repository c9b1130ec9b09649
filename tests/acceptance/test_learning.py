"""`make demo-learning` as it comes, one seed: traffic → outcomes → a real job → gate → canary → live → rollback.

It must gain: what it shows a new user is what is held here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from policy.evaluate.entrants import SHIPPED
from policy.serve.manifest import read_complete

pytestmark = [pytest.mark.train, pytest.mark.timeout(1000)]
pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
RUN_S = 960.0  # of a busy machine; five minutes of a quiet one
ROLLBACK_S_MAX = 5.0  # of a machine that does much else; alone it is a few hundredths


def test_the_demo_as_it_comes_gains_and_goes_live_and_back(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "policy.recipes.learning", "--out", str(tmp_path / "out")],
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
    assert report["gain"] > 0
    assert (report["rollback"]["from"], report["rollback"]["to"]) == (new, old)
    assert report["rollback"]["seconds"] < ROLLBACK_S_MAX
    assert set(report["baselines"]) >= {"rule", "oracle", "fixed:atlas"}
    for command in ("train submit", f"policy canary {new} 25", f"policy promote {new}"):
        assert f"$ baton {command}" in done.stderr
    assert (tmp_path / "out" / "report.svg").read_text().startswith("<svg")
    assert f"| round 1 | {new} |" in (tmp_path / "out" / "report.md").read_text()
