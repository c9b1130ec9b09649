"""`validate` is total: any input gives a plan within what is allowed, or a refusal with a listed name."""

from __future__ import annotations

import ast
import json
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gateway.core.loop.contract as contract_module
import gateway.core.loop.plan as plan_module
import gateway.core.loop.reader as reader_module
from gateway.core.loop.plan import (
    REASONS,
    TASK_CHARS_MAX,
    Plan,
    PlanLimits,
    Step,
    validate,
    validate_step,
)
from gateway.core.loop.reader import PLAN_BYTES_MAX
from gateway.errors import PlanRefused
from tests.plans import CHECKED, FIRST, LATER, SINGLE, TASKS, adversarial, valid_plan
from tests.sizes import report_row, sized

PLANS = sized(ci=12_000, long=100_000)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["all", "quill"]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from(["steps", "worker", "task", "see", "x"]) | st.text(max_size=5), inner)
    ),
    max_leaves=30,
)


def one(worker: object = "quill", task: object = None, see: object = ()) -> dict[str, Any]:
    return {"steps": [{"worker": worker, "task": task, "see": list(see) if isinstance(see, tuple) else see}]}


def outcome(raw: object, allowed: PlanLimits) -> str:
    """`plan`, or the reason of the refusal. Anything else fails the test."""
    try:
        plan = validate(raw, allowed)
    except PlanRefused as error:
        refused = error
    else:
        assert_within(plan, allowed)
        return "plan"
    assert refused.reason in REASONS
    assert refused.message
    return refused.reason


def assert_within(plan: Plan, allowed: PlanLimits) -> None:
    assert len(plan.steps) <= allowed.steps_max
    assert plan.steps or allowed.first_index > 0
    for index, step in enumerate(plan.steps, allowed.first_index):
        assert step.worker in allowed.handles
        assert step.task is None or (step.task.strip() and len(step.task) <= TASK_CHARS_MAX)
        assert (step.task or "").encode() is not None  # no half surrogate
        assert list(step.see) == sorted(set(step.see))
        assert all(type(seen) is int and 0 <= seen < index for seen in step.see)


def test_thousands_of_adversarial_plans_are_run_as_allowed_or_refused_by_name() -> None:
    seen: Counter[str] = Counter()
    for seed in range(PLANS):
        rng = Random(seed)
        allowed = rng.choice((FIRST, SINGLE, LATER, CHECKED))
        seen[outcome(adversarial(rng, allowed), allowed)] += 1
    assert set(seen) == REASONS | {"plan"}  # none of the ways to be wrong was missed
    assert seen["plan"] > PLANS // 20
    report_row("B4", plans=PLANS, run=seen["plan"], refused=PLANS - seen["plan"], outside_caps=0)


@settings(max_examples=200, deadline=None)
@given(json_values | st.binary(max_size=200) | st.text(max_size=200), st.sampled_from([FIRST, SINGLE, LATER, CHECKED]))
def test_any_value_is_a_plan_or_a_named_refusal(raw: object, allowed: PlanLimits) -> None:
    outcome(raw, allowed)
    if not isinstance(raw, str | bytes):
        outcome(json.dumps(raw), allowed)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([FIRST, SINGLE, LATER, CHECKED]))
def test_the_wire_form_of_an_accepted_plan_is_accepted_as_itself(seed: int, allowed: PlanLimits) -> None:
    plan = validate(valid_plan(Random(seed), allowed), allowed)
    assert validate(plan.as_json(), allowed) == plan
    assert validate(json.dumps(plan.as_json()), allowed) == plan
    assert validate(json.dumps(plan.as_json(), ensure_ascii=False).encode(), allowed) == plan


@pytest.mark.parametrize("task", ["\ud7ff", "\ue000", "x" * TASK_CHARS_MAX])
def test_a_task_up_to_its_bounds_is_taken(task: str) -> None:
    step = {"worker": FIRST.handles[0], "task": task, "see": []}
    assert validate({"steps": [step]}, FIRST).steps[0].task == task


@pytest.mark.parametrize("allowed", [FIRST, LATER], ids=["first", "later"])
def test_a_step_names_what_it_sees_as_often_as_the_grammar_lets_it_and_no_oftener(allowed: PlanLimits) -> None:
    most = allowed.first_index + allowed.steps_max - 1
    first: dict[str, Any] = {"worker": allowed.handles[0], "task": None, "see": []}
    second = {**first, "see": [allowed.first_index] * most}
    assert validate({"steps": [first, second]}, allowed).steps[1].see == (allowed.first_index,)
    with pytest.raises(PlanRefused) as refused:
        validate({"steps": [first, {**first, "see": [allowed.first_index] * (most + 1)}]}, allowed)
    assert refused.value.reason == "bad_see"


def test_a_plan_of_exactly_the_bound_is_read() -> None:
    text = json.dumps(valid_plan(Random(1), FIRST)).ljust(PLAN_BYTES_MAX)
    assert validate(text, FIRST) == validate(text.encode(), FIRST) == validate(text.strip(), FIRST)


