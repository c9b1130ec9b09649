"""The verdict that stands on a step, out of its attempts."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.log.rollout import AttemptRecord, as_payload
from gateway.core.loop.replies.verdicts import StepVerdict, step_verdict
from gateway.service.loop.checks import standing_verdict, verdicts_of
from tests.records import a_rollout, a_step


def attempt(
    by: str | None = None, accept: bool | None = None, worker: str | None = None, *, dispatched: bool = True
) -> AttemptRecord:
    verdict = None if by is None else {"by": by, "accept": accept, "why": ""}
    return AttemptRecord(0, 1, dispatched=dispatched, worker=worker, verdict=verdict)


KEPT, MISSED = attempt("contract", True), attempt("contract", False)


@pytest.mark.parametrize(
    ("attempts", "word", "repaired", "checker"),
    [
        ([KEPT], "kept", False, None),
        ([MISSED, KEPT], "repaired", True, None),
        ([MISSED, MISSED], "missed", False, None),
        ([attempt("contract", False, "alpha"), attempt("contract", False, "alpha"), KEPT], "repaired", True, None),
        ([KEPT, attempt("contract", True, "judge")], "kept", False, "judge"),
        ([KEPT, attempt("contract", False, "judge")], "missed", False, "judge"),
        ([KEPT, attempt("contract", None, "judge")], "unchecked", False, "judge"),
        ([KEPT, attempt("contract", False, "judge"), KEPT, attempt("contract", True, "judge")], "repaired", True,
         "judge"),
        ([MISSED, KEPT, attempt("contract", None, "judge")], "unchecked", True, "judge"),
        ([MISSED, attempt()], "missed", False, None),  # another reply was asked for, and none came
        ([attempt("verify", True)], "accepted", False, "alpha"),
        ([attempt(), attempt("verify", False)], "rejected", False, "alpha"),
        ([attempt("verify", None)], "unchecked", False, "alpha"),
        ([attempt("verify", False, dispatched=False)], "unchecked", False, None),  # there was no candidate
    ],
)  # fmt: skip
def test_the_last_verdict_stands(attempts: list[AttemptRecord], word: str, repaired: bool, checker: str | None) -> None:
    step = a_step(2, "alpha", attempts=attempts)
    verdict = standing_verdict("r", step)
    assert verdict is not None
    assert (verdict.word, verdict.repaired, verdict.checker) == (word, repaired, checker)
    assert (verdict.rollout_id, verdict.round, verdict.step) == ("r", 1, 2)
    logged: Any = as_payload(a_rollout(steps=[step]))["steps"][0]["attempts"]
    assert step_verdict("r", 1, 2, "alpha", logged) == verdict


def test_whether_two_replies_say_the_same_is_no_verdict_on_a_step() -> None:
    compared = {"by": "verify", "accept": False, "why": "", "pairwise": True}
    assert step_verdict("r", 1, 2, "judge", [{"verdict": compared, "dispatched": True}]) is None


def test_a_step_that_nobody_checked_has_none() -> None:
    checked = a_step(1, attempts=[KEPT])
    assert standing_verdict("r", a_step(0)) is None
    assert standing_verdict("r", a_step(0, attempts=[])) is None
    record, child = a_rollout(steps=[a_step(0), checked]), a_rollout(steps=[checked])
    assert verdicts_of([record, child]) == tuple(
        StepVerdict(each.id, 1, 1, "contract", True) for each in (record, child)
    )
