"""Contracts and verify steps: what a plan may say of them, what code can tell, and what a checker's words mean."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from gateway.core.loop.contract import Expect, Verify, verdict_of
from gateway.core.loop.plan import Plan, PlanLimits, Step, limits_from_json, plan_schema, portable_schema, validate
from gateway.errors import PlanRefused

ALLOWED = PlanLimits(("quill", "atlas", "check"), 5, merges=frozenset({"tally"}), checkers=("check",), runs_tests=True)


def a_plan(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"steps": [{"worker": "quill", "task": None, "see": [], **step} for step in steps]}


def refusal(plan: dict[str, Any], allowed: PlanLimits = ALLOWED) -> str:
    with pytest.raises(PlanRefused) as refused:
        validate(plan, allowed)
    return refused.value.reason


VERIFY = {"worker": "check", "see": [0], "kind": "verify", "accept": "ship", "escalate": 2}


def test_a_plan_with_contracts_survives_its_own_json() -> None:
    expect = {"schema": {"type": "object"}, "regex": "^a+$", "tests": ["assert f(1)"], "min_chars": 3, "judge": "check"}
    plan = validate(a_plan({"expect": expect}, VERIFY, {"worker": "atlas"}), ALLOWED)
    assert plan.steps[0].expect == Expect('{"type":"object"}', "^a+$", ("assert f(1)",), 3, "check")
    assert plan.steps[1].verify == Verify(None, 2)
    assert validate(plan.as_json(), ALLOWED) == plan
    assert hash(plan)


def test_a_plan_without_contracts_has_the_json_and_the_grammar_that_it_had() -> None:
    assert Plan((Step("quill", None),)).as_json() == {"steps": [{"worker": "quill", "task": None, "see": []}]}
    plain = PlanLimits(ALLOWED.handles, 5)
    assert plan_schema(ALLOWED) == plan_schema(plain) == plan_schema(plain, checks=True)
    assert plain.as_json() == {
        "handles": ["quill", "atlas", "check"], "steps_max": 5, "first_index": 0, "depth_capped": []
    }  # fmt: skip


def test_limits_survive_their_json() -> None:
    assert limits_from_json(json.loads(json.dumps(ALLOWED.as_json()))) == ALLOWED


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ({"expect": {}}, "bad_expect"),
        ({"expect": None}, "bad_expect"),
        ({"expect": {"length": 3}}, "bad_expect"),
        ({"expect": {"regex": "(?=look)"}}, "bad_expect"),
        ({"expect": {"regex": "(.{0,500}){0,20}x"}}, "bad_expect"),
        ({"expect": {"regex": "a" * 301}}, "bad_expect"),
        ({"expect": {"schema": {"$ref": "http://x/y"}}}, "bad_expect"),
        ({"expect": {"min_chars": 0}}, "bad_expect"),
        ({"expect": {"min_chars": True}}, "bad_expect"),
        ({"expect": {"tests": []}}, "bad_expect"),
        ({"expect": {"tests": [1]}}, "bad_expect"),
        ({"expect": {"judge": "atlas"}}, "bad_expect"),
        ({"accept": "ship"}, "bad_step"),
        ({"kind": "verify"}, "bad_step"),
        ({"worker": "check", "kind": "verify", "see": []}, "bad_see"),
        ({"worker": "check", "kind": "vote", "see": []}, "bad_step"),
    ],
)
def test_a_bad_contract_is_refused_by_name(step: dict[str, Any], reason: str) -> None:
    assert refusal(a_plan(step)) == reason


@pytest.mark.parametrize(
    ("edges", "reason"),
    [
        ({"escalate": 1}, "bad_edge"),
        ({"escalate": 3}, "bad_edge"),
        ({"escalate": "ship"}, "bad_edge"),
        ({"accept": 2, "escalate": 2}, "bad_edge"),
        ({"accept": True}, "bad_edge"),
        ({"expect": {"min_chars": 1}}, "bad_step"),
    ],
)
def test_a_verify_step_leads_to_later_steps_of_its_plan(edges: dict[str, Any], reason: str) -> None:
    assert refusal(a_plan({}, {**VERIFY, **edges}, {"worker": "atlas"})) == reason


def test_a_verify_step_sees_the_step_right_before_it() -> None:
    plan = a_plan({}, {}, {**VERIFY, "see": [0], "escalate": "plan"})
    assert refusal(plan) == "bad_see"
    plan["steps"][2]["see"] = [0, 1]
    assert validate(plan, ALLOWED).steps[2].see == (0, 1)


def test_contracts_need_a_pool_that_checks() -> None:
    plain = PlanLimits(ALLOWED.handles, 5)
    assert refusal(a_plan({"expect": {"min_chars": 1}}), plain) == "bad_step"
    untested = PlanLimits(ALLOWED.handles, 5, checkers=("check",))
    assert refusal(a_plan({"expect": {"tests": ["pass"]}}), untested) == "bad_expect"


def test_a_merge_of_nothing_is_refused() -> None:
    allowed = PlanLimits(("quill", "tally"), 5, merges=frozenset({"tally"}))
    assert refusal(a_plan({"worker": "tally"}), allowed) == "no_inputs"
    assert refusal(a_plan({}, {"worker": "tally"}), allowed) == "no_inputs"
    assert validate(a_plan({}, {"worker": "tally", "see": [0]}), allowed)


def test_which_steps_may_answer() -> None:
    chain = a_plan({}, VERIFY, {"worker": "atlas"}, {**VERIFY, "see": [2], "escalate": 4}, {})
    plan = validate(chain, ALLOWED)
    assert [plan.may_answer(at, 0) for at in range(5)] == [True, False, True, False, True]
    branches = validate(a_plan({}, {**VERIFY, "accept": 2, "escalate": 3}, {}, {}), ALLOWED)
    assert [branches.may_answer(at, 0) for at in range(4)] == [False, False, True, True]
    plain = validate(a_plan({}, {}), ALLOWED)
    assert [plain.may_answer(at, 0) for at in range(2)] == [False, True]


def test_what_code_can_tell_of_a_reply() -> None:
    assert Expect(min_chars=3).fault(" ab ") == "it has 2 characters; at least 3 are wanted"
    assert Expect(regex="^[0-9]+$").fault("4 2") == "it does not match the pattern ^[0-9]+$"
    schema = json.dumps({"type": "object", "required": ["city"]})
    assert Expect(schema=schema).fault("Paris") == "it is not JSON"
    assert Expect(schema=schema).fault("{}") == "$: 'city' is a required property"
    assert Expect(schema=schema).fault('```json\n{"city": "Paris"}\n```') is None


def test_no_pattern_that_is_allowed_takes_long() -> None:
    for pattern in (r"(.{0,30}){0,30}x", r"(\w+\s?)+$", r"^(a+)+$", r"^.{1,5000}$"):
        began = time.process_time()
        Expect(regex=pattern).fault("a" * 200_000)
        assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("reply", "accept"),
    [
        ("valid", True),
        ("not valid", False),
        ("**Accept**", True),
        ("Rejected: it is off by one", False),
        ('{"accept": false, "why": "off by one"}', False),
        ('I tried it.\n{"accept": true, "why": "fine"}', True),
        ('{"exit_status": 0, "stdout": "", "files": {"a": "{}"}, "error": ""}', True),
        ('{"accept": true, "value": 1.0, "verdict": "right", "reason": "fine", "by": "builtin:judge@1"}', True),
        ('{"exit_status": 1, "stdout": "", "files": {}, "error": "AssertionError"}', False),
        ("Reasons first.\nFAILED", False),
        ("It may be right.", None),
        ("", None),
        ("[1]", None),
    ],
)
def test_what_a_checker_says(reply: str, accept: bool | None) -> None:
    assert verdict_of(reply).accept is accept


def test_the_grammar_offers_contracts_where_they_are_allowed() -> None:
    steps = plan_schema(ALLOWED, checks=True)["properties"]["steps"]["prefixItems"]
    assert [len(step["anyOf"]) for step in steps] == [3, 4, 4, 4, 4]
    verify = steps[1]["anyOf"][3]["properties"]
    assert verify["worker"] == {"enum": ["check"]}
    assert verify["accept"] == {"enum": ["ship", 2, 3, 4]}
    loose = portable_schema(plan_schema(ALLOWED, checks=True))["properties"]["steps"]["items"]["anyOf"]
    assert loose[3]["properties"]["escalate"] == {"anyOf": [{"const": "plan"}, {"type": "integer"}]}
    assert "schema" not in json.dumps(loose[2]["properties"]["expect"])
