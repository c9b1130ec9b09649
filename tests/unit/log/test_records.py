"""Identifiers sort by time, covered time is a union, and a rollout's payload is plain data."""

from __future__ import annotations

import json
import uuid

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.log.events import uuid7
from gateway.core.log.rollout import AttemptRecord, RolloutRecord, RoundRecord, StepRecord, as_payload
from gateway.service.request.running import covered_us

spans = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), max_size=12)


@given(st.integers(0, 2**48 - 1))
def test_an_id_is_a_uuid_of_version_seven_that_holds_its_millisecond(unix_ms: int) -> None:
    made = uuid.UUID(uuid7(unix_ms))
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert made.int >> 80 == unix_ms
    assert str(made) == uuid7(unix_ms)[:14] + str(made)[14:]


@given(st.integers(0, 2**48 - 2))
def test_ids_sort_by_time(unix_ms: int) -> None:
    assert uuid7(unix_ms) < uuid7(unix_ms + 1)


def test_ids_of_one_millisecond_differ() -> None:
    assert len({uuid7(1_700_000_000_000) for _ in range(2000)}) == 2000


@given(spans)
def test_covered_time_counts_each_microsecond_once(times: list[tuple[int, int]]) -> None:
    assert covered_us(iter(times)) == len({us for start, end in times for us in range(start, end)})


def test_no_spans_cover_nothing() -> None:
    assert covered_us([]) == 0


def test_a_payload_is_plain_data_all_the_way_down() -> None:
    step = StepRecord(1, 0, "local", "atlas", "openai", "1", None, [])
    step.attempts.append(AttemptRecord(1, 2, "upstream_timeout"))
    record = RolloutRecord("r", "k", "org", 5, "baton", "default", "h", [], {}, {}, "chatcmpl-r")
    record.rounds.append(RoundRecord(1, "conductor", plan_token_ids=[1], plan_logprobs=[-0.5], decision_mask=[True]))
    record.steps.append(step)
    payload = as_payload(record)
    assert json.loads(json.dumps(payload)) == payload
    assert payload["steps"][0]["attempts"][0]["error"] == "upstream_timeout"
    assert payload["rounds"][0]["plan_logprobs"] == [-0.5]
    payload["steps"].clear()
    assert record.steps == [step]  # a copy
