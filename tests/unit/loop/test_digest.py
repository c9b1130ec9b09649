"""Answers are extracted, compared and counted the way a grader would."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.loop.digest import digest
from gateway.core.loop.replies.agreement import groups, majority
from gateway.core.loop.replies.answers import extract_answer, is_refusal, normalise
from gateway.core.loop.replies.kinds import read_text


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("Answer: 5", "5"),
        ("First Answer: 4\nno, wait\nAnswer: 5\n", "5"),
        ("final answer = 12 apples\nthanks", "12 apples"),
        ("**Answer:** 42", "42"),
        ("**Final answer:** $18.90", "$18.90"),
        ("So the answer is 7.\n", "7."),
        ("The answer is: (B) Paris", "(B) Paris"),
        ("just some text\nlast line ", "last line"),
        ("", ""),
        ("  \n ", ""),
        ("Think.\n<answer>off</answer>\nDone. The answer is: on", "off"),
        ("<answer>\n1 2\n3 4\n</answer>", "1 2\n3 4"),
        ("<answer>1</answer> no, wait <ANSWER> 2 </ANSWER>", "2"),
        ("The form is <answer>, so: <answer>3</answer>", "3"),
        ("<answer>4</answer> and <answer>cut", "4"),
        ('<answer>{"answer": 5}</answer>', '{"answer": 5}'),
        ("<answer></answer>\nAnswer: 6", ""),
        ("</answer>\nAnswer: 7", "7"),
        ("<answer>8\n9", "9"),
        ('{"reasoning": "2+2, answer later", "answer": "4"}', "4"),
        ('```json\n{"reasoning": "x", "answer": 4.50}\n```', "4.5"),
        ('{"reasoning": "x",\n "answer": [1, 2]}', "[1, 2]"),
        ('{"reasoning": "x", "answer": null}', "null"),
        ('{"answer": "first"} then {"answer": "second"}', "second"),
        ('{"reasoning": "cut", "answer": "12 and mo', "12 and mo"),
        ('{"reasoning": "bad escape", "answer": "\\frac{1}{2}', "\\frac{1}{2"),
        ("We get \\boxed{\\frac{1}{2}} at last", "\\frac{1}{2}"),
        ("We get \\boxed{12", "We get \\boxed{12"),
        ("Answer: \\boxed{3}", "3"),
        ("Answer:", "Answer:"),
        ("Partial 1 of 2: 9", "Partial 1 of 2: 9"),
    ],
)
def test_extract(reply: str, answer: str) -> None:
    assert extract_answer(reply) == answer


def test_extract_reads_the_end_of_a_long_reply() -> None:
    assert extract_answer("Answer: 1\n" + "x " * 100_000 + "\nAnswer: 2") == "2"


def test_replies_without_an_answer_have_no_vote() -> None:
    assert majority(["", "<answer></answer>", "<answer>7</answer>", "<answer>8</answer>"]) == 2
    assert majority(["", "<answer></answer>"]) == 1
    assert majority(["", " "]) == 0


def test_tags_without_end_take_linear_time() -> None:
    assert extract_answer("<answer>" * 100_000) == "<answer>" * (65_536 // len("<answer>"))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("$18.90", "18.9"),
        ("1,234", "1234"),
        ("$1,234,567.50", "1234567.5"),
        ("-$5", "-5"),
        ("+3", "3"),
        (".5", "0.5"),
        ("-.50", "-0.5"),
        ("007", "7"),
        ("0.00", "0"),
        ("-0", "0"),
        ("42.", "42"),
        ("**42**", "42"),
        ('"Yes."', "yes"),
        ("\\(x+1\\)", "x+1"),
        ("$x+1$", "x+1"),
        ("\\$40", "40"),
        ("(B)", "b"),
        ("B.", "b"),
        ("B) Paris", "(b) the capital of France"),
        ("B: Paris", "b"),
        ("9,7 ,  5", "9, 7, 5"),
        ("STONE,  A. | 12.50", "stone, a.| 12.50"),
        ("```\n5\n```", "5"),
        ("two  words", "Two words"),
    ],
)
def test_same_answer(a: str, b: str) -> None:
    assert normalise(a) == normalise(b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("1,23", "123"),
        ("12,34", "1234"),
        ("18.9", "18.09"),
        ("5", "-5"),
        ("50", "500"),
        ("B", "C"),
        ("A friend", "a"),
        ("9, 7, 5", "9, 5, 7"),
        ("1 234", "1234"),
        ("٣", "3"),
        ("1.2.3", "1.23"),
        ("50%", "50"),
    ],
)
def test_other_answer(a: str, b: str) -> None:
    assert normalise(a) != normalise(b)


@given(st.text(max_size=200))
def test_normalise_is_total_and_settles(text: str) -> None:
    once = normalise(text)
    assert isinstance(extract_answer(text), str)
    assert normalise(text) == once


@given(st.decimals(min_value=-10_000_000, max_value=10_000_000, places=2))
def test_money_in_any_dress_is_one_number(value: object) -> None:
    assert normalise(f"${value:,}".replace("$-", "-$")) == normalise(f"{value}")


def test_majority_counts_answers_not_wording() -> None:
    assert majority(["Answer: 4", "so it is\nAnswer: $5.00", "Answer: 5"]) == 1


def test_majority_ties_go_to_the_earliest() -> None:
    assert majority(["Answer: 3", "Answer: 2", "Answer: 1"]) == 0
    assert majority(["Answer: 1", "Answer: 2", "Answer: 2", "Answer: 1"]) == 0


def test_majority_never_elects_silence() -> None:
    assert majority(["", " ", "Answer: 2"]) == 2
    assert majority(["", ""]) == 0


def test_majority_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no replies"):
        majority([])


def test_agreement_groups_largest_first() -> None:
    replies = ["Answer: 1", "Answer: 2", "Answer: 2", "", "Answer: 1.0", "Answer: 2"]
    assert groups([read_text(reply) for reply in replies]) == [[1, 2, 5], [0, 4], [3]]


@pytest.mark.parametrize("text", ["I'm sorry, but I can't help with that.", "I cannot assist.", "I can’t answer this"])
def test_refusals(text: str) -> None:
    assert is_refusal(text)


@pytest.mark.parametrize("text", ["The train can't stop here. Answer: 4", "I help.", "x" * 500 + " I cannot help"])
def test_not_refusals(text: str) -> None:
    assert not is_refusal(text)


def test_digest_is_facts_only() -> None:
    facts = digest(["Answer: 4", "I cannot help with that", "Answer: $4.00"], ["stop", "stop", "length"])
    assert facts == {
        "answers": ["4", "I cannot help with that", "$4.00"],
        "agree": [[0, 2]],
        "refused": [1],
        "truncated": [2],
    }
    assert digest([]) == {"answers": [], "agree": [], "refused": [], "truncated": []}
