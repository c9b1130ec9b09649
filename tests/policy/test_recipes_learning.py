"""The learning demo's picture and table: pure, from figures to text."""

from __future__ import annotations

import json
import time
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.simulated import learning_rounds
from policy.environments.arena import ArenaEnvironment
from policy.evaluate.plot import kind_of, rounds
from policy.recipes import traffic
from policy.recipes.learning import NO_TORCH, SIMULATOR, main, parser, train_words
from policy.recipes.operator import JobBars, LearningRound
from policy.recipes.questions import Questions
from policy.recipes.report import FILES, LearningReport
from policy.recipes.traffic import Answer, PolicyScore, StageBar, Tally


def score(accuracy: float, usd: float = 0.2) -> PolicyScore:
    return PolicyScore(100, accuracy, accuracy - 0.05, accuracy + 0.05, usd)


@pytest.fixture
def report() -> LearningReport:
    told = [
        LearningRound(0, "conductor@1", "–", score(0.2)),
        LearningRound(
            1, "conductor@1", "refused", score(0.2), score(0.19), 400, 60.0, refusal="worse_than_live: it is"
        ),
        LearningRound(2, "conductor@2", "done", score(0.4), score(0.3), 400, 70.0, 0.2),
    ]
    baselines = {
        "fixed:a": score(0.25, 0.1),
        "fixed:b": score(0.3, 0.3),
        "fixed:c": score(0.3, 0.2),
        "rule": score(0.22),
        "oracle": score(0.97, 0.4),
    }
    made = LearningReport(
        {"seed": "0"}, SIMULATOR, told, baselines, {"sent": 9, "failed": 0, "retried": 2, "fallbacks": 1}
    )
    made.rollback = {"from": "conductor@2", "to": "conductor@1", "seconds": 0.04}
    return made


def test_the_best_fixed_worker_alone_is_drawn_and_of_equals_the_cheaper(report: LearningReport) -> None:
    assert list(report.shown()) == ["fixed:c", "rule", "oracle"]


def test_the_page_tells_every_round_every_baseline_and_what_was_refused(report: LearningReport) -> None:
    page = report.page()
    for words in ("cold start", "round 2", "conductor@2", "40.0%", "fixed:b", "worse_than_live", "Gain: +0.200"):
        assert words in page
    assert "Requests: 9, failed: 0, tried again: 2, planned by the fallback: 1." in page
    assert "Rolled back from conductor@2 to conductor@1 in 0.04 s" in page


def test_the_report_is_written_as_json_page_and_picture(report: LearningReport, tmp_path: Path) -> None:
    report.write(tmp_path / "made")
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == sorted(FILES)
    body = json.loads((tmp_path / "made" / "report.json").read_text())
    assert body["gain"] == pytest.approx(0.2)
    assert [told["job"] for told in body["rounds"]] == ["–", "refused", "done"]
    assert body["baselines"]["oracle"]["accuracy"] == 0.97


def test_the_picture_is_svg_with_a_point_for_every_round_in_both_panels(report: LearningReport) -> None:
    curve = [told.held_out for told in report.rounds]
    drawn = rounds(curve, report.shown(), "a <title>", ["refused", "done"])
    root = ElementTree.fromstring(drawn)  # noqa: S314 (our own text)
    circles = [each for each in root.iter() if each.tag.endswith("circle")]
    assert len(circles) == 2 * len(curve)
    heights = [float(each.attrib["cy"]) for each in circles[: len(curve)]]
    assert heights[0] == heights[1] > heights[2]  # up is better
    texts = [each.text for each in root.iter() if each.tag.endswith("text")]
    assert {"a <title>", "cold", "refused", "oracle", "fixed:c"} <= set(texts)
    assert texts.count("done") == 0


def test_names_at_the_right_never_cover_each_other() -> None:
    close = {f"fixed:{name}": score(0.2) for name in "abcdef"}
    root = ElementTree.fromstring(rounds([score(0.2)], close, "t"))  # noqa: S314 (our own text)
    named = [float(e.attrib["y"]) for e in root.iter() if e.tag.endswith("text") and str(e.text).startswith("fixed:")]
    assert len(named) == 6
    assert all(abs(a - b) >= 15 for index, a in enumerate(named) for b in named[:index])


