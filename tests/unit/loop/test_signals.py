"""Signals: what the next request of a client says of an earlier reply."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.core.loop.evidence.signals import SAME_QUESTION, Asked, Signal, signals_of, succeeded
from gateway.core.loop.experience.likeness import question_text
from gateway.core.loop.experience.meaning import TABLE_FILE, by_meaning
from gateway.files import shipped

Message = dict[str, Any]
HERE = Path(__file__).parent
AGAIN = [json.loads(line) for line in (HERE / "asked_again.jsonl").read_text().splitlines()]
FOLLOW_UPS = [json.loads(line) for line in (HERE / "follow_ups.jsonl").read_text().splitlines()]
EMBEDDING = by_meaning(shipped(TABLE_FILE))
FIRST = AGAIN[0]["question"]
ANSWER = "Canberra. Sydney and Melbourne could not agree, so a new city was built between them."


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def asked(name: str, messages: Sequence[Message], at: int, *replies: Message, who: str | None = "ann") -> Asked:
    """A request that took one microsecond."""
    vector = EMBEDDING.embed(question_text(messages))
    return Asked(name, who, at, at + 1, messages, replies, vector, "minilm")


def found(later: Asked, *earlier: Asked) -> list[tuple[str, str, float]]:
    return [(one.rollout_id, one.source, one.value) for one in signals_of(later, earlier)]


P = asked("p", [user(FIRST)], 0, said(ANSWER))
MORE = user("And how many people live there?")


# ---------------------------------------------------------------- the same question again


@pytest.mark.parametrize(("question", "again"), [(one["question"], text) for one in AGAIN for text in one["again"]])
def test_the_same_question_in_other_words_is_the_same(question: str, again: str) -> None:
    first = asked("p", [user(question)], 0, said("…"))
    assert found(asked("t", [user(again)], 9), first) == [("p", "signal:repeat", 0.0)]


@pytest.mark.parametrize(("question", "after"), [(one["question"], one["next"]) for one in AGAIN])
def test_another_question_says_that_the_reply_would_do(question: str, after: str) -> None:
    assert found(asked("t", [user(after)], 9), asked("p", [user(question)], 0)) == [("p", "signal:repeat", 1.0)]


def test_the_bound_lies_between_questions_that_are_asked_again_and_those_that_follow_up() -> None:
    def cosine(one: str, other: str) -> float:
        return sum(a * b for a, b in zip(EMBEDDING.embed(one), EMBEDDING.embed(other), strict=True))

    again = min(cosine(one["question"], text) for one in AGAIN for text in one["again"])
    follow_up = max(cosine(one["question"], text) for one in FOLLOW_UPS for text in one["follow_ups"])
    assert (round(follow_up, 2), round(again, 2)) == (0.61, 0.84)
    assert follow_up < SAME_QUESTION < again


def test_the_same_question_about_another_number_is_another() -> None:
    first = asked("p", [user("When was invoice 2291 paid?")], 0)
    assert found(asked("t", [user("When was invoice 2292 paid?")], 9), first) == [("p", "signal:repeat", 1.0)]
    assert found(asked("t", [user("When was the invoice 2291 paid?")], 9), first) == [("p", "signal:repeat", 0.0)]


def test_without_an_end_user_only_a_conversation_tells_who_asks() -> None:
    nobody = asked("p", [user(FIRST)], 0, said(ANSWER), who=None)
    assert found(asked("t", [user(FIRST)], 9, who=None), nobody) == []
    goes_on = asked("t", [user(FIRST), said(ANSWER), user(FIRST)], 9, who=None)
    assert found(goes_on, nobody) == [("p", "signal:edit", 1.0), ("p", "signal:repeat", 0.0)]


def test_the_turns_of_an_agent_are_one_question() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asks = asked("p", [user(FIRST)], 0, said("", tool_calls=[call]))
    turn = [user(FIRST), said("", tool_calls=[call]), {"role": "tool", "tool_call_id": "c1", "content": "a city"}]
    assert found(asked("t", turn, 9), asks) == [("p", "signal:edit", 1.0)]


def test_a_request_that_began_before_the_reply_was_there_says_nothing_of_it() -> None:
    assert found(asked("t", [user(FIRST)], 0), P) == []


def test_vectors_of_two_embedders_are_not_compared() -> None:
    later = asked("t", [user(FIRST)], 9)
    other = Asked("t", "ann", 9, 10, later.messages, (), later.question, "hashing")
    assert found(other, P) == []


# ---------------------------------------------------------------- kept, edited, asked again


def test_a_reply_that_is_sent_back_as_it_was_was_kept() -> None:
    spaced = [user(FIRST), said(f" {ANSWER}\n", refusal=None), MORE]
    assert found(asked("t", spaced, 9), P) == [("p", "signal:edit", 1.0), ("p", "signal:repeat", 1.0)]


def test_an_edited_reply_counts_by_how_much_of_it_was_kept() -> None:
    little = found(asked("t", [user(FIRST), said(ANSWER.replace("Canberra", "It is Canberra")), MORE], 9), P)
    wholly = found(asked("t", [user(FIRST), said("Vienna, of course, my dear friend."), MORE], 9), P)
    assert little[0][:2] == wholly[0][:2] == ("p", "signal:edit")
    assert 0.85 < little[0][2] < 1
    assert wholly[0][2] < 0.2


def test_a_tool_call_that_is_changed_is_an_edit() -> None:
    def call(place: str) -> Message:
        function = {"name": "look", "arguments": json.dumps({"place": place})}
        return said("", tool_calls=[{"id": "c1", "type": "function", "function": function}])

    asks = asked("p", [user(FIRST)], 0, call("Sydney"))
    result = {"role": "tool", "tool_call_id": "c1", "content": "a city"}
    assert found(asked("t", [user(FIRST), call("Canberra"), result], 9), asks) == [("p", "signal:edit", 0.0)]


def test_of_several_choices_the_one_that_was_sent_back_counts() -> None:
    two = asked("p", [user(FIRST)], 0, said("Vienna."), said(ANSWER))
    assert found(asked("t", [user(FIRST), said(ANSWER), MORE], 9), two)[0] == ("p", "signal:edit", 1.0)


def test_a_turn_that_is_asked_again_was_rejected() -> None:
    talk = [user(FIRST), said(ANSWER), MORE]
    second = asked("q", talk, 5, said("Many."))
    assert found(asked("t", talk, 9), second, P) == [("q", "signal:edit", 0.0)]


def test_after_a_second_try_the_reply_that_was_chosen_is_the_one_that_was_kept() -> None:
    talk = [user(FIRST), said(ANSWER), MORE]
    tries = asked("r", talk, 7, said("Nobody.")), asked("q", talk, 5, said("Many.")), P
    goes_on = asked("t", [*talk, said("Many."), user("Thanks, and how old is it?")], 9)
    assert found(goes_on, *tries)[0] == ("q", "signal:edit", 1.0)


def test_a_conversation_that_nobody_knows_says_nothing() -> None:
    other = [user("Where is Perth?"), said("In the west."), MORE]
    assert found(asked("t", other, 9, who=None), P) == []
    assert found(asked("t", [], 9), P) == []


# ---------------------------------------------------------------- tests and commands


@pytest.mark.parametrize(
    ("content", "more", "expected"),
    [
        ("3 passed, 1 failed", {}, None),
        ("error: it failed", {}, None),
        ('{"exit_code": 0, "stdout": "4 passed"}', {}, True),
        ('{"exit_code": 1, "stdout": "3 passed, 1 failed"}', {}, False),
        ('{"returncode": 127}', {}, False),
        ('{"exit_code": true}', {}, None),
        ('{"isError": true, "content": []}', {}, False),
        ('{"isError": false, "content": []}', {}, True),
        ("gone", {"is_error": True}, False),
        ("there", {"is_error": False}, True),
        ('{"error": {"code": 5}}', {}, False),
        ('{"error": null, "rows": 3}', {}, None),
        ('{"exit_code": 0, "error": "killed"}', {}, False),
        ("{not json", {}, None),
        ("[1]", {}, None),
        ([{"type": "text", "text": '{"exitCode": 0}'}], {}, True),
    ],
)
def test_only_a_declared_end_of_a_tool_says_anything(content: Any, more: Message, expected: bool | None) -> None:
    assert succeeded({"role": "tool", "tool_call_id": "c1", "content": content, **more}) is expected
    assert succeeded({"role": "user", "content": content, **more}) is None


def test_the_results_of_the_tools_that_a_reply_called_judge_it() -> None:
    calls = [{"id": name, "type": "function", "function": {"name": "run", "arguments": "{}"}} for name in ("a", "b")]
    asks = asked("p", [user(FIRST)], 0, said("", tool_calls=calls))
    results = [
        {"role": "tool", "tool_call_id": "a", "content": '{"exit_code": 0}'},
        {"role": "tool", "tool_call_id": "b", "content": '{"exit_code": 2}'},
    ]
    turn = asked("t", [user(FIRST), said("", tool_calls=calls), *results], 9)
    signals = list(signals_of(turn, [asks]))
    assert Signal("p", "signal:test", 0.5, "1 of 2 succeeded") in signals
    assert [one.source for one in signals] == ["signal:edit", "signal:test"]
