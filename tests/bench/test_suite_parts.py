"""Parts of the suite at their smallest, with whole gateways; the programs beside them are not installed here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.suite import page, run
from bench.suite.parts import gateways, plans, training
from bench.suite.sizes import TINY, Size
from policy.recipes.stack import temporary_directory

pytestmark = pytest.mark.long


def measured(measure: Callable[[Path, Size], dict[str, Any]]) -> dict[str, Any]:
    with temporary_directory() as directory:
        return measure(directory, TINY)


@pytest.mark.timeout(280)
def test_baton_is_measured_beside_its_worker() -> None:
    raw = measured(lambda directory, size: gateways.measure(directory, size, only=()))
    figures = gateways.figures(raw)
    own = figures["medians"][gateways.BATON]
    assert set(own) == {gateways.ONE, gateways.MANY, gateways.STREAM, gateways.CROWD}
    assert all(cell["refused"] == 0 < cell["asked"] for cell in own.values()), raw
    assert all(cell["cpu_us"] > 0 for cell in own.values())
    assert page.of_gateways(figures)


@pytest.mark.timeout(280)
def test_plans_take_at_least_as_long_as_their_slowest_step_and_the_merge() -> None:
    figures = plans.figures(measured(lambda directory, size: plans.measure(directory, size, only=())))
    own = figures["medians"][gateways.BATON][plans.PLANS]
    assert own["refused"] == 0 < own["asked"]
    assert own["p50_ms"] > 0
    assert figures["fallbacks"] == 0
    first = figures["dispatch"]
    assert first["whole"]["first_ms"] >= first["whole"]["plan_ms"] > first["tokens"] * first["token_ms"] * 0.9
    assert first["decoded"]["first_ms"] < first["decoded"]["reply_ms"]
    assert "read while it is decoded" in "\n".join(page.of_plans(figures))


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "name", ["overload", "keys", "workers", "rollouts", "console", "memory", "streams", "processes"]
)
def test_a_part_of_baton_alone_fills_its_section(name: str) -> None:
    part = run.PARTS[name]
    figures = part.figures(measured(part.measure))
    assert page.SECTIONS[name][1](figures)
    for cells in figures.get("medians", {}).values():
        assert all(cell["refused"] == 0 < cell["asked"] for cell in cells.values()), figures
    if name == "streams":
        assert figures["open"] == TINY.streams
    if name == "rollouts":
        assert figures["counts"]["many"] > figures["counts"]["few"] > 900
    if name == "keys":
        assert figures["counts"]["many"] == TINY.keys


def test_environments_are_measured_without_a_model() -> None:
    raw = measured(lambda directory, size: training.measure(directory, size, only=()))
    assert {(row["environment"], row["steps"]) for row in raw["rows"]} == {
        *(("arena", 1), ("arena", 3)),
        *(("replay", 1), ("replay", 3)),
    }
    assert all(0 < row["right"] <= 1 and row["cpu_us"] > 0 for row in raw["rows"]), raw
    assert page.of_training(training.figures(raw))


@pytest.mark.train
@pytest.mark.timeout(280)
def test_the_steps_of_our_trainer_have_shares() -> None:
    pytest.importorskip("torch")
    raw = measured(lambda directory, size: training.measure(directory, size, only=("small",)))
    shares = training.figures(raw)["engines"]["small"]
    assert all(0 < shares[name] < 1 for name in ("decoding", "environment"))
    assert shares["per_s"] > 0
