"""Check, then escalate: the expectation of a chain, and where a checker's errors use up the gain."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.recorded.checked import Tasks, by_checker, chain, curve, drawn, read, table, write_rows

RIGHT = np.array([[1.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
TASKS = Tasks(
    ("a", "b"), RIGHT, np.full((4, 2), 0.1), np.array([[1.0, 1], [1, 0], [0, 1], [0, 0]]), np.full((4, 2), 0.01)
)


def test_a_chain_ships_what_is_accepted_and_pays_for_the_rest() -> None:
    outcome, usd = chain(TASKS, (0, 1), TASKS.accepts("recorded"), TASKS.check_usd)
    assert outcome.tolist() == [1, 0, 0, 0]
    assert usd == pytest.approx([0.11, 0.11, 0.21, 0.21])
    outcome, usd = chain(TASKS, (0, 1), TASKS.accepts("ideal"), TASKS.checks_usd("ideal, free"))
    assert outcome.tolist() == [1, 1, 1, 0]
    assert usd == pytest.approx([0.1, 0.2, 0.1, 0.2])


def test_a_checker_that_errs_has_its_expectation() -> None:
    outcome, _ = chain(TASKS, (0, 1), TASKS.erring(0.25, 0.5), TASKS.check_usd)
    assert outcome == pytest.approx([1.0, 0.75, 0.5, 0.0])
    assert curve(TASKS, "a>b", "both").points[0][1] == pytest.approx(0.25)
    assert "<svg" in drawn(TASKS, ["a>b"])


def test_tasks_are_read_from_a_recording_with_checks(tmp_path: Path) -> None:
    rows = []
    for number in range(8):
        runs = {
            name: {"output": f"{name} {number}", "correct": number % 2 == at, "output_tokens": 1, "cost_usd": 0.1 + at}
            for at, name in enumerate("ab")
        }
        checks = {"a": {"valid": number % 2 == 0, "cost_usd": 0.01}} if number < 6 else {}
        rows.append(
            {"id": f"{number}", "question": f"q {number}", "input_tokens": 0, "workers": runs, "checks": checks}
        )
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = read(path, ("a", "b"))
    assert tasks.right.shape == (6, 2)
    assert tasks.valid[:, 0].tolist() == tasks.right[:, 0].tolist()
    assert tasks.check_usd[:, 1].tolist() == [0.0] * 6
    assert "| check: ideal |" in table(tasks, 2)
    assert "a>b, recorded: " in by_checker(tasks, "a>b")
    write_rows(path, ("a", "b"), tmp_path / "rows.jsonl")
    assert (tmp_path / "rows.jsonl").read_text() == "".join(path.read_text().splitlines(keepends=True)[:6])
