"""Off-policy estimates against the truth: a bandit whose every reward is known, then recorded answers."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.recorded.ope_replay import cases, compare, halves, main, markdown, read_world
from policy.reward import RewardSettings
from policy.simulators.recordings import BadRecording
from policy.statistics.ope import (
    LoggedSample,
    OpeSettings,
    RewardTable,
    effective_sample_size,
    estimate,
    fold_of,
    refusals,
    terms,
)
from policy.statistics.stats import Floats

RECORDED = Path(__file__).resolve().parents[3] / "shared" / "replay" / "zeroeval_dev.jsonl.gz"
QUICK = OpeSettings(resamples=200)


def logged(
    rewards: list[float], weights: list[float], q_logged: float = 0.0, q_new: float = 0.0, prompts: Any = None
) -> LoggedSample:
    with np.errstate(divide="ignore"):
        logs = np.log(np.array(weights))
    n = len(rewards)
    return LoggedSample(np.array(rewards), logs, np.full(n, q_logged), np.full(n, q_new), prompts or range(n))


# ---------------------------------------------------------------- by hand


def test_the_estimators_by_hand() -> None:
    rows = logged([1.0, 0.0, 1.0, 1.0], [2.0, 0.5, 0.0, 20.0], q_logged=0.5, q_new=0.6)
    found = {name: top.sum() / bottom.sum() for name, (top, bottom) in terms(rows, OpeSettings()).items()}
    assert found["ips"] == pytest.approx(22 / 4)
    assert found["ips_clipped"] == pytest.approx(12 / 4)
    assert found["snips"] == pytest.approx(22 / 22.5)
    assert found["dm"] == pytest.approx(0.6)
    assert found["dr"] == pytest.approx(0.6 + (2 - 0.5 + 0 + 10) * 0.5 / 4)
    assert found["switch_dr"] == pytest.approx(0.6 + (2 - 0.5) * 0.5 / 4)
    report = estimate(rows, QUICK)
    assert {name: interval.value for name, interval in report.estimates.items()} == pytest.approx(found)
    assert report.mean_weight.value == pytest.approx(22.5 / 4)
    assert report.weight_max == pytest.approx(20)
    assert report.ess == pytest.approx(22.5**2 / (4 + 0.25 + 400))
    assert report.kl == math.inf
    assert report.behaviour.value == 0.75


def test_effective_sample_size() -> None:
    assert effective_sample_size(np.zeros(7)) == pytest.approx(7)
    assert effective_sample_size(np.full(7, -900.0)) == pytest.approx(7)  # scale does not show: read mean weight too
    assert effective_sample_size(np.log([1.0, 1e-9, 1e-9])) == pytest.approx(1)
    assert effective_sample_size(np.full(3, -math.inf)) == 0.0


def test_the_verdict_names_each_reason() -> None:
    assert refusals(1_000, 1.0, 400, OpeSettings()) == ()
    assert refusals(1_000, 0.85, 200, OpeSettings()) == ()
    for mean in (0.84, 1.16, math.nan):
        (reason,) = refusals(1_000, mean, 400, OpeSettings())
        assert f"mean weight {mean:.3f}" in reason
    (reason,) = refusals(1_000, 1.0, 199, OpeSettings())
    assert "effective sample size 199 of 1000 rows is under 200" in reason
    (reason,) = refusals(9_000, 1.0, 899, OpeSettings())
    assert "under 900" in reason
    assert len(refusals(1_000, 0.5, 1, OpeSettings())) == 2


def test_a_policy_without_support_gets_no_number_and_a_refusal() -> None:
    report = estimate(logged([1.0] * 300, [0.0] * 300), QUICK)
    assert math.isnan(report.estimates["snips"].value)
    assert report.estimates["ips"].value == 0.0
    assert report.ess == 0.0
    assert len(report.refused) == 2


def test_weights_near_nothing_fool_snips_and_ess_but_not_the_verdict() -> None:
    report = estimate(logged([1.0, 0.0] * 300, [1e-9] * 600), QUICK)
    assert report.estimates["snips"].value == pytest.approx(0.5)
    assert report.ess == pytest.approx(600)
    assert "mean weight 0.000" in report.refused[0]


def test_huge_weights_stay_finite() -> None:
    rows = LoggedSample(np.ones(3), np.array([900.0, 0.0, 0.0]), np.zeros(3), np.zeros(3), range(3))
    report = estimate(rows, QUICK)
    assert math.isfinite(report.estimates["ips"].value)
    assert report.ess == pytest.approx(1)
    assert report.refused


@pytest.mark.parametrize(
    ("column", "value", "complaint"),
    [
        ("rewards", np.array([1.0, math.nan]), "`rewards` holds a number"),
        ("weights_log", np.array([0.0, math.nan]), "lacks a behaviour log-prob"),
        ("weights_log", np.array([0.0, math.inf]), "lacks a behaviour log-prob"),
        ("weights_log", np.zeros(3), "`weights_log` has 3 rows where `rewards` has 2"),
        ("q_new", np.array([0.0, math.inf]), "`q_new` holds a number"),
        ("prompts", ["a"], "`prompts` has 1 rows"),
        ("rewards", np.zeros(0), "no logged rows"),
    ],
)
def test_logs_that_cannot_be_used_are_refused(column: str, value: Any, complaint: str) -> None:
    columns: dict[str, Any] = {name: np.zeros(2) for name in ("rewards", "weights_log", "q_logged", "q_new")}
    with pytest.raises(ValueError, match=complaint):
        LoggedSample(**{"prompts": range(2), **columns, column: value})


def test_the_reward_table_backs_off() -> None:
    keys = [(("math", "a"), "math")] * 3 + [(("math", "b"), "math")] * 2 + [(("law", "a"), "law")]
    table = RewardTable(keys, np.array([1.0, 1.0, 0.0, 0.0, 0.0, 1.0]))
    assert table.value((("math", "a"), "math")) == pytest.approx(2 / 3)
    assert table.value((("math", "b"), "math")) == pytest.approx(2 / 5)  # two are too few
    assert table.value((("law", "a"), "law")) == pytest.approx(1 / 2)
    assert table.value(()) == pytest.approx(1 / 2)
    with pytest.raises(ValueError, match="at least one"):
        RewardTable([], np.zeros(0))


def test_folds_keep_a_prompt_together_and_are_even() -> None:
    prompts = [f"p{n % 30}" for n in range(300)]
    fold = fold_of(prompts, 3)
    assert all(len({fold[m] for m in range(n, 300, 30)}) == 1 for n in range(30))
    assert np.bincount(fold).tolist() == [100, 100, 100]
    assert fold_of([], 3).tolist() == []


# ---------------------------------------------------------------- bias and coverage where the truth is known

RATES = np.array([[0.9, 0.2, 0.5, 0.4], [0.1, 0.8, 0.5, 0.4], [0.6, 0.5, 0.3, 0.9]])  # [contexts, actions]
OLD = np.array([[0.4, 0.2, 0.2, 0.2]] * 3)
NEW = np.array([[0.7, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1], [0.2, 0.1, 0.1, 0.6]])
TRUTH = float((NEW * RATES).sum(axis=1).mean())


def bandit(rng: np.random.Generator, model: Floats, rows: int = 800) -> LoggedSample:
    context = rng.integers(3, size=rows)
    action = (rng.random((rows, 1)) < OLD[context].cumsum(axis=1)).argmax(axis=1)
    rewards = (rng.random(rows) < RATES[context, action]).astype(float)
    weights_log = np.log(NEW[context, action] / OLD[context, action])
    return LoggedSample(rewards, weights_log, model[context, action], (model * NEW).sum(axis=1)[context], range(rows))


def trials(model: Floats) -> dict[str, tuple[float, float, float]]:
    """Bias, RMSE and 95 % coverage of each estimator over 200 logs."""
    rng = np.random.default_rng(11)
    reports = [estimate(bandit(rng, model), QUICK, seed=n) for n in range(200)]
    assert all(report.refused == () for report in reports)
    measured = {}
    for name in reports[0].estimates:
        found = [report.estimates[name] for report in reports]
        errors = np.array([interval.value - TRUTH for interval in found])
        held = np.mean([i.low <= TRUTH <= i.high for i in found])
        measured[name] = (float(errors.mean()), float(np.sqrt((errors**2).mean())), float(held))
    return measured


def test_estimates_are_unbiased_and_intervals_cover_with_a_good_model() -> None:
    measured = trials(RATES)
    for name, (bias, rmse, held) in measured.items():
        assert abs(bias) < 0.01, name
        assert rmse < 0.05, name
        assert 0.89 <= held <= 1.0, name
    assert measured["dr"][1] < measured["ips"][1]


def test_doubly_robust_estimates_survive_a_wrong_model_and_the_model_alone_does_not() -> None:
    measured = trials(1 - RATES)
    assert abs(measured["dm"][0]) > 0.3
    assert measured["dm"][2] == 0.0
    for name in ("ips", "snips", "dr", "switch_dr"):
        assert abs(measured[name][0]) < 0.01, name
        assert measured[name][2] >= 0.89, name


# ---------------------------------------------------------------- recorded answers


def record(n: int, **more: Any) -> dict[str, Any]:
    right = {"a": n % 2 == 0, "b": n % 2 == 1, "c": n % 3 == 0}
    workers = {w: {"correct": right[w], "cost_usd": 0.001 * (1 + ord(w) - ord("a"))} for w in right}
    return {"id": f"q{n}", "domain": ("even", "odd")[n % 2], "workers": workers, **more}


def write(path: Path, *records: Any) -> Path:
    lines = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
    data = lines.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_a_world_holds_every_workers_reward(tmp_path: Path) -> None:
    lonely = record(98, workers={"a": {"correct": True, "cost_usd": 0.0}})
    path = write(tmp_path / "r.jsonl.gz", *(record(n) for n in range(40)), lonely)
    settings = RewardSettings(cost_per_usd=100, latency_per_s=0, penalty_max=0.25, format_reward=0.1)
    world = read_world(path, ["b", "a"], settings)
    assert len(world.ids) == 40
    assert world.rewards[0].tolist() == pytest.approx([0.1, 0.9])
    assert world.rewards[1].tolist() == pytest.approx([0.8, 0.1])
    assert world.costs_usd[1].tolist() == [0.002, 0.001]


def test_estimates_find_the_truth_of_recorded_policies(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", *(record(n) for n in range(400)))
    world = read_world(path, ["a", "b", "c"], RewardSettings())
    for case in cases(world, halves(world.ids)):
        for propensities in (case.logged, case.new):
            assert np.allclose(propensities.sum(axis=1), 1)
    lines = compare(world, logs=1_200, repeats=8)
    assert {line.policy for line in lines if line.refused_share == 1} == {"table, never logged"}
    for line in lines:
        if line.policy != "table, never logged" and line.estimator in ("ips", "snips", "dr", "switch_dr"):
            assert abs(line.bias) < 0.05, line
            assert line.rmse < 0.15, line
            assert line.mean_weight == pytest.approx(1, abs=0.1)
    blind = {line.estimator: line for line in lines if line.policy == "table, never logged"}
    assert blind["ips"].bias < -0.5
    assert blind["ips"].coverage == 0
    printed = markdown(lines)
    assert printed.count("\n") == 2 + len(lines)
    assert "| table | " in printed


def test_the_command_prints_a_table_or_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "r.jsonl", *(record(n) for n in range(60)))
    quick = ["--logs", "50", "--repeats", "2"]
    assert main([str(path), "--workers", "a,b", *quick]) == 0
    assert capsys.readouterr().out.startswith("| new policy | truth |")
    for arguments, complaint in (
        ([str(path), "--workers", "a,a"], "two different --workers"),
        ([str(path), "--workers", "a,b", "--logs", "0"], "at least 1"),
        ([str(path), "--workers", "a,zebra"], "too few questions are answered by all of a, zebra"),
        ([str(tmp_path / "absent"), "--workers", "a,b"], "cannot be read"),
    ):
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert complaint in err
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "r.jsonl:1: not JSON"),
        ("[1]", "r.jsonl:1: not an object"),
        ({"id": "x", "domain": "d"}, "r.jsonl:1: needs id, domain and workers"),
        (record(0, workers={"a": {"correct": True}}), "cost_usd"),
        (record(0, workers=3), "needs id"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: Any, complaint: str) -> None:
    with pytest.raises(BadRecording, match=complaint):
        read_world(write(tmp_path / "r.jsonl", line), ["a", "b"], RewardSettings())


def test_a_file_too_long_or_cut_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = write(tmp_path / "r.jsonl.gz", record(0))
    cut.write_bytes(cut.read_bytes()[:-12])
    with pytest.raises(BadRecording, match="cannot be read"):
        read_world(cut, ["a", "b"], RewardSettings())
    monkeypatch.setattr("bench.recorded.ope_replay.QUESTIONS_MAX", 3)
    assert len(read_world(write(tmp_path / "3.jsonl", *map(record, range(3))), ["a", "b"], RewardSettings()).ids) == 3
    with pytest.raises(BadRecording, match=r"4\.jsonl:4: over 3 questions"):
        read_world(write(tmp_path / "4.jsonl", *map(record, range(4))), ["a", "b"], RewardSettings())
    monkeypatch.setattr("bench.recorded.ope_replay.LINE_BYTES_MAX", 50)
    with pytest.raises(BadRecording, match="line over 50 bytes"):
        read_world(write(tmp_path / "r.jsonl", record(0)), ["a", "b"], RewardSettings())


@pytest.mark.skipif(not RECORDED.exists(), reason="the recorded answers are not beside the repository")
def test_estimates_hold_on_recorded_replies_of_real_models() -> None:
    workers = ["gpt-4o-2024-05-13", "gpt-4o-mini-2024-07-18", "claude-3-haiku-20240307", "gemini-1.5-flash"]
    lines = compare(read_world(RECORDED, workers, RewardSettings()), logs=1_200, repeats=6)
    by_name = {(line.policy, line.estimator): line for line in lines}
    for policy in ("a little bolder", "uniform"):
        assert by_name[policy, "dr"].rmse < 0.04
        assert by_name[policy, "dr"].refused_share == 0
    assert by_name["table, never logged", "dr"].refused_share == 1
