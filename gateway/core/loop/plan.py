"""The plan: what a policy emits in one round (DESIGN §3). Pure and total.

`validate` turns any input into a Plan or a named refusal; it executes, evaluates and guesses nothing. `reader.py` finds
complete steps while the text is still being decoded, so that step 0 may start before step 2 is written. Step indices
count over all rounds of a loop: round 1 has 0..k-1, and the next plan's first step is k.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from gateway.core.loop.compose import Context
from gateway.core.loop.contract import (
    Expect,
    Verify,
    checked_schemas,
    context_of,
    expect_of,
    plain_schemas,
    tools_of,
    verify_of,
)
from gateway.core.loop.contract import PlanLimits as PlanLimits
from gateway.core.loop.contract import limits_from_json as limits_from_json
from gateway.core.loop.contract import portable_schema as portable_schema
from gateway.core.loop.reader import loads, object_within
from gateway.errors import PlanRefused

TASK_CHARS_MAX = 8_000
WHY_CHARS_MAX = 300
STEP_KEYS, CHECKED_KEYS = frozenset({"worker", "task", "see"}), frozenset({"expect", "kind", "accept", "escalate"})
TOOL_KEYS, CONTEXT_KEYS = frozenset({"tools"}), frozenset({"context"})
REASONS = frozenset(
    {
        "bad_context", "bad_edge", "bad_expect", "bad_see", "bad_step", "bad_task", "bad_tools", "depth_cap",
        "duplicate_key", "forward_see", "no_inputs", "no_steps", "not_json", "not_list", "not_object", "task_too_long",
        "too_large", "too_many_steps", "unknown_key", "unknown_worker",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One worker call. `see` holds the indices of the earlier steps whose replies this step may read, ascending."""

    worker: str  # handle
    task: str | None  # None: the conversation as the client sent it
    see: tuple[int, ...] = ()
    expect: Expect | None = None  # what its reply must satisfy before anybody sees it
    verify: Verify | None = None  # of a step that checks the one before it
    tools: tuple[str, ...] = ()  # handles of the MCP servers whose tools its model may call
    context: Context = "all"  # what it gets of the conversation

    @property
    def needs_checks(self) -> bool:
        """Whether it has what a plan has only where the planner's prompt tells of checks, tools and contexts."""
        return bool(self.expect or self.verify or self.tools) or self.context != "all"

    @property
    def is_plain(self) -> bool:
        """Whether the first words of its worker are those of its reply: nothing is checked or called before."""
        return self.expect is None and not self.tools

    def as_json(self) -> dict[str, Any]:
        """The step as JSON data, in the form that `validate_step` reads and in the order of the grammar."""
        more: dict[str, Any] = {"expect": self.expect.as_json()} if self.expect else {}
        more |= {"tools": list(self.tools)} if self.tools else {}
        if self.context != "all":
            more["context"] = list(self.context) if isinstance(self.context, tuple) else self.context
        edges = self.verify.as_json() if self.verify else {}
        kind = {"kind": edges.pop("kind")} if edges else {}
        return {**kind, "worker": self.worker, "task": self.task, "see": list(self.see), **more, **edges}


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of one round; empty means "ship the previous answer". `why` is the planner's one line about them: it is
    logged and shown, and nothing reads it."""

    steps: tuple[Step, ...]
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON data, in the form that `validate` reads."""
        why = {"why": self.why} if self.why else {}
        return why | {"steps": [step.as_json() for step in self.steps]}

    def may_answer(self, offset: int, first_index: int) -> bool:
        """Whether the reply of the step at this position may be the answer of the plan: no later step is sure to run,
        or a verdict on it ends the plan."""
        step, rest = self.steps[offset], self.steps[offset + 1 :]
        if step.verify is not None or not rest:
            return step.verify is None
        if rest[0].verify is not None:
            return None in rest[0].verify.edges
        edges = {edge for one in self.steps if one.verify for edge in one.verify.edges}
        return all(one.verify or at in edges for at, one in enumerate(rest, first_index + offset + 1))


def validate(raw: str | bytes | object, allowed: PlanLimits) -> Plan:
    """Return the plan that `raw` spells, if it is within the limits `allowed`. Raises PlanRefused with a stable
    `reason`."""
    value = loads(raw) if isinstance(raw, str | bytes) else raw
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
    _check_edges(steps, allowed.first_index + len(steps))
    return Plan(steps, clean_why(value.get("why")))


def _check_edges(steps: Sequence[Step], end: int) -> None:
    """Raises PlanRefused(bad_edge) where a verdict leads past the end of the plan."""
    for offset, step in enumerate(steps):
        if step.verify is not None and any(edge is not None and edge >= end for edge in step.verify.edges):
            raise PlanRefused("bad_edge", f"steps[{offset}] leads past the end of the plan", param=f"steps[{offset}]")


def clean_why(why: object) -> str:
    """The rationale as one line of printable text, cut; empty for anything but text."""
    if not isinstance(why, str):
        return ""
    line = "".join(char if char.isprintable() else " " for char in why[: 4 * WHY_CHARS_MAX])
    return " ".join(line.split())[:WHY_CHARS_MAX].rstrip()


