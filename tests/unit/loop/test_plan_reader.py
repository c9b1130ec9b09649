"""Steps are found while the plan is being decoded, and are the very steps of the finished plan."""

from __future__ import annotations

import json
import time
from random import Random
from typing import Any

import pytest

from gateway.core.loop.plan import PlanLimits, Step, validate, validate_step
from gateway.core.loop.reader import PLAN_BYTES_MAX, PlanReader
from gateway.errors import PlanRefused
from tests.plans import FIRST, LATER, cuts, valid_plan


def layouts(rng: Random, plan: dict[str, Any]) -> str:
    """The plan as different models write it: dense, spaced, indented, escaped, after thinking, fenced."""
    text = json.dumps(plan, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 2)))
    if rng.random() < 0.3:
        text = f'<think>Perhaps {{"steps": [{{"worker": "slate", "task": null}}]}}? No.</think>\n{text}'
    elif rng.random() < 0.3:
        text = f"```json\n{text}\n```"
    return text


@pytest.mark.parametrize("allowed", [FIRST, LATER], ids=["first", "later"])
def test_any_cuts_hand_out_exactly_the_steps_in_order(allowed: PlanLimits) -> None:
    for seed in range(400):
        rng = Random(seed)
        plan = valid_plan(rng, allowed)
        text = layouts(rng, plan)
        reader = PlanReader()
        raw: list[object] = []
        for piece in cuts(rng, text):
            raw += reader.feed(piece)
            assert len(raw) <= reader.opened <= len(raw) + 1
        assert reader.opened == len(raw) == len(plan["steps"])
        assert reader.text == text
        early = tuple(validate_step(step, allowed, at) for at, step in enumerate(raw))
        assert early == validate(text, allowed).steps


def test_a_step_is_out_with_its_last_brace_and_the_next_counts_from_its_first() -> None:
    reader = PlanReader()
    assert reader.feed('{"steps":[{"worker":"quill","task":"a } b","see":[]') == []
    assert reader.opened == 1
    assert reader.feed("}") == [{"worker": "quill", "task": "a } b", "see": []}]
    assert reader.feed(",") == []
    assert reader.opened == 1
    assert reader.feed('{"worker"') == []
    assert reader.opened == 2


def test_a_step_that_begins_with_an_empty_name_ends_where_it_ends() -> None:
    assert PlanReader().feed('{"steps": [{"": 1}, {"worker": "}"}]}') == [{"": 1}, {"worker": "}"}]


def test_several_steps_in_one_delta() -> None:
    assert PlanReader().feed('{"steps": [{"worker": "a"}, {"worker": "b"}]}') == [{"worker": "a"}, {"worker": "b"}]


def test_nothing_after_the_array_is_a_step() -> None:
    reader = PlanReader()
    assert reader.feed('{"steps": [{"worker": "a"}]') == [{"worker": "a"}]
    assert reader.feed(', "more": [{"worker": "b"}]}') == []
    assert reader.opened == 1


@pytest.mark.parametrize(
    "text",
    [
        'My plan is {"steps": [{"worker": "quill"}]}',
        '<think>{"steps": [{"worker": "quill"}]}',
        '<think>a</think><think>{"steps": [{"worker": "quill"}]}</think>',
        '<think>a</think> b</think>{"steps": [{"worker": "quill"}]}',
        '{"plan": {"steps": [{"worker": "quill"}]}}',
        '[{"steps": [{"worker": "quill"}]}]',
        '"{\\"steps\\": [{\\"worker\\": \\"quill\\"}]}"',
        '{"steps": {"worker": "quill"}}',
    ],
)
def test_the_reader_yields_no_step_that_validate_refuses(text: str) -> None:
    reader = PlanReader()
    assert [step for char in text for step in reader.feed(char)] == []
    assert reader.opened == 0
    with pytest.raises(PlanRefused):
        validate(text, FIRST)


def test_a_list_in_place_of_a_step_is_handed_out_and_refused_as_one() -> None:
    (raw,) = PlanReader().feed('{"steps": [["quill"]]}')
    with pytest.raises(PlanRefused) as refused:
        validate_step(raw, FIRST, 0)
    assert refused.value.reason == "bad_step"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"steps": [{worker: "quill"}', "not_json"),
        ('{"steps": [{"worker": "quill"]', "not_json"),
        ('{"steps": [{"worker": "quill", "worker": "atlas"}', "duplicate_key"),
        ('{"steps": [' + " " * PLAN_BYTES_MAX, "too_large"),
    ],
)
def test_text_that_cannot_become_a_plan_is_refused_at_once(text: str, reason: str) -> None:
    with pytest.raises(PlanRefused) as refused:
        PlanReader().feed(text)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    "text", ["<think>" + "[" * 4_000, "```" + "\n" * 20_000 + "[" * 100, '{"steps": [' + "[" * 20_000]
)
def test_crafted_text_costs_little_even_char_by_char(text: str) -> None:
    reader = PlanReader()
    began_s = time.thread_time()
    for char in text:
        reader.feed(char)
    assert time.thread_time() - began_s < 10  # of this thread's own work; quadratic time is minutes


def test_early_steps_keep_their_task_text_to_the_character() -> None:
    task = 'braces {"steps": [{}]}, "quotes", back\\slash\\" and 😀'
    (raw,) = PlanReader().feed(json.dumps({"steps": [{"worker": "quill", "task": task, "see": []}]}))
    assert validate_step(raw, FIRST, 0) == Step("quill", task)
