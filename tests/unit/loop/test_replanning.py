"""When a conversation is planned anew: what counts as a failure, an error, a cap in sight, another intent."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.loop.experience.meaning import TABLE_FILE, by_meaning
from gateway.core.loop.experience.worth import Worth
from gateway.core.loop.turns.replanning import (
    DISTANCE_MAX,
    Expected,
    Left,
    Replanning,
    TurnFacts,
    better_worker,
    cache_worth_nano,
    cap_in_sight,
    distance,
    fault_of,
    has_intent,
    has_tool_error,
)
from gateway.core.money.amounts import Usage, cost_nano, worst_case_nano
from gateway.core.pool.workers import Price
from gateway.files import shipped

TALKS = [json.loads(line) for line in (Path(__file__).parent / "follow_ups.jsonl").read_text().splitlines()]
CACHED = Price(input_usd_per_mtok=Decimal(3), output_usd_per_mtok=Decimal(15), cache_read_usd_per_mtok=Decimal("0.3"))


def test_the_bound_on_meaning_keeps_follow_ups_and_notices_new_intents() -> None:
    """40 conversations: two follow-ups of each, and each one's question after every other one's."""
    embed = by_meaning(shipped(TABLE_FILE)).embed

    def is_new(question: str, message: str) -> bool:
        far = distance(embed(question), embed(message))
        return has_intent(message) and far is not None and far > DISTANCE_MAX

    follow_ups = [is_new(talk["question"], text) for talk in TALKS for text in talk["follow_ups"]]
    others = [is_new(talk["question"], one["question"]) for talk in TALKS for one in TALKS if one is not talk]
    assert (len(follow_ups), len(others)) == (80, 1560)
    assert sum(follow_ups) / len(follow_ups) <= 0.05
    assert sum(others) / len(others) >= 0.45


def test_texts_without_words_have_no_distance() -> None:
    assert distance([0.0, 0.0], [1.0, 0.0]) is None
    assert distance([1.0, 0.0], [0.0, 1.0]) == 1.0


def body(finish: str = "stop", **message: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish}]}


@pytest.mark.parametrize(
    ("reply", "capped", "fault"),
    [
        (body(content="4"), None, None),
        (body(content=None, tool_calls=[{"id": "a"}]), None, None),
        (body(content=None, function_call={"name": "a"}), None, None),
        (body(content="cut", finish="length"), None, None),
        (body(content="4"), "wall_s", "capped_wall_s"),
        (body(content="I", finish="content_filter"), None, "content_filter"),
        (body(content=None, refusal="No."), None, "refusal"),
        (body(content=""), None, "empty"),
        ({"choices": []}, None, "empty"),
    ],
)
def test_what_counts_as_a_failed_turn(reply: dict[str, Any], capped: str | None, fault: str | None) -> None:
    assert fault_of(reply, capped) == fault


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "a", "content": content, **more}


@pytest.mark.parametrize(
    ("content", "more", "error"),
    [
        ("sunny", {}, False),
        ("Error: no such file", {}, False),  # words decide nothing
        ("Error: no such file", {"is_error": True}, True),
        ('{"isError": true, "content": [{"type": "text", "text": "no"}]}', {}, True),
        ('{"isError": false, "content": []}', {}, False),
        ('{"error": {"code": 404}}', {}, True),
        ('{"error": "not found"}', {}, True),
        ('{"error": null, "rows": 3}', {}, False),
        ('{"error": "", "rows": 3}', {}, False),
        ('{"error": 0}', {}, False),
        ('{"error": "cut', {}, False),
        ('["error"]', {}, False),
        ([{"type": "text", "text": ' {"is_error": true} '}], {}, True),
        ("{" * 100_000, {}, False),
    ],
)
def test_an_error_of_a_tool_is_what_is_declared_one(content: Any, more: dict[str, Any], error: bool) -> None:
    asked = {"role": "assistant", "tool_calls": [{"id": "a"}]}
    turn = [result(content, **more), result("fine")]
    assert has_tool_error([asked, *turn]) is error
    assert not has_tool_error([asked, *turn, {"role": "assistant", "content": "so"}, {"role": "user", "content": "?"}])


@pytest.mark.parametrize(
    ("left", "cap"),
    [
        (Left(20, 2, 10), None),
        (Left(20, None, None), None),
        (Left(19, 2, 10), "cost"),
        (Left(20, 1, 10), "calls"),
        (Left(20, 2, 9), "context"),
    ],
)
def test_a_cap_is_in_sight_where_two_more_such_turns_do_not_fit(left: Left, cap: str | None) -> None:
    assert cap_in_sight(TurnFacts(cost_nano=10, calls=1, completion_tokens=5), left, 2) == cap


def test_of_a_turn_of_which_nothing_is_known_no_cap_is_in_sight() -> None:
    assert cap_in_sight(TurnFacts.read(None), Left(0, 2, 0), 2) is None


@given(st.builds(TurnFacts, st.none() | st.text(), st.none() | st.text(), *[st.integers(0, 10**12)] * 4))
def test_facts_survive_json(facts: TurnFacts) -> None:
    assert TurnFacts.read(json.loads(json.dumps(facts.as_json()))) == facts


@pytest.mark.parametrize("data", [None, 7, [], {"planned": 7}, {"cost_nano": "much"}, {"other": 1}])
def test_facts_of_another_form_say_nothing(data: Any) -> None:
    assert TurnFacts.read(data) == TurnFacts()


# ---------------------------------------------------------------- a better worker


def test_a_warm_cache_is_worth_the_difference_of_the_two_prices() -> None:
    assert cache_worth_nano(CACHED, 10_000) == 27_000_000  # 10k tokens at $2.70 a million
    assert cache_worth_nano(Price(input_usd_per_mtok=Decimal(3), output_usd_per_mtok=Decimal(15)), 10_000) == 0
    dearer = CACHED.model_copy(update={"cache_read_usd_per_mtok": Decimal(4)})
    assert cache_worth_nano(Price.model_validate(dearer.model_dump()), 10_000) == 0


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_what_is_held_for_a_call_covers_it_also_where_the_cache_is_cold_or_written(
    prompt: int, cached: int, written: int
) -> None:
    """So a warm cache takes nothing off a hold: no report of the worker is charged more than what was held."""
    price = Price.model_validate({**CACHED.model_dump(), "cache_write_usd_per_mtok": Decimal("3.75")})
    usage = Usage(prompt, 100, details={"cached_tokens": cached, "cache_write_tokens": written})
    cold = Usage(prompt, 100, details={"cached_tokens": 0})
    held = worst_case_nano(price, prompt, 100)
    assert max(cost_nano(price, usage), cost_nano(price, cold)) <= held


RULES, WORTH = Replanning(), Worth(0.05)
GOOD, POOR = Expected(20, 0.9, 1_000_000, 1.0), Expected(20, 0.5, 1_000_000, 1.0)


def test_a_much_better_worker_is_named_and_a_little_better_one_is_not() -> None:
    assert better_worker({"warm": POOR, "other": GOOD}, "warm", 0, RULES, WORTH) == "other"
    near = Expected(20, 0.58, 1_000_000, 1.0)
    assert better_worker({"warm": POOR, "other": near}, "warm", 0, RULES, WORTH) is None
    assert better_worker({"warm": GOOD, "other": POOR}, "warm", 0, RULES, WORTH) is None


def test_a_cache_that_is_worth_more_than_the_gain_keeps_the_worker() -> None:
    expected = {"warm": POOR, "other": GOOD}  # 0.4 of a right answer, so $0.015 beyond the margin
    assert better_worker(expected, "warm", 10_000_000, RULES, WORTH) == "other"
    assert better_worker(expected, "warm", 20_000_000, RULES, WORTH) is None


def test_workers_of_whom_little_is_known_are_not_compared() -> None:
    few = Expected(2, 1.0, 0, 0.1)
    assert better_worker({"warm": POOR, "other": few}, "warm", 0, RULES, WORTH) is None
    assert better_worker({"warm": few, "other": GOOD}, "warm", 0, RULES, WORTH) is None
    assert better_worker({"other": GOOD}, "warm", 0, RULES, WORTH) is None
