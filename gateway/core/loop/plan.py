"""The plan: what a policy emits in one round (DESIGN §3). Pure and total.

`validate` turns any input into a Plan or a named refusal; nothing is executed, evaluated or guessed at. `PlanReader`
finds finished steps while the text is still being decoded, so that step 0 may start before step 2 is written.
Step indices count over all rounds of a loop: round 1 has 0..k-1, the next plan's first step is k.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.errors import PlanRefused

PLAN_BYTES_MAX = 65_536
TASK_CHARS_MAX = 8_000
REASONS = frozenset(
    {
        "bad_see", "bad_step", "bad_task", "depth_cap", "duplicate_key", "forward_see", "no_steps", "not_json",
        "not_list", "not_object", "task_too_long", "too_large", "too_many_steps", "unknown_key", "unknown_worker",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One worker call. `see` holds the indices of earlier steps whose replies this one may read, ascending."""

    worker: str  # handle
    task: str | None  # None: the conversation as the client sent it
    see: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of one round; empty means "ship the previous answer"."""

    steps: tuple[Step, ...]

    def as_json(self) -> dict[str, Any]:
        """The wire form."""
        return {"steps": [{"worker": s.worker, "task": s.task, "see": list(s.see)} for s in self.steps]}


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a plan may do now: handles in the order shown, how many steps, and how many came before it."""

    handles: tuple[str, ...]
    steps_max: int
    first_index: int = 0
    depth_capped: frozenset[str] = frozenset()  # handles that would start a child loop, were there depth left

    def as_json(self) -> dict[str, Any]:
        """The form that a round's record keeps; `allowed_of` is the inverse."""
        limits = {"steps_max": self.steps_max, "first_index": self.first_index}
        return {"handles": list(self.handles), **limits, "depth_capped": sorted(self.depth_capped)}


def allowed_of(logged: Mapping[str, Any]) -> Allowed:
    """The limits that `Allowed.as_json` wrote. Raises ValueError on anything else."""
    try:
        handles, capped = map(str, logged["handles"]), map(str, logged["depth_capped"])
        return Allowed(tuple(handles), int(logged["steps_max"]), int(logged["first_index"]), frozenset(capped))
    except (KeyError, TypeError):
        raise ValueError("not the limits of a plan") from None


def validate(raw: str | bytes | object, allowed: Allowed) -> Plan:
    """Any input → a plan within `allowed`. Raises PlanRefused with a stable `reason`."""
    value = _loads(raw) if isinstance(raw, str | bytes) else raw
    if not isinstance(value, dict):
        raise PlanRefused("not_object", "a plan is a JSON object with the key `steps`")
    if set(value) != {"steps"}:
        raise PlanRefused("unknown_key", "a plan has exactly one key, `steps`", param="steps")
    steps = value["steps"]
    if not isinstance(steps, list):
        raise PlanRefused("not_list", "`steps` must be a list", param="steps")
    if not steps and allowed.first_index == 0:
        raise PlanRefused("no_steps", "the first plan must have at least one step", param="steps")
    if len(steps) > allowed.steps_max:
        raise PlanRefused(
            "too_many_steps", f"{len(steps)} steps; at most {allowed.steps_max} are allowed", param="steps"
        )
    return Plan(tuple(validate_step(step, allowed, offset) for offset, step in enumerate(steps)))


def validate_step(raw: object, allowed: Allowed, offset: int) -> Step:
    """One raw step at position `offset` of its plan → a Step. Raises PlanRefused."""
    where = f"steps[{offset}]"
    if not isinstance(raw, dict) or not set(raw) <= {"worker", "task", "see"} or "worker" not in raw:
        raise PlanRefused("bad_step", f"{where} must be an object with `worker`, `task` and `see`", param=where)
    worker = raw["worker"]
    if not isinstance(worker, str) or worker not in allowed.handles:
        if isinstance(worker, str) and worker in allowed.depth_capped:
            raise PlanRefused("depth_cap", f"{where}: no child loop below this depth", param=f"{where}.worker")
        raise PlanRefused("unknown_worker", f"{where}: no worker of that handle here", param=f"{where}.worker")
    return Step(worker, _task(raw.get("task"), where), _see(raw.get("see", []), allowed, offset))


def _task(task: object, where: str) -> str | None:
    if task is None:
        return None
    if not isinstance(task, str) or not task.strip():
        raise PlanRefused("bad_task", f"{where}.task must be text or null", param=f"{where}.task")
    if len(task) > TASK_CHARS_MAX:
        raise PlanRefused("task_too_long", f"{where}.task is over {TASK_CHARS_MAX} characters", param=f"{where}.task")
    if any(0xD800 <= ord(char) <= 0xDFFF for char in task):
        raise PlanRefused("bad_task", f"{where}.task holds half a surrogate pair", param=f"{where}.task")
    return task


def _see(see: object, allowed: Allowed, offset: int) -> tuple[int, ...]:
    where, index = f"steps[{offset}]", allowed.first_index + offset
    if see == "all":
        return tuple(range(index))
    if not isinstance(see, list) or len(see) > _see_max(allowed):
        raise PlanRefused("bad_see", f'{where}.see must be a list of earlier steps, or "all"', param=f"{where}.see")
    for item in see:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise PlanRefused("bad_see", f"{where}.see holds something that is no step index", param=f"{where}.see")
        if item >= index:
            raise PlanRefused("forward_see", f"{where} can only see steps before {index}", param=f"{where}.see")
    return tuple(sorted(set(see)))


def _see_max(allowed: Allowed) -> int:
    """Most entries of one `see`, repeats included: as many as the last step has before it, as the grammar says too."""
    return max(1, allowed.first_index + allowed.steps_max - 1)


