"""Rows and marks for tests of the data set."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from gateway.core.loop.replies.verdicts import StepVerdict
from policy.dataset.read import rows_of, snapshot
from policy.dataset.row import Row, StepRow
from policy.dataset.rules import Mark
from policy.dataset.select import Selection

T0 = datetime(2026, 1, 1, tzinfo=UTC)
STEP: dict[str, Any] = {
    "step": 0,
    "worker": "alpha",
    "handle": "quill",
    "kind": "openai",
    "worker_version": "1",
    "task": None,
    "see": (),
    "status": "done",
    "error": None,
    "prompt_tokens": 9,
    "completion_tokens": 1,
    "cost_nano": 400,
    "latency_ms": 100.0,
}
ROW: dict[str, Any] = {
    "rollout_id": "r1",
    "round": 1,
    "root_id": "r1",
    "parent_id": None,
    "depth": 0,
    "created_at": T0,
    "key_id": "key1",
    "log_mode": "full",
    "pool_name": "default",
    "pool": [{"name": "alpha", "handle": "quill", "version": "1"}],
    "caps": {"steps": 3, "quality": 7},
    "workers_used": (("alpha", "1"),),
    "task_type": "arithmetic",
    "tags": {"team": "blue"},
    "group": "g1",
    "request_messages": [{"role": "user", "content": "What is 2+2?"}],
    "messages": [{"role": "user", "content": "plan this"}],
    "prompt_token_ids": [1, 2, 3],
    "plan_token_ids": [10, 11],
    "plan_logprobs": [-0.5, -1.25],
    "decision_mask": [True, False],
    "plan_text": '{"steps":[]}',
    "plan": {"steps": []},
    "sampling": {"temperature": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    "schema_hash": "cd34",
    "allowed": {"handles": ["quill"], "steps_max": 3, "first_index": 0, "depth_capped": []},
    "quality": 7,
    "prompt_version": "3",
    "prompt_hash": "ab12",
    "planner": "conductor",
    "policy_version": "conductor@7",
    "steps": (StepRow(**STEP),),
    "outcome": 1.0,
    "outcome_metadata": {"page": "7"},
    "outcome_n": 1,
    "outcome_sources": ("client",),
    "grader_versions": (),
    "cost_nano": 805,
    "latency_ms": 140.0,
    "status": "done",
    "fallback": None,
    "capped": None,
    "refusal": None,
}


def a_row(**changes: Any) -> Row:
    return Row(**(ROW | changes))


def a_verdict(by: str = "contract", accept: bool | None = False, **changes: Any) -> StepVerdict:
    filled: dict[str, Any] = {"rollout_id": "r1", "round": 1, "step": 0, "by": by, "accept": accept}
    return StepVerdict(**(filled | changes))


def a_mark(index: int, key: str = "key1", **changes: Any) -> Mark:
    """The `index`-th row of the log, a minute after the one before it."""
    filled: dict[str, Any] = {
        "call": (f"r{index}", 1),
        "root_id": f"r{index}",
        "key_id": key,
        "created_at": T0 + timedelta(minutes=index),
        "group": f"g{index}",
        "outcome": float(index % 2),
        "parsed": True,
    }
    return Mark(**(filled | changes))


def read(database_url: str, selection: Selection) -> Iterator[Row]:
    """Every selected planning call that has enough outcomes, oldest first."""
    with snapshot(database_url) as connection:
        for row in rows_of(connection, selection):
            if row.outcome_n >= selection.min_outcomes:
                yield row
