"""Convert journal payloads to rows of `tables.py`, and rows to the tree that `GET /v1/rollouts/{id}` shows. No I/O."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import groupby
from typing import Any
from uuid import UUID

from sqlalchemy import Table

from gateway.adapters.postgres import tables
from gateway.core.log.counterfactual import JudgedPlan, judged_plan, planned_round
from gateway.core.log.events import Event
from gateway.core.log.outcome import Judgement, Outcome
from gateway.core.loop.evidence.credit import CREDIT_VERSION
from gateway.core.loop.experience.likeness import HASHED, Embedding, question_text
from gateway.core.loop.experience.past import FAILURE
from gateway.core.openai.responses.conversations import turn_of
from gateway.core.policies import grading
from gateway.errors import BadRequest
from gateway.service.ports.request import WonPlan

Row = dict[str, Any]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")  # PostgreSQL's text and jsonb refuse both
_NUL, _SURROGATE = b"\\u0000", b"\xed"  # of a surrogate, the first byte
_NAN, _INFINITY = b"NaN", b"Infinity"
_LEDGER_FIELDS = {"hold_id", "rollout_id", "amount_nano", "bound_nano", "charged_nano", "state", "scopes"}
_HIDDEN = {"task_embedding", "task_embedder", "credited"}
SUMMARY = (
    *("id", "created_at", "finished_at", "completion_id", "policy_requested", "policy_used", "policy_version"),
    *(
        "pool_name",
        "task_type",
        "status",
        "fallback",
        "memory",
        "capped",
        "cost_nano",
        "prompt_tokens",
        "completion_tokens",
    ),
    *("overhead_ms", "stream"),
)


@dataclass(slots=True)
class Rows:
    """Rows by table, in the order in which foreign keys allow them to be inserted."""

    rollouts: list[Row] = field(default_factory=list)
    rounds: list[Row] = field(default_factory=list)
    steps: list[Row] = field(default_factory=list)
    ledger: list[Row] = field(default_factory=list)
    policy_shadows: list[Row] = field(default_factory=list)
    gradings: list[Row] = field(default_factory=list)
    continuations: list[Row] = field(default_factory=list)
    experience: list[Row] = field(default_factory=list)  # of steps that failed by their worker's own fault
    turns: list[Row] = field(default_factory=list)  # what rollouts add to stored conversations

    def extend(self, other: Rows) -> None:
        for name in self.__slots__:
            getattr(self, name).extend(getattr(other, name))


def clean(value: Any) -> Any:
    """Copy a value so that PostgreSQL can store it: NUL and lone surrogates become U+FFFD, NaN and infinities None."""
    if isinstance(value, str):
        return _UNSTORABLE.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def needs_cleaning(record: bytes) -> bool:
    """Whether `clean` might change a journal record. Searching its bytes is a hundred times cheaper."""
    return _NUL in record or _SURROGATE in record or _NAN in record or _INFINITY in record


def at(us: int | None) -> datetime | None:
    """Convert microseconds since the epoch to UTC, exactly; 0 and None (it never happened) to None."""
    return EPOCH + timedelta(microseconds=us) if us else None


def event_rows(event: Event, *, is_clean: bool = False, embedding: Embedding | None = HASHED) -> Rows:
    """The rows of one event. `embedding` computes the vector of a question that was logged without one; None: it stays
    without. Raises ValueError, TypeError or KeyError if the payload is none of the five kinds."""
    payload = event.payload if is_clean else clean(event.payload)
    if event.kind == "rollout":
        return _rollout_rows(payload, event.payload, embedding)
    if event.kind == "shadow":
        record = {**payload, "id": uuid_text(event.id), "at": at(event.ts_us)}
        return Rows(policy_shadows=[_table_row(tables.policy_shadows, record)])
    return Rows(ledger=[_ledger_row(event, payload)])


def uuid_text(value: str) -> str:
    """The canonical form of a UUID. Raises ValueError or AttributeError for anything else."""
    return str(UUID(value))


def _table_row(table: Table, record: Mapping[str, Any]) -> Row:
    get = record.get
    return {name: at(get(us)) if us else get(name) for name, us in _cells(table)}


def field_of(column: str) -> str:
    """The field of a record from which a column comes."""
    return f"{column[:-3]}_us" if column.endswith("_at") else column


@lru_cache(maxsize=32)
def _cells(table: Table) -> Sequence[tuple[str, str | None]]:
    """The columns of a table, and for those of times the field of the record that gives them."""
    names = [column.name for column in table.columns if column.name not in _HIDDEN]
    return [(name, field_of(name) if name.endswith("_at") else None) for name in names]


def won_plan(request: Any, plan: Any, pool: Any, cost_nano: int) -> WonPlan:
    """A plan that won, from its row."""
    workers = [one for one in pool if isinstance(one, dict)] if isinstance(pool, list) else []
    messages = request.get("messages") if isinstance(request, dict) else None
    names = {str(one.get("handle")): str(one.get("name")) for one in workers}
    return WonPlan(question_text(messages), plan, names, int(cost_nano))


def judged_plans_of(rounds: Iterable[Mapping[Any, Any]]) -> list[JudgedPlan]:
    """Judged requests from the rows of their rounds, in which those of one rollout follow one another."""
    plans = []
    for _, group in groupby(rounds, key=lambda row: row["rollout_id"]):
        own = list(group)
        names = {str(one.get("handle")): str(one.get("name")) for one in own[0]["pool"] if isinstance(one, dict)}
        planned = [planned_round(row, names) for row in own]
        plans.append(judged_plan(planned, own[0]["fallback"], float(own[0]["value"])))
    return plans


def cosine(one: Sequence[float] | None, other: Sequence[float] | None) -> float:
    """The cosine of two vectors; 0 where they cannot be compared."""
    if not one or not other or len(one) != len(other):
        return 0.0
    norm = math.hypot(*one) * math.hypot(*other)
    return sum(map(operator.mul, one, other)) / norm if norm else 0.0


def _rollout_rows(record: Mapping[str, Any], payload: Mapping[str, Any], embedding: Embedding | None) -> Rows:
    rollout_id = uuid_text(record["id"])
    vector, embedder = _task_vector(record, embedding)
    rollout = _table_row(tables.rollouts, record) | {"task_embedding": vector, "task_embedder": embedder}
    rounds = [_table_row(tables.rounds, r | {"rollout_id": rollout_id}) for r in record["rounds"]]
    for row, raw in zip(rounds, payload["rounds"], strict=True):
        row["plan_logprobs"] = raw["plan_logprobs"]  # a float array holds -inf, which jsonb could not
    steps = [_table_row(tables.steps, s | {"rollout_id": rollout_id}) for s in record["steps"]]
    to_grade = grading_row(rollout)
    to_continue = continuation_rows(rollout, record)
    graded = [to_grade] if to_grade else []
    turns = _turn_rows(rollout)
    failed = failure_rows(rollout, steps, record.get("failures") or ())
    return Rows(*([rollout], rounds, steps), gradings=graded, continuations=to_continue, experience=failed, turns=turns)


def failure_rows(rollout: Row, steps: Sequence[Row], failures: Sequence[Sequence[Any]]) -> list[Row]:
    """The experience of a rollout's steps that failed by their worker's own fault: (round, step, weight) of each."""
    weights = {(round_, step): weight for round_, step, weight in failures}
    about = {name: rollout[name] for name in ("pool_name", "task_type", "org", "key_id")}
    about |= {"embedding": rollout["task_embedding"], "embedder": rollout["task_embedder"], "source": FAILURE}
    own = ("rollout_id", "round", "step", "worker", "worker_version", "cost_nano")
    failed = [step for step in steps if (step["round"], step["step"]) in weights and step["finished_at"]]
    return [
        {
            **{name: step[name] for name in own},
            **about,
            "success": 0.0,
            "latency_ms": _milliseconds(step),
            "weight": weights[step["round"], step["step"]],
            "at": step["finished_at"],
        }
        for step in failed
    ]


def _milliseconds(step: Row) -> int:
    took: timedelta = step["finished_at"] - (step["started_at"] or step["finished_at"])
    return max(0, took // timedelta(milliseconds=1))


def _turn_rows(rollout: Row) -> list[Row]:
    """What a client's request adds to the stored conversation that it is a turn of."""
    turn = None if rollout["parent_id"] else turn_of(rollout)
    return [] if turn is None else [asdict(turn) | {"key_id": rollout["key_id"]}]


