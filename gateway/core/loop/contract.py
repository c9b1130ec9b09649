"""The limits of a plan, and its contracts: what a reply must satisfy, and where a plan goes on a verdict. Pure.

`expect` names checks of one reply: a JSON schema, a pattern, a length, Python tests, a judge. All of them must hold.
Schema, pattern and length are checked here; tests are run by the pool's `builtin:python`, and a judge is a worker.
A `verify` step asks a checker about the reply of the step before it, its *candidate*. Every later step of the plan
waits for the verdict. `accept` and `escalate` name the step that runs on either verdict and not on the other; `ship`
ends the loop with the candidate as its answer, and `plan` ends the round, so that the policy plans again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.core.loop.compose import Context
from gateway.core.openai.structured import json_problem, pattern_matches, pattern_problem, schema_problem
from gateway.errors import PlanRefused

SCHEMA_CHARS_MAX = 4_000
REGEX_CHARS_MAX = 300
TESTS_MAX = 20
TEST_CHARS_MAX = 4_000
MIN_CHARS_MAX = 20_000
TEXT_CHARS_MAX = 100_000  # of a reply that a pattern is looked for in
FAULT_CHARS_MAX = 300
SHIP, PLAN = "ship", "plan"
WHY = ("why", "reason", "error", "stdout")  # where a checker's reply says it
TOOLBOXES_MAX = 4  # of one step
CONTEXT_PLACES_MAX, CONTEXT_PLACE_MAX = 32, 100_000  # messages that a step names, and the farthest from the end
CHECKS = ("schema", "regex", "tests", "min_chars", "judge")
VERIFY_TASK = """Check the last reply above against the request. Is it right, complete and in the form that was asked
for? Solve what you can yourself before you decide. End with one line of JSON and nothing after it:
{"accept": true or false, "why": "one sentence"}"""
_FENCE = re.compile(r"^\s*```(?:json)?[^\S\n]*\n(.*?)\n?```\s*$", re.DOTALL)
_OBJECT = re.compile(r"\{[^{}]*\}")  # a verdict is a flat object
_NO = re.compile(
    r"\W*(?:not (?:valid|accepted|ok)|invalid|reject(?:ed)?|fail(?:ed|s)?|no|false|wrong)\b", re.IGNORECASE
)
_YES = re.compile(r"\W*(?:valid|accept(?:ed)?|pass(?:ed|es)?|ok|yes|true|correct)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Expect:
    """What the reply of one step must satisfy. `schema` is JSON text; `judge` is a worker's handle."""

    schema: str | None = None
    regex: str | None = None
    tests: tuple[str, ...] = ()
    min_chars: int = 0
    judge: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The contract as JSON data, in the form that `expect_of` reads."""
        values = {name: getattr(self, name) for name in CHECKS if getattr(self, name)}
        values |= {"schema": json.loads(self.schema)} if self.schema else {}
        return values | ({"tests": list(self.tests)} if self.tests else {})

    def fault(self, text: str) -> str | None:
        """What is wrong with a reply in one line, as far as code can tell at once; None where nothing is."""
        if len(text.strip()) < self.min_chars:
            return f"it has {len(text.strip())} characters; at least {self.min_chars} are wanted"
        if self.regex is not None and not pattern_matches(self.regex, text[:TEXT_CHARS_MAX]):
            return f"it does not match the pattern {self.regex}"
        if self.schema is not None:
            fence = _FENCE.match(text)
            return json_problem(self.schema, fence[1] if fence else text)
        return None


@dataclass(frozen=True, slots=True)
class Verify:
    """The edges of a verify step: the index of the step that runs on each verdict. None: `ship`, or `plan`."""

    accept: int | None = None
    escalate: int | None = None

    @property
    def edges(self) -> tuple[int | None, int | None]:
        """Both edges."""
        return self.accept, self.escalate

    def as_json(self) -> dict[str, Any]:
        """The edges as JSON data."""
        accept = SHIP if self.accept is None else self.accept
        return {"kind": "verify", "accept": accept, "escalate": PLAN if self.escalate is None else self.escalate}


@dataclass(frozen=True, slots=True)
class Ruling:
    """What a checker says of a candidate. `accept` None: nothing that can be read, or the checker failed. `pairwise`:
    it was compared with another reply, and accepted if they say the same."""

    accept: bool | None
    why: str = ""
    pairwise: bool = False


def verdict_of(reply: str) -> Ruling:
    """The verdict in a checker's reply: the last JSON object with `accept`, `valid`, `passed`, `same` (of a judge that
    compares two replies) or `exit_status`; else the word that the last line, or the first, begins with."""
    for text in (reply, *reversed(_OBJECT.findall(reply[-TEXT_CHARS_MAX:]))):
        verdict = _from_object(text)
        if verdict is not None:
            return verdict
    lines = [line for line in reply.splitlines() if line.strip()]
    for line in (lines[-1:] + lines[:1]) if lines else []:
        if _NO.match(line) or _YES.match(line):
            return Ruling(not _NO.match(line), one_line(reply))
    return Ruling(None, one_line(reply))


def _from_object(text: str) -> Ruling | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    verdict = next((value[name] for name in ("accept", "valid", "passed") if isinstance(value.get(name), bool)), None)
    status, same = value.get("exit_status"), value.get("same")
    if verdict is None and isinstance(status, int):
        verdict = status == 0
    why = one_line(next((value[name] for name in WHY if isinstance(value.get(name), str)), ""))
    if verdict is None and isinstance(same, bool):
        return Ruling(same, why, pairwise=True)
    return None if verdict is None else Ruling(verdict, why)


def one_line(text: str) -> str:
    """A text as one line, cut to what a fault may have."""
    return " ".join(text[: 4 * FAULT_CHARS_MAX].split())[:FAULT_CHARS_MAX]


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The limits of the next plan. `handles` stand in the order in which the prompt shows them; `first_index` is the
    number of steps before this plan."""

    handles: tuple[str, ...]
    steps_max: int
    first_index: int = 0
    depth_capped: frozenset[str] = frozenset()  # handles of child loops that the depth cap excludes
    merges: frozenset[str] = frozenset()  # handles that only merge replies: such a step must see at least one
    checkers: tuple[
        str, ...
    ] = ()  # handles that may check replies; without any a plan has neither `expect` nor `verify`
    runs_tests: bool = False  # whether the pool has `builtin:python`
    toolboxes: tuple[str, ...] = ()  # handles of MCP servers; without any, no step of a plan is given tools

    def as_json(self) -> dict[str, Any]:
        """The limits as JSON data, for the record of a round; `limits_from_json` is the inverse."""
        limits = {"steps_max": self.steps_max, "first_index": self.first_index}
        more: dict[str, Any] = {"merges": sorted(self.merges)} if self.merges else {}
        more |= {"checkers": list(self.checkers), "runs_tests": self.runs_tests} if self.checkers else {}
        more |= {"toolboxes": list(self.toolboxes)} if self.toolboxes else {}
        return {"handles": list(self.handles), **limits, "depth_capped": sorted(self.depth_capped), **more}

    def without_toolboxes(self) -> PlanLimits:
        """The limits without MCP servers, of whose steps no prompt but `checked` tells."""
        handles = tuple(handle for handle in self.handles if handle not in self.toolboxes)
        return replace(self, handles=handles, toolboxes=())


