"""Who is credited with what after one judgement."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.loop.credit import FinishedStep, credits


def tried(index: int, reply: str, see: Sequence[int] = (), kind: str = "openai", alone: bool = True) -> FinishedStep:
    return FinishedStep(index, kind, see, reply, alone)


CHAIN = [tried(0, "Partial: 7"), tried(1, "Answer: 9", [0])]
VOTE = [tried(0, "Answer: 4"), tried(1, "Answer: 5"), tried(2, "4"), tried(3, "4", [0, 1, 2], "tool")]
PASSED_OVER = [tried(0, "Answer: 4"), tried(1, "Answer: 5"), tried(2, "Answer: 4.0")]  # nobody saw the first two


@pytest.mark.parametrize("value", [0.0, 0.3, 1.0])
def test_all_that_went_into_the_answer_share_its_judgement(value: float) -> None:
    assert credits(CHAIN, value) == {0: value, 1: value}
    assert credits([tried(0, "Answer: 9")], value) == {0: value}


def test_voters_are_judged_by_the_answer_that_won() -> None:
    assert credits(VOTE, 1.0) == {0: 1.0, 1: 0.0, 2: 1.0, 3: 1.0}
    assert credits(VOTE, 0.0) == {0: 0.0, 2: 0.0, 3: 0.0}
    assert credits(PASSED_OVER, 1.0) == {0: 1.0, 1: 0.0, 2: 1.0}


def test_replies_that_only_a_voter_saw_count_for_its_vote_alone() -> None:
    helped = [
        tried(0, "a hint"),
        tried(1, "Answer: 4", [0]),
        tried(2, "Answer: 5"),
        tried(3, "Answer: 4", [1, 2], "tool"),
    ]
    assert credits(helped, 0.0) == {1: 0.0, 3: 0.0}


def test_a_tool_that_computes_is_no_vote() -> None:
    computed = [tried(0, "6 * 7"), tried(1, "42", [0], "tool"), tried(2, "Answer: 42", [1])]
    assert credits(computed, 1.0) == {0: 1.0, 1: 1.0, 2: 1.0}


def test_a_step_with_a_task_of_its_own_that_nobody_saw_is_not_judged() -> None:
    assert credits([tried(0, "Paris", alone=False), tried(1, "Answer: 4")], 1.0) == {1: 1.0}


def test_without_texts_all_share_the_judgement() -> None:
    assert credits([tried(0, ""), tried(1, "")], 1.0) == {0: 1.0, 1: 1.0}
    assert credits([], 1.0) == {}


@given(
    st.lists(st.tuples(st.sampled_from(["4", "5", ""]), st.lists(st.integers(-2, 9)), st.booleans(), st.booleans())),
    st.floats(0, 1),
)
def test_any_steps_get_credits_in_range(raw: list[tuple[str, list[int], bool, bool]], value: float) -> None:
    steps = [
        tried(i, reply, see, "tool" if tool else "openai", alone) for i, (reply, see, tool, alone) in enumerate(raw)
    ]
    found = credits(steps, value)
    assert set(found) <= set(range(len(steps)))
    assert set(found.values()) <= {value, 0.0}
    assert not steps or found[len(steps) - 1] == value
