"""Explanations: what the log says of a choice, and what it does not."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from gateway.cli.admin import rollouts
from gateway.core.log.counterfactual import JudgedPlan
from gateway.core.log.explain import Surroundings, explain
from gateway.core.log.rollout import AttemptRecord, RolloutRecord
from gateway.core.pool.workers import MODEL_KINDS
from tests.records import T0_US, a_rollout, a_round, a_step, tree_of

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
    """Requests that the rule gave to `large` (0.75) or `small` (0.25); truths 0.9 and 0.6."""
    draw, chances = Random(seed), {"large": 0.75, "small": 0.25}
    plans = []
    for _ in range(n):
        worker, right = ("large", 0.9) if draw.random() < 0.75 else ("small", 0.6)
        plans.append(JudgedPlan(worker, chances[worker], float(draw.random() < right), chances))
    return plans


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
    assert "without a draw" in plan["unknown"]
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


def test_who_rested_and_why_is_told_apart_from_quarantine() -> None:
    record = record_of(caps={"quarantined": ["old"], "resting": {"vision": "silent"}})
    why = explain(tree_of(record), around())
    assert [(one["by"], one["what"]) for one in why["forbidden"]][-2:] == [
        ("quarantine", "workers old, unless every other one failed"),
        ("rest", "worker vision (silent), unless every other one failed"),
    ]
    assert (why["not_shown"]["resting"], why["not_shown"]["workers"]) == ({"vision": "silent"}, [])


def test_what_caps_key_and_pool_ruled_out() -> None:
    caps = {"calls": 16, "steps": 3, "cost_nano": 500_000_000}
    record = record_of(capped="cost", steps=[], caps=caps)
    why = explain(tree_of(record), around(key_workers=["small", "large", "search"]))
    assert [(one["by"], one["what"]) for one in why["forbidden"]] == [
        ("cap depth", "a step on `self`"),
        (
            "cap cost",
            "the rest of the request: it ran out of dollars: it spent $0.00000081 of the $0.000009 that were held "
            "for it (its cap is $0.50)",
        ),
        ("key", "workers other than large, search, small (as it is today)"),
    ], "the caps that bounded nothing are not told"
    assert why["not_shown"] == {"workers": [], "reason": None, "by_key": ["vision"], "drawn": {"search": 0.125}}
    assert explain(tree_of(record), around())["not_shown"]["workers"] == ["vision"]
    assert explain(tree_of(record), around(pool_workers=None))["not_shown"]["workers"] is None


def test_child_loops_are_explained_with_their_parent() -> None:
    top = record_of()
    child = a_rollout(parent_id=top.id, depth=1, created_us=T0_US + 1)
    decisions = explain(tree_of(top, child), around())["decisions"]
    assert [(one["rollout_id"], one["depth"]) for one in decisions] == [(top.id, 0), (child.id, 1)]


# ---------------------------------------------------------------- as text


def text_of(why: dict[str, Any]) -> str:
    return rollouts._explanation(json.loads(json.dumps(why)))


def ruled() -> RolloutRecord:
    """A request that the rule planned, between a cheap worker that is mostly wrong and a dear one that is mostly
    right."""
    pool = [
        {"name": name, "handle": name, "kind": kind, "experience": {"n": 8, "success": right / 8, "ms": ms}}
        for name, kind, right, ms in (("cheap", "openai", 1, 310), ("dear", "openai", 7, 920))
    ]
    cheap = {"n": 8.0, "right": 1.0, "success": 0.27, "low": 0.05, "high": 0.56, "usd": 0.00003, "latency_s": 0.31}
    dear = {"n": 8.0, "right": 7.0, "success": 0.82, "low": 0.55, "high": 0.98, "usd": 0.0003, "latency_s": 0.92}
    arms = [
        {"worker": "cheap", "handle": "cheap", **cheap, "utility": 0.255, "propensity": 0.05},
        {"worker": "dear", "handle": "dear", **dear, "utility": 0.705, "propensity": 0.95},
    ]
    worth = {"usd": 0.003, "seconds": 60.0, "by": "prices"}
    decision = {
        "planner": "rule",
        "worth": worth,
        "explored": False,
        "chosen": "dear",
        "propensity": 0.95,
        "arms": arms,
    }
    plan: dict[str, Any] = {"steps": [{"worker": "dear", "task": None, "see": []}]}
    first = a_round(
        planner="rule",
        policy_version=None,
        plan=plan,
        plan_logprobs=[],
        decision_mask=[],
        decision=decision,
        allowed={"handles": ["cheap", "dear"], "steps_max": 5, "first_index": 0},
    )
    return record_of(
        pool=pool, rounds=[first], steps=[a_step(0, "dear")], memory={"state": "fresh"}, policy_used="rule"
    )


def drawn_by_the_rule() -> list[JudgedPlan]:
    """Requests of which 360 went to `dear`, which was right on 290, and 40 to `cheap`, right on 8."""
    chances = {"cheap": 0.1, "dear": 0.9}
    went = [("dear", 290, 70), ("cheap", 8, 32)]
    return [
        JudgedPlan(worker, chances[worker], value, chances)
        for worker, right, wrong in went
        for value in [1.0] * right + [0.0] * wrong
    ]


def test_the_page_of_the_docs_shows_these_explanations() -> None:
    page = PAGE.read_text()
    tree = tree_of(ruled()) | {"outcomes": [{"kind": "number", "value": 1.0, "source": "client"}]}
    about = around(pool_workers=["cheap", "dear"], alike=drawn_by_the_rule())
    assert text_of(explain(tree, about)) in page
    assert text_of(explain(tree_of(record_of()), around())) in page


def test_the_table_has_the_figures_of_every_worker_and_marks_the_chosen_one() -> None:
    why = explain(tree_of(ruled()), around(pool_workers=["cheap", "dear"]))
    assert why["sentence"].startswith("dear, because it was right on 7 of 8 alike at $0.0003")
    decided = why["decided"]
    assert [(arm["worker"], arm["chosen"], arm["propensity"]) for arm in decided["arms"]] == [
        ("dear", True, 0.95),
        ("cheap", False, 0.05),
    ]
    assert (decided["planner"], decided["probability"], decided["memory"]) == ("rule", 0.95, {"state": "fresh"})
    alternatives = why["decisions"][0]["steps"][0]["alternatives"]
    assert [(one["worker"], one["probability"]) for one in alternatives] == [("cheap", 0.05), ("dear", 0.95)]


def test_verdicts_of_checkers_stand_beside_the_figures() -> None:
    record = record_of()
    record.steps[1].attempts.append(AttemptRecord(0, 1, verdict={"by": "judge", "accept": False, "why": "no year"}))
    why = explain(tree_of(record), around())
    (verdict,) = why["decided"]["verdicts"]
    assert (verdict["step"], verdict["by"], verdict["accept"]) == (1, "judge", False)
    assert "verdict at step 1: judge rejected: no year" in text_of(why)


def test_counterfactuals_are_of_models_alone() -> None:
    pool = [POOL[0] | {"kind": "openai"}, {"name": "vote", "handle": "vote", "kind": "tool"}]
    told = explain(tree_of(record_of(pool=pool)), around(models=MODEL_KINDS))["counterfactual"]["workers"]
    assert [one["worker"] for one in told] == ["small"]


def test_a_terminal_gets_no_control_characters() -> None:
    hostile = "\x1b]0;pwned\x07\x1b[2J\n\u202e"
    steps = [{"worker": "atlas", "task": hostile, "see": []}]
    record = record_of(rounds=[a_round(plan={"why": hostile, "steps": steps})], pool=[POOL[0] | {"name": hostile}])
    shown = text_of(explain(tree_of(record), around(key_workers=[hostile], likeness=hostile)))
    assert not any((ord(char) < 32 and char != "\n") or char in "\x7f\u202e" for char in shown)