def continuation_rows(rollout: Row, record: Mapping[str, Any]) -> list[Row]:
    """The marks of the conversation's next turn, and until when they count."""
    given_at, worker = rollout["finished_at"] or rollout["created_at"], record.get("answered_by")
    whose = {"key_id": rollout["key_id"], "worker": worker, "rollout_id": rollout["id"], "facts": record.get("facts")}
    marks = record.get("marks") or {} if worker else {}
    return [whose | {"mark": mark, "until": given_at + timedelta(seconds=marks[mark])} for mark in marks]


def _task_vector(
    record: Mapping[str, Any], embedding: Embedding | None
) -> tuple[list[float], str | None] | tuple[None, None]:
    """The vector that later tasks are compared with, and the name of its embedder; None for keys that log no text."""
    if record.get("log_mode") == "metadata" or not isinstance(record["request"], Mapping):
        return None, None
    if record.get("task_embedding") is not None:
        return (record["task_embedding"], record.get("task_embedder")) if record["task_embedding"] else (None, None)
    vector = [] if embedding is None else question_vector(record["request"], embedding)
    return (vector, embedding.name) if embedding is not None and any(vector) else (None, None)


def question_vector(request: Mapping[str, Any], embedding: Embedding) -> list[float]:
    """The vector of a logged request's question; empty where the request was refused for its shape."""
    try:
        return embedding.embed(question_text(request.get("messages")))
    except (AttributeError, TypeError):
        return []


