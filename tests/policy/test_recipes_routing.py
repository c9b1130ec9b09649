"""The routing demo's table, verdict and workers: pure, from answers to text."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from policy.recipes.report import write_block
from policy.recipes.routing.tally import LAST, RoutedAnswer, RoutingTally
from policy.recipes.routing.world import CHEAP, DEAR, SUM_SHARE, Kind, PairOfWorkers, Sum, questions, usd
from policy.simulators.server import RequestRefusal


def said(worker: str, text: str, *, never: bool = False) -> str:
    workers = PairOfWorkers({CHEAP: 0.0, DEAR: 0.5}, cheap_never_right=never)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    [[reply]] = workers.say(worker, body).choices
    return reply


def routed(kind: Kind, worker: str, right: bool) -> RoutedAnswer:
    return RoutedAnswer(kind, worker, right, usd(worker))


def tally_of(answers: list[RoutedAnswer]) -> RoutingTally:
    return RoutingTally(len(answers), answers)


LEARNT = [routed("sum", CHEAP, True)] * 40 + [routed("product", DEAR, True)] * 20


def test_the_cheap_worker_is_right_on_sums_alone_and_on_none_if_told_so() -> None:
    for question in questions(40, 1):
        assert said(DEAR, question.text) == question.answer
        assert (said(CHEAP, question.text) == question.answer) is (question.kind == "sum")
        assert said(CHEAP, question.text, never=True) != question.answer
    with pytest.raises(RequestRefusal):
        said(DEAR, "Good morning")


def test_questions_are_the_same_for_a_seed_and_two_thirds_of_them_are_sums() -> None:
    assert questions(50, 3) == questions(50, 3) != questions(50, 4)
    share = sum(one.kind == "sum" for one in questions(3000, 0)) / 3000
    assert share == pytest.approx(SUM_SHARE, abs=0.03)
    assert Sum("product", 12, 13).answer == "156"


def test_it_learnt_if_the_last_requests_are_right_and_cheaper_than_the_dear_worker_alone() -> None:
    learnt, told = tally_of(LEARNT).verdict()
    assert learnt
    assert told.startswith("It learnt: of the last 60 requests 100% were right, for 35%")


@pytest.mark.parametrize(
    "answers",
    [
        [routed("sum", CHEAP, True)] * 40 + [routed("product", CHEAP, False)] * 20,
        [routed("sum", DEAR, True)] * 40 + [routed("product", DEAR, True)] * 20,
        LEARNT[:-1],
    ],
)
def test_it_did_not_if_they_are_wrong_or_dear_or_too_few(answers: list[RoutedAnswer]) -> None:
    assert not tally_of(answers).verdict()[0]


def test_always_the_dear_worker_is_what_there_is_to_learn_where_the_cheap_one_is_never_right() -> None:
    answers = [routed("sum", DEAR, True)] * LAST
    assert tally_of(answers).verdict(cheap_never_right=True)[0]


def test_a_failed_request_is_no_verdict() -> None:
    tally = tally_of(LEARNT)
    tally.failed = 1
    assert not tally.verdict()[0]


def test_the_table_says_who_answered_what_and_what_that_saved() -> None:
    table = tally_of([routed("product", CHEAP, False), *LEARNT]).table(12.3)
    assert "61 of 61 requests, 12 s" in table
    assert "sums          40      40       0    100%" in table
    assert "products      21       1      20     95%   x" + "D" * 20 in table
    assert f"${20 * usd(DEAR) + 41 * usd(CHEAP):.6f} of ${usd(DEAR, 61):.6f} for dear alone: 65% saved" in table
    assert "\x1b[31mc" in tally_of([routed("product", CHEAP, False)]).table(0.0, colour=True)
    assert "nothing yet" in RoutingTally(3).table(0.0)


def test_a_line_of_the_log_is_about_the_last_requests() -> None:
    line = tally_of([routed("product", CHEAP, False), *LEARNT]).line()
    assert line.startswith("  61 of 61; last 60: sums: 40 cheap, 0 dear; products: 0 cheap, 20 dear; 100% right")


def test_dollars_are_those_that_the_pool_file_says() -> None:
    assert usd(DEAR) == Decimal("0.00381")
    assert usd(CHEAP, 1000) == Decimal("0.102")


def test_a_block_of_a_page_is_written_anew_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- written by `x` -->\nold\n<!-- end of `x` -->\nb\n")
    write_block(page, "x", "new")
    assert page.read_text() == "a\n<!-- written by `x` -->\nnew\n<!-- end of `x` -->\nb\n"
    with pytest.raises(ValueError, match="no block of `y`"):
        write_block(page, "y", "new")


def test_it_loads_nothing_that_serving_does_not_need() -> None:
    heavy = "{'torch', 'pyarrow', 'transformers', 'tokenizers'}"
    code = f"import sys, policy.recipes.routing.__main__ as _; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
