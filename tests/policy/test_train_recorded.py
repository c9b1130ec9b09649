"""`train --env replay` without weights to begin with: taught by search, then GRPO, then a place on the dial."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.core.loop.prompt import DIAL, QUALITY_MAX
from policy.__main__ import main
from policy.serve.manifest import read_complete
from tests.policy.environments import PRICES, answer, lines

pytestmark = pytest.mark.train
pytest.importorskip("torch", reason="needs the train extra")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "prices.json").write_text(json.dumps(PRICES))
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines(150)))
    return ["--env", "replay", "--data", str(tmp_path / "r.jsonl"), "--prices", str(tmp_path / "prices.json")]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    from policy.start.recorded import start

    monkeypatch.setattr(start, "EPISODES_MIN", 2_500)
    monkeypatch.setattr(start, "EPISODES_MAX", 2_500)


@pytest.mark.timeout(300)
def test_a_file_of_recorded_answers_is_all_it_takes(files: list[str], tmp_path: Path, short: None) -> None:
    """In these recordings the best single worker is right on three of four questions, and programs on all."""
    out = tmp_path / "conductor"
    small = ["--set", "steps=2", "--set", "prompts=4", "--set", "samples=4"]
    assert main(["train", *files, *small, "--out", str(out)]) == 0
    manifest = read_complete(out).manifest
    assert manifest.prompt_version.startswith("dial-")
    assert manifest.quality is not None
    assert 0 <= manifest.quality <= QUALITY_MAX
    report = tmp_path / "report.json"
    assert main(["evaluate", *files, "--policy", str(out), "--quality", "9", "--out", str(report)]) == 0
    found = json.loads(report.read_text())
    mine, best = found["policies"][str(out)], found["policies"][found["best_single"]]
    assert mine["parse_rate"] == 1.0
    assert mine["accuracy"] > best["accuracy"] + 0.1


def test_a_start_that_was_made_is_not_made_again(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("policy.start.recorded.start.EPISODES_MIN", 100)
    monkeypatch.setattr("policy.start.recorded.start.EPISODES_MAX", 100)
    small = ["--set", "steps=1", "--set", "prompts=2", "--set", "samples=2", "--work", str(tmp_path / "work")]
    small += ["--set", "dial_questions=10"]
    assert main(["train", *files, *small, "--out", str(tmp_path / "one")]) == 0
    assert "teaching" in capsys.readouterr().err
    assert main(["train", *files, *small, "--resume", "--out", str(tmp_path / "two")]) == 0
    assert "teaching" not in capsys.readouterr().err
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()


def test_a_place_of_the_dial_goes_on_meaning_the_same_price(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained again, from its own directory, it is paid by the dial that it was taught with."""
    monkeypatch.setattr("policy.start.recorded.start.EPISODES_MIN", 100)
    monkeypatch.setattr("policy.start.recorded.start.EPISODES_MAX", 100)
    small = ["--set", "steps=1", "--set", "prompts=2", "--set", "samples=2", "--set", "usd_per_1k_max=0.01"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(["train", *files, *small, "--out", str(one)]) == 0
    assert main(["train", *files, *small, "--profile", "recorded", "--init", str(one), "--out", str(two)]) == 0
    dials = [read_complete(path).manifest.config["settings"]["dial"] for path in (one, two)]
    assert dials[0] == dials[1] == sorted(dials[0], reverse=True)
    assert tuple(dials[0]) != DIAL
    spoiled = json.loads((one / "manifest.json").read_text())
    spoiled["config"]["settings"]["dial"] = [1.0, 2.0]
    (one / "manifest.json").write_text(json.dumps(spoiled))
    capsys.readouterr()
    assert main(["train", *files, *small, "--init", str(one), "--out", str(tmp_path / "three")]) == 2
    told = capsys.readouterr().err
    assert "manifest.json: settings.dial" in told
    assert told.count("\n") == 1


def test_a_worker_without_a_price_is_one_line(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prices.json").write_text(json.dumps({name: PRICES[name] for name in ("cheap", "mid")}))
    assert main(["train", *files, "--out", str(tmp_path / "conductor")]) == 2
    told = capsys.readouterr().err
    assert "no price of `dear`" in told
    assert told.count("\n") == 1


def test_questions_that_all_get_right_teach_nothing(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{**row, "workers": {name: answer(row["gold"], True) for name in ("cheap", "mid")}} for row in lines(20)]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["train", *files, "--out", str(tmp_path / "conductor")]) == 2
    assert "every worker is right on every training question" in capsys.readouterr().err
    assert not (tmp_path / "conductor").exists()