@pytest.mark.parametrize(("name", "kind"), [("oracle", "oracle"), ("fixed:a", "fixed"), ("rule", "router")])
def test_kinds_of_baselines(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def round_of(number: int, accuracy: float) -> learning_rounds.Round:
    here = learning_rounds.Score(accuracy, 0.1 * number, 1.5)
    return learning_rounds.Round(number, here, None if number == 1 else here, None, None, {}, 10.0 * number)


def test_rounds_are_told_as_medians_over_the_seeds_with_their_range() -> None:
    curves = [[round_of(number, accuracy + number / 10) for number in range(3)] for accuracy in (0.1, 0.2, 0.4)]
    base = {
        "fixed:a": learning_rounds.Score(0.2, 0.1, 1.0),
        "fixed:b": learning_rounds.Score(0.3, 0.2, 1.0),
        "oracle": learning_rounds.Score(0.9, 0.3, 2.0),
    }
    told = learning_rounds.table(curves, base).splitlines()
    assert told[2] == "| 0 | 20.0% (10.0%–40.0%) | 20.0% | 0.000 | – | 0 |"
    assert told[3].startswith("| 1 | 30.0% (20.0%–50.0%) |  | 0.100 ")
    assert [line.split("|")[1].strip() for line in told[5:]] == ["oracle", "fixed:b", "fixed:a"]
    drawn = learning_rounds.drawn(curves, base)
    assert "medians of 3 seeds" in drawn
    assert "fixed:b" in drawn
    assert "fixed:a" not in drawn


def test_traffic_is_counted_by_outcome_and_version() -> None:
    tally = Tally()
    tally.add(Answer("q", 200, 1.0), "conductor@1", graded=True)
    tally.add(Answer("q", 503, 0.0), "", graded=True)
    tally.add(Answer("q", 200, 1.0, fallback="conductor_slow"), "conductor@2", graded=False)
    assert (tally.sent, tally.failed, tally.fallbacks, tally.graded) == (3, 1, 1, 1)
    assert tally.versions == {"conductor@1": 1, "": 1, "conductor@2": 1}


def test_no_two_kinds_of_traffic_share_a_question_and_a_client_tells_its_grader_the_answer() -> None:
    questions = Questions(ArenaEnvironment(staff="untold"), 0)
    ten, twenty = questions.graded("train", 20, 10), questions.graded("train", 20, 20)
    assert not {one.question.text for one in ten} & {one.question.text for one in twenty}
    for one in ten:
        assert one.graded == {"grader": "exact", "reference": one.reference}
        assert one.question.grade(f"Answer: {one.reference}") == 1.0


def test_an_untold_pool_says_nothing_of_what_its_models_are_good_at() -> None:
    (prompt,) = Questions(ArenaEnvironment(staff="untold"), 0).prompts("train", 1, 0)
    models = [spec for spec in prompt.pool if spec.kind == "openai"]
    assert len(models) == 8
    assert all(spec.tags == () and spec.description == models[0].description for spec in models)
    assert {spec.tags for spec in prompt.pool if spec.kind != "openai"} == {("majority",), ("planner",)}


def test_without_torch_it_says_how_to_install_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--python", "/bin/false"]) == 2
    assert capsys.readouterr().err.strip() == NO_TORCH


def test_the_loop_at_its_defaults_loosens_nothing() -> None:
    words = train_words(parser().parse_args(["--defaults", "--seed", "3"]))
    assert words == ["--set", "seed=3", "--gate", "--env arena"]
    assert "margin=0.08" in train_words(parser().parse_args([]))[-1]


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_redrawn_on_a_terminal_and_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 10.0, 10.0, 10.0, 10.05, 20.0, 20.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    bar = StageBar("train", screen := Terminal())
    bar.at(0.25, "step 1/4")
    bar.at(0.26, "too soon to be redrawn")
    bar.end("4 steps")
    first, last = screen.getvalue().lstrip("\r").split("\r")
    assert first.split() == ["train", "█" * 6 + "░" * 18, "step", "1/4", "30", "s", "left"]
    assert last.split() == ["train", "█" * 24, "4", "steps", "20", "s"]
    assert last.endswith("\n")


def test_a_bar_is_a_line_now_and_then_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 1.0, 9.0, 9.0, 9.0, 12.0, 12.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    bar = StageBar("gate", log := StringIO())
    bar.at(0.1, "within five seconds nothing is said")
    bar.at(0.9, "16/17")
    bar.end()
    assert [line.split()[-3:] for line in log.getvalue().splitlines()] == [["1", "s", "left"], ["█" * 24, "12", "s"]]


def test_a_jobs_stages_are_read_off_its_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "LINE_S", 0.0)
    bars = JobBars()
    for line in (
        "09:52:08 wrote rows.parquet: 470 rows to train on, 116 to validate",
        "09:52:19 433 plans of 397 requests; left out: 37 greedy",
        "09:52:51 step 1/4 reward 0.265 loss 0.4212 update 29.2",
        "09:54:28 jobs/1/candidate: arena@4, 397 rollouts",
        "09:54:30 planning logged prompts anew: 116/116",
        "09:54:39 undecided   plan_validity                    0.974 of 114 plans, 95 % from 0.925 to 0.991",
        "09:54:50 [8/16] fixed:quill: right 0.233, $0.017 per 1,000",
        "09:54:55 injection set: 29/58",
        "09:54:58 planning logged prompts anew: 1/116",
    ):
        bars.line(line)
    bars.end()
    shown = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert [words[0] for words in shown if "░" in words[1] or "█" in words[1]].count("train") == 3
    assert any(words[1:3] == ["undecided", "plan_validity"] for words in shown)
    gate = [words[1].count("█") for words in shown if words[0] == "gate"]
    assert gate == sorted(gate)
    assert gate[-1] == 24
