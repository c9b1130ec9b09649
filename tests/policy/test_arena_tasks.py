"""Tasks are drawn reproducibly, read back by programs, and graded by their answer."""

from __future__ import annotations

import re
from datetime import date

import pytest

from policy.simulators.arena.families.family import SKILLS, Family, factor, phrasings
from policy.simulators.arena.families.tasks import (
    FAMILIES,
    INSTRUCTIONS,
    Split,
    focus,
    grade,
    make_task,
    ordinal,
    understand,
)
from tests.policy.family_tasks import make_family_task

SPLITS: tuple[Split, ...] = ("train", "held_out")
MANY = 400


def test_a_seed_is_a_task() -> None:
    assert make_task(11) == make_task(11)
    assert make_task(11) != make_task(12)
    assert make_task(11, "held_out") != make_task(11)


@pytest.mark.parametrize("split", SPLITS)
def test_every_task_is_understood_as_what_it_is(split: Split) -> None:
    for seed in range(MANY):
        task = make_task(seed, split)
        problem = understand(task.text)
        assert problem is not None, task.text
        assert problem.answer() == task.answer
        assert (problem.family.name if problem.family else "both") == task.family
        assert set(task.skills) <= set(SKILLS)
        assert 15 <= len(task.text.split()) <= 70
        assert grade(task, f"Answer: {task.answer}") == 1.0
        assert grade(task, "Answer: unknown") == 0.0


def test_held_out_phrasings_are_other_phrasings() -> None:
    for family in FAMILIES:
        assert not set(family.train) & set(family.held_out)
        assert len(family.train) >= 2
        assert len(family.held_out) >= 1


def test_texts_do_not_name_the_skills() -> None:
    words = {word for seed in range(MANY) for word in re.findall(r"[a-z]+", make_task(seed).text.lower())}
    assert not words & set(SKILLS)


def test_vocabulary_is_modest() -> None:
    texts = (make_task(seed, split).text for seed in range(MANY) for split in SPLITS)
    assert len({word for text in texts for word in re.findall(r"[A-Za-z]+", text)}) < 900


def test_tasks_of_every_shape_come() -> None:
    shapes = [make_task(seed).shape for seed in range(MANY)]
    assert set(shapes) == {"single", "chain", "vote", "check", "child"}
    assert sum(shape != "single" for shape in shapes) / MANY > 0.4


KNOWN = [
    ("Please convert 9 kilograms to grams. Only the number in grams is needed, no other words.", "9000"),
    ("Something measures 2 hours and 5 minutes. What is this in minutes alone, as a number?", "125"),
    ("How many days pass from 27 February 2024 until 2 March 2024? Give the number of days and nothing else.", "4"),
    ("Counting 30 days forward from 31 December 2023, when does Mia come back? Use the form YYYY-MM-DD.", "2024-01-30"),
    ('Please write the word "silver" backwards in capital letters. Give me just the new word.', "REVLIS"),
    (
        "Prices in coins: pear: 7; fig: 12. Ben buys 3 bags of fig and pays with 50 coins. How many coins come back?",
        "14",
    ),
    (
        "Find the day of the week of 4 July 2024. Then write the name of that day backwards in capital letters.",
        "YADSRUHT",
    ),
    ("Pick the three largest of the numbers 5, 90, 7, 31 and then add them up. What is the sum?", "128"),
    (
        "Ann, Ben, Cara ran a race and nobody tied. We know: Ben beat Ann, Cara lost to Ann. Who came first, second "
        "and so on? Give the full order.",
        "Ben, Ann, Cara",
    ),
    (
        "I think of the smallest number above 20 that can be divided by 3 and leaves 2 when divided by 7. Which number "
        "is it?",
        "30",
    ),
    (
        "Write this bill as one line, SURNAME, I. | YYYY-MM-DD | 0.00: Gina Brook must pay 5405 cents by 2 June 2022.",
        "BROOK, G. | 2022-06-02 | 54.05",
    ),
    (
        "Write one stock line in the style NAME | 0000 | 0.00 for 7 bags of plum at 250 cents each.",
        "PLUM | 0007 | 2.50",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "answer"), KNOWN)