def validate_step(raw: object, allowed: PlanLimits, offset: int) -> Step:
    """Return the step at position `offset` of its plan. Raises PlanRefused."""
    where = f"steps[{offset}]"
    keys = STEP_KEYS | (CHECKED_KEYS if allowed.checkers else frozenset())
    keys |= TOOL_KEYS if allowed.toolboxes else frozenset()
    keys |= CONTEXT_KEYS if allowed.checkers or allowed.toolboxes else frozenset()
    if not isinstance(raw, dict) or not set(raw) <= keys or "worker" not in raw:
        raise PlanRefused("bad_step", f"{where} must be an object with `worker`, `task` and `see`", param=where)
    worker = raw["worker"]
    if not isinstance(worker, str) or worker not in allowed.handles:
        if isinstance(worker, str) and worker in allowed.depth_capped:
            raise PlanRefused("depth_cap", f"{where}: no child loop below this depth", param=f"{where}.worker")
        raise PlanRefused("unknown_worker", f"{where}: no worker of that handle here", param=f"{where}.worker")
    step = Step(worker, _task(raw.get("task"), where), _see(raw.get("see", []), allowed, offset))
    if worker in allowed.merges and not step.see:
        problem = f"{where} merges replies and sees none; let it see the steps whose replies it merges"
        raise PlanRefused("no_inputs", problem, param=f"{where}.see")
    if "context" in raw:
        step = replace(step, context=context_of(raw["context"], where, step.task))
    if "tools" in raw:
        step = replace(step, tools=tools_of(raw["tools"], where, allowed))
    return _checked(step, raw, allowed, offset) if set(raw) & CHECKED_KEYS else step


def _checked(step: Step, raw: Mapping[str, Any], allowed: PlanLimits, offset: int) -> Step:
    """The step with its contract, or as a verify step. Raises PlanRefused."""
    where = f"steps[{offset}]"
    if "kind" in raw:
        if raw["kind"] != "verify" or set(raw) & {"expect", "tools", "context"} or step.worker not in allowed.checkers:
            raise PlanRefused("bad_step", f"{where}: `kind` is `verify`, of a worker that checks", param=where)
        return replace(step, verify=verify_of(raw, where, step.see, allowed.first_index + offset))
    if "expect" not in raw:
        raise PlanRefused("bad_step", f"{where}: `accept` and `escalate` are of a verify step", param=where)
    contract = expect_of(raw["expect"], where, allowed.checkers, runs_tests=allowed.runs_tests)
    return replace(step, expect=contract)


def _task(task: object, where: str) -> str | None:
    if task is None:
        return None
    if not isinstance(task, str) or not task.strip():
        raise PlanRefused("bad_task", f"{where}.task must be text or null", param=f"{where}.task")
    if len(task) > TASK_CHARS_MAX:
        raise PlanRefused("task_too_long", f"{where}.task is over {TASK_CHARS_MAX} characters", param=f"{where}.task")
    if not task.isascii() and any(0xD800 <= ord(char) <= 0xDFFF for char in task):
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
        value = loads(text)
    except PlanRefused as refusal:
        if refusal.reason != "not_json":
            raise
        value = object_within(text)
        flags.append("prose")
    plan = validate(value, allowed)
    if isinstance(value, dict) and plan.why != value.get("why", ""):
        flags.append("why_cut")
    return plan, flags


# ---------------------------------------------------------------- schema and decisions


def plan_schema(allowed: PlanLimits, *, why: bool = False, checks: bool = False) -> dict[str, Any]:
    """The JSON schema for constrained decoding. It admits only the allowed handles, and lets each step see only earlier
    steps; task text is free. A step that merges replies sees one at least. Handles are sorted, so that pools in any
    order share one grammar. `why`: the plan begins with a rationale. `checks`: steps may have contracts, verify others
    and get tools, where the limits allow it."""
    handles = sorted(allowed.handles)
    first, end = allowed.first_index, allowed.first_index + allowed.steps_max
    kinds = [plain_schemas(handles, allowed.merges, index) for index in range(first, end)]
    if checks and (allowed.checkers or allowed.toolboxes):
        kinds = [checked_schemas(plain, allowed, index, end) for index, plain in enumerate(kinds, start=first)]
    each = [{"anyOf": kind} if len(kind) > 1 else kind[0] for kind in kinds]
    steps = {
        "type": "array",
        "prefixItems": each,
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


def schema_hash(schema: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of the canonical schema. It identifies the grammar under which a plan's log-probs were
    sampled."""
    return hashlib.sha256(json.dumps(schema, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


_FREE_STRING = re.compile(r'"(?:task|why|regex)"\s*:\s*"((?:[^"\\]|\\.)*)')


def decision_mask(tokens: Sequence[str]) -> list[bool]:
    """For each token of a plan, True if it is a decision, False if it lies entirely inside free text."""
    ends = list(accumulate(map(len, tokens)))
    starts = [0, *ends[:-1]]
    mask = [True] * len(ends)
    for match in _FREE_STRING.finditer("".join(tokens)):
        begin, stop = match.span(1)
        first, last = bisect_left(starts, begin), min(bisect_left(starts, stop), bisect_right(ends, stop))
        mask[first:last] = [False] * (last - first)
    return mask