def limits_from_json(logged: Mapping[str, Any]) -> PlanLimits:
    """Read what `PlanLimits.as_json` wrote. Raises ValueError on anything else."""
    try:
        handles, capped = map(str, logged["handles"]), map(str, logged["depth_capped"])
        return PlanLimits(
            *(tuple(handles), int(logged["steps_max"]), int(logged["first_index"]), frozenset(capped)),
            merges=frozenset(map(str, logged.get("merges", ()))),
            checkers=tuple(map(str, logged.get("checkers", ()))),
            runs_tests=bool(logged.get("runs_tests")),
            toolboxes=tuple(map(str, logged.get("toolboxes", ()))),
        )
    except (KeyError, TypeError):
        raise ValueError("not the limits of a plan") from None


# ---------------------------------------------------------------- parsing


def expect_of(raw: object, where: str, checkers: Collection[str], *, runs_tests: bool) -> Expect:
    """The contract that `raw` spells. Raises PlanRefused(bad_expect)."""
    if not isinstance(raw, dict) or not raw or not set(raw) <= set(CHECKS):
        raise _bad(where, f"must be an object with one or more of {', '.join(CHECKS)}")
    schema, regex, tests, least, judge = (raw.get(name) for name in CHECKS)
    text = None if schema is None else json.dumps(schema, sort_keys=True, separators=(",", ":"))
    if text is not None and (not isinstance(schema, dict) or len(text) > SCHEMA_CHARS_MAX or schema_problem(text)):
        raise _bad(where, f"`schema` must be a JSON schema of at most {SCHEMA_CHARS_MAX} characters")
    if regex is not None and (not isinstance(regex, str) or not 0 < len(regex) <= REGEX_CHARS_MAX):
        raise _bad(where, f"`regex` must be a pattern of at most {REGEX_CHARS_MAX} characters")
    if regex is not None and pattern_problem(regex):
        raise _bad(where, "`regex` must be a pattern without look-around and with little repetition of repetitions")
    if least is not None and (isinstance(least, bool) or not isinstance(least, int) or not 0 < least <= MIN_CHARS_MAX):
        raise _bad(where, f"`min_chars` must be a number from 1 to {MIN_CHARS_MAX}")
    if judge is not None and judge not in checkers:
        raise _bad(where, "`judge` must be a worker that checks")
    return Expect(text, regex, _tests(tests, where, runs_tests=runs_tests), least or 0, judge)


