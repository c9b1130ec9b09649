"""Tasks that read alike are near each other; the rule weighs what was seen."""

from __future__ import annotations

import hashlib
import math
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gateway.core.loop.experience.likeness import (
    EMBEDDED_CHARS_MAX,
    EMBEDDING_DIM,
    NEAR,
    NEAREST,
    content_text,
    embed,
    project,
    question_text,
    smoothed_success,
)
from tests.models.experience import likeness, nearness


def near(a: str, b: str) -> float:
    return sum(x * y for x, y in zip(embed(a), embed(b), strict=True))


@given(st.text(st.characters(), max_size=300))
def test_any_text_has_an_embedding_of_length_one_or_none(text: str) -> None:
    vector = embed(text)
    assert len(vector) == EMBEDDING_DIM
    norm = math.sqrt(sum(x * x for x in vector))
    assert norm == pytest.approx(1) or norm == 0


@pytest.mark.parametrize("text", ["", " \n\t", "_"])
def test_text_without_words_is_nowhere(text: str) -> None:
    assert embed(text) == [0.0] * EMBEDDING_DIM


def test_half_a_surrogate_is_text_too() -> None:
    assert any(embed("what is \ud83d ?"))


def test_the_embedding_is_the_same_everywhere() -> None:
    """Stored vectors outlive the process: changing this hash makes every stored embedding useless."""
    rounded = ",".join(f"{x:.6f}" for x in embed("How many days are there between 3 May and 7 June?"))
    assert (
        hashlib.sha256(rounded.encode()).hexdigest()
        == "6ba8248eab5b2802cc56baee6626afff423c2adf62e3437d48801a87661fdc29"
    )


def test_alike_is_nearer_than_unlike_and_numbers_do_not_count() -> None:
    assert near("What is 17 + 25?", "What is 98 + 11?") == pytest.approx(1)
    alike = near("Convert 3 miles to kilometres", "Convert 12 pounds to kilograms")
    unlike = near("Convert 3 miles to kilometres", "Write a sonnet about the sea")
    assert alike > unlike + 0.2


def test_only_the_beginning_is_embedded() -> None:
    text = "a b c " * EMBEDDED_CHARS_MAX
    assert embed(text) == embed(text[:EMBEDDED_CHARS_MAX])


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


@pytest.mark.parametrize(("numbers", "within"), [(3, 1e-9), (EMBEDDING_DIM, 1e-9), (1536, 0.25)])
def test_an_embedding_of_any_length_is_fitted_and_cosines_stay(numbers: int, within: float) -> None:
    draw = Random(numbers)
    for _ in range(20):
        a = [draw.gauss(0, 1) for _ in range(numbers)]
        b = [x + draw.gauss(0, draw.choice((0.1, 1, 5))) for x in a]
        fit_a, fit_b = project(a, "model"), project(b, "model")
        assert len(fit_a) == EMBEDDING_DIM
        assert math.sqrt(sum(x * x for x in fit_a)) == pytest.approx(1)
        assert cosine(fit_a, fit_b) == pytest.approx(cosine(a, b), abs=within)
    assert project(a, "model") == fit_a


def test_vectors_of_two_models_are_strangers() -> None:
    draw = Random(1)
    both = [draw.gauss(0, 1) for _ in range(768)]
    assert abs(cosine(project(both, "one#model"), project(both, "another#model"))) < 0.3


@pytest.mark.parametrize("bad", [[], [0.0, 0.0], [1.0, float("nan")], [float("inf")]])
def test_a_vector_without_a_finite_direction_is_no_embedding(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        project(bad, "model")


def test_likeness_runs_from_the_mean_to_the_best() -> None:
    assert likeness([1.0, 0.4, 0.1, 0.1]) == pytest.approx([1, 0, 0, 0])  # their mean is 0.4
    assert likeness([0.9, 0.6, 0.0, 0.1]) == pytest.approx([1, 0.4, 0, 0])
    assert likeness([0.5, 0.5]) == [1, 1]
    assert likeness([]) == []


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=50), st.floats(-3, 3), st.floats(0.5, 5))
def test_likeness_does_not_depend_on_scale_or_offset(found: list[float], by: float, of: float) -> None:
    assume(not 1e-7 < max(found) - sum(found) / len(found) < 1e-3)
    assert likeness([by + of * one for one in found]) == pytest.approx(likeness(found), abs=1e-6)
    assert max(likeness(found)) == pytest.approx(1)


def test_a_step_that_is_half_near_counts_half() -> None:
    found = [nearness(alike) for alike in (0.0, NEAR, (NEAR + NEAREST) / 2, NEAREST, 1.0)]
    assert found == pytest.approx([0, 0, 0.5, 1, 1])


@pytest.mark.parametrize(
    ("messages", "question"),
    [
        (None, ""),
        ([], ""),
        ([{"role": "system", "content": "Be brief."}], ""),
        ([{"role": "user", "content": "first"}, {"role": "user", "content": "last"}, {"role": "tool"}], "last"),
        (["odd", {"role": "user", "content": "a"}, "odd"], "a"),
        ([{"role": "user", "content": None}], ""),
    ],
)
def test_the_question_is_the_last_text_of_the_user(messages: Any, question: str) -> None:
    assert question_text(messages) == question


def test_parts_are_joined_and_media_named() -> None:
    parts = [
        {"type": "text", "text": "Look"},
        {"type": "image_url", "image_url": {"url": "secret"}},
        {},
        {"type": "text"},
    ]
    assert content_text(parts) == "Look\n(image_url)\n(part)\n"


def test_an_unseen_worker_counts_as_two_right_of_three() -> None:
    assert smoothed_success(0.0, 0) == pytest.approx(2 / 3)
    assert smoothed_success(1.0, 7) == pytest.approx(9 / 10)
    assert smoothed_success(0.0, 97) == pytest.approx(2 / 100)


@given(st.floats(0, 1), st.integers(0, 10_000))
def test_experience_pulls_the_prior_towards_its_mean(mean: float, n: int) -> None:
    smoothed = smoothed_success(mean, n)
    low, high = sorted((mean, 2 / 3))
    assert low - 1e-9 <= smoothed <= high + 1e-9
