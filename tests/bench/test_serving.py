"""The pure parts of the benches: intervals, percentiles, tables, grading of replays, the script's stream."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench import show
from bench.database import STEPS_WITH_TOKENS, TOGETHER, TOKENS, page_queries
from bench.overhead import DIRECT, Samples, figures
from bench.recorded.replay_serving import Recorded, drawn, load
from bench.scripted_conductor import chunk_of, pieces
from bench.serving import default_policies, markdown, percentile, summed_up
from bench.show import short
from bench.simulated.arena_serving import names, questions
from policy.recipes.stack import Gateway, clean_environment
from policy.recipes.traffic import Answer, Question, bootstrap, read_answer
from policy.simulators.arena.families.tasks import make_task


def test_the_bootstrap_is_seeded_and_covers_the_mean() -> None:
    values = [1.0] * 30 + [0.0] * 70
    low, high = bootstrap(values)
    assert low < 0.3 < high
    assert 0.19 <= low <= 0.23  # the normal approximation says 0.210 and 0.390
    assert 0.37 <= high <= 0.41
    assert bootstrap(values) == (low, high)
    assert bootstrap([1.0] * 5) == (1.0, 1.0)
    with pytest.raises(ValueError, match="no values"):
        bootstrap([])


def test_more_questions_make_a_narrower_interval() -> None:
    few, many = bootstrap([0.0, 1.0] * 10), bootstrap([0.0, 1.0] * 500)
    assert many[1] - many[0] < (few[1] - few[0]) / 3


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 6), (0.95, 10), (1.0, 10)])
def test_percentiles_are_values_that_occurred(share: float, value: float) -> None:
    assert percentile([float(n) for n in range(10, 0, -1)], share) == value
    assert percentile([], share) == 0.0


def reply(status: int = 200, **headers: str) -> httpx.Response:
    body = {"choices": [{"message": {"content": "Answer: 4"}}]} if status == 200 else {"error": {"code": "x"}}
    return httpx.Response(status, json=body, headers={f"x-baton-{k.replace('_', '-')}": v for k, v in headers.items()})


def test_an_answer_is_read_from_reply_and_headers() -> None:
    question = Question("q", "2 + 2?", lambda text: float(text == "Answer: 4"))
    told = reply(rollout_id="r1", cost_usd="0.0000012", steps="3", overhead_ms="4.5", fallback="conductor_down")
    answer = read_answer(question, told, 12.0)
    assert (answer.right, answer.cost_usd, answer.steps) == (1.0, Decimal("0.0000012"), 3)
    assert (answer.overhead_ms, answer.wall_ms, answer.fallback, answer.capped) == (4.5, 12.0, "conductor_down", None)


def test_a_failed_request_is_wrong_and_costs_what_it_cost() -> None:
    answer = read_answer(Question("q", "?", lambda text: 1.0), reply(502, cost_usd="0.5"), 1.0)
    assert (answer.status, answer.right, answer.cost_usd) == (502, 0.0, Decimal("0.5"))


def test_a_row_sums_up_its_answers() -> None:
    answers = [
        Answer("a", 200, 1.0, "x", "r1", Decimal("0.001"), 1, 2.0, 10.0),
        Answer("b", 200, 0.0, "x", "r2", Decimal("0.003"), 3, 4.0, 30.0, "conductor_down", "depth"),
        Answer("c", 0, 0.0),
        Answer("d", 200, 1.0, "x", "r4", Decimal(0), 2, 6.0, 20.0),
    ]
    calls: dict[str, dict[str, Any]] = {
        "r1": {"calls": 1, "explored": False},
        "r2": {"calls": 5, "explored": True},
        "r4": {"calls": 3, "explored": False},
    }
    row = summed_up("baton/x", answers, calls)
    assert (row.n, row.accuracy, row.errors) == (4, 0.5, 1)
    assert row.usd_per_1000 == pytest.approx(1.0)
    assert (row.steps_mean, row.calls_mean) == (2.0, 3.0)
    assert (row.fallback_share, row.capped_share, row.explored_share) == (0.25, 0.25, 0.25)
    assert (row.overhead_ms_p50, row.wall_ms_p50) == (4.0, 20.0)
    assert row.accuracy_low <= row.accuracy <= row.accuracy_high
    head, rule, line = markdown([row]).splitlines()
    assert head.count("|") == rule.count("|") == line.count("|")
    assert line.startswith("| `baton/x` | 50.0% |")


def test_the_default_policies_are_fixed_rule_and_conductor() -> None:
    models = ["baton", "baton/conductor", "baton/rule", "baton/fixed:a", "baton/fixed:b", "a", "b"]
    assert default_policies(models) == ["baton/fixed:a", "baton/fixed:b", "baton/rule", "baton/conductor"]


def test_arena_questions_carry_their_own_grader() -> None:
    asked = questions(3, "held_out", 5)
    tasks = [make_task(seed, "held_out") for seed in (5, 6, 7)]
    assert [question.text for question in asked] == [task.text for task in tasks]
    assert [question.grade(f"Answer: {task.answer}") for question, task in zip(asked, tasks, strict=True)] == [1.0] * 3
    assert asked[0].grade("Answer: nonsense") == 0.0


def recorded(number: int, **outputs: tuple[str, bool]) -> Recorded:
    said = {model: {"output": output, "correct": right} for model, (output, right) in outputs.items()}
    return Recorded(f"q{number}", "math", f"question {number}", "42", said)


def test_a_replayed_reply_gets_the_recordings_verdict_and_any_other_is_compared_with_gold() -> None:
    odd = recorded(1, a=('{"answer": "42"}', False), b=("forty-two", True))
    assert odd.grade('{"answer": "42"}') == 0.0  # as the recording says, whatever the text says
    assert odd.grade("forty-two") == 1.0
    assert odd.grade("So the answer is 42.") == 1.0
    assert odd.grade("So the answer is 41.") == 0.0


def test_questions_are_drawn_by_hash_and_never_both_asked_and_learned_from() -> None:
    every = [recorded(number) for number in range(50)]
    asked, learned = drawn(every, 20, 20, seed=1)
    assert not {each.id for each in asked} & {each.id for each in learned}
    assert drawn(list(reversed(every)), 20, 20, seed=1) == (asked, learned)
    assert drawn(every, 20, 20, seed=2)[0] != asked
    with pytest.raises(SystemExit, match="50 are there"):
        drawn(every, 40, 20, seed=1)


def test_only_questions_that_all_workers_answered_are_loaded(tmp_path: Path) -> None:
    both = {"a": {"output": "x", "correct": True}, "b": {"output": "y", "correct": False}}
    lines = [
        {"id": str(n), "domain": "d", "question": "q", "gold": 7, "workers": workers}
        for n, workers in enumerate([both, {"a": both["a"]}])
    ]
    path = tmp_path / "answers.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    assert [(each.id, each.gold, set(each.workers)) for each in load(path, ["a", "b"])] == [("0", "7", {"a", "b"})]
    with pytest.raises(SystemExit, match="no question was answered by all of a, c"):
        load(path, ["a", "c"])
    with pytest.raises(SystemExit, match="cannot be used"):
        load(tmp_path / "absent", ["a"])


def test_ratios_are_taken_within_a_round() -> None:
    found = figures(
        {
            DIRECT: Samples([1.0, 10.0, 1.0], [0.0] * 3),
            "fixed": Samples([3.0, 20.0, 2.0], [1.0, 5.0, 2.0], errors=1),
        }
    )
    assert (found[0].ratio, found[0].added_ms) == (1.0, 0.0)
    assert (found[1].latency_ms, found[1].added_ms, found[1].ratio) == (3.0, 2.0, 2.0)
    assert (found[1].gateway_cpu_ms, found[1].errors) == (2.0, 1)


def test_the_script_is_streamed_whole_with_its_pause_inside_the_last_step() -> None:
    text = '{"steps":[{"worker":"a","task":null,"see":[]},{"worker":"b","task":null,"see":[0]}]}'
    parts = pieces(text)
    pause = parts.index(None)
    assert "".join(part for part in parts if part) == text
    assert "".join(part for part in parts[:pause] if part).endswith("},{")
    (choice,) = chunk_of('{"st', None)["choices"]
    assert choice["token_ids"] == [ord(char) for char in '{"st']
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == list('{"st')


def test_the_queries_are_those_of_the_page() -> None:
    assert "r.plan_token_ids, r.plan_logprobs" in page_queries()[STEPS_WITH_TOKENS]
    assert "WITH ORDINALITY" in page_queries()[TOKENS]
    assert "together_ms" in page_queries()[TOGETHER]


def test_long_texts_are_cut_and_their_length_named() -> None:
    cut = short({"a": ["x" * 1000, "y"], "n": 3})
    assert cut["a"][0].endswith("… (1000 characters)")
    assert (cut["a"][1], cut["n"]) == ("y", 3)


def test_no_gateway_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="start one with `make serve`"):
        Gateway.read(tmp_path / "serve.json")


def test_a_benchs_gateway_never_sees_the_callers_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATON_PORT", "DATABASE_URL", "REDIS_URL"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SOMETHING_ELSE", "kept")
    found = clean_environment()
    assert not {"BATON_PORT", "DATABASE_URL", "REDIS_URL"} & set(found)
    assert found["SOMETHING_ELSE"] == "kept"


def test_comma_separated_names() -> None:
    assert names(" a, b ,,c") == ["a", "b", "c"]


def test_show_names_its_cases_where_one_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        show.main(["nothing"])
    assert "there are parallel, child" in capsys.readouterr().err
