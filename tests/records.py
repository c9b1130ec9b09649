"""Complete records for tests of the log: a rollout with every field filled, and the events around it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from gateway.adapters.postgres import rows
from gateway.core.log.events import Event, Kind, uuid7
from gateway.core.log.outcome import Judgement, Outcome
from gateway.core.log.rollout import AttemptRecord, RolloutRecord, RoundRecord, StepRecord, as_payload

T0_US = 1_760_000_000_123_456
_ms: Iterator[int] = itertools.count(T0_US // 1000)


def new_id() -> str:
    return uuid7(next(_ms))


def a_round(number: int = 1, **changes: Any) -> RoundRecord:
    filled: dict[str, Any] = {
        "planner": "conductor",
        "policy_version": "conductor@7",
        "prompt_version": "3",
        "prompt_hash": "ab12",
        "messages": [{"role": "user", "content": "plan this"}],
        "prompt_token_ids": [1, 2, 3],
        "plan_token_ids": [10, 11, 12],
        "plan_logprobs": [-0.1, -2.5, -0.000001],
        "decision_mask": [True, False, True],
        "plan_text": '{"steps":[]}',
        "plan": {"steps": [{"worker": "quill", "task": None, "see": []}]},
        "sampling": {"temperature": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
        "schema_hash": "cd34",
        "allowed": {"handles": ["quill"], "steps_max": 3, "first_index": 0, "depth_capped": []},
        "quality": 7,
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "cost_nano": 5,
        "started_us": T0_US + 1,
        "finished_us": T0_US + 20_001,
    }
    return RoundRecord(round=number, **(filled | changes))


def a_step(step: int, worker: str = "alpha", **changes: Any) -> StepRecord:
    filled: dict[str, Any] = {
        "handle": "quill",
        "kind": "openai",
        "worker_version": "1",
        "task": None if step == 0 else f"check step {step - 1}",
        "see": list(range(step)),
        "messages": [{"role": "user", "content": "2+2?"}],
        "reply": "4",
        "finish_reason": "stop",
        "status": "done",
        "prompt_tokens": 9,
        "completion_tokens": 1,
        "cost_nano": 400,
        "started_us": T0_US + 30_000,
        "first_byte_us": T0_US + 40_000,
        "finished_us": T0_US + 130_000,
        "attempts": [AttemptRecord(T0_US + 30_000, T0_US + 130_000)],
    }
    return StepRecord(round=1, step=step, worker=worker, **(filled | changes))


def a_rollout(**changes: Any) -> RolloutRecord:
    filled: dict[str, Any] = {
        "id": new_id(),
        "key_id": "key1",
        "org": "acme",
        "created_us": T0_US,
        "policy_requested": "baton",
        "pool_name": "default",
        "pool_hash": "ef56",
        "pool": [{"name": "alpha", "handle": "quill", "version": "1"}],
        "caps": {"depth": 2},
        "request": {"model": "baton", "messages": [{"role": "user", "content": "What is 2+2?"}]},
        "policy_used": "conductor",
        "policy_version": "conductor@7",
        "task_type": "arithmetic",
        "end_user": "ann",
        "status": "done",
        "reply": {"choices": [{"message": {"role": "assistant", "content": "4"}}]},
        "hold_nano": 9_000,
        "cost_nano": 805,
        "prompt_tokens": 21,
        "completion_tokens": 5,
        "overhead_ms": 3.25,
        "finished_us": T0_US + 140_000,
        "tags": {"team": "blue"},
        "rounds": [a_round()],
        "steps": [a_step(0), a_step(1, "beta", kind="litellm")],
    }
    record = filled | changes
    record.setdefault("completion_id", f"chatcmpl-{record['id']}")
    return RolloutRecord(**record)


def an_outcome(rollout_id: str, value: float | None = 1.0, **changes: Any) -> Outcome:
    """An outcome of kind number, unless `changes` say otherwise; they name fields of Outcome and of Judgement."""
    of_outcome = {name: changes.pop(name) for name in Outcome.__slots__ if name in changes}
    judgement = Judgement(**({"kind": "number", "value": value} | changes))
    filled: dict[str, Any] = {
        "id": new_id(),
        "rollout_id": rollout_id,
        "key_id": "key1",
        "created_at": datetime.now(UTC),
    }
    return Outcome(**(filled | {"judgement": judgement} | of_outcome))


def event(kind: Kind, payload: Any, ts_us: int = T0_US) -> Event:
    return Event(new_id(), kind, ts_us, payload)


def rollout_event(record: RolloutRecord) -> Event:
    return event("rollout", as_payload(record), record.finished_us)


def hold_event(hold_id: str, rollout_id: str, amount_nano: int, *scopes: tuple[str, int | None]) -> Event:
    payload = {"hold_id": hold_id, "rollout_id": rollout_id, "amount_nano": amount_nano}
    return event("hold", payload | {"scopes": [list(s) for s in scopes]})


def dispatch_event(hold_id: str, rollout_id: str, bound_nano: int = 100) -> Event:
    payload = {"hold_id": hold_id, "rollout_id": rollout_id, "step_id": "1.0", "attempt": 1, "worker": "alpha"}
    return event("dispatch", payload | {"bound_nano": bound_nano}, T0_US + 1)


def settle_event(hold_id: str, rollout_id: str, state: str, charged_nano: int, *scopes: str) -> Event:
    payload = {"hold_id": hold_id, "rollout_id": rollout_id, "state": state, "charged_nano": charged_nano}
    return event("settle", payload | {"scopes": [[name, None] for name in scopes]}, T0_US + 2)


def tree_of(*records: RolloutRecord) -> dict[str, Any]:
    """The tree of the first rollout, as the API shows it, with the others as its children."""
    new = rows.Rows()
    for record in records:
        new.extend(rows.event_rows(rollout_event(record)))
    parts = {"rounds": new.rounds, "steps": new.steps, "outcomes": [], "ledger": []}
    return rows.tree(records[0].id, new.rollouts, parts)
