"""The grammar a plan is decoded under agrees with `validate`, and the log tells decisions from task text."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from gateway.core.loop.plan import (
    WHY_CHARS_MAX,
    PlanLimits,
    decision_mask,
    plan_schema,
    portable_schema,
    schema_hash,
    validate,
)
from gateway.errors import PlanRefused
from tests.plans import FIRST, HANDLES, LATER, OBJECTS, SINGLE, cuts, valid_plan

ALLOWED = [FIRST, SINGLE, LATER]
MERGING = replace(FIRST, merges=frozenset(HANDLES[:2]))
IDS = ["first", "single", "later"]
TEXT_ONLY = {"bad_task", "task_too_long"}  # what a grammar leaves to `validate`: how long and how blank a task is


def accepted(raw: object, allowed: PlanLimits) -> str:
    try:
        validate(raw, allowed)
    except PlanRefused as refused:
        return refused.reason
    return "plan"


def schema_step(rng: Random, allowed: PlanLimits, at: int | None = None) -> dict[str, Any]:
    """Any step the schema lets through at this place, repeats included; without `at`, as the portable one does."""
    last = allowed.first_index + (allowed.steps_max - 1 if at is None else at)
    see: Any = [rng.randrange(last) for _ in range(rng.randint(0, last))] if last else []
    return {
        "worker": rng.choice(allowed.handles),
        "task": rng.choice((None, "Do it.", 'a "b" {c}')),
        "see": rng.choice((see, see, see, "all")),
    }


@pytest.mark.parametrize("allowed", ALLOWED, ids=IDS)
def test_each_plan_of_the_schema_is_valid(allowed: PlanLimits) -> None:
    schema = Draft202012Validator(plan_schema(allowed))
    for seed in range(300):
        rng = Random(seed)
        count = rng.randint(allowed.first_index == 0, allowed.steps_max)
        steps = [schema_step(rng, allowed, at) for at in range(count)]
        assert schema.is_valid({"steps": steps})
        assert accepted({"steps": steps}, allowed) == "plan"


@pytest.mark.parametrize("allowed", ALLOWED, ids=IDS)
def test_plans_of_the_portable_schema_are_refused_only_for_looking_forward(allowed: PlanLimits) -> None:
    assert "prefixItems" not in json.dumps(portable_schema(plan_schema(allowed)))
    schema = Draft202012Validator(portable_schema(plan_schema(allowed)))
    seen = set()
    for seed in range(300):
        rng = Random(seed)
        steps = [schema_step(rng, allowed) for _ in range(rng.randint(allowed.first_index == 0, allowed.steps_max))]
        assert schema.is_valid({"steps": steps})
        forward = any(
            item >= allowed.first_index + at
            for at, step in enumerate(steps)
            if step["see"] != "all"
            for item in step["see"]
        )
        seen.add(forward)
        assert accepted({"steps": steps}, allowed) == ("forward_see" if forward else "plan")
    assert False in seen
    assert (True in seen) == (allowed is not SINGLE)


@pytest.mark.parametrize("allowed", [*ALLOWED, MERGING], ids=[*IDS, "merging"])
def test_schema_and_validator_agree_on_mutated_plans(allowed: PlanLimits) -> None:
    """But for what a grammar cannot count (task length), and for what `validate` forgives: a step
    that leaves out `task` or `see`."""
    schema = Draft202012Validator(plan_schema(allowed))
    agreed = 0
    for seed in range(250):
        rng = Random(seed)
        plan = rng.choice(OBJECTS)(rng, valid_plan(rng, allowed))
        verdict = accepted(plan, allowed)
        if verdict == "plan":
            assert schema.is_valid(validate(plan, allowed).as_json())
        elif verdict not in TEXT_ONLY and not _floats(plan):
            assert not schema.is_valid(plan), verdict
            agreed += 1
    assert agreed > 50


def _floats(plan: Any) -> bool:
    """JSON Schema holds 0.0 and false for the index 0, or near it; decoders write neither."""
    steps = plan.get("steps") if isinstance(plan, dict) else None
    sees = [step.get("see") for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    return any(isinstance(item, float) for see in sees if isinstance(see, list) for item in see)


@pytest.mark.parametrize("allowed", ALLOWED, ids=IDS)
def test_the_grammar_compiles_and_decodes_valid_plans(allowed: PlanLimits) -> None:
    for seed in range(30):
        plan = valid_plan(Random(seed), allowed)
        assert decodes(allowed, json.dumps(plan, separators=(",", ":"), ensure_ascii=False))


@pytest.mark.parametrize(
    ("allowed", "text", "good"),
    [
        (FIRST, '{"steps":[{"worker":"quill","task":null,"see":[]}]}', True),
        (FIRST, '{"steps":[{"worker":"gpt","task":null,"see":[]}]}', False),
        (FIRST, '{"steps":[]}', False),
        (LATER, '{"steps":[]}', True),
        (SINGLE, '{"steps":[{"worker":"quill","task":null,"see":[0]}]}', False),
        (FIRST, '{"steps":[{"worker":"quill","task":null,"see":[3]}]}', False),
        (FIRST, '{"steps":[{"worker":"quill","task":null,"see":[0]}]}', False),
        (
            FIRST,
            '{"steps":[{"worker":"quill","task":null,"see":"all"},{"worker":"atlas","task":null,"see":[0]}]}',
            True,
        ),
        (LATER, '{"steps":[{"worker":"quill","task":"again","see":[0,3]}]}', True),
        (LATER, '{"steps":[{"worker":"quill","task":"again","see":[6]}]}', False),
        (FIRST, '{"steps":[{"worker":"quill","task":null}]}', False),
        (FIRST, '{"steps":[{"worker":"quill","task":null,"see":[],"x":1}]}', False),
    ],
)
def test_the_grammar_draws_the_same_line(allowed: PlanLimits, text: str, good: bool) -> None:
    assert decodes(allowed, text) is good


def decodes(allowed: PlanLimits, text: str) -> bool:
    """Whether constrained decoding could have written exactly this text."""
    tokenizer = LLTokenizer("byte")
    style = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    grammar = LLMatcher.grammar_from_json_schema(plan_schema(allowed), overrides=style)
    assert not LLMatcher.validate_grammar(grammar, tokenizer)
    matcher = LLMatcher(tokenizer, grammar)
    return bool(matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting())


def test_the_schema_hash_tells_grammars_apart() -> None:
    hashes = {schema_hash(plan_schema(allowed)) for allowed in ALLOWED}
    assert len(hashes) == 3
    assert schema_hash(plan_schema(FIRST)) == schema_hash(plan_schema(FIRST))
    reordered = PlanLimits(HANDLES[::-1], FIRST.steps_max)
    assert schema_hash(plan_schema(reordered)) == schema_hash(plan_schema(FIRST))
    schema = plan_schema(FIRST)
    assert schema_hash(dict(reversed(schema.items()))) == schema_hash(schema)  # however it was put together


# ---------------------------------------------------------------- decisions


def free_spans(text: str, plan: dict[str, Any]) -> list[tuple[int, int]]:
    """Where task text stands, found by writing the plan out again, not by a pattern."""
    spans, at = [], 0
    for step in plan["steps"]:
        if step["task"] is not None:
            written = json.dumps(step["task"])
            at = text.index(f'"task": {written}', at) + len('"task": ')
            spans.append((at + 1, at + len(written) - 1))
            at += len(written)
        else:
            at = text.index('"task": null', at) + 1
    return spans


def test_tokens_wholly_inside_task_text_are_no_decisions_and_all_others_are() -> None:
    free = decided = 0
    for seed in range(500):
        rng = Random(seed)
        plan = valid_plan(rng, FIRST)
        text = json.dumps(plan)
        spans = free_spans(text, plan)
        start = 0
        tokens = cuts(rng, text)
        mask = decision_mask(tokens)
        assert len(mask) == len(tokens)
        for token, decides in zip(tokens, mask, strict=True):
            inside = any(a <= start and start + len(token) <= b for a, b in spans)
            assert decides is not inside
            start += len(token)
            free, decided = free + inside, decided + decides
    assert min(free, decided) > 1000


def test_the_quote_that_ends_a_task_is_a_decision() -> None:
    tokens = ['{"steps":[{"worker":"', "quill", '","task":"', "Add", " it", '."', ',"see":[]}]}']
    assert decision_mask(tokens) == [True, True, True, False, False, True, True]


def test_half_a_character_is_decoded_as_no_text_and_belongs_to_the_task_around_it() -> None:
    tokens = ['{"task":"', "", "😀", "", "!", '"', "", "}", ""]
    assert decision_mask(tokens) == [True, False, False, False, False, True, True, True, True]


def test_a_token_without_text_before_the_closing_quote_decides_to_close() -> None:
    assert decision_mask(['{"task":"', "a", "", '"}']) == [True, False, True, True]


def test_a_cut_plan_has_a_mask_too() -> None:
    assert decision_mask(['{"steps":[{"task":"', "Ad", "d"]) == [True, False, False]
    assert decision_mask([]) == []


@pytest.mark.parametrize("allowed", ALLOWED, ids=IDS)
def test_a_plan_that_begins_with_a_rationale(allowed: PlanLimits) -> None:
    plain, schema = plan_schema(allowed), plan_schema(allowed, why=True)
    assert list(schema["properties"]) == ["why", "steps"] == schema["required"]
    assert schema["properties"]["why"] == {"type": "string", "maxLength": WHY_CHARS_MAX}
    assert portable_schema(schema)["properties"]["why"] == {"type": "string"}
    assert portable_schema(schema)["properties"]["steps"] == portable_schema(plain)["properties"]["steps"]
    assert schema_hash(schema) != schema_hash(plain)
    steps = valid_plan(Random(1), allowed)["steps"]
    assert Draft202012Validator(schema).is_valid({"why": "w", "steps": steps})
    assert (
        validate({"why": "w", "steps": steps}, allowed).as_json()
        == {"why": "w"} | validate({"steps": steps}, allowed).as_json()
    )


def test_a_rationale_is_no_decision() -> None:
    tokens = ['{"why":"', "it is", ' easy","', 'steps":[', "]}"]
    assert decision_mask(tokens) == [True, False, True, True, True]


def test_a_step_that_merges_replies_sees_one_at_least() -> None:
    """A model that is bound to the schema cannot vote over nothing."""

    def workers(first_index: int, handles: tuple[str, ...] = ("ada", "tally")) -> list[str]:
        schema = plan_schema(PlanLimits(handles, 1, first_index, merges=frozenset({"tally"})))
        return [worker for worker in handles for see in ([], "all", [0]) if allows(schema, worker, see)]

    def allows(schema: dict[str, Any], worker: str, see: object) -> bool:
        plan = {"steps": [{"worker": worker, "task": None, "see": see}]}
        return Draft202012Validator(schema).is_valid(plan)

    assert workers(0) == ["ada", "ada"]
    assert workers(1) == ["ada", "ada", "ada", "tally", "tally"]
    assert workers(0, ("tally",)) == ["tally", "tally"]  # a grammar without any plan is none