@pytest.mark.parametrize(
    ("reason", "raw"),
    [
        ("too_large", '{"steps": []}' + " " * PLAN_BYTES_MAX),
        ("too_large", b" " * (PLAN_BYTES_MAX + 1)),
        ("not_json", ""),
        ("not_json", "Call quill, then atlas."),
        ("not_json", '{"steps": [NaN]}'),
        ("not_json", '{"steps": [-Infinity]}'),
        ("not_json", b"\xff\xfe"),
        ("not_json", '{"steps": ' + "[" * 60_000),
        ("not_json", '{"steps": [' + "9" * 5000 + "]}"),
        ("not_json", 'Sure! {"steps": [{"worker": "quill"}]}'),
        ("duplicate_key", '{"steps": [], "steps": [{"worker": "quill"}]}'),
        ("duplicate_key", '{"steps": [{"worker": "quill", "worker": "atlas"}]}'),
        ("not_object", "[]"),
        ("not_object", None),
        ("not_object", bytearray(b"{}")),
        ("unknown_key", {}),
        ("unknown_key", {"steps": [], "answer": "42"}),
        ("not_list", {"steps": {"worker": "quill"}}),
        ("not_list", {"steps": None}),
        ("no_steps", {"steps": []}),
        ("too_many_steps", {"steps": [{"worker": "quill"}] * 5}),
        ("bad_step", {"steps": ["quill"]}),
        ("bad_step", {"steps": [{"task": None}]}),
        ("bad_step", {"steps": [{"worker": "quill", "price": 0}]}),
        ("unknown_worker", one("gpt-4o")),
        ("unknown_worker", one(0)),
        ("unknown_worker", one(["quill"])),
        ("depth_cap", one("maestro")),
        ("bad_task", one(task="")),
        ("bad_task", one(task=" \n\t")),
        ("bad_task", one(task=7)),
        ("bad_task", one(task="half \ud83d")),
        ("bad_task", '{"steps": [{"worker": "quill", "task": "half \\ude00"}]}'),
        ("task_too_long", one(task="x" * (TASK_CHARS_MAX + 1))),
        ("bad_see", one(see="ALL")),
        ("bad_see", one(see=None)),
        ("bad_see", one(see=(-1,))),
        ("bad_see", one(see=(True,))),
        ("bad_see", one(see=(0.0,))),
        ("bad_see", one(see=(0,) * 99)),
        ("forward_see", one(see=(0,))),
        ("forward_see", {"steps": [{"worker": "quill", "see": [1]}, {"worker": "atlas", "see": [0]}]}),
        ("forward_see", {"steps": [{"worker": "quill"}, {"worker": "atlas", "see": [1]}]}),
    ],
)
def test_each_refusal_has_its_name(reason: str, raw: object) -> None:
    assert outcome(raw, FIRST) == reason


def test_the_list_of_reasons_is_the_list_in_the_code() -> None:
    files = [Path(str(module.__file__)) for module in (plan_module, reader_module, contract_module)]
    raised = {
        node.args[0].value
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "PlanRefused"
        if isinstance(node.args[0], ast.Constant)
    }
    assert raised == REASONS


def test_a_refusal_names_the_place() -> None:
    with pytest.raises(PlanRefused) as refused:
        validate({"steps": [{"worker": "quill"}, {"worker": "atlas", "see": [5]}]}, FIRST)
    assert refused.value.param == "steps[1].see"
    assert "before 1" in refused.value.message


@pytest.mark.parametrize(
    "raw",
    [
        '{"steps": [' + " " * 10_000_000 + "]}",
        b"9" * 10_000_000,
        "```" + "\n" * 60_000,  # each of these once took a regular expression quadratic time
        "```" + " " * 60_000,
        "```\n" * 15_000,
        "<think>" * 9_000,
        " " * 60_000 + "<think>",
    ],
    ids=["spaces", "digits", "lines", "blanks", "fences", "thinks", "blank-think"],
)
def test_huge_and_crafted_plans_are_refused_quickly(raw: str | bytes) -> None:
    began_s = time.thread_time()
    assert outcome(raw, FIRST) in {"too_large", "not_json"}
    assert time.thread_time() - began_s < 5  # of this thread's own work; quadratic time is minutes


@pytest.mark.parametrize("task", TASKS)
def test_any_text_may_be_a_task(task: str | None) -> None:
    assert validate(json.dumps(one(task=task)), FIRST).steps[0].task == task


@pytest.mark.parametrize(
    "text",
    [
        '<think>First {"steps": []} no.</think> {"steps": [{"worker": "quill"}]}',
        '```json\n{"steps": [{"worker": "quill"}]}\n```',
        '```\n{"steps": [{"worker": "quill"}]}```  \n',
        '<think></think>\n```json \n{"steps": [{"worker": "quill"}]}\n```',
        ' \n{"steps": [{"worker": "quill", "task": null, "see": "all"}]}\n',
    ],
)
def test_one_think_block_and_one_fence_are_taken_off(text: str) -> None:
    assert validate(text, FIRST) == Plan((Step("quill", None),))


@pytest.mark.parametrize(
    "text",
    [
        '<think>a</think><think>b</think>{"steps": [{"worker": "quill"}]}',
        '```json\n{"steps": [{"worker": "quill"}]}\n```\nThat is my plan.',
        '{"steps": [{"worker": "quill"}]} {"steps": []}',
    ],
)
def test_nothing_else_is_taken_off(text: str) -> None:
    assert outcome(text, FIRST) == "not_json"


def test_indices_count_over_all_rounds() -> None:
    plan = validate({"steps": [{"worker": "quill", "see": "all"}, {"worker": "atlas", "see": [4, 0, 4]}]}, LATER)
    assert [step.see for step in plan.steps] == [(0, 1, 2, 3), (0, 4)]
    assert outcome({"steps": [{"worker": "quill", "see": [4]}]}, LATER) == "forward_see"


def test_an_empty_plan_ships_the_last_answer_but_not_at_first() -> None:
    assert validate({"steps": []}, LATER) == Plan(())
    assert outcome({"steps": []}, FIRST) == "no_steps"


def test_a_step_by_itself_is_judged_like_one_in_its_plan() -> None:
    raw = {"worker": "quill", "task": "Check.", "see": [1, 0]}
    assert validate_step(raw, FIRST, 2) == Step("quill", "Check.", (0, 1))
    with pytest.raises(PlanRefused, match="before 1"):
        validate_step(raw, FIRST, 1)
