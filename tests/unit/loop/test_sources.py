"""Sources: in which order they count, and how far each is believed."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.loop.evidence.sources import (
    Said,
    SourceWeights,
    is_explicit,
    prior_weights,
    reliabilities,
    trust_of,
)

Accuracy = tuple[float, float]  # how often it accepts what is right, and rejects what is wrong


def simulated(sources: Mapping[str, Accuracy], n: int, right_share: float = 0.5, seed: int = 7) -> list[Said]:
    """Replies that all sources judge, each with its own accuracy."""
    draw = random.Random(seed)

    def says(right: bool, accuracy: Accuracy) -> float:
        is_true = draw.random() < accuracy[0 if right else 1]
        return float(right == is_true)

    return [
        Said({name: says(right, accuracy) for name, accuracy in sources.items()})
        for right in (draw.random() < right_share for _ in range(n))
    ]


SURE = (1.0, 1.0)


def test_people_come_first_and_signals_last() -> None:
    order = ["person", "client", "label", "verifier", "judge:a", "signal:test", "signal:edit", "signal:repeat"]
    trusts = [trust_of(source) for source in order]
    assert trusts == sorted(trusts, reverse=True)
    assert len(set(trusts)) == len(trusts)
    assert trust_of("grader") == trust_of("our-own-tests") == trust_of("client")
    assert [one for one in ("person", "grader", "judge:a", "signal:edit") if is_explicit(one)] == ["person", "grader"]


@pytest.mark.parametrize("accuracy", [(0.9, 0.8), (0.6, 0.95), (0.75, 0.75)])
def test_the_posterior_finds_the_accuracy_of_a_source(accuracy: Accuracy) -> None:
    known = reliabilities(simulated({"person": SURE, "judge:a": accuracy}, 2_000))["judge:a"]
    assert known.sensitivity == pytest.approx(accuracy[0], abs=0.03)
    assert known.specificity == pytest.approx(accuracy[1], abs=0.03)
    sensitivity, specificity = accuracy
    right, wrong = sensitivity / (1 - specificity), specificity / (1 - sensitivity)
    assert known.weights.right == pytest.approx((right - 1) / (right + 1), abs=0.05)
    assert known.weights.wrong == pytest.approx((wrong - 1) / (wrong + 1), abs=0.05)


def test_a_weight_is_twice_the_balanced_accuracy_less_one_where_both_errors_are_alike() -> None:
    known = reliabilities(simulated({"person": SURE, "judge:a": (0.8, 0.8)}, 4_000))["judge:a"]
    assert known.weights == pytest.approx((0.6, 0.6), abs=0.04)


def test_what_is_said_rarely_and_of_wrong_replies_alone_weighs_much() -> None:
    """A signal that notices 3 of 10 wrong replies, and 1 of 100 right ones."""
    right, wrong = reliabilities(simulated({"person": SURE, "signal:edit": (0.99, 0.3)}, 4_000))["signal:edit"].weights
    assert right < 0.2
    assert wrong > 0.85


@pytest.mark.parametrize("right_share", [0.5, 0.9, 0.95])
def test_a_source_that_always_says_right_weighs_nothing_however_often_it_agrees(right_share: float) -> None:
    judged = simulated({"person": SURE, "judge:a": (1.0, 0.0)}, 2_000, right_share)
    known = reliabilities(judged)["judge:a"]
    assert known.seen.agreement > right_share - 0.03
    assert known.weights.right < 0.05
    judged = simulated({"person": SURE, "judge:a": (0.0, 1.0)}, 2_000, right_share)
    assert reliabilities(judged)["judge:a"].weights.wrong < 0.05


def test_a_coin_and_a_liar_weigh_nothing() -> None:
    assert reliabilities(simulated({"person": SURE, "judge:a": (0.5, 0.5)}, 2_000))["judge:a"].weights == pytest.approx(
        (0, 0), abs=0.06
    )
    assert reliabilities(simulated({"person": SURE, "judge:a": (0.1, 0.1)}, 2_000))["judge:a"].weights == (0, 0)


def test_a_source_nobody_checked_has_the_weight_of_its_prior() -> None:
    alone = reliabilities([Said({"judge:a": 1.0}, 40), Said({"client": 0.0}, 40)])
    assert alone["judge:a"].weights == prior_weights("judge:a") == pytest.approx((0.619, 0.684), abs=0.001)
    assert alone["client"].weights == prior_weights("client") == prior_weights("person") == (1, 1)
    assert prior_weights("signal:repeat") == pytest.approx((0.125, 0.5))
    assert prior_weights("signal:of-another-release") == prior_weights("signal:repeat")


def test_a_judgement_between_the_verdicts_weighs_in_between() -> None:
    assert [SourceWeights(0.2, 0.6).of(value) for value in (0.0, 0.5, 1.0)] == pytest.approx([0.6, 0.4, 0.2])


def test_few_replies_move_a_weight_a_little() -> None:
    few = reliabilities([Said({"person": 1.0, "judge:a": 0.0}), Said({"person": 0.0, "judge:a": 1.0})])["judge:a"]
    assert 0.3 < few.weights.right < prior_weights("judge:a").right


def test_a_reference_that_errs_itself_counts_for_less() -> None:
    """The client is wrong in three of ten, the person never. The signal is compared with the person if there is one."""
    both = simulated({"person": SURE, "client": (0.7, 0.7), "signal:edit": (0.9, 0.9)}, 1_000)
    apart = [Said({name: one for name, one in said.values.items() if name != "person"}) for said in both[500:]]
    known = reliabilities([*both[:500], *apart])
    assert known["client"].weights == pytest.approx((0.4, 0.4), abs=0.1)
    assert known["signal:edit"].seen.n == pytest.approx(500 + 500 * sum(known["client"].weights) / 2, rel=0.05)
    assert 0.4 < known["signal:edit"].weights.wrong <= 0.85


def test_equals_do_not_check_each_other() -> None:
    known = reliabilities([Said({"client": 1.0, "grader": 0.0}, 30)])
    assert {one.seen.n for one in known.values()} == {0}


@given(
    st.lists(
        st.builds(
            Said,
            st.dictionaries(
                st.sampled_from(["person", "client", "label", "verifier", "judge:a", "judge:b", "signal:edit"]),
                st.floats(0, 1),
            ),
            st.integers(1, 50),
        ),
        max_size=12,
    )
)
def test_a_weight_is_a_share_and_no_reply_counts_twice(replies: list[Said]) -> None:
    for source, known in reliabilities(replies).items():
        assert all(0 <= weight <= 1 for weight in known.weights)
        assert known.seen.n <= sum(said.n for said in replies if source in said.values) + 1e-6