def _tests(tests: object, where: str, *, runs_tests: bool) -> tuple[str, ...]:
    if tests is None:
        return ()
    if not runs_tests:
        raise _bad(where, "`tests` need `builtin:python` in the pool")
    if not isinstance(tests, list) or not 0 < len(tests) <= TESTS_MAX:
        raise _bad(where, f"`tests` must be a list of at most {TESTS_MAX} programs")
    if not all(isinstance(test, str) and 0 < len(test) <= TEST_CHARS_MAX for test in tests):
        raise _bad(where, f"each of `tests` must be Python of at most {TEST_CHARS_MAX} characters")
    return tuple(tests)


def _bad(where: str, problem: str) -> PlanRefused:
    return PlanRefused("bad_expect", f"{where}.expect: {problem}", param=f"{where}.expect")


def verify_of(raw: Mapping[str, Any], where: str, see: Sequence[int], index: int) -> Verify:
    """The edges of the verify step at `index`, which sees `see`. Raises PlanRefused(bad_see | bad_edge)."""
    if not see or see[-1] != index - 1:
        raise PlanRefused("bad_see", f"{where}.see must end with the step right before it", param=f"{where}.see")
    accept, escalate = raw.get("accept", SHIP), raw.get("escalate", PLAN)
    edges = []
    for name, edge, end in (("accept", accept, SHIP), ("escalate", escalate, PLAN)):
        later = isinstance(edge, int) and not isinstance(edge, bool) and edge > index
        if edge != end and not later:
            raise PlanRefused("bad_edge", f'{where}.{name} must be "{end}" or a later step', param=f"{where}.{name}")
        edges.append(None if edge == end else int(edge))
    if accept == escalate:
        raise PlanRefused("bad_edge", f"{where}: both verdicts go on with one step", param=f"{where}.escalate")
    return Verify(*edges)


def tools_of(tools: object, where: str, allowed: PlanLimits) -> tuple[str, ...]:
    """The workers whose tools a step is given. Raises PlanRefused(bad_tools)."""
    named = isinstance(tools, list) and all(isinstance(one, str) and one in allowed.toolboxes for one in tools)
    if not isinstance(tools, list) or not named or not 0 < len(tools) <= TOOLBOXES_MAX:
        problem = f"{where}.tools must be 1 to {TOOLBOXES_MAX} workers that have tools"
        raise PlanRefused("bad_tools", problem, param=f"{where}.tools")
    return tuple(dict.fromkeys(tools))


def context_of(context: object, where: str, task: str | None) -> Context:
    """What a step gets of the conversation. Raises PlanRefused(bad_context)."""
    if context in ("all", "last") or (context == "none" and task is not None):
        return context
    places = context if isinstance(context, list) else []
    whole = all(isinstance(n, int) and not isinstance(n, bool) and 0 < n <= CONTEXT_PLACE_MAX for n in places)
    if not places or not whole or len(places) > CONTEXT_PLACES_MAX:
        problem = f'{where}.context must be "all", "last", "none" (with a task), or places of messages from the end'
        raise PlanRefused("bad_context", problem, param=f"{where}.context")
    return tuple(sorted(set(places)))


# ---------------------------------------------------------------- the grammar