def test_worked_by_hand(text: str, answer: str) -> None:
    problem = understand(text)
    assert problem is not None
    assert problem.answer() == answer


def test_white_space_and_words_around_do_not_matter() -> None:
    problem = understand("Hi!\n How many   grams are there in 9 kilograms?\nGive the amount as a plain number. Ta")
    assert problem is not None
    assert problem.answer() == "9000"


def test_of_two_readings_the_longer_that_begins_first_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    tail = Family("tail", "single", lambda _rng: {}, (), phrasings("a plain number. Thank {who}"), ())
    monkeypatch.setattr("policy.simulators.arena.families.tasks.FAMILIES", (tail, *FAMILIES))
    problem = understand("How many grams are there in 8 kilograms? Give the amount as a plain number. Thank Ann")
    assert problem is not None
    assert problem.answer() == "8000"


def test_anything_else_is_not_understood() -> None:
    assert understand("Write a poem about the sea") is None
    assert understand("") is None


@pytest.mark.parametrize(
    "text",
    [
        "How many kilometres are there in 3 grams? Give the amount as a plain number.",
        "Counting 9 days forward from 31 February 2023, when does Mia come back? Use the form YYYY-MM-DD.",
        "Ann, Ben, Cara ran a race and nobody tied. We know: Ben beat Ann, Ben beat Cara. Who came first, second "
        "and so on? Give the full order.",
        "Ann, Ben, Cara, Dan, Eva, Finn, Gina ran a race and nobody tied. We know: Ben beat Ann, Ann beat Cara. Who "
        "came first, second and so on? Give the full order.",
        "I think of the smallest number above 20 that can be divided by 4 and leaves 1 when divided by 2. Which number "
        "is it?",
        "I think of the smallest number above 20 that can be divided by 0 and leaves 1 when divided by 2. Which number "
        "is it?",
    ],
)
def test_impossible_questions_raise(text: str) -> None:
    problem = understand(text)
    assert problem is not None
    with pytest.raises(ValueError, match=r"."):
        problem.answer()


def test_factor_knows_its_pairs_only() -> None:
    assert factor("weeks", "days") == 7
    with pytest.raises(ValueError, match="no conversion"):
        factor("days", "weeks")


def test_a_task_text_narrows_the_question() -> None:
    task = next(t for t in map(make_task, range(MANY)) if t.shape == "child")
    for index, instruction in enumerate(INSTRUCTIONS):
        problem = focus(task.text, instruction)
        assert problem is not None
        assert problem.answer() == task.parts[index].answer
    whole = focus(task.text, "Do your best.")
    assert whole is not None
    assert whole.answer() == task.answer


def test_a_task_text_that_asks_by_itself_is_the_question() -> None:
    problem = focus(make_task(1).text, KNOWN[0][0])
    assert problem is not None
    assert problem.answer() == "9000"
    assert focus("what?", "Answer only the first question.") is None


def test_ordinals() -> None:
    assert [ordinal(text) for text in (None, "Go.", "the FIRST one", "question 2")] == [None, None, 0, 1]


def test_keys_do_not_depend_on_words() -> None:
    a = understand("How many grams are there in 9 kilograms? Give the amount as a plain number.")
    b = understand(KNOWN[0][0])
    assert a is not None
    assert b is not None
    assert a.key == b.key


def test_family_tasks_by_name() -> None:
    for family in FAMILIES:
        task = make_family_task(family.name, 3)
        assert (task.family, task.shape, task.skills) == (family.name, family.shape, family.skills)
    with pytest.raises(KeyError):
        make_family_task("none such", 0)


def test_dates_in_answers_are_real() -> None:
    for seed in range(20):
        assert date.fromisoformat(make_family_task("deadline", seed).answer)