def _ledger_row(event: Event, payload: Mapping[str, Any]) -> Row:
    kind, amount = {
        "hold": ("hold", "amount_nano"),
        "dispatch": ("dispatched", "bound_nano"),
        "settle": (payload.get("state"), "charged_nano"),
    }[event.kind]
    return {
        "event_id": uuid_text(event.id),
        "hold_id": payload["hold_id"],
        "rollout_id": payload.get("rollout_id"),
        "kind": kind,
        "amount_nano": payload[amount],
        "scopes": scope_pairs(payload.get("scopes")),
        "detail": {key: value for key, value in payload.items() if key not in _LEDGER_FIELDS},
        "at": at(event.ts_us),
    }


def scope_pairs(scopes: Sequence[Any] | None) -> list[list[Any]]:
    """Scopes with their limits, where an event may name the scope alone. Raises TypeError."""
    return [[scope, None] if isinstance(scope, str) else list(scope) for scope in scopes or []]


def outcome_row(outcome: Outcome) -> Row:
    """The row of `outcomes`."""
    record = {name: getattr(outcome, name) for name in ("id", "rollout_id", "key_id", "idempotency_key", "created_at")}
    record |= {name: clean(getattr(outcome.judgement, name)) for name in Judgement.__slots__}
    return record | {"credited": CREDIT_VERSION}


def grading_row(rollout: Row) -> Row | None:
    """The row of `gradings` for a stored rollout whose request named a grader. Child loops carry their parent's tags
    and are not graded; tags that today's gateways would refuse ask for no grade."""
    try:
        asked = None if rollout["depth"] else grading.asked_then(rollout["tags"] or {})
    except (BadRequest, AttributeError):
        return None
    if asked is None:
        return None
    grader, reference = asked
    times = {"created_at": rollout["created_at"], "due_at": rollout["created_at"]}
    named = {"rollout_id": rollout["id"], "grader": grader, "reference": reference}
    return named | {"state": "waiting", "attempts": 0} | times


def jsonable(row: Mapping[str, Any]) -> Row:
    """A row as JSON: times as ISO 8601 in UTC with microseconds. Columns that only machines read are left out."""
    return {name: _iso(value) for name, value in row.items() if name not in _HIDDEN}


def summary(row: Mapping[Any, Any]) -> Row:
    """A rollout in a list: planner, end and cost."""
    return jsonable({name: row[name] for name in SUMMARY})


def _iso(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return value


def tree(root_id: str, rollouts: Iterable[Row], parts: Mapping[str, Sequence[Row]]) -> Row:
    """One rollout with its `parts` (rounds, steps, outcomes, ledger) and its `children` in the same shape."""
    nodes = {row["id"]: jsonable(row) | {name: [] for name in parts} | {"children": []} for row in rollouts}
    for name, rows in parts.items():
        for row in rows:
            nodes[row["rollout_id"]][name].append(jsonable(row))
    for node in nodes.values():
        if node["id"] != root_id and node["parent_id"] in nodes:
            nodes[node["parent_id"]]["children"].append(node)
    return nodes[root_id]
