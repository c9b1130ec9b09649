"""What makes a check pass, refuse or not know; the held-out run's refusals by name, from rows made by hand."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import ConfigError
from policy.evaluate.contest import QuestionResult
from policy.evaluate.figures import affordable, best_of
from policy.gate.checks import Check, GatePart, Thresholds, bounded, cannot_say, not_worse, thresholds_of
from policy.gate.heldout import Comparison, checks, concentration, facts, kind_checks, kind_facts
from policy.gate.report import GateReport, Refusal, finite
from policy.gate.scene import QUESTIONS_ARENA, GateScene, GateSpec, add_spec, given_of
from policy.spec import checked, plain, read
from policy.statistics.stats import Interval

MODELS = ("cheap", "dear")


def row(index: int, *, right: bool, worker: str = "cheap", usd_1k: float = 1.0, parsed: bool = True) -> QuestionResult:
    return QuestionResult(
        prompt_id=f"q{index}",
        category="sums",
        outcome=float(right),
        cost_nano=round(usd_1k * 1e6),
        latency_s=1.0,
        calls=1,
        rounds=1,
        planning_tokens=10,
        parsed=parsed,
        workers=(worker,),
        error=None,
        refusals=() if parsed else ("not_json",),
    )


def rows(
    right: float, n: int = 400, *, dear: float = 0.5, usd_1k: float = 1.0, parsed: float = 1.0
) -> list[QuestionResult]:
    """`right`, `dear` and `parsed`: shares of the questions that are right, that `dear` answers, whose plans are valid.
    Of two sets the one with more right is right wherever the other one is."""
    return [
        row(
            at,
            right=at < right * n,
            worker="dear" if at * 7 % n < dear * n else "cheap",
            usd_1k=usd_1k,
            parsed=at < parsed * n,
        )
        for at in range(n)
    ]


def compared(
    candidate: list[QuestionResult], live: list[QuestionResult], *, single: float = 0.5, table_dear: float = 0.5
) -> Comparison:
    others = {
        "fixed:cheap": rows(single, dear=0.0),
        "fixed:dear": rows(0.3, dear=1.0),
        "table": rows(0.6, dear=table_dear),
    }
    return Comparison(candidate, live, others, rows(0.95), MODELS)


def refused(found: Comparison, thresholds: Thresholds | None = None) -> set[str]:
    return {check.name for check in checks(found, thresholds or Thresholds(), 0) if check.refuses}


# ---------------------------------------------------------------- one check


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        (Interval(0.0, -0.02, 0.02), "passed"),
        (Interval(-0.02, -0.03, 0.0), "passed"),
        (Interval(-0.031, -0.06, 0.0), "refused"),
        (Interval(0.01, -0.05, 0.07), "cannot say"),
        (Interval(-0.03, -0.07, 0.01), "cannot say"),
        (Interval(math.nan, math.nan, math.nan), "refused"),
    ],
)
def test_not_worse_is_non_inferiority(interval: Interval, verdict: str) -> None:
    assert not_worse("x", interval, 0.03, 100, "fix it").verdict == verdict


def test_undecided_says_how_many_rows_would_decide() -> None:
    undecided = not_worse("x", Interval(0.0, -0.06, 0.06), 0.03, 100, "fix it")
    assert undecided.todo == "too few rows to tell: about 400 would decide"


def test_only_a_required_check_refuses_by_not_knowing() -> None:
    assert not cannot_say("x", "why", "todo").refuses
    assert cannot_say("x", "why", "todo", required=True).refuses
    assert Check("x", "refused", "", "").refuses
    assert not Check("x", "passed", "", "", required=True).refuses


def test_bounds_belong_to_what_passes() -> None:
    assert bounded("x", 1.0, 1.0, 2.0, "", "t").verdict == bounded("x", 2.0, 1.0, 2.0, "", "t").verdict == "passed"
    for value in (0.99, 2.01, math.nan, math.inf):
        assert bounded("x", value, 1.0, 2.0, "", "fix it").verdict == "refused"
    assert bounded("x", 1.5, 1.0, 2.0, "", "fix it").todo == ""


def test_thresholds_are_set_by_name() -> None:
    found = thresholds_of(["margin=0.05", "category_rows_min=7"])
    assert (found.margin, found.category_rows_min, found.kl_max) == (0.05, 7, Thresholds().kl_max)
    for wrong, complaint in (
        ("marge=1", "no such threshold"),
        ("margin=much", "not a number"),
        ("margin=-1", "0 or more"),
        ("margin=nan", "0 or more"),
        ("margin", "not a number"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            thresholds_of([wrong])


# ---------------------------------------------------------------- the held-out run


def test_as_good_as_live_passes() -> None:
    found = compared(rows(0.7), rows(0.7))
    assert refused(found) == set()
    assert found.best_single == "fixed:cheap"
    assert all(check.required for check in checks(found, Thresholds(), 0))


def test_worse_than_live() -> None:
    assert refused(compared(rows(0.62), rows(0.7))) == {"worse_than_live"}
    assert refused(compared(rows(0.69), rows(0.7))) == set()


def test_worse_than_the_best_single() -> None:
    assert refused(compared(rows(0.5), rows(0.5), single=0.6)) == {"worse_than_best_single"}


def test_costlier_only_where_it_is_not_better() -> None:
    dear = rows(0.7, usd_1k=1.2)
    assert refused(compared(dear, rows(0.7))) == {"costlier"}
    assert refused(compared(rows(0.7, usd_1k=1.09), rows(0.7))) == set()
    assert refused(compared(rows(0.8, usd_1k=9.0), rows(0.7))) == set()
    assert refused(compared(rows(0.8, usd_1k=9.0), rows(0.7)), Thresholds(usd_per_1k_max=5.0)) == {"over_budget"}
    assert refused(compared(dear, rows(0.7, usd_1k=0.0))) == {"costlier"}
    assert refused(compared(rows(0.7, usd_1k=0.0), rows(0.7, usd_1k=0.0))) == set()


def test_collapsed_unless_that_is_right() -> None:
    always = rows(0.7, dear=1.0)
    assert refused(compared(always, rows(0.7))) == {"collapsed"}
    assert refused(compared(rows(0.7, dear=0.9), rows(0.7))) == set()
    assert refused(compared(always, rows(0.7), table_dear=1.0)) == set()  # nor does the table call anybody else
    assert refused(compared(rows(0.94, dear=1.0), rows(0.7))) == set()  # the oracle is no better
    same = [replace(each, workers=("cheap", "dear")) for each in rows(0.7)]
    assert refused(compared(same, rows(0.7))) == {"collapsed"}  # both are called, and always both
    nobody = [replace(each, workers=("vote",)) for each in rows(0.7)]
    assert concentration(nobody, MODELS) == ("no worker", 1.0, 1.0, 1.0)


def test_less_parseable() -> None:
    assert refused(compared(rows(0.7, parsed=0.97), rows(0.7))) == {"less_parseable"}
    assert refused(compared(rows(0.7, parsed=0.985), rows(0.7))) == {"less_parseable"}  # live: all
    assert refused(compared(rows(0.7, parsed=0.99), rows(0.7))) == set()
    assert refused(compared(rows(0.7, parsed=0.96), rows(0.7, parsed=0.95))) == set()  # live is no better
    [check] = [c for c in checks(compared(rows(0.7, parsed=0.5), rows(0.7)), Thresholds(), 0) if c.refuses]
    assert "200 not_json" in check.figure


def test_too_few_questions_cannot_accept() -> None:
    few = rows(0.9, 50)
    found = Comparison(few, few, {"fixed:cheap": few}, few, MODELS)
    assert refused(found) == {"questions"}
    [check] = checks(found, Thresholds(), 0)
    assert check.verdict == "cannot say"


def test_facts_hold_the_gain_over_everybody() -> None:
    found = facts(compared(rows(0.8), rows(0.7)), 0)
    assert found["gains"]["live"][0] == pytest.approx(0.1)
    assert set(found["gains"]) == {"fixed:cheap", "fixed:dear", "table", "live", "oracle"}


# ---------------------------------------------------------------- the report


def report(*checks: Check, forced: str | None = None) -> GateReport:
    parts = [GatePart("held-out run", checks, {"weight": math.inf})]
    about = {"environment": "arena", "questions": 7}
    return GateReport("x@2", "ab" * 32, "x@1", about, parts, Thresholds(), "2026-01-01", forced=forced)


def test_the_page_says_the_verdict_first_and_what_to_do() -> None:
    found = report(Check("a", "passed", "1", "at most 2"), Check("b", "refused", "3 | 4", "at most 2", "train on"))
    page = found.markdown()
    assert page.startswith("# x@2 is refused: b\n")
    assert "- `b`: train on" in page
    assert "3 \\| 4" in page
    assert found.refusals == [Refusal("b", "3 | 4; wanted at most 2")]
    assert report(Check("a", "passed", "1", "")).markdown().startswith("# x@2 passed the gate")


def test_a_refusal_for_want_of_rows_says_so() -> None:
    [refusal] = report(cannot_say("a", "7 questions", "ask more", "at least 9", required=True)).refusals
    assert refusal == Refusal("a", "not shown: 7 questions; wanted at least 9; ask more")


def test_a_forced_report_has_not_passed() -> None:
    found = report(Check("b", "refused", "3", "2"), forced="the old one is on fire")
    assert not found.passed
    assert found.as_json()["forced"] == "the old one is on fire"
    assert "**Forced**: the old one is on fire" in found.markdown()


def test_the_json_is_json() -> None:
    told = report(Check("a", "passed", "1", "")).as_json()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["thresholds"]["usd_per_1k_max"] is None
    assert told["parts"][0]["facts"] == {"weight": None}
    assert finite({1: (math.nan, 2.5)}) == {"1": [None, 2.5]}


# ---------------------------------------------------------------- the scene


def test_a_scene_asks_for_an_evaluation(tmp_path: Path) -> None:
    asked = GateScene(out=tmp_path / "o.json", staff="fresh", seed=3).evaluation(("rule", "random"))
    assert (asked.env, asked.staff, asked.n, asked.seed) == ("arena", "standard", QUESTIONS_ARENA, 3)
    assert asked.policies == ("rule", "random")
    assert GateScene(out=tmp_path / "o.json", rounds=1).evaluation(("rule",)).rounds == 1
    replay = GateScene(out=tmp_path / "o.json", env="replay", workers=("a", "b"), n=9, neighbours=0)
    asked = replay.evaluation(("rule",))
    assert (asked.n, asked.workers, asked.neighbours, asked.data) == (9, ("a", "b"), 0, None)
    with pytest.raises(ConfigError, match="--data is for --env replay"):
        GateScene(out=tmp_path / "o.json", data=Path("x")).evaluation(("rule",))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"staff": "nobody"}, "staff: Input should be 'standard'"),
        ({"draws": 0}, "draws: Input should be greater than or equal to 1"),
        ({"thresholds": {"mood": 1}}, "thresholds: no threshold `mood`; there are attacked_usd_ratio_max"),
        ({"thresholds": {"margin": -1}}, "thresholds: threshold margin is -1.0"),
    ],
)
def test_a_spec_that_no_gate_could_have_is_one_line(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        checked(GateSpec, values)
    assert "\n" not in error.value.message


def test_the_arguments_of_a_gate_are_those_of_its_spec(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_spec(parser)
    given = given_of(parser.parse_args(["--n", "9", "--experience", "0", "--set", "margin=0.1", "--set", "ess_min=7"]))
    assert given == {"n": 9, "neighbours": 0, "thresholds": {"margin": 0.1, "ess_min": 7.0}}
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(plain(GateSpec, given)))
    spec = read(GateSpec, path)
    assert spec == checked(GateSpec, given)
    assert (spec.bounds.margin, spec.bounds.ess_min, spec.bounds.kl_max) == (0.1, 7.0, Thresholds().kl_max)


# ---------------------------------------------------------------- the user's own requests


def of_kinds(shares: dict[str, tuple[float, int]], usd_1k: float = 1.0) -> list[QuestionResult]:
    """(share right, rows) of each kind of task."""
    made = [(kind, one) for kind, (right, n) in shares.items() for one in rows(right, n, usd_1k=usd_1k)]
    return [replace(one, category=kind, prompt_id=f"{kind}-{one.prompt_id}") for kind, one in made]


def test_a_kind_that_got_worse_refuses_whatever_the_whole_says() -> None:
    live = of_kinds({"sums": (0.5, 200), "words": (0.9, 60), "dates": (0.5, 9), "": (0.5, 9)})
    candidate = of_kinds({"sums": (0.8, 200), "words": (0.7, 60), "dates": (0.5, 9), "": (0.5, 9)})
    others = {"fixed:cheap": live, "price-cascade": live}
    found = Comparison(candidate, live, others, live, MODELS)
    told = {check.name: check.verdict for check in kind_checks(found, Thresholds(), 0)}
    assert told == {
        "worse_than_live[other]": "cannot say",
        "worse_than_live[sums]": "passed",
        "worse_than_live[words]": "refused",
    }
    assert not any(check.required for check in kind_checks(found, Thresholds(), 0))
    known = kind_facts(found, Thresholds(), 0)
    assert known["kinds_in_other"] == {"dates": 9, "": 9}
    assert {kind: one["n"] for kind, one in known["task_kinds"].items()} == {"other": 18, "sums": 200, "words": 60}
    assert known["task_kinds"]["words"]["gains"]["price-cascade"][0] == pytest.approx(-0.2)


def test_real_workers_are_rivals_where_they_cost_no_more() -> None:
    """The dear worker is the better one; the candidate is held against the one that its dollars would buy."""
    candidate, live = rows(0.6), rows(0.5)
    others = {"fixed:cheap": rows(0.5, dear=0.0), "fixed:dear": rows(0.9, dear=1.0, usd_1k=20.0)}
    found = Comparison(candidate, live, others, rows(0.95), MODELS)
    assert (found.best_single, found.best_affordable) == ("fixed:dear", "fixed:cheap")
    assert "worse_than_best_single" in refused(found)
    assert not any(check.refuses for check in checks(found, Thresholds(), 0, real=True))
    other = Comparison(rows(0.4), live, others, rows(0.95), MODELS)
    assert "worse_than_best_single" in {
        check.name for check in checks(other, Thresholds(), 0, real=True) if check.refuses
    }
    assert best_of(affordable(others, 0.1)) == "fixed:cheap"  # none costs so little: the cheapest
    assert best_of(affordable(others, 20.0)) == "fixed:dear"
