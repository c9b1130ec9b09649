"""Which steps speak against their worker before anybody judges the request."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.log.rollout import AttemptRecord
from gateway.service.loop.experience.failures import failure_weight, note_failures
from tests.records import a_rollout, a_step


def failed(error: str, status: int | None = None, **attempt: Any) -> dict[str, Any]:
    one = AttemptRecord(0, 1, error=error, upstream_status=status, **attempt)
    return {"status": "failed", "error": error, "reply": None, "attempts": [one]}


@pytest.mark.parametrize(
    ("step", "weight"),
    [
        ({}, 0),
        (failed("upstream_timeout"), 1),
        (failed("upstream_timeout", dispatched=False), 0),  # there was no free place here
        (failed("upstream_error", dispatched=False), 1),  # it refused the connection
        (failed("upstream_error", 500), 1),
        (failed("model_crashed", 503), 1),  # the worker's own code
        (failed("upstream_error", 401), 1),
        (failed("upstream_protocol"), 1),
        (failed("invalid_structured_output"), 1),
        (failed("upstream_refused", 400), 0),
        (failed("context_length_exceeded", 400), 0),
        (failed("context_length_exceeded", 500), 0),
        (failed("upstream_rate_limited", 429), 0),
        (failed("cap_reached"), 0),
        (failed("deadline_exceeded"), 0),
        (failed("insufficient_quota"), 0),
        (failed("upstream_timeout", worker="judge"), 0),  # it was the checker that failed
        ({**failed("upstream_error", 500), "error": "deadline_exceeded"}, 0),  # then the request's time was over
        ({"status": "failed", "error": "spool_full", "attempts": []}, 0),
        ({"status": "cancelled", "error": "cancelled"}, 0),
        ({"status": "skipped", "reply": None}, 0),
        ({"reply": "  "}, 1),
        ({"reply": "", "finish_reason": "length"}, 0),  # the client left it no room
        ({"reply": "", "tool_calls": [{"id": "1"}]}, 0),
        ({"reply": "I'm sorry, but I can't help with that."}, 0.5),
        ({"reply": "42", "finish_reason": "content_filter"}, 0.5),
    ],
)
def test_what_is_the_workers_own_fault(step: dict[str, Any], weight: float) -> None:
    assert failure_weight(a_step(0, **step)) == weight


def test_only_model_workers_fail() -> None:
    record = a_rollout(steps=[a_step(0, reply=""), a_step(1, kind="tool", reply=""), a_step(2), a_step(3, reply=" ")])
    note_failures(record)
    assert record.failures == [(1, 0, 1.0), (1, 3, 1.0)]
