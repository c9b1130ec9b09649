"""What may be trained on: outcomes settled, rows left out by name, the split, the share of a key."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.policies.holdout import Bound
from gateway.errors import ConfigError
from policy.dataset import rules
from policy.dataset.refusals import REASONS, RowRefused
from policy.dataset.row import OutcomeValue, Rating, settle
from policy.dataset.rules import Rules
from policy.dataset.select import Selection, parse_tags, parse_time
from policy.reward import RewardSettings
from tests.policy.dataset_rows import T0, a_mark, a_row, a_verdict


def test_the_first_source_that_judged_decides() -> None:
    said = [
        Rating(0.0, "exact", "exact@1"),
        Rating(1.0, "client"),
        Rating(0.5, "client", "app@2"),
        Rating(0.25, "person"),
    ]
    assert settle(said) == OutcomeValue(0.25, 1, ("person",), ())
    assert settle(said[:3]) == OutcomeValue(0.75, 2, ("client",), ("app@2",))
    assert settle([*said[:1], Rating(1.0, "judge", "judge@1")]) == OutcomeValue(
        0.5, 2, ("exact", "judge"), ("exact@1", "judge@1")
    )
    assert settle([]) == settle([], ("client",)) == OutcomeValue()


def test_named_sources_alone_count_in_their_order() -> None:
    said = [Rating(0.0, "exact"), Rating(1.0, "client"), Rating(0.25, "person")]
    assert settle(said, ("exact", "client")).value == 0.0
    assert settle(said, ("absent", "client")).value == 1.0
    assert settle(said, ("absent",)) == OutcomeValue()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"plan_token_ids": [], "log_mode": "metadata"}, "metadata_only"),
        ({"plan_token_ids": [], "log_mode": "redacted"}, "redacted"),
        ({"plan_token_ids": [], "log_mode": "full"}, "no_tokens"),
        ({"log_mode": "redacted"}, None),  # nothing in it had to be taken out
        ({"prompt_token_ids": []}, "no_tokens"),
        ({"plan_logprobs": []}, "no_logprobs"),
        ({"plan_logprobs": [-0.5]}, "no_logprobs"),
        ({"plan_logprobs": [-0.5, -math.inf]}, "no_logprobs"),
        ({"plan_logprobs": [-0.5, math.nan]}, "no_logprobs"),
        ({"plan_logprobs": [-0.5, 0.5]}, "no_logprobs"),
        ({"plan_logprobs": [-0.5, 0.0005]}, None),  # a certain token, rounded
        ({"decision_mask": [True]}, "no_logprobs"),
        ({"outcome_n": 0, "outcome": None}, "too_few_outcomes"),
        ({"workers_used": (("alpha", "1"), ("beta", "1"))}, "stale_worker"),  # beta is at 2
        ({"workers_used": (("gone", "1"),)}, "stale_worker"),
        ({"workers_used": ()}, None),  # nothing ran
    ],
)
def test_a_row_is_left_out_by_name(changes: dict[str, Any], reason: str | None) -> None:
    found = rules.why_left_out(a_row(**changes), Rules(versions={"alpha": "1", "beta": "2"}), min_outcomes=1)
    assert found == reason
    assert reason is None or reason in REASONS


def test_a_request_is_worth_its_outcome_and_nothing_where_a_plan_was_refused() -> None:
    refused = a_row(outcome=0.5, refusal="unparseable")  # a router planned instead, and was half right
    assert rules.unparsed([a_row(root_id="r0"), refused]) == {"r1"}
    assert [rules.value_of(refused, parsed) for parsed in (True, False)] == [0.5, 0.0]
    for parsed in (True, False):
        with pytest.raises(RowRefused, match="no_outcome"):
            rules.value_of(a_row(outcome=None), parsed)


def test_the_reward_is_the_training_reward_at_the_dial_shown() -> None:
    weights = RewardSettings()
    undialled = a_row(cost_nano=2_500_000, latency_ms=0.0, quality=None)
    assert rules.reward_of(undialled, True, weights) == pytest.approx(0.95)
    assert rules.reward_of(replace(undialled, quality=0), True, weights) == pytest.approx(0.7)
    assert rules.reward_of(replace(undialled, quality=9), True, weights) == 1.0
    assert rules.reward_of(replace(undialled, outcome=0.0), True, weights) == pytest.approx(0.1)
    assert rules.reward_of(undialled, False, weights) == 0.0
    assert rules.reward_of(a_row(latency_ms=None, cost_nano=0, quality=None), True, weights) == 1.0


def test_verdicts_count_where_the_weights_say_so() -> None:
    weights = RewardSettings(missed_penalty=0.02, repaired_penalty=0.01)
    missed, mended = a_verdict(), a_verdict(accept=True, repaired=True, step=1)
    row = a_row(cost_nano=0, quality=9, verdicts=(missed, mended))
    assert rules.reward_of(row, True, weights) == pytest.approx(0.97)
    assert rules.reward_of(row, True, RewardSettings()) == 1.0
    assert rules.reward_of(replace(row, verdicts=()), True, weights) == 1.0
    older = replace(row, verdicts=None)  # exported before exports had verdicts
    assert rules.reward_of(older, True, RewardSettings()) == 1.0
    with pytest.raises(RowRefused, match="no_verdicts"):
        rules.reward_of(older, True, weights)


def test_rows_without_tokens_stay_where_no_tokens_are_required() -> None:
    bare = a_row(plan_token_ids=[], outcome_n=0, workers_used=(("gone", "9"),))
    assert rules.why_left_out(bare, Rules(tokens_required=False), min_outcomes=0) is None


def test_the_latest_rows_validate() -> None:
    marks = [a_mark(index) for index in range(10)]
    at = rules.boundary(marks, 0.3)
    assert at == T0 + timedelta(minutes=7)
    train, validation, overlap = rules.split(marks, Bound(at))
    assert [one.root_id for one in train] == [f"r{i}" for i in range(7)]
    assert [one.root_id for one in validation] == ["r7", "r8", "r9"]
    assert overlap == []
    assert rules.boundary(marks, 0.09) is None  # less than one row
    assert rules.split(marks, Bound()) == (marks, [], [])


def test_a_question_is_never_on_both_sides_nor_is_a_request() -> None:
    late_child = a_mark(3, root_id="r0")
    marks = [a_mark(0), a_mark(1, group="same"), a_mark(2, group="same"), late_child, a_mark(4)]
    train, validation, overlap = rules.split(marks, Bound(T0 + timedelta(minutes=2)))
    assert (train, validation) == (marks[:2], marks[4:])
    assert overlap == [marks[2], late_child]


@given(st.lists(st.integers(0, 7), min_size=1, max_size=60), st.integers(0, 60))
def test_the_sides_share_no_question_whatever_the_log(groups: list[int], cut: int) -> None:
    marks = [a_mark(index, group=str(group)) for index, group in enumerate(groups)]
    train, validation, overlap = rules.split(marks, Bound(T0 + timedelta(minutes=cut)))
    assert not {one.group for one in train} & {one.group for one in validation}
    assert len(train) + len(validation) + len(overlap) == len(marks)
    assert all(a.created_at < b.created_at for a in train for b in validation)


@given(st.lists(st.integers(1, 400), min_size=20, max_size=60))
def test_no_key_holds_more_than_its_share_and_no_row_is_wasted(counts: list[int]) -> None:
    named = {str(index): count for index, count in enumerate(counts)}
    allowed = rules.key_allowance(named, 0.05)

    def worst(most: int) -> float:
        kept = [min(count, most) for count in counts]
        return 20 * max(kept) - sum(kept)

    assert worst(allowed) <= 0
    assert allowed == max(counts) or worst(allowed + 1) > 0


def test_the_share_is_capped_the_same_way_every_time() -> None:
    flood = [a_mark(index, key="loud") for index in range(100)]
    rest = [a_mark(1000 + index, key=f"key{index % 25}") for index in range(100)]
    kept, over = rules.capped([*flood, *rest], 0.05)
    counts = Counter(one.key_id for one in kept)
    assert counts["loud"] == 5  # 5 of 105 rows: 4.8 %; 6 of 106 would be over
    assert len(over) == 95
    again, _ = rules.capped([*rest, *reversed(flood)], 0.05)
    assert {one.call for one in again} == {one.call for one in kept}


def test_a_request_is_kept_whole_where_it_fits() -> None:
    marks = [a_mark(index, root_id=f"r{index // 3}", call=(f"r{index // 3}", index % 3)) for index in range(300)]
    others = [a_mark(1000 + index, key=f"other{index}") for index in range(120)]
    kept, _ = rules.capped([*marks, *others], 0.05)
    rounds = Counter(one.root_id for one in kept if one.key_id == "key1")
    assert sorted(rounds.values()) == [3, 3]  # 6 of 126 rows


def test_too_few_keys_are_refused_by_name() -> None:
    marks = [a_mark(index, key=f"key{index % 4}") for index in range(40)]
    with pytest.raises(ConfigError, match=r"4 keys cannot each hold at most 0.05 of the rows, that takes 20: .*1\.0"):
        rules.capped(marks, 0.05)
    assert rules.capped(marks, 1.0) == (marks, [])
    assert rules.capped(marks, 0.25) == (marks, [])
    assert rules.capped([], 0.05) == ([], [])


@pytest.mark.parametrize(("keys", "kept"), [(1, 200), (3, 200), (18, 200), (40, None)])
def test_a_team_with_few_keys_keeps_its_rows(keys: int, kept: int | None) -> None:
    """One key of 100 rows and the others of a hundred together: bounded from 20 keys on."""
    marks = [a_mark(index, key="loud" if index < 100 else f"key{index % keys}") for index in range(200)]
    remaining, over = rules.capped(marks, None)
    assert len(remaining) + len(over) == 200
    assert kept is None or len(remaining) == kept
    if kept is None:
        assert max(Counter(one.key_id for one in remaining).values()) <= 0.05 * len(remaining)


def test_a_key_that_holds_most_of_few_is_warned_of() -> None:
    marks = [a_mark(index, key="loud" if index < 9 else "quiet", outcome=index % 2) for index in range(10)]
    sides, left_out = rules.divided(marks, Rules())
    (warning,) = rules.summed_up(marks, sides, left_out).warnings
    assert warning.startswith("one of 2 keys holds 90 % of the rows")


def test_each_side_is_capped_and_everything_is_counted() -> None:
    loud = [a_mark(index, key="loud") for index in range(100)]
    many = [a_mark(index, key=f"key{index % 30}", call=(f"m{index}", 1), group=f"m{index}") for index in range(100)]
    sides, left_out = rules.divided([*loud, *many], Rules(validation_share=0.4))
    report = rules.summed_up([*loud, *many], sides, {**left_out, "redacted": 3})
    assert report.found == 203 == report.kept + sum(report.left_out.values())
    assert report.key_share <= 0.05
    assert report.train > report.validation > 0
    assert set(report.left_out) == {"over_key_share", "redacted"}
    assert report.reasons().endswith(f"3 redacted ({REASONS['redacted']})")
    assert (report.keys, report.outcome_values, report.warnings) == (31, 2, [])


def test_a_single_class_and_an_empty_validation_side_are_warned_of() -> None:
    same = [a_mark(index, group="one", outcome=1.0) for index in range(4)]
    sides, left_out = rules.divided(same, Rules(key_share_max=1.0, validation_share=0.5))
    report = rules.summed_up(same, sides, left_out)
    assert (report.train, report.validation, report.left_out) == (2, 0, {"prompt_on_both_sides": 2})
    assert "every outcome is 1" in report.warnings[0]
    assert "no row is left to validate on" in report.warnings[1]


def test_nothing_gives_an_empty_report() -> None:
    report = rules.summed_up([], {}, {})
    assert (report.found, report.kept, report.key_share, report.outcome_mean, report.reasons()) == (0, 0, 0.0, None, "")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"key_share_max": 0.0}, "key share 0.0"),
        ({"key_share_max": 1.5}, "key share 1.5"),
        ({"validation_share": 1.0}, "validation share 1.0"),
        ({"validation_share": 0.1, "split_at": T0}, "not both"),
    ],
)
def test_rules_out_of_range_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Rules(**wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"since": T0, "until": T0}, "is not before until"),
        ({"since": datetime(2026, 1, 1)}, "no time zone"),
        ({"min_outcomes": -1}, "min_outcomes is -1"),
        ({"planners": ()}, "planners is empty"),
    ],
)
def test_selections_that_match_nothing_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Selection(**wrong)


def test_a_selection_says_what_it_selects() -> None:
    chosen = Selection(since=T0, pools=("a", "b"), tags=(("team", "blue"),))
    assert str(chosen) == (
        "since=2026-01-01T00:00:00+00:00, pools=a,b, tags=team=blue, planners=conductor, min_outcomes=1"
    )


def test_flags_become_values_or_a_line_that_names_them() -> None:
    assert parse_time("2026-01-31", "--since") == datetime(2026, 1, 31, tzinfo=UTC)
    assert parse_time("2026-01-31T12:00:00+02:00", "--since") == datetime(2026, 1, 31, 10, tzinfo=UTC)
    assert parse_tags(["team=blue", "note=a=b", "empty="]) == (("team", "blue"), ("note", "a=b"), ("empty", ""))
    with pytest.raises(ConfigError, match="--until `yesterday` is not a time; write 2026-01-31"):
        parse_time("yesterday", "--until")
    for text in ("team", "=blue"):
        with pytest.raises(ConfigError, match="is not key=value"):
            parse_tags([text])
