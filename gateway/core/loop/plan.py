"""The plan: what a policy emits in one round (DESIGN §3). Pure and total.

`validate` turns any input into a Plan or a named refusal; it executes, evaluates and guesses nothing. `PlanReader`
finds complete steps while the text is still being decoded, so that step 0 may start before step 2 is written. Step
indices count over all rounds of a loop: round 1 has 0..k-1, and the next plan's first step is k.
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
WHY_CHARS_MAX = 300
OBJECTS_TRIED_MAX = 64  # opening braces at which a plan is looked for in prose
REASONS = frozenset(
    {
        "bad_see", "bad_step", "bad_task", "depth_cap", "duplicate_key", "forward_see", "no_steps", "not_json",
        "not_list", "not_object", "task_too_long", "too_large", "too_many_steps", "unknown_key", "unknown_worker",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One worker call. `see` holds the indices of the earlier steps whose replies this step may read, ascending."""

    worker: str  # handle
    task: str | None  # None: the conversation as the client sent it
    see: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of one round; empty means "ship the previous answer". `why` is the planner's one line about them: it is
    logged and shown, and nothing reads it."""

    steps: tuple[Step, ...]
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON data, in the form that `validate` reads."""
        why = {"why": self.why} if self.why else {}
        return why | {"steps": [{"worker": s.worker, "task": s.task, "see": list(s.see)} for s in self.steps]}


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The limits of the next plan. `handles` stand in the order in which the prompt shows them; `first_index` is the
    number of steps before this plan."""

    handles: tuple[str, ...]
    steps_max: int
    first_index: int = 0
    depth_capped: frozenset[str] = frozenset()  # handles of child loops that the depth cap excludes

    def as_json(self) -> dict[str, Any]:
        """The limits as JSON data, for the record of a round; `limits_from_json` is the inverse."""
        limits = {"steps_max": self.steps_max, "first_index": self.first_index}
        return {"handles": list(self.handles), **limits, "depth_capped": sorted(self.depth_capped)}


def limits_from_json(logged: Mapping[str, Any]) -> PlanLimits:
    """Read what `PlanLimits.as_json` wrote. Raises ValueError on anything else."""
    try:
        handles, capped = map(str, logged["handles"]), map(str, logged["depth_capped"])
        return PlanLimits(tuple(handles), int(logged["steps_max"]), int(logged["first_index"]), frozenset(capped))
    except (KeyError, TypeError):
        raise ValueError("not the limits of a plan") from None


def validate(raw: str | bytes | object, allowed: PlanLimits) -> Plan:
    """Return the plan that `raw` spells, if it is within the limits `allowed`. Raises PlanRefused with a stable
    `reason`."""
    value = _loads(raw) if isinstance(raw, str | bytes) else raw
    if not isinstance(value, dict):
        raise PlanRefused("not_object", "a plan is a JSON object with the key `steps`")
    if set(value) - {"why"} != {"steps"}:
        raise PlanRefused("unknown_key", "a plan has the key `steps`, and may have `why`", param="steps")
    steps = value["steps"]
    if not isinstance(steps, list):
        raise PlanRefused("not_list", "`steps` must be a list", param="steps")
    if not steps and allowed.first_index == 0:
        raise PlanRefused("no_steps", "the first plan must have at least one step", param="steps")
    if len(steps) > allowed.steps_max:
        raise PlanRefused(
            "too_many_steps", f"{len(steps)} steps; at most {allowed.steps_max} are allowed", param="steps"
        )
    steps = tuple(validate_step(step, allowed, offset) for offset, step in enumerate(steps))
    return Plan(steps, clean_why(value.get("why")))


def clean_why(why: object) -> str:
    """The rationale as one line of printable text, cut; empty for anything but text."""
    if not isinstance(why, str):
        return ""
    line = "".join(char if char.isprintable() else " " for char in why[: 4 * WHY_CHARS_MAX])
    return " ".join(line.split())[:WHY_CHARS_MAX].rstrip()


def validate_step(raw: object, allowed: PlanLimits, offset: int) -> Step:
    """Return the step at position `offset` of its plan. Raises PlanRefused."""
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


def _see(see: object, allowed: PlanLimits, offset: int) -> tuple[int, ...]:
    where, index = f"steps[{offset}]", allowed.first_index + offset
    if see == "all":
        return tuple(range(index))
    if not isinstance(see, list) or len(see) > _see_max(allowed):
        raise PlanRefused("bad_see", f'{where}.see must be a list of earlier steps, or "all"', param=f"{where}.see")
    for item in see:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise PlanRefused("bad_see", f"{where}.see holds a value that is not a step index", param=f"{where}.see")
        if item >= index:
            raise PlanRefused("forward_see", f"{where} can only see steps before {index}", param=f"{where}.see")
    return tuple(sorted(set(see)))


def _see_max(allowed: PlanLimits) -> int:
    """The largest number of entries in one `see`, with repeats: the number of steps before the last one. The grammar of
    `plan_schema` has the same limit."""
    return max(1, allowed.first_index + allowed.steps_max - 1)


def read_plan(text: str, allowed: PlanLimits) -> tuple[Plan, list[str]]:
    """The plan in what a model wrote that has no grammar to hold it, and flags: `prose` (words around the JSON object),
    `why_cut` (a rationale that was cut or was no line of text). Raises PlanRefused."""
    flags: list[str] = []
    try:
        value = _loads(text)
    except PlanRefused as refused:
        if refused.reason != "not_json":
            raise
        value = _object_within(text)
        flags.append("prose")
    plan = validate(value, allowed)
    if isinstance(value, dict) and plan.why != value.get("why", ""):
        flags.append("why_cut")
    return plan, flags


def _object_within(text: str) -> object:
    """The last JSON object with `steps` in a text, thoughts apart; the first where the text begins with it, since steps
    of that one may have started. Raises PlanRefused(not_json | duplicate_key)."""
    text = _THINK_ANYWHERE.sub("", text)
    plan = None
    begins = _BEGINS.match(text) is not None
    decoder = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    at = text.find("{")
    for _ in range(OBJECTS_TRIED_MAX):
        if at < 0:
            break
        try:
            value, end = decoder.raw_decode(text, at)
        except PlanRefused as refused:
            if refused.reason == "duplicate_key":
                raise
            value, end = None, at + 1
        except (ValueError, RecursionError):
            value, end = None, at + 1
        if isinstance(value, dict) and "steps" in value:
            plan = value
            if begins:
                break
        at = text.find("{", end)
    if plan is None:
        raise PlanRefused("not_json", "the text holds no plan")
    return plan


# ---------------------------------------------------------------- text → JSON

_THINK = re.compile(r"^\s*<think>.*?</think>", re.DOTALL)
_THINK_ANYWHERE = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)  # one that never ends is all thought
_BEGINS = re.compile(r"\s*(?:```(?:json)?[^\S\n]*\n\s*)?\{")
_FENCE = re.compile(r"^\s*```(?:json)?[^\S\n]*\n(.*?)\n?```\s*$", re.DOTALL)


def _loads(raw: str | bytes) -> object:
    """Parse plan text. Removes one leading think block and one fence around everything, and nothing else."""
    if len(raw) > PLAN_BYTES_MAX:
        raise PlanRefused("too_large", f"the plan is over {PLAN_BYTES_MAX} bytes")
    try:
        text = raw.decode() if isinstance(raw, bytes) else raw
        text = _THINK.sub("", text, count=1)
        fence = _FENCE.match(text)
        return json.loads(
            fence.group(1) if fence else text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant
        )
    except PlanRefused:
        raise
    except (ValueError, RecursionError):
        raise PlanRefused("not_json", "the plan is not JSON") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise PlanRefused("duplicate_key", "the plan has the same key twice")
    return value


def _no_constant(name: str) -> object:
    raise PlanRefused("not_json", f"{name} is not JSON")


class PlanReader:
    """Finds complete step objects in plan text as it grows. Feed it deltas; it returns raw steps in order.

    It only detects where an object ends. `validate_step` decides whether a step may run, and the finished text still
    goes through `validate`.
    """

    # What `validate` removes, then the head of the object. Possessive: a match never looks past the first `</think>`.
    _OPEN = re.compile(
        r"(?>(?:\s*<think>.*?</think>)?)\s*+(?:```(?:json)?[^\S\n]*+\n\s*+)?+\{\s*+"
        r'(?:"why"\s*+:\s*+"(?:[^"\\]|\\.){0,2000}+"\s*+,\s*+)?+"steps"\s*+:\s*+\[',
        re.DOTALL,
    )

    def __init__(self) -> None:
        self.text = ""
        self._at = -1  # scan position inside the array; -1: the array has not begun
        self._start = -1  # start of the current object
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._closed = False
        self.opened = 0  # number of step objects that have begun; a step that another one follows is not the last

    def feed(self, delta: str) -> list[object]:
        """Return the step objects that `delta` completes. Raises PlanRefused(too_large | not_json | duplicate_key)."""
        self.text += delta
        if len(self.text) > PLAN_BYTES_MAX:
            raise PlanRefused("too_large", f"the plan is over {PLAN_BYTES_MAX} bytes")
        if self._at < 0:
            opening = self._OPEN.match(self.text) if "[" in delta else None
            if opening is None:
                return []
            self._at = opening.end()
        steps: list[object] = []
        while self._at < len(self.text) and not self._closed:
            self._scan(self.text[self._at], steps)
            self._at += 1
        return steps

    def _scan(self, char: str, steps: list[object]) -> None:
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
                steps.append(_loads(self.text[self._start : self._at + 1]))


# ---------------------------------------------------------------- schema and decisions


def plan_schema(allowed: PlanLimits, *, why: bool = False) -> dict[str, Any]:
    """The JSON schema for constrained decoding. It admits only the allowed handles, and lets each step see only earlier
    steps; task text is free. Handles are sorted, so that pools in any order share one grammar. `why`: the plan begins
    with a rationale."""
    handles = sorted(allowed.handles)
    steps = {
        "type": "array",
        "prefixItems": [_step_schema(handles, allowed.first_index + at) for at in range(allowed.steps_max)],
        "items": False,
    }
    if allowed.first_index == 0:
        steps["minItems"] = 1
    rationale = {"why": {"type": "string", "maxLength": WHY_CHARS_MAX}} if why else {}
    return {
        "type": "object",
        "properties": {**rationale, "steps": steps},
        "required": [*rationale, "steps"],
        "additionalProperties": False,
    }


def _step_schema(handles: Sequence[str], before: int) -> dict[str, Any]:
    """The schema of a step with `before` steps before it."""
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
    """A plan schema without `prefixItems` and `maxLength`, which hosted vendors do not support. It lets every step see
    as far as the last step may, and `validate` refuses forward references. Any other schema stays unchanged."""
    properties = dict(schema.get("properties", {}))
    steps = dict(properties.get("steps", {}))
    step_schemas = steps.pop("prefixItems", None)
    if step_schemas is None:
        return dict(schema)
    steps |= {"items": step_schemas[-1], "maxItems": len(step_schemas)}
    rationale = {"why": {"type": "string"}} if "why" in properties else {}
    return {**schema, "properties": {**rationale, "steps": steps}}


def schema_hash(schema: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of the canonical schema. It identifies the grammar under which a plan's log-probs were
    sampled."""
    return hashlib.sha256(json.dumps(schema, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


_FREE_STRING = re.compile(r'"(?:task|why)"\s*:\s*"((?:[^"\\]|\\.)*)')


def decision_mask(tokens: Sequence[str]) -> list[bool]:
    """For each token of a plan, True if it is a decision, False if it lies entirely inside free text."""
    text = "".join(tokens)
    free = [match.span(1) for match in _FREE_STRING.finditer(text)]
    mask: list[bool] = []
    start = 0
    for token in tokens:
        end = start + len(token)
        mask.append(not any(begin <= start < stop and end <= stop for begin, stop in free))
        start = end
    return mask