def plain_schemas(handles: Sequence[str], merges: Collection[str], before: int) -> list[dict[str, Any]]:
    """The schemas of a step with `before` steps before it: of a worker that reads any of their replies, and of one of
    `merges`, which reads at least one."""
    writers = [handle for handle in handles if handle not in merges] or list(handles)
    mergers = [handle for handle in handles if handle not in writers]
    replies: dict[str, Any] = {"type": "array", "items": {"enum": list(range(before))}, "maxItems": before}
    if before == 0:
        return [_plain(writers, {"type": "array", "maxItems": 0})]
    merging = [_plain(mergers, {**replies, "minItems": 1})] if mergers else []
    return [_plain(writers, replies), *merging]


def _plain(handles: Sequence[str], indices: Mapping[str, Any]) -> dict[str, Any]:
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


def expect_schema(checkers: Sequence[str], *, runs_tests: bool) -> dict[str, Any]:
    """The JSON schema of a contract, of one check, as a planner writes it."""
    values: dict[str, Any] = {
        "min_chars": {"type": "integer"},
        "regex": {"type": "string"},
        "schema": {"type": "object"},
    }
    values |= {"judge": {"enum": sorted(checkers)}} if checkers else {}
    values |= {"tests": {"type": "array", "items": {"type": "string"}, "maxItems": TESTS_MAX}} if runs_tests else {}
    return {"anyOf": [_object({name: value}) for name, value in sorted(values.items())]}


def checked_schemas(
    plain: Sequence[Mapping[str, Any]], allowed: PlanLimits, index: int, end: int
) -> list[dict[str, Any]]:
    """The schemas of the step at `index` of a plan whose steps end before `end`: plain, with a contract, with tools, or
    verify."""
    later, checkers = list(range(index + 1, end)), allowed.checkers
    places = {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": CONTEXT_PLACES_MAX}
    context = {"anyOf": [{"enum": ["last", "none"]}, places]}
    more: list[dict[str, Any]] = [{"context": context}]
    if checkers:
        more.append({"expect": expect_schema(checkers, runs_tests=allowed.runs_tests)})
    if allowed.toolboxes:
        names = {"enum": sorted(allowed.toolboxes)}
        more.append({"tools": {"type": "array", "items": names, "minItems": 1, "maxItems": TOOLBOXES_MAX}})
    kinds = [dict(each) for each in plain]
    kinds += [_object({**each["properties"], **one}) for one in more for each in plain]
    if index and checkers:
        edges = {"accept": {"enum": [SHIP, *later]}, "escalate": {"enum": [PLAN, *later]}}
        verify = {"kind": {"const": "verify"}, **plain[0]["properties"], "worker": {"enum": sorted(checkers)}, **edges}
        kinds.append(_object(verify))
    return kinds


def portable_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A plan schema without `prefixItems` and `maxLength`, which hosted vendors do not support. It lets every step see
    as far as the last step may, and `validate` refuses forward references. Any other schema stays unchanged."""
    properties = dict(schema.get("properties", {}))
    steps = dict(properties.get("steps", {}))
    step_schemas = steps.pop("prefixItems", None)
    if step_schemas is None:
        return dict(schema)
    steps |= {"items": portable_step(step_schemas[-1]), "maxItems": len(step_schemas)}
    rationale = {"why": {"type": "string"}} if "why" in properties else {}
    return {**schema, "properties": {**rationale, "steps": steps}}


def portable_step(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A step's schema for hosted vendors, which know no position of a step and no object without listed names: an edge
    may be any number, and a contract has no schema."""
    kinds = schema.get("anyOf")
    if kinds is None:
        return dict(schema)
    ends = {"accept": SHIP, "escalate": PLAN}
    edges = {name: {"anyOf": [{"const": end}, {"type": "integer"}]} for name, end in ends.items()}
    return {"anyOf": [_portable(kind, edges) for kind in kinds]}


def _portable(kind: Mapping[str, Any], edges: Mapping[str, Any]) -> dict[str, Any]:
    properties = kind["properties"]
    if "kind" in properties:
        return _object({**properties, **edges})
    if "expect" not in properties:
        return dict(kind)
    checks = [check for check in properties["expect"]["anyOf"] if "schema" not in check["properties"]]
    return _object({**properties, "expect": {"anyOf": checks}})


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }
