"""`bench.recorded.replay_serving` from end to end on a small made-up recording: what it prints is what was recorded."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.test_show import ROOT, servable_model

pytestmark = pytest.mark.long

QUESTIONS = 10
RIGHT = {"steady": 10, "uneven": 4}  # of the recorded questions


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="baton-replay-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def recording(place: Path) -> Path:
    lines = []
    for number in range(QUESTIONS):
        workers = {
            name: {"output": f"Answer: {name} {number}", "output_tokens": 10, "correct": number < right}
            for name, right in RIGHT.items()
        }
        question = {"id": f"q{number}", "domain": "made up", "question": f"What is the {number}th thing?"}
        lines.append(json.dumps(question | {"gold": "none", "input_tokens": 100, "workers": workers}))
    (place / "answers.jsonl").write_text("\n".join(lines))
    return place / "answers.jsonl"


def test_every_policy_is_asked_graded_by_the_recording_and_found_in_postgres(place: Path) -> None:
    prices = {name: {"input_usd_per_mtok": 1, "output_usd_per_mtok": 2} for name in RIGHT}
    (place / "prices.json").write_text(json.dumps(prices))
    arguments = ["--data", str(recording(place)), "--prices", str(place / "prices.json"), "--workers", ",".join(RIGHT)]
    arguments += ["--n", "7", "--learn", "3", "--conductor", str(servable_model(place / "model"))]
    done = subprocess.run(
        [sys.executable, "-m", "bench.recorded.replay_serving", *arguments, "--out", str(place / "out.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["policy"]: row for row in json.loads((place / "out.json").read_text())["rows"]}
    assert list(rows) == ["baton/fixed:steady", "baton/fixed:uneven", "baton/rule", "baton/conductor"]
    assert rows["baton/fixed:steady"]["accuracy"] == 1.0
    assert 0.1 < rows["baton/fixed:uneven"]["accuracy"] < 0.6  # 1 to 4 of the 7 drawn
    assert rows["baton/fixed:steady"]["usd_per_1000"] == pytest.approx(1000 * (100 * 1 + 10 * 2) / 1e6)
    assert all(row["errors"] == 0 and row["n"] == 7 for row in rows.values())
    assert "Rollouts of this run: 31 answered with an id, 31 of them in PostgreSQL." in done.stdout
    assert "Every fixed row equals what its recording says." in done.stdout
    assert "untrained for these workers" in done.stdout
