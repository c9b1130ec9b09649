"""Who is credited with what after one judgement."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.loop.evidence.credit import Evidence, FinishedStep, JudgedLoop, credited, credited_tree, credits
from gateway.core.loop.evidence.sources import SourceWeights
from gateway.core.loop.replies.kinds import read_text


def tried(index: int, reply: str, see: Sequence[int] = (), kind: str = "openai", alone: bool = True) -> FinishedStep:
    return FinishedStep(index, kind, see, read_text(reply), alone)


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


def test_without_texts_the_steps_that_went_into_the_answer_share_the_judgement() -> None:
    assert credits([tried(0, ""), tried(1, "", [0])], 1.0) == {0: 1.0, 1: 1.0}
    assert credits([tried(0, ""), tried(1, "")], 1.0) == {1: 1.0}
    assert credits([], 1.0) == {}


ESSAYS = (
    "Trees cool our streets and clean the air that we breathe.\n\nThey are worth their cost many times over.",
    "A city without trees is a city without shade, birds and rest.\n\nPlant them before the next hot summer comes.",
    "Every street deserves a tree, since trees make people walk and talk.\n\nSo let us begin with our own street.",
)
CODE = "Here you are:\n\n```python\ndef double(x):\n    {}\n```\n\nLet me know if you need tests."


def test_of_three_good_essays_none_is_wrong_because_they_differ() -> None:
    assert credits([tried(index, text) for index, text in enumerate(ESSAYS)], 1.0) == {2: 1.0}


def test_programs_that_end_with_the_same_line_are_not_the_same() -> None:
    twice, right = CODE.format("return 2 * x"), CODE.format('"""Twice x."""\n    return x + x  # simple')
    assert credits([tried(0, twice), tried(1, right)], 1.0) == {1: 1.0}
    assert credits([tried(0, right.replace("  # simple", "")), tried(1, right)], 1.0) == {0: 1.0, 1: 1.0}


def test_a_verdict_from_elsewhere_counts_where_texts_leave_it_open() -> None:
    steps = [tried(index, text) for index, text in enumerate(ESSAYS)]
    assert credits(steps, 1.0, {(0, 2): "same", (1, 2): "different"}) == {0: 1.0, 1: 0.0, 2: 1.0}
    assert credits(VOTE, 1.0, {(1, 3): "same"}) == {0: 1.0, 1: 0.0, 2: 1.0, 3: 1.0}


def test_a_judge_that_compared_two_replies_is_believed() -> None:
    said = '{"same": false, "verdict": "different", "by": "builtin:judge@1"}'
    steps = [tried(0, ESSAYS[0]), tried(1, said, [0, 2], "tool"), tried(2, ESSAYS[2])]
    loop = JudgedLoop(steps, [Evidence(1.0, 1)])
    assert loop.verdicts == {(0, 2): "different"}
    assert {i: one.value for i, one in credited_tree({"r": loop}, "r")["r"].items()} == {0: 0.0, 2: 1.0}


def values(steps: Sequence[FinishedStep], *evidence: Evidence) -> dict[int, float]:
    return {index: each.value for index, each in credited(steps, evidence).items()}


def test_a_judgement_of_the_step_counts_for_more_than_one_of_the_rollout() -> None:
    of_step, of_rollout = Evidence(0.0, 1, step=0), Evidence(1.0, 2)
    assert values(CHAIN, of_rollout, of_step) == values(CHAIN, of_step, of_rollout) == {0: 0.0, 1: 1.0}
    assert values(ESSAY_STEPS, Evidence(1.0, 1), Evidence(0.9, 2, step=0)) == {0: 0.9, 2: 1.0}


def test_a_judgement_of_a_step_speaks_of_what_went_into_it() -> None:
    steps = [tried(0, "Partial: 7"), tried(1, "Half: 9", [0]), tried(2, "Answer: 5", [1])]
    assert values(steps, Evidence(0.0, 3), Evidence(1.0, 1, step=1)) == {0: 1.0, 1: 1.0, 2: 0.0}
    assert values(steps, Evidence(1.0, 1, step=1), Evidence(0.5, 2, step=0)) == {0: 0.5, 1: 1.0}
    assert values(steps, Evidence(1.0, 1, step=7)) == {}


def test_of_equal_evidence_the_latest_counts_and_a_verifier_last() -> None:
    assert values(CHAIN, Evidence(0.0, 1), Evidence(1.0, 2)) == {0: 1.0, 1: 1.0}
    assert values(CHAIN, Evidence(0.0, 1, "person"), Evidence(1.0, 2, "verifier")) == {0: 0.0, 1: 0.0}
    assert values(CHAIN, Evidence(0.0, 5, distance=1), Evidence(1.0, 2)) == {0: 1.0, 1: 1.0}


def test_a_person_counts_before_a_client_a_judge_and_a_signal_whatever_came_last() -> None:
    said = [
        Evidence(1.0, 1, "person"),
        Evidence(0.0, 2, "client"),
        Evidence(0.0, 3, "judge:wise", weights=SourceWeights(0.9, 0.9)),
        Evidence(0.0, 4, "signal:repeat", weights=SourceWeights(0.9, 0.9)),
    ]
    for count in range(len(said)):
        best = credited(CHAIN, said[count:])[1]
        assert (best.source, best.value) == (said[count].source, said[count].value)


def test_a_judge_that_weighs_nothing_silences_no_signal_and_no_client() -> None:
    worthless = Evidence(1.0, 9, "judge:yes", weights=SourceWeights(0.01, 0.0))
    assert (
        credited(CHAIN, [worthless, Evidence(0.0, 1, "signal:edit", weights=SourceWeights(0.1, 0.3))])[1].source
        == "signal:edit"
    )
    assert (
        credited(CHAIN, [worthless, Evidence(0.0, 1, "client", weights=SourceWeights(0.0, 0.0))])[1].source == "client"
    )


ESSAY_STEPS = [tried(index, text) for index, text in enumerate(ESSAYS)]


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
