"""Explanations: what the log says of a choice, and what it does not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gateway.adapters.postgres import rows
from gateway.cli.admin import rollouts
from gateway.core.log.counterfactual import JudgedPlan, had_it_gone_to, judged_plan, plan_probability
from gateway.core.log.explain import Surroundings, explain
from gateway.core.log.rollout import AttemptRecord, RolloutRecord
from tests.records import T0_US, a_rollout, a_round, a_step, rollout_event

PAGE = Path(__file__).resolve().parents[3] / "docs" / "explain.md"
POOL: list[dict[str, Any]] = [
    {"name": "small", "handle": "atlas", "experience": {"n": 12, "success": 0.58, "cost_nano": 90, "ms": 400}},
    {"name": "large", "handle": "quill", "experience": {"n": 9, "success": 0.9, "cost_nano": 4_000, "ms": 1_900}},
    {"name": "search", "handle": "ember", "experience": None, "drawn": 0.125},
]
STEPS: list[dict[str, Any]] = [
    {"worker": "atlas", "task": "Find the year.", "see": []},
    {"worker": "quill", "task": "Find the place.", "see": []},
    {"worker": "quill", "task": None, "see": [0]},
]


def tree_of(*records: RolloutRecord) -> dict[str, Any]:
    new = rows.Rows()
    for record in records:
        new.extend(rows.event_rows(rollout_event(record)))
    parts = {"rounds": new.rounds, "steps": new.steps, "outcomes": [], "ledger": []}
    return rows.tree(records[0].id, new.rollouts, parts)


def record_of(**changes: Any) -> RolloutRecord:
    example = {"question": "When was the bridge built?", "plan": "{}", "cost_nano": 10}
    one = a_round(
        plan={"why": "two facts, then one answer", "steps": STEPS},
        plan_logprobs=[-0.5, -3.0, -0.25],
        decision_mask=[True, False, True],
        allowed={"handles": ["atlas", "ember", "quill"], "steps_max": 3, "first_index": 0, "depth_capped": ["self"]},
        shown={"request": {"rounds": 1}, "examples": [example]},
    )
    filled: dict[str, Any] = {
        "id": "0199c82d-8c80-7000-8000-000000000001",
        "pool": POOL,
        "caps": {"calls": 16, "steps": 3},
        "rounds": [one],
        "steps": [
            a_step(0, "small", task="Find the year.", see=[]),
            a_step(1, "large", task="Find the place.", see=[]),
            a_step(2, "large", task=None, see=[0]),
        ],
    }
    return a_rollout(**(filled | changes))


def around(**changes: Any) -> Surroundings:
    filled: dict[str, Any] = {"pool_workers": ["small", "large", "search", "vision"], "alike": logged_plans()}
    return Surroundings(**(filled | {"likeness": "requests of task type arithmetic"} | changes))


def logged_plans(seed: int = 3, n: int = 400) -> list[JudgedPlan]:
    """Plans of a policy that prefers `large` (0.75) to `small` (0.25); truths 0.9 and 0.6."""
    draw = Random(seed)
    plans = []
    for _ in range(n):
        worker, chance, right = ("large", 0.75, 0.9) if draw.random() < 0.75 else ("small", 0.25, 0.6)
        plans.append(JudgedPlan((worker,), True, chance, float(draw.random() < right)))
    return plans


def test_a_plan_has_the_probability_of_its_decisions() -> None:
    assert plan_probability([-0.5, -3.0, -0.25], [True, False, True]) == pytest.approx(math.exp(-0.75))
    assert plan_probability([None, -1.0], [False, True]) == pytest.approx(math.exp(-1))
    for logprobs, mask in (([], []), ([-1.0], [True, True]), ([-math.inf], [True]), ([None], [True]), ([0.5], [True])):
        assert plan_probability(logprobs, mask) is None


def test_alternatives_stand_between_the_bounds_that_the_log_gives() -> None:
    decision = explain(tree_of(record_of()), around())["decisions"][0]
    assert decision["why"] == "two facts, then one answer"
    assert decision["plan"] == {
        "probability": 0.472367,
        "source": "logged",
        "decisions": 2,
        "choices": 2,
        "least_likely": 0.606531,
        "temperature": 1.0,
    }
    first = decision["steps"][0]["alternatives"]
    assert [(one["worker"], one["chosen"]) for one in first] == [("small", True), ("search", False), ("large", False)]
    assert first[0]["probability"] == {"at_least": 0.472367, "at_most": 1.0}
    assert first[1]["probability"] == {"at_least": 0.0, "at_most": 0.527633}


def test_what_was_recomputed_says_so() -> None:
    record = record_of()
    known = {(record.id, 1, 0): {"atlas": 0.7, "quill": 0.3}}
    alternatives = explain(tree_of(record), around(recomputed=known))["decisions"][0]["steps"][0]["alternatives"]
    assert [(one["probability"], one["source"]) for one in alternatives if one["handle"] != "ember"] == [
        (0.7, "recomputed"),
        (0.3, "recomputed"),
    ]


def test_a_router_and_a_plan_without_log_probs_are_unknown_with_the_reason() -> None:
    ruled = record_of(rounds=[a_round(planner="rule", plan={"steps": STEPS[:1]}, plan_logprobs=[], decision_mask=[])])
    plan = explain(tree_of(ruled), around())["decisions"][0]["plan"]
    assert plan["probability"] is None
    assert "no probabilities" in plan["unknown"]
    bare = record_of(rounds=[a_round(plan_logprobs=[], decision_mask=[], allowed=None)])
    decision = explain(tree_of(bare), around())["decisions"][0]
    assert "no log-probs" in decision["plan"]["unknown"]
    assert decision["steps"][0]["unknown"] == "the log does not say which workers the mask allowed"
    assert decision["steps"][0]["alternatives"][0]["probability"] is None


def test_a_sole_worker_was_certain() -> None:
    assert explain(tree_of(a_rollout()), Surroundings())["decisions"][0]["steps"][0]["alternatives"] == [
        {"handle": "quill", "worker": "alpha", "chosen": True, "probability": 1.0, "source": "logged"}
    ]


def test_what_was_hidden_from_whom() -> None:
    hidden = explain(tree_of(record_of()), around())["hidden"]
    assert [(one["saw"], one["hidden"], one["conversation"]) for one in hidden] == [
        ([], [], False),
        ([], [0], False),
        ([0], [1], True),
    ]
    bare = explain(tree_of(record_of(log_mode="metadata")), around())["hidden"]
    assert {one["conversation"] for one in bare} == {None}, "the log has no tasks, so it cannot say"


def test_what_was_cut_of_a_prompt_is_there() -> None:
    record = record_of()
    record.steps[2].attempts.append(AttemptRecord(0, 1, cut={"messages": 4, "summary": "made"}))
    hidden = explain(tree_of(record), around())["hidden"]
    assert [one.get("cut") for one in hidden] == [None, None, {"messages": 4, "summary": "made"}]


def test_what_caps_key_and_pool_ruled_out() -> None:
    record = record_of(capped="cost", steps=[])
    why = explain(tree_of(record), around(key_workers=["small", "large", "search"]))
    told = [(one["by"], one["what"]) for one in why["forbidden"]]
    assert ("cap steps", "more than 3") in told
    assert ("cap depth", "a step on `self`") in told
    assert ("cap cost", "the rest of the request: it ended here") in told
    assert ("key", "workers other than large, search, small (as it is today)") in told
    assert why["not_shown"] == {"workers": [], "reason": None, "by_key": ["vision"], "drawn": {"search": 0.125}}
    assert explain(tree_of(record), around())["not_shown"]["workers"] == ["vision"]
    assert explain(tree_of(record), around(pool_workers=None))["not_shown"]["workers"] is None


def test_child_loops_are_explained_with_their_parent() -> None:
    top = record_of()
    child = a_rollout(parent_id=top.id, depth=1, created_us=T0_US + 1)
    decisions = explain(tree_of(top, child), around())["decisions"]
    assert [(one["rollout_id"], one["depth"]) for one in decisions] == [(top.id, 0), (child.id, 1)]


# ---------------------------------------------------------------- counterfactuals


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    truth, runs = {"large": 0.9, "small": 0.6}, 200
    held = dict.fromkeys(truth, 0)
    for seed in range(runs):
        plans = logged_plans(seed, 200)
        for worker, value in truth.items():
            one = had_it_gone_to(worker, plans)
            held[worker] += one["low"] <= value <= one["high"]
    assert all(count / runs >= 0.92 for count in held.values()), held


def test_what_the_log_does_not_support_is_unknown() -> None:
    plans = logged_plans()
    assert "went to vision alone" in had_it_gone_to("vision", plans)["unknown"]
    assert "judged requests like this" in had_it_gone_to("large", plans[:20])["unknown"]
    routed = [JudgedPlan(("large",), True, None, 1.0)] * 100
    assert had_it_gone_to("large", routed)["alike"] == 0, "a router's choice has no probability"
    staged = [JudgedPlan(("large", "small"), False, 0.5, 1.0)] * 100
    assert had_it_gone_to("large", staged)["tried"] == 0, "a plan of two steps is not the worker alone"
    rare = [JudgedPlan(("small",), True, 0.5, 1.0)] * 30 + [JudgedPlan(("large",), True, 0.001, 1.0)] * 12
    assert "weights' mean" in had_it_gone_to("large", rare)["unknown"]
    uneven = [*rare[30:31], *[JudgedPlan(("large",), True, 0.9, 1.0)] * 40]
    assert "weigh all" in had_it_gone_to("large", uneven)["unknown"]


def test_a_plain_single_step_is_the_worker_alone() -> None:
    names = {"atlas": "small"}
    assert judged_plan({"steps": [STEPS[2] | {"worker": "atlas"}]}, names, 0.5, 1.0).alone
    assert not judged_plan({"steps": STEPS[:1]}, names, 0.5, 1.0).alone, "a task of the planner's own"
    assert not judged_plan({"steps": []}, names, 0.5, 1.0).alone


# ---------------------------------------------------------------- as text


def text_of(why: dict[str, Any]) -> str:
    return rollouts._explanation(json.loads(json.dumps(why)))


def test_the_page_of_the_docs_shows_this_explanation() -> None:
    assert text_of(explain(tree_of(record_of()), around())) in PAGE.read_text()


def test_a_terminal_gets_no_control_characters() -> None:
    hostile = "\x1b]0;pwned\x07\x1b[2J\n\u202e"
    steps = [{"worker": "atlas", "task": hostile, "see": []}]
    record = record_of(rounds=[a_round(plan={"why": hostile, "steps": steps})], pool=[POOL[0] | {"name": hostile}])
    shown = text_of(explain(tree_of(record), around(key_workers=[hostile], likeness=hostile)))
    assert not any((ord(char) < 32 and char != "\n") or char in "\x7f\u202e" for char in shown)
