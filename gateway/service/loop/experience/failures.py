"""Failures as evidence: which steps speak against their worker before anybody judges the request. Pure.

A time-out, a refused connection, an error of the worker's server and a malformed reply are the worker's own fault, and
so is an empty reply. What the request itself caused is not: an error of its own (4xx), a cap, a budget, the end of its
time, a cancellation, a rate limit, or the lack of a free place here.
"""

from __future__ import annotations

from gateway.core.log.rollout import RolloutRecord, StepRecord
from gateway.core.loop.replies.answers import is_refusal
from gateway.core.openai.finish import FILTERED
from gateway.core.openai.vendors import overflow
from gateway.core.pool.workers import MODEL_KINDS

FAULTS = ("upstream_error", "upstream_timeout", "upstream_overloaded", "upstream_protocol", "invalid_structured_output")
KEY_REFUSED = (401, 403)  # the worker's key does not work: whoever is sent there gets nothing
REFUSAL_WEIGHT = 0.5  # of a refusal: the request may have been one to refuse


def note_failures(record: RolloutRecord) -> None:
    """Add to the record which of its steps failed by their worker's own fault."""
    found = [(step.round, step.step, failure_weight(step)) for step in record.steps if step.kind in MODEL_KINDS]
    record.failures = [each for each in found if each[2]]


def failure_weight(step: StepRecord) -> float:
    """The weight of the evidence that its worker fails such tasks; 0: none."""
    if step.status == "failed":
        return float(_is_own_fault(step))
    if step.status != "done":
        return 0.0
    if not step.tool_calls and not (step.reply or "").strip():
        return float(step.reply is not None and step.finish_reason != "length")
    return REFUSAL_WEIGHT if step.finish_reason == FILTERED or is_refusal(step.reply or "") else 0.0


def _is_own_fault(step: StepRecord) -> bool:
    last = next((one for one in reversed(step.attempts) if one.worker is None), None)
    if last is None or last.error is None or last.error != step.error:
        return False
    status = last.upstream_status
    if step.error == overflow.CODE:  # some servers say so with a 500
        return False
    if status is not None:
        return status >= 500 or status in KEY_REFUSED
    return step.error in FAULTS and (last.dispatched or step.error != "upstream_timeout")
