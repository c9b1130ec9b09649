"""`bench.work`: its tasks and workers are what they claim to be, its figures count, and a small run shows all of it."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from random import Random

import pytest

from bench.work.__main__ import main
from bench.work.coding import FAMILIES, coding_task
from bench.work.figures import differences, records, row_of, table
from bench.work.measure import LEARNING, Credit, Judged, Measured
from bench.work.prose import RUBRIC
from bench.work.workers import (
    CRITIC,
    KINDS,
    SKILLS,
    ScriptedWorkers,
    is_right,
    make_tasks,
    reply_of,
    say_the_same,
    seems_right,
)
from gateway.core.loop.compose import SeenStep, step_messages
from gateway.core.loop.replies.agreement import compare
from gateway.core.loop.replies.answers import extract_answer
from gateway.core.loop.replies.judging import judge_messages
from gateway.core.loop.replies.kinds import read_text
from gateway.service.ports.request import CodeLimits
from policy.graders import Tools, grade
from policy.graders.judge import JudgeReference, messages
from tests.waiting import BOUND_S

SHORT, CODE, PROSE = (make_tasks(kind, range(40), 3) for kind in ("short", "code", "prose"))
JAIL = Tools(limits=CodeLimits(wall_s=BOUND_S, cpu_s=int(BOUND_S)))


def test_tasks_and_replies_are_the_same_in_every_process() -> None:
    for kind in KINDS:
        (first,), (again,) = make_tasks(kind, [7], 3), make_tasks(kind, [7], 3)
        assert first.text == again.text
        assert reply_of("cheap", first, 3) == reply_of("cheap", again, 3)
        assert len({task.text for task in make_tasks(kind, range(60), 3)}) == 60


def test_workers_are_right_as_often_as_they_should_be() -> None:
    for worker, (easy, hard) in SKILLS.items():
        tasks = make_tasks("short", range(2000), 1)
        assert abs(sum(is_right(worker, task, 1) for task in tasks) / 2000 - (easy + hard) / 2) < 0.04


def test_replies_are_of_their_kind_and_as_right_as_meant() -> None:
    for tasks, kind in ((SHORT, "short"), (CODE, "code"), (PROSE, "prose")):
        for task in tasks:
            for worker in SKILLS:
                reply = reply_of(worker, task, 3)
                assert read_text(reply).kind == kind
                if kind != "code":
                    assert seems_right(task, reply) == is_right(worker, task, 3)


def test_short_replies_agree_where_their_figures_do_and_never_else() -> None:
    """The cascade asks the third worker by this alone: what it loses, two workers that make the same slip lose."""
    for task in make_tasks("short", range(16, 40), 0):
        replies = [reply_of(worker, task, 0) for worker in SKILLS]
        for one, other in combinations(replies, 2):
            values = [Fraction(extract_answer(text).strip("*. ").replace(",", "")) for text in (one, other)]
            wanted = "same" if values[0] == values[1] else "different"
            assert compare(read_text(one), read_text(other)) == wanted, (one, other)


@pytest.mark.parametrize("number", range(len(FAMILIES)))
async def test_the_graders_jail_finds_the_bugs(number: int) -> None:
    task = coding_task(number, 3)
    values = []
    for right, wanted in ((True, 2), (False, 2)):
        replies: dict[str, str] = {}
        for draw in range(60):
            text = task.reply(right, Random(draw))
            replies.setdefault(text.split("```")[1], text)
        assert len(replies) == wanted
        values += [(await grade(task.grader, task.reference, text, tools=JAIL)).value for text in replies.values()]
    assert values[:2] == [1.0, 1.0]
    assert 0.0 in values[2:]


def test_a_critic_without_errors_says_the_truth_in_every_form() -> None:
    critic = ScriptedWorkers([*SHORT, *CODE, *PROSE], 3, 0.0)
    for task in PROSE[:10]:
        said = [reply_of(worker, task, 3) for worker in ("cheap", "best")]
        seen = [SeenStep(at, "ember", None, text) for at, text in enumerate(said)]
        question = [{"role": "user", "content": task.text}]
        alone = judge_messages(step_messages(question, None, seen[:1]), RUBRIC, 1)
        asked = messages(JudgeReference(task.text, None, RUBRIC), said[0])
        for prompt in (alone, asked):
            assert _verdict(critic, prompt) == ("right" if is_right("cheap", task, 3) else "wrong")
        both = judge_messages(step_messages(question, None, seen), RUBRIC, 2)
        assert _verdict(critic, both) == ("same" if say_the_same(task, *said) else "different")


def test_a_critic_errs_as_often_as_asked() -> None:
    tasks = make_tasks("prose", range(400), 3)
    critic = ScriptedWorkers(tasks, 3, 0.25)
    wrong = sum(
        _verdict(critic, messages(JudgeReference(task.text, None, RUBRIC), reply_of("cheap", task, 3)))
        != ("right" if is_right("cheap", task, 3) else "wrong")
        for task in tasks
    )
    assert 70 < wrong < 130


def _verdict(critic: ScriptedWorkers, prompt: list[dict[str, str]]) -> str:
    said = critic.say(CRITIC, {"messages": prompt})
    return str(json.loads("".join(said.choices[0]))["verdict"])


# ---------------------------------------------------------------- figures


def a_measured(arm: str, rights: list[bool], credits: list[Credit], policy: str = "baton/vote") -> Measured:
    requests = [Judged(f"t{at}", right, 1.0, 0.001, 3, 200) for at, right in enumerate(rights)]
    return Measured(arm, "prose", policy, requests, credits)


def test_a_wrong_credit_is_one_that_the_truth_contradicts() -> None:
    credits = [Credit("a", 1.0, True), Credit("a", 0.0, True), Credit("b", 1.0, False), Credit("b", None, False)]
    row = row_of(a_measured("after", [True, True, False, True], credits))
    assert (row.wrong_credits, row.given_credits, row.credits) == (2, 3, 0.75)
    assert (row.right, row.calls, row.wrong_outcomes) == (0.75, 3.0, 1)
    assert row.usd_per_1000 == pytest.approx(1.0)
    assert "| prose | `baton/vote` | after | 75.0% |" in table([row])
    assert "2 of 3 (67%)" in table([row])


def test_the_record_of_a_worker_stands_beside_the_truth() -> None:
    credits = [Credit("a", 0.0, True), Credit("a", None, True), Credit("b", None, False)]
    lines = records([a_measured("before", [True], credits, LEARNING)]).splitlines()
    assert lines[2:] == ["| prose | a | before | 1 of 2 | 0% | 100% |", "| prose | b | before | 0 of 1 | – | 0% |"]


def test_arms_are_compared_on_the_same_tasks() -> None:
    before = a_measured("before", [True, False, False, True], [])
    after = a_measured("after", [True, True, False, True], [])
    assert "| prose | `baton/vote` | +25.0 |" in differences([before, after], "before", "after")


def test_bad_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in ((["--kinds", "poems"], "no kind of work `poems`"), (["--arm", "x=/nowhere"], "NAME=CHECKOUT")):
        with pytest.raises(SystemExit):
            main(words)
        assert said in capsys.readouterr().err


# ---------------------------------------------------------------- a small run


@pytest.mark.long
def test_a_small_run_through_a_real_gateway(tmp_path: Path) -> None:
    assert main(["--n", "4", "--learn", "3", "--judge-errs", "0", "--out", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    rows = {(row["kind"], row["policy"]): row for row in found["rows"]}
    assert all(row["errors"] == 0 and row["wrong_outcomes"] == 0 for row in rows.values())
    for (kind, policy), row in rows.items():
        assert row["n"] == (3 if policy == LEARNING else 4)
        if policy.startswith("baton/fixed:") or kind == "prose":
            assert row["wrong_credits"] == 0, (kind, policy)
    for kind, checker in (("short", "judge"), ("code", "python"), ("prose", "judge")):
        checked = rows[kind, f"baton/checked:cheap>best@{checker}"]
        assert checked["right"] >= rows[kind, "baton/fixed:cheap"]["right"]
        assert rows[kind, "baton/vote"]["calls"] == 3.0
