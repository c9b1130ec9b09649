"""What every engine is given: rows checked, advantages computed, the order known before."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the train extra is not installed")

from gateway.errors import BadRequest
from policy.train.engines.cli import settings_of
from policy.train.engines.rows import EngineRow, EngineSettings, order, prepare, read_rows, trained_tokens
from policy.train.step.grpo import LossSettings
from policy.train.step.rows import MissingLogprobs
from tests.policy.engine_toys import write_export

pytestmark = pytest.mark.train
SMALL = EngineSettings(steps=3, rows_per_step=4, rows_per_device=2)


def row(name: str, reward: float, group: str = "q", **changes: Any) -> EngineRow:
    made = EngineRow(name, group, [9, 8], [5, 6, 2], [-0.5, -0.1, 0.0], reward, [True, False, True])
    return replace(made, **changes)


def test_advantages_are_of_the_group_and_rows_without_one_are_left_out() -> None:
    rows = [row("a", 1.0), row("b", 0.0), row("c", 1.0, "dead"), row("d", 1.0, "dead")]
    assert [(one.row.name, one.advantage) for one in prepare(rows, SMALL)] == [("a", 0.5), ("b", -0.5)]


def test_traffic_with_one_rollout_a_question_is_compared_over_the_batch() -> None:
    rows = [row(str(index), float(index == 0), str(index)) for index in range(4)]
    with pytest.raises(BadRequest, match=r'none of 4 rows teaches anything.*baseline "batch"'):
        prepare(rows, SMALL)
    told = prepare(rows, replace(SMALL, baseline="batch"))
    assert [one.advantage for one in told] == [0.75, -0.25, -0.25, -0.25]


def test_tokens_that_the_grammar_forced_do_not_train() -> None:
    assert trained_tokens(row("a", 1.0), decisions_only=False) == (True, True, False)
    assert trained_tokens(row("a", 1.0), decisions_only=True) == (True, False, False)


@pytest.mark.parametrize("logprobs", [None, [], [-0.5, -0.1], [-0.5, -0.1, float("nan")], [-0.5, -0.1, 1.0]])
def test_rows_without_behaviour_logprobs_are_refused_by_name(logprobs: Any) -> None:
    with pytest.raises(MissingLogprobs, match=r"1 of 2 rows \(bad\)"):
        prepare([row("a", 1.0), row("bad", 0.0, logprobs=logprobs)], SMALL)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"decisions": [True]}, "row bad: plan tokens, decision mask and grammar masks differ"),
        ({"prompt_ids": []}, "row bad: .*no prompt"),
        ({"allowed": [b"", b"", b""]}, "for some rows only"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        prepare([row("a", 1.0), row("bad", 0.0, **changes)], SMALL)


def test_the_order_is_passes_over_all_rows_and_depends_on_the_seed_alone() -> None:
    found = order(5, SMALL)
    assert len(found) == 12
    assert [sorted(found[:5]), sorted(found[5:10])] == [list(range(5))] * 2
    assert found == order(5, SMALL)
    assert found != order(5, replace(SMALL, seed=2))


def test_an_export_is_read_back_without_its_validation_side(tmp_path: Path) -> None:
    rows = [row(f"r{index}/0", 1.0) for index in range(6)]
    found = read_rows(write_export(rows, tmp_path / "rows.parquet"), SMALL)
    assert [one.name for one in found] == ["r0/0", "r1/0", "r2/0", "r3/0", "r5/0"]
    assert list(found[0].logprobs or ()) == [-0.5, -0.1, 0.0]
    assert (found[0].group, list(found[0].decisions)) == ("q", [True, False, True])


@pytest.mark.parametrize("content", [None, b"", b"no parquet"])
def test_a_file_that_is_no_export_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "rows.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadRequest, match="not an export in verl's shape"):
        read_rows(path, SMALL)


def test_settings_come_from_a_file_and_from_pairs_over_it(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("steps: 9\nloss: {clip_low: 0.1}\n")
    found = settings_of(file, ["learning_rate=1e-4", "loss.clip_high=0.3", "baseline=batch"])
    assert found == EngineSettings(
        steps=9, learning_rate=1e-4, baseline="batch", loss=LossSettings(clip_low=0.1, clip_high=0.3)
    )


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ("stepps=3", "no such setting: stepps"),
        ("loss.clip=3", "no such setting: loss.clip"),
        ("steps=many", "setting steps"),
        ("steps", "write KEY=VALUE"),
        ("loss=3", "loss"),
        ("rows_per_step=9", "multiple of rows_per_device"),
        ("steps=0", "at least 1"),
        ("loss.staleness_max=0.04", "staleness_max is our own trainer's"),
        ("baseline=median", "setting baseline"),
    ],
)
def test_wrong_settings_are_named(pair: str, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        settings_of(None, [pair])


def test_the_docs_list_every_setting_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    told = dict(re.findall(r"^\| `([a-z_.0-9]+)` \| `([^`]*)` \|", page, re.MULTILINE))
    defaults = asdict(EngineSettings())
    loss = {f"loss.{name}": value for name, value in defaults.pop("loss").items()}
    del loss["loss.staleness_max"], loss["loss.weight_max"]  # our own trainer's
    reward = {f"reward.{name}": value for name, value in defaults.pop("reward").items() if name != "dial"}
    assert told == {name: str(value) for name, value in (defaults | loss | reward).items()}
