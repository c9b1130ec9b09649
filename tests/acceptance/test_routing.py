"""`make demo-routing`, small: real workers, a real gateway, an outcome after each reply, and the verdict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]


def demo(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "policy.recipes.routing", "--seconds", "10", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize("world", [(), ("--cheap-never-right",), ("--cheap-s", "0.02", "--dear-s", "0.06")])
def test_the_right_worker_gets_each_kind_of_question_within_two_hundred_outcomes(world: tuple[str, ...]) -> None:
    done = demo("--requests", "200", *world)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "It learnt: of the last 60 requests" in done.stdout


def test_too_few_requests_are_no_proof() -> None:
    done = demo("--requests", "20", "--seconds", "1")
    assert done.returncode == 1
    assert "It cannot be told: 20 answers" in done.stdout