# ---------------------------------------------------------------- text → JSON

_THINK = re.compile(r"^\s*<think>.*?</think>", re.DOTALL)
_FENCE = re.compile(r"^\s*```(?:json)?[^\S\n]*\n(.*?)\n?```\s*$", re.DOTALL)


def _loads(raw: str | bytes) -> object:
    """Parse plan text. One leading think block and one fence around everything are taken off; nothing else is."""
    if len(raw) > PLAN_BYTES_MAX:
        raise PlanRefused("too_large", f"the plan is over {PLAN_BYTES_MAX} bytes")
    try:
        text = raw.decode() if isinstance(raw, bytes) else raw
        text = _THINK.sub("", text, count=1)
        fenced = _FENCE.match(text)
        return json.loads(
            fenced.group(1) if fenced else text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant
        )
    except PlanRefused:
        raise
    except (ValueError, RecursionError):
        raise PlanRefused("not_json", "the plan is not JSON") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise PlanRefused("duplicate_key", "the plan says the same key twice")
    return value


def _no_constant(name: str) -> object:
    raise PlanRefused("not_json", f"{name} is not JSON")


class PlanReader:
    """Finds whole step objects in plan text as it grows. Feed it deltas; it hands out raw steps in order.

    It only spots where an object ends; whether the step may run is `validate_step`'s business, and the finished text
    still goes through `validate`.
    """

    # What `validate` takes off, then the head of the object. Possessive: a match never looks past the first `</think>`.
    _OPEN = re.compile(
        r'(?>(?:\s*<think>.*?</think>)?)\s*+(?:```(?:json)?[^\S\n]*+\n\s*+)?+\{\s*+"steps"\s*+:\s*+\[', re.DOTALL
    )

    def __init__(self) -> None:
        self.text = ""
        self._at = -1  # scan position inside the array; -1: array not found yet
        self._start = -1  # where the current object began
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._closed = False
        self.opened = 0  # step objects begun so far: one that is followed by another cannot be the last

    def feed(self, delta: str) -> list[object]:
        """Step objects completed by `delta`. Raises PlanRefused (too_large, not_json, duplicate_key)."""
        self.text += delta
        if len(self.text) > PLAN_BYTES_MAX:
            raise PlanRefused("too_large", f"the plan is over {PLAN_BYTES_MAX} bytes")
        if self._at < 0:
            found = self._OPEN.match(self.text) if "[" in delta else None
            if found is None:
                return []
            self._at = found.end()
        done: list[object] = []
        while self._at < len(self.text) and not self._closed:
            self._scan(self.text[self._at], done)
            self._at += 1
        return done

    def _scan(self, char: str, done: list[object]) -> None:
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            if self._depth == 0:
                self._start = self._at
                self.opened += 1
            self._depth += 1
        elif char in "}]":
            if self._depth == 0:
                self._closed = True
                return
            self._depth -= 1
            if self._depth == 0:
                done.append(_loads(self.text[self._start : self._at + 1]))


# ---------------------------------------------------------------- schema and decisions


def plan_schema(allowed: Allowed) -> dict[str, Any]:
    """JSON schema for constrained decoding: only the handles allowed now, in an order of their own, so that pools shown
    in any order share one grammar; each step sees only what comes before it; task text stays free."""
    handles = sorted(allowed.handles)
    steps = {
        "type": "array",
        "prefixItems": [_step_schema(handles, allowed.first_index + at) for at in range(allowed.steps_max)],
        "items": False,
    }
    if allowed.first_index == 0:
        steps["minItems"] = 1
    return {
        "type": "object",
        "properties": {"steps": steps},
        "required": ["steps"],
        "additionalProperties": False,
    }


def _step_schema(handles: Sequence[str], before: int) -> dict[str, Any]:
    """A step that has `before` steps before it."""
    indices: dict[str, Any] = {"type": "array", "items": {"enum": list(range(before))}, "maxItems": before}
    if before == 0:
        indices = {"type": "array", "maxItems": 0}
    return {
        "type": "object",
        "properties": {
            "worker": {"enum": list(handles)},
            "task": {"anyOf": [{"type": "null"}, {"type": "string"}]},
            "see": {"anyOf": [indices, {"const": "all"}]},
        },
        "required": ["worker", "task", "see"],
        "additionalProperties": False,
    }


def portable_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same without `prefixItems`, which hosted vendors do not take: every step may then look as far as the last
    one, and `validate` refuses what looks forward. Any other schema is left as it is."""
    steps = dict(schema.get("properties", {}).get("steps", {}))
    each = steps.pop("prefixItems", None)
    if each is None:
        return dict(schema)
    steps |= {"items": each[-1], "maxItems": len(each)}
    return {**schema, "properties": {"steps": steps}}


def schema_hash(schema: Mapping[str, Any]) -> str:
    """sha256 of the canonical schema: the grammar under which a plan's log-probs were taken."""
    return hashlib.sha256(json.dumps(schema, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


_TASK_STRING = re.compile(r'"task"\s*:\s*"((?:[^"\\]|\\.)*)')


def decision_mask(tokens: Sequence[str]) -> list[bool]:
    """For each token of a plan: True when it decides something, False when it is (wholly) free task text."""
    text = "".join(tokens)
    free = [match.span(1) for match in _TASK_STRING.finditer(text)]
    mask: list[bool] = []
    start = 0
    for token in tokens:
        end = start + len(token)
        mask.append(not any(begin <= start < stop and end <= stop for begin, stop in free))
        start = end
    return mask
