"""What `bench.recorded.planner` counts, on a small recording."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.recorded.planner import arguments, episodes_of, figures, main, row
from policy.environments.base import Episode
from tests.policy.environments import PRICES, lines


async def run(tmp_path: Path, profile: Any, *more: str) -> list[Episode]:
    data, prices = tmp_path / "r.jsonl", tmp_path / "prices.json"
    data.write_text("".join(json.dumps(each) + "\n" for each in lines()))
    prices.write_text(json.dumps(PRICES))
    words = ["--data", str(data), "--prices", str(prices), "--n", "6", *more]
    return await episodes_of(arguments(words), profile)


async def test_both_prompts_plan_the_same_questions(tmp_path: Path) -> None:
    old, new = await run(tmp_path, "full"), await run(tmp_path, "guided")
    assert [each.prompt_id for each in old] == [each.prompt_id for each in new]
    before, after = figures(old), figures(new)
    assert (before["valid"][0], after["valid"][0]) == (1.0, 1.0)
    assert (before["rounds"], before["steps"], after["plans_with_own_tasks"]) == (2.0, 1.0, 0.0)
    assert before["workers_usd_per_1k"] == after["workers_usd_per_1k"] > 0
    assert 0 < before["planner_usd_per_1k"] != after["planner_usd_per_1k"]
    assert row("guided", after).startswith("| guided | 1.000 (")


async def test_the_cap_ends_a_run(tmp_path: Path) -> None:
    assert len(await run(tmp_path, "guided", "--calls", "1", "--planner-cap-usd", "0.00000001")) == 1


async def test_it_prints_a_row_for_each_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await run(tmp_path, "full")
    words = ["--data", str(tmp_path / "r.jsonl"), "--prices", str(tmp_path / "prices.json"), "--n", "2"]
    await main(arguments(words))
    printed = capsys.readouterr().out
    assert "the scripted stand-in, 2 questions of r.jsonl, seed 0" in printed
    rows = [line.split(" | ")[0] for line in printed.splitlines() if line.startswith("| ")]
    assert rows == ["| prompt", "| full", "| guided"]
