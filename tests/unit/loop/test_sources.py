"""Sources: in which order they count, and how far each is believed."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.loop.evidence.sources import Said, is_explicit, prior_weight, reliabilities, trust_of

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
    assert known.weight == pytest.approx(sum(accuracy) - 1, abs=0.05)


@pytest.mark.parametrize("right_share", [0.5, 0.9, 0.95])
def test_a_source_that_always_says_right_weighs_nothing_however_often_it_agrees(right_share: float) -> None:
    judged = simulated({"person": SURE, "judge:a": (1.0, 0.0)}, 2_000, right_share)
    known = reliabilities(judged)["judge:a"]
    assert known.seen.agreement > right_share - 0.03
    assert known.weight < 0.1
    judged = simulated({"person": SURE, "judge:a": (0.0, 1.0)}, 2_000, right_share)
    assert reliabilities(judged)["judge:a"].weight < 0.05


def test_a_coin_and_a_liar_weigh_nothing() -> None:
    assert reliabilities(simulated({"person": SURE, "judge:a": (0.5, 0.5)}, 2_000))["judge:a"].weight < 0.06
    assert reliabilities(simulated({"person": SURE, "judge:a": (0.1, 0.1)}, 2_000))["judge:a"].weight == 0


def test_a_source_nobody_checked_has_the_weight_of_its_prior() -> None:
    alone = reliabilities([Said({"judge:a": 1.0}, 40), Said({"client": 0.0}, 40)])
    assert alone["judge:a"].weight == prior_weight("judge:a") == pytest.approx(0.6)
    assert alone["client"].weight == prior_weight("client") == prior_weight("person") == 1
    assert prior_weight("signal:repeat") == pytest.approx(0.2)
    assert prior_weight("signal:of-another-release") == prior_weight("signal:repeat")


def test_few_replies_move_a_weight_a_little() -> None:
    few = reliabilities([Said({"person": 1.0, "judge:a": 0.0}), Said({"person": 0.0, "judge:a": 1.0})])["judge:a"]
    assert 0.2 < few.weight < prior_weight("judge:a")


def test_a_reference_that_errs_itself_counts_for_less() -> None:
    """The client is wrong in three of ten, the person never. The signal is compared with the person if there is one."""
    both = simulated({"person": SURE, "client": (0.7, 0.7), "signal:edit": (0.9, 0.9)}, 1_000)
    apart = [Said({name: one for name, one in said.values.items() if name != "person"}) for said in both[500:]]
    known = reliabilities([*both[:500], *apart])
    assert known["client"].weight == pytest.approx(0.4, abs=0.07)
    assert known["signal:edit"].seen.n == pytest.approx(500 + 500 * known["client"].weight)
    assert 0.4 < known["signal:edit"].weight <= 0.85


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
        assert 0 <= known.weight <= 1
        assert known.seen.n <= sum(said.n for said in replies if source in said.values) + 1e-6
