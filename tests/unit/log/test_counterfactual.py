"""Counterfactuals: only what was really drawn, only where the log covers it, and intervals that hold the truth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from random import Random
from typing import Any

import pytest

from bench.simulated.counterfactuals import DESIGNS, cell
from gateway.adapters.postgres import rows
from gateway.adapters.postgres.reports.overview import NEARLY_THE_SAME
from gateway.core.log.counterfactual import (
    CHANCE_MIN,
    EFFECTIVE_MIN,
    TRIED_MIN,
    JudgedPlan,
    drawn_probability,
    had_it_gone_to,
)
from gateway.core.log.rollout import plan_probability
from gateway.core.loop.experience.meaning import TABLE_FILE, by_meaning
from gateway.files import shipped

NAMES = [{"name": "small", "handle": "atlas"}, {"name": "large", "handle": "quill"}]


def by_rule(chances: Sequence[float], truths: dict[str, float], seed: int = 3) -> list[JudgedPlan]:
    """Requests whose worker was drawn with these chances of `small`; `large` has the rest."""
    draw, plans = Random(seed), []
    for chance in chances:
        small = draw.random() < chance
        worker = "small" if small else "large"
        drawn = {"small": chance, "large": 1 - chance}
        plans.append(JudgedPlan(worker, drawn[worker], float(draw.random() < truths[worker]), drawn))
    return plans


def a_row(**changes: Any) -> dict[str, Any]:
    """A round as the query of judged plans gives it."""
    step = {"worker": "quill", "task": None}
    filled: dict[str, Any] = {"rollout_id": "r1", "value": 1.0, "pool": NAMES, "fallback": None, "planner": "conductor"}
    filled |= {"plan": {"steps": [step]}, "plan_logprobs": [-0.5], "decision_mask": [True]}
    return filled | {"sampling": {"temperature": 1.0}, "decision": None} | changes


def decided(worker: str = "large", propensity: float = 0.8) -> dict[str, Any]:
    handles = {"small": "atlas", "large": "quill"}
    chances = {worker: propensity, ({*handles} - {worker}).pop(): 1 - propensity}
    arms = [{"worker": name, "handle": handles[name], "propensity": chances[name]} for name in handles]
    return {"planner": "rule", "chosen": worker, "propensity": propensity, "arms": arms}


# ---------------------------------------------------------------- what counts as a draw


def test_a_plan_has_the_probability_of_its_decisions() -> None:
    assert plan_probability([-0.5, -3.0, -0.25], [True, False, True]) == pytest.approx(math.exp(-0.75))
    assert plan_probability([None, -1.0], [False, True]) == pytest.approx(math.exp(-1))
    for logprobs, mask in (([], []), ([-1.0], [True, True]), ([-math.inf], [True]), ([None], [True]), ([0.5], [True])):
        assert plan_probability(logprobs, mask) is None


def test_only_a_draw_has_a_probability() -> None:
    assert drawn_probability(a_row()) == pytest.approx(math.exp(-0.5))
    assert drawn_probability(a_row(sampling={"temperature": 0.0})) is None, "the likeliest plan is no draw"
    assert drawn_probability(a_row(sampling={})) is None
    assert drawn_probability(a_row(planner="fixed:large")) is None
    assert drawn_probability(a_row(planner="rule", decision=decided())) == 0.8
    assert drawn_probability(a_row(planner="vote", decision={"planner": "vote", "arms": []})) is None


def test_a_judged_request_has_what_its_rounds_say() -> None:
    (plan,) = rows.judged_plans_of([a_row(planner="rule", decision=decided())])
    assert (plan.alone, plan.probability, plan.value) == ("large", 0.8, 1.0)
    assert plan.chances == pytest.approx({"large": 0.8, "small": 0.2})
    shipped = [a_row(), a_row(plan={"steps": []}, plan_logprobs=[-0.25])]
    (plan,) = rows.judged_plans_of(shipped)
    assert (plan.alone, plan.chances) == ("large", None)
    assert plan.probability == pytest.approx(math.exp(-0.75)), "that it shipped was drawn too"
    greedy = [a_row(), a_row(plan={"steps": []}, sampling={"temperature": 0.0})]
    assert rows.judged_plans_of(greedy)[0].probability is None
    task = {"steps": [{"worker": "quill", "task": "Find the year.", "see": []}]}
    several = [a_row(), a_row(rollout_id="r2", plan=task), a_row(rollout_id="r3"), a_row(rollout_id="r3")]
    assert [plan.alone for plan in rows.judged_plans_of(several)] == ["large", None, None]


def test_a_worker_that_failed_was_wrong_whoever_answered_then() -> None:
    then = a_row(planner="rule", decision=decided("small", 1.0), plan={"steps": [{"worker": "atlas", "task": None}]})
    failed = [a_row(planner="rule", decision=decided(), fallback="worker_timeout"), then]
    (plan,) = rows.judged_plans_of(failed)
    assert (plan.alone, plan.probability, plan.value) == ("large", 0.8, 0.0)


# ---------------------------------------------------------------- what the log does not support


def test_what_the_log_does_not_support_is_unknown() -> None:
    plans = by_rule([0.5] * 200, {"small": 0.6, "large": 0.9})
    assert had_it_gone_to("large", plans)["estimate"] == pytest.approx(0.9, abs=0.1)
    assert "in any of 200 judged requests" in had_it_gone_to("vision", plans)["unknown"]
    routed = [JudgedPlan("large", None, 1.0)] * 100
    assert "probability; 100 were planned without chance" in had_it_gone_to("large", routed)["unknown"]
    few = had_it_gone_to("large", plans[:12])
    assert f"{TRIED_MIN} and {EFFECTIVE_MIN:g} needed, about 28 more" in few["unknown"]
    staged = [JudgedPlan(None, 0.5, 1.0)] * 100
    assert had_it_gone_to("large", staged)["tried"] == 0, "a plan of two steps is not the worker alone"


def test_where_a_worker_had_no_chance_the_log_says_nothing_of_it() -> None:
    """Sums, of which half the log is, went to `small` at even chance, and products never did: of the whole that says
    nothing, although every trial was right."""
    sums = by_rule([0.5] * 100, {"small": 1.0, "large": 1.0})
    products = by_rule([CHANCE_MIN / 10] * 100, {"small": 0.0, "large": 1.0})
    found = had_it_gone_to("small", sums + products)
    assert found["unknown"] == "it had a chance under 0.02 in 50% of them; the estimate bears 10%"
    a_few = had_it_gone_to("small", sums + products[:8])
    assert a_few["low"] < 1 - 8 / 108 <= a_few["high"], "the few may have been wrong"
    assert a_few["low"] < had_it_gone_to("small", sums)["low"]


def test_chances_that_were_not_drawn_are_refused() -> None:
    told = [JudgedPlan("large", 0.5, 1.0, {"large": 0.5, "small": 0.5})] * 80
    assert "surely not 1" in had_it_gone_to("large", told)["unknown"], "it was always drawn, at chances of one half"


def test_of_sampled_plans_the_mean_weight_says_what_is_covered() -> None:
    draw = Random(1)
    plans = [JudgedPlan("large" if draw.random() < 0.5 else None, 0.5, 1.0) for _ in range(400)]
    found = had_it_gone_to("large", plans)
    assert found["low"] < 0.95, "plans that were not drawn may have had no chance"
    assert found["high"] == pytest.approx(1, abs=0.01)
    assert "not surely about 1; " in had_it_gone_to("large", plans[:41])["unknown"]
    half = [*plans[:200], *[JudgedPlan(None, 0.5, 1.0)] * 200]
    assert "not surely about 1" in had_it_gone_to("large", half)["unknown"]


# ---------------------------------------------------------------- how often an interval holds the truth


def held_of(designs: Sequence[str], replications: int) -> float:
    cells = [cell(each, success, 160, replications) for each in designs for success in (0.25, 0.75, 0.93)]
    given = sum(one.given for one in cells)
    assert given > 0.5 * replications * len(cells), "most logs support an estimate"
    return sum(one.held for one in cells) / given


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Over even and uneven chances, chances that go with success or against it, and a bandit that learns from its log.
    1,000 logs and more: the share is within 0.02 of its own mean in 99 of 100 seeds."""
    known = [each for each in DESIGNS if not each.startswith(("sampled", "graded", "even 0.1", "between 0.02"))]
    assert 0.93 <= held_of(known, 60) <= 0.97


def test_where_it_is_not_known_what_was_covered_an_interval_is_wider() -> None:
    assert held_of([each for each in DESIGNS if each.startswith("sampled")], 30) >= 0.95


# ---------------------------------------------------------------- whose text is alike


def test_without_a_task_type_sums_and_products_are_two_kinds() -> None:
    draw, embedding = Random(1), by_meaning(shipped(TABLE_FILE))

    def vectors(sign: str) -> list[list[float]]:
        texts = [f"What is {draw.randint(10, 999)} {sign} {draw.randint(10, 999)}?" for _ in range(30)]
        return [embedding.embed(text) for text in texts]

    sums, products = vectors("+"), vectors("*")
    among = [rows.cosine(one, other) >= NEARLY_THE_SAME for one, other in combinations(sums, 2)]
    assert sum(among) > 0.75 * len(among), "sums of numbers of about the same length are one kind"
    assert not any(rows.cosine(one, other) >= NEARLY_THE_SAME for one in sums for other in products)
