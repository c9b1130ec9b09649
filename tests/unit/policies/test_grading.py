"""A request's own grader: what is let through, what is refused, and that the names are the graders' own."""

from __future__ import annotations

import pytest

from gateway.adapters.postgres.rows import grading_row
from gateway.core.policies import grading
from gateway.errors import BadRequest
from policy.graders import versions
from tests.records import a_rollout


def test_the_names_and_versions_are_the_graders_own() -> None:
    assert dict(grading.GRADERS) == versions()


@pytest.mark.parametrize("named", ["numeric", "numeric@2"])
def test_a_named_grader_is_pinned_to_its_version(named: str) -> None:
    assert grading.asked({"grader": named, "reference": "18.90"}) == ("numeric@2", "18.90")


def test_metadata_without_a_grader_asks_for_nothing() -> None:
    assert grading.asked({"reference": "18.90", "task_type": "math"}) is None
    grading.check({}, "metadata")


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"grader": "numerical", "reference": "1"}, "no grader `numerical`; use one of exact, numeric"),
        ({"grader": "", "reference": "1"}, "no grader ``"),
        ({"grader": "numeric@9", "reference": "1"}, "at version 2, not 9"),
        ({"grader": "numeric"}, "needs `reference`"),
        ({"grader": "numeric", "reference": "  "}, "needs `reference`"),
    ],
)
def test_a_bad_grader_is_refused_by_name(metadata: dict[str, str], said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        grading.asked(metadata)
    assert said in refused.value.message
    assert (refused.value.param, refused.value.code) == ("metadata", "bad_grader")


def test_a_key_that_logs_no_reply_cannot_ask_for_a_grade() -> None:
    with pytest.raises(BadRequest, match="keeps no reply"):
        grading.check({"grader": "exact", "reference": "x"}, "metadata")
    grading.check({"grader": "exact", "reference": "x"}, "redacted")


def test_only_the_top_of_a_tree_is_graded() -> None:
    tags = {"grader": "exact", "reference": "x"}
    record = {"id": a_rollout().id, "depth": 0, "tags": tags, "created_at": "t"}
    row = grading_row(record)
    assert row is not None
    assert (row["grader"], row["reference"], row["state"]) == ("exact@1", "x", "waiting")
    earlier = grading_row(record | {"tags": {"grader": "numeric@1", "reference": "1"}})
    assert earlier is not None
    assert earlier["grader"] == "numeric@2"
    assert grading_row(record | {"depth": 1}) is None
    assert grading_row(record | {"tags": {"grader": "unheard-of"}}) is None
    assert grading_row(record | {"tags": None}) is None
