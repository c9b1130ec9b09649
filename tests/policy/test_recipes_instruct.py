"""The instruct demo's parts: the jobs that it submits by default, and its wait for grades."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from policy.gate.checks import Thresholds
from policy.recipes import instruct, operator, smol
from policy.recipes.engines import EngineProcess
from policy.recipes.instruct import InstructLoop, Site, main, parser, shortage
from policy.recipes.operator import Operator
from policy.recipes.questions import RecordedQuestions
from policy.recipes.report import LearningReport
from policy.recipes.stack import Gateway, RecipeFailed
from policy.recipes.traffic import Tally
from policy.train.settings import settings_of
from tests.policy.environments import PRICES, SUMS, line, lines, recorded

SERVED = Gateway("http://127.0.0.1:1/v1", "bt_data_x", "http://127.0.0.1:2", "bt_admin_x", "postgresql:///x", 0)


def options_of(folder: Path, *words: str) -> argparse.Namespace:
    (folder / "recorded.jsonl").write_text("\n".join(map(json.dumps, lines(30))))
    (folder / "prices.json").write_text(json.dumps(PRICES))
    files = ["--base", str(folder), "--data", str(folder / "recorded.jsonl"), "--prices", str(folder / "prices.json")]
    return parser().parse_args([*files, "--out", str(folder / "out"), *words])


def loop_of(options: argparse.Namespace, folder: Path) -> InstructLoop:
    traffic: Any = argparse.Namespace(tally=Tally())
    return InstructLoop(options, Site(SERVED, folder, folder / "pool.yaml"), traffic, LearningReport({}, ""))


def sets(words: list[str]) -> list[str]:
    return [value for flag, value in pairwise(words) if flag == "--set"]


def test_the_lessons_and_the_practice_train_an_adapter_on_pools_of_these_workers(tmp_path: Path) -> None:
    jobs = dict(loop_of(options_of(tmp_path), tmp_path)._replayed())
    taught = settings_of("taught", sets(jobs["lessons from a search"]))
    practised = settings_of("small", sets(jobs["GRPO on recordings"]))
    for each in (taught, practised):
        assert each.lora_rank == 16
        assert each.redraw_handles
        assert each.experience_share == 1.0
        assert each.k_of_n == (3, 3), "the recording has three workers"
    recipe = settings_of("taught", list(smol.TAUGHT))
    wanted = (recipe.steps, recipe.lr, recipe.prompts)
    assert (taught.steps, taught.lr, taught.prompts) == wanted, "fewer steps teach no choice (docs/results.md)"
    assert practised.quality == (0, 9), "the whole dial"


def test_what_the_command_sets_is_last(tmp_path: Path) -> None:
    given = ["--sft", "steps=1", "--grpo", "samples=2", "--logged", "lora_rank=4", "--seed", "7"]
    loop = loop_of(options_of(tmp_path, *given), tmp_path)
    jobs = dict(loop._replayed())
    assert settings_of("taught", sets(jobs["lessons from a search"])).steps == 1
    assert settings_of("small", sets(jobs["GRPO on recordings"])).samples == 2
    logged = settings_of("logged", sets(loop._logged()))
    assert (logged.lora_rank, logged.seed) == (4, 7)


def test_the_gates_of_all_rounds_plan_on_the_engine_that_was_asked_for(tmp_path: Path) -> None:
    loop = loop_of(options_of(tmp_path, "--gate-engine", "torch"), tmp_path)
    gates = [words[words.index("--gate") + 1] for words in (*dict(loop._replayed()).values(), loop._logged())]
    assert [gate.count("--engine torch") for gate in gates] == [1, 1, 1]
    assert "--engine" not in loop_of(options_of(tmp_path), tmp_path)._gate()


def test_a_question_whose_gold_answer_fits_in_no_metadata_is_not_asked(tmp_path: Path) -> None:
    """One request of 13 of a recording was refused with 400 (`metadata`), and the demo counted it as failed."""
    rows = [line(i, SUMS, {"cheap": "1"}, "1" * (513 if i % 2 else 512)) for i in range(10, 70)]
    questions = RecordedQuestions(recorded(tmp_path / "long.jsonl", rows), 0)
    graded = questions.graded("train", 1000, 1)
    assert len(graded) > 10
    assert {len(each.reference) for each in graded} == {512}
    assert [each.question.id for each in questions.graded("train", 5, 1)] == [each.question.id for each in graded[:5]]


def test_options_of_the_users_own_come_last_on_vllms_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU has no adapters in float32, which is what the recipe starts vLLM with."""
    started: list[list[str]] = []

    def start(server: EngineProcess) -> float:
        started.append(server._vllm()[0])
        return 0.0

    monkeypatch.setattr(EngineProcess, "start", start)
    monkeypatch.setattr("policy.recipes.engines.VLLM", Path(__file__))
    with instruct.engine(options_of(tmp_path, "--vllm", "--dtype bfloat16 --no-enforce-eager"), tmp_path) as (url, _):
        assert url.endswith("/v1#conductor")
    assert started[0][-3:] == ["--dtype", "bfloat16", "--no-enforce-eager"]
    assert "float32" in started[0][:-3]


