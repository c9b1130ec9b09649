"""`bench.recorded.gate_traffic` from end to end: replay workers and a gateway, the log in PostgreSQL, the gates."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.recorded.gate_traffic import CRUX, GPT4O, GSM, HAIKU, MATH, MINI, WORKERS
from tests.acceptance.test_show import ROOT
from tests.policy.environments import ABSENT, RECORDED

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="baton-gate-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def gates(place: Path, data: Path, prices: Path, *more: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "bench.recorded.gate_traffic", "--data", str(data), "--prices", str(prices)]
    done = subprocess.run(
        [*command, "--out", str(place / "out"), *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr[-3000:]


def is_right(name: str, kind: str, number: int) -> bool:
    """Mini is right but on a fifth of one kind, where a vote helps; the others on that kind, and half of the rest."""
    if kind == GSM:
        return name != MINI or number % 5 > 0
    if name in (MINI, GPT4O):
        return True
    return number % 2 == 0 and (name, kind) != (HAIKU, MATH)


def made_up(place: Path, n: int) -> tuple[Path, Path]:
    lines = []
    for number in range(n):
        kind, gold = (GSM, MATH, CRUX)[number % 3], f"thing {number}"
        right = {name: is_right(name, kind, number) for name in WORKERS}
        said = {name: f"Answer: {gold if right[name] else name}" for name in WORKERS}
        workers = {name: {"output": said[name], "output_tokens": 20, "correct": right[name]} for name in WORKERS}
        question = {"id": f"q{number}", "domain": kind, "question": f"What is the {number}th {kind}?", "gold": gold}
        lines.append(json.dumps(question | {"input_tokens": 100, "workers": workers}))
    (place / "answers.jsonl").write_text("\n".join(lines))
    dollars = {GPT4O: 10.0, MINI: 0.2}
    prices = {name: {"input_usd_per_mtok": dollars.get(name, 0.2), "output_usd_per_mtok": 1.0} for name in WORKERS}
    (place / "prices.json").write_text(json.dumps(prices))
    return place / "answers.jsonl", place / "prices.json"


def test_made_up_answers_pass_a_better_candidate_and_refuse_the_others(place: Path) -> None:
    status, said = gates(place, *made_up(place, 360), "--n", "360", "--small-cap", "0.05", "--usd-max", "3")
    assert status == 0, said
    assert "| `better` | stopped | the gate stopped at " in said
    report = json.loads((place / "out" / "better.json").read_text())
    assert report["passed"]
    assert report["scene"]["environment"] == "logged"
    assert report["scene"]["questions"] == 108


@pytest.mark.skipif(not RECORDED.is_dir(), reason=ABSENT)
def test_recorded_answers_of_real_models_do_so_too(place: Path) -> None:
    status, said = gates(place, RECORDED / "zeroeval_dev.jsonl.gz", RECORDED / "prices.json")
    assert status == 0, said
