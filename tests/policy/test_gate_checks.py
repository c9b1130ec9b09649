"""What makes a check pass, refuse or not know; the held-out run's refusals by name, from rows made by hand."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ConfigError
from policy.evaluate.contest import QuestionResult
from policy.evaluate.figures import affordable, best_of
from policy.gate.checks import (
    ROWS_MAX,
    Check,
    GatePart,
    ShareCount,
    Thresholds,
    Verdict,
    bounded,
    cannot_say,
    not_worse,
    share_check,
    thresholds_of,
)
from policy.gate.heldout import Comparison, checks, concentration, facts, kind_checks, kind_facts
from policy.gate.report import GateReport, Refusal, finite
from policy.gate.run import questions_wanted
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


def verdict_of(name: str, found: Comparison) -> str:
    [check] = [one for one in checks(found, Thresholds(), 0) if one.name == name]
    return check.verdict


# ---------------------------------------------------------------- one check


@pytest.mark.parametrize(
    ("interval", "verdict", "refuses"),
    [
        (Interval(0.02, 0.01, 0.03), "passed", False),
        (Interval(0.0, -0.02, 0.02), "not worse", False),
        (Interval(-0.02, -0.03, 0.0), "not worse", False),
        (Interval(0.01, -0.05, 0.07), "undecided", False),
        (Interval(-0.03, -0.07, 0.01), "undecided", False),
        (Interval(-0.031, -0.06, 0.0), "undecided", True),
        (Interval(-0.06, -0.08, -0.04), "refused", True),
        (Interval(math.nan, math.nan, math.nan), "refused", True),
    ],
)
def test_not_worse_is_non_inferiority(interval: Interval, verdict: str, refuses: bool) -> None:
    check = not_worse("x", interval, 0.03, 100, "fix it")
    assert (check.verdict, check.refuses) == (verdict, refuses)


def test_undecided_says_how_many_rows_would_decide() -> None:
    undecided = not_worse("x", Interval(0.0, -0.06, 0.06), 0.03, 100, "fix it")
    assert undecided.todo == "about 300 more rows would decide"
    behind = not_worse("x", Interval(-0.06, -0.12, 0.0), 0.03, 100, "fix it")
    assert (behind.verdict, behind.more) == ("undecided", 300)
    equal = not_worse("x", Interval(0.0, -0.0301, 0.0301), 0.03, 100, "fix it")
    assert equal.more == 10  # never none


# ---------------------------------------------------------------- a share beside its bound


def test_a_share_is_compared_by_its_interval() -> None:
    """111 of 114 says nothing about 98 in 100; 114 of 114 neither, 200 of 200 and 60 of 114 do."""
    verdicts = {k: share_check("x", ShareCount(k, n, "plans"), 0.98).verdict for k, n in ((111, 114), (114, 114))}
    assert set(verdicts.values()) == {"undecided"}
    assert share_check("x", ShareCount(200, 200), 0.98).verdict == "passed"
    assert share_check("x", ShareCount(60, 114), 0.98, todo="train").todo == "train"
    check = share_check("plan_validity", ShareCount(111, 114, "plans"), 0.98)
    assert check.figure == "0.974 of 114 plans, 95 % from 0.925 to 0.991"
    assert check.todo == f"111 of 114; about {check.more:,} more plans would decide"
    assert not check.refuses
    assert share_check("x", ShareCount(111, 114), 0.98, required=True).refuses


def test_a_share_may_have_a_bound_above_it() -> None:
    assert share_check("x", ShareCount(0, 100), most=0.1).verdict == "passed"
    assert share_check("x", ShareCount(8, 100), most=0.1).verdict == "undecided"
    assert share_check("x", ShareCount(30, 100), most=0.1).verdict == "refused"
    assert share_check("x", ShareCount(0, 0), most=0.1).verdict == "undecided"  # nothing was counted
    assert share_check("x", ShareCount(0, 0), most=1.0).verdict == "passed"


def test_no_number_of_rows_shows_a_share_of_exactly_its_bound() -> None:
    check = share_check("x", ShareCount(98, 100, "plans"), 0.98)
    assert (check.verdict, check.more) == ("undecided", ROWS_MAX)
    assert check.todo == "98 of 100; it is at the bound: no plans would decide"


COUNTS = st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
BOUNDS = st.floats(0.01, 0.99)


@given(COUNTS, BOUNDS)
def test_a_verdict_agrees_with_the_estimate_and_more_of_the_same_never_turns_it(
    kn: tuple[int, int], bound: float
) -> None:
    count = ShareCount(*kn)
    side = count.side(least=bound)
    assert side == 0 or (side > 0) == (count.share >= bound)
    assert count.interval.low <= count.share <= count.interval.high
    thousandfold = ShareCount(1000 * count.k, 1000 * count.n)
    assert thousandfold.side(least=bound) in ((side,) if side else (-1, 0, 1))
    assert -1 <= count.side(most=bound) <= 1


@given(COUNTS, BOUNDS)
def test_as_many_more_as_are_said_decide_and_half_as_many_do_not(kn: tuple[int, int], bound: float) -> None:
    count = ShareCount(*kn)
    more = count.more(least=bound)
    if count.side(least=bound) != 0 or more == ROWS_MAX:
        return
    enough = ShareCount(round(count.share * (count.n + more)), count.n + more)
    assert enough.side(least=bound) != 0
    half = count.n + more // 2
    share = count.share
    slack = 1 / half  # a share of `half` rows is rounded to whole rows
    assert any(
        ShareCount(round(min(max(near, 0.0), 1.0) * half), half).side(least=bound) == 0
        for near in (share, share - slack, share + slack)
    )


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
    assert concentration(nobody, MODELS).worker == "no worker"
    assert concentration(nobody, MODELS).plans.share == 1.0
    assert verdict_of("collapsed", compared(rows(0.7, dear=0.94), rows(0.7))) == "undecided"


def validity(ours: float, n: int = 400, theirs: float = 1.0, real: bool = False) -> dict[str, tuple[str, bool]]:
    """Verdict of both checks of validity, and whether each refuses."""
    single = {"fixed:cheap": rows(0.5, n)}
    found = Comparison(rows(0.7, n, parsed=ours), rows(0.7, n, parsed=theirs), single, rows(0.9, n), MODELS)
    every = checks(found, Thresholds(), 0, real=real)
    return {one.name: (one.verdict, one.refuses) for one in every if one.name.endswith("parseable")}


def test_too_few_valid_plans_and_fewer_than_lives() -> None:
    good = {"parseable": ("passed", False), "less_parseable": ("not worse", False)}
    assert validity(1.0) == good
    assert validity(0.9, theirs=0.9)["less_parseable"] == ("not worse", False)
    assert validity(0.95) == {"parseable": ("refused", True), "less_parseable": ("refused", True)}
    assert validity(0.985)["parseable"] == ("undecided", True)
    assert validity(0.96, theirs=0.93) == {"parseable": ("passed", False), "less_parseable": ("passed", False)}
    [check] = [c for c in checks(compared(rows(0.7, parsed=0.5), rows(0.7)), Thresholds(), 0) if c.name == "parseable"]
    assert "200 not_json" in check.figure


def test_of_few_real_requests_an_undecided_validity_refuses_below_its_bound_alone() -> None:
    assert validity(1.0, n=100)["parseable"] == ("undecided", True)
    assert validity(1.0, n=100, real=True)["parseable"] == ("undecided", False)
    assert validity(0.97, n=100, real=True)["parseable"] == ("undecided", True)


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
    assert refusal == Refusal("a", "cannot say: 7 questions; wanted at least 9; ask more")


def test_the_verdict_of_a_report_is_the_worst_that_blocks_or_that_it_is_no_worse() -> None:
    good, better = Check("a", "passed", "1", ""), Check("worse_than_live", "passed", "1", "")
    same, open_ = Check("worse_than_live", "not worse", "1", ""), Check("b", "undecided", "1", "", "9 more", True, 9)
    assert report(good, better).verdict == "passed"
    assert report(good, same).verdict == "not worse"
    assert report(good, same).passed
    assert report(good, same).markdown().startswith("# x@2 passed the gate and is not worse than live")
    assert report(same, open_).verdict == "undecided"
    assert report(same, open_).markdown().startswith("# x@2 is undecided: b")
    assert report(open_, Check("c", "refused", "1", "")).verdict == "refused"
    assert report(replace(open_, required=False), same).passed


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


# ---------------------------------------------------------------- asking more


@pytest.mark.parametrize(
    ("more", "verdict", "n", "asked", "wanted"),
    [
        (140, "undecided", 200, 200, 340),
        (5000, "undecided", 200, 200, 800),
        (10, "undecided", 800, 200, 0),
        (140, "refused", 200, 200, 0),
        (140, "undecided", 200, None, 0),
        (0, "passed", 200, 200, 0),
    ],
)
def test_undecided_questions_are_asked_on_up_to_a_bound(
    more: int, verdict: Verdict, n: int, asked: int | None, wanted: int
) -> None:
    check = Check("parseable", verdict, "", "", required=True, more=more)
    assert questions_wanted([check], n, asked) == wanted
    assert questions_wanted([check, Check("b", "refused", "", "")], n, asked) == 0