def parsed(*words: str) -> argparse.Namespace:
    return parser().parse_args(["--base", "b", "--data", "d", "--prices", "p", *words])


def test_by_default_the_last_round_has_enough_to_learn_and_to_be_judged_by() -> None:
    options = parsed()
    assert shortage(options) == ""
    held_out = options.rollouts * options.held_out_share
    assert held_out >= Thresholds().questions_min
    explored = (options.rollouts - held_out) * float(instruct.SETTINGS["BATON_EXPLORE_SHARE"])
    assert explored >= settings_of("logged", instruct.LOGGED).requests_min


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rollouts", "200"], "about 105 of them train and 70 are held out"),
        (["--held-out-share", "0.2"], "80 are held out, where round 3 needs 200"),
        (["--rollouts", "60"], r"21 are held out, where round 3 needs 200 .* and 100 "),
        (["--gate", "mood=1"], "no such threshold"),
        (["--logged", "speed=1"], "a setting of docs/training.md"),
    ],
)
def test_what_the_last_round_cannot_do_is_said_before_the_first(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    assert main(["--base", "b", "--data", "d", "--prices", "p", *words]) == 1
    assert re.search(said, capsys.readouterr().err)


def test_a_small_run_lets_its_bounds_go() -> None:
    small = ["--rollouts", "60", "--held-out-share", "0.4", "--gate-n", "20", "--logged", "requests_min=24"]
    assert shortage(parsed(*small)) == ""


def test_the_gate_of_the_last_round_holds_out_that_share(tmp_path: Path) -> None:
    words = loop_of(options_of(tmp_path, "--held-out-share", "0.3"), tmp_path)._logged()
    gate = shlex.split(words[words.index("--gate") + 1])
    assert gate[gate.index("--held-out-share") + 1] == "0.3"


class SlowGradings:
    """One more request is judged each time that one looks; none after `last`."""

    def __init__(self, last: int) -> None:
        self._ended, self._last = 0, last

    def ended(self) -> int:
        self._ended = min(self._last, self._ended + 1)
        return self._ended


def operator_of(gradings: Any, folder: Path) -> Operator:
    traffic: Any = argparse.Namespace(tally=Tally(graded=5))
    questions: Any = None
    return Operator(SERVED, folder, traffic, questions, gradings, ())


async def test_grades_that_go_on_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "GRADED_S", 0.5)  # five looks of 0.2 s each take longer than that together
    await operator_of(SlowGradings(5), tmp_path).wait_for_grades()


async def test_grades_that_stop_end_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "GRADED_S", 0.5)
    with pytest.raises(RecipeFailed, match=r"2 of 5 requests are graded, none more in 0\.5 s"):
        await operator_of(SlowGradings(2), tmp_path).wait_for_grades()
