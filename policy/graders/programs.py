"""Graders that run something: Python unit tests, a regular expression, a JSON schema. All in the sandbox.

A pattern or a schema can run for ever as well as code can (`(a+)+$`, nested references), and all three may come with a
client's request, so none of them runs in this process but in the sandbox that the gateway's `builtin:python` uses.
"""

from __future__ import annotations

import ast
import json
import re
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for

from gateway.adapters.upstream import sandbox
from gateway.adapters.upstream.sandbox import SandboxFailed, SandboxResult, code_in
from gateway.core.loop.replies.answers import extract_answer
from gateway.service.ports.request import CodeLimits
from policy.graders.base import BadReference, GraderFailed, Judged, Tools, fields, object_in, shorten

TESTS_MAX = 1_000
PATTERN_CHARS_MAX = 1_000
SHORT_S = 3.0  # for a pattern or a schema
_FENCED = re.compile(r"```([A-Za-z0-9_+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)

# ---------------------------------------------------------------- python

PYTHON_WANTED = (
    'tests: ["assert add(1, 2) == 3", …], one text of them, or {"tests": […], "entry": "add", "partial": true}'
)


@dataclass(frozen=True, slots=True)
class PythonReference:
    """Tests, each a program run after the reply's code; the name that code must define; whether some are worth some."""

    tests: tuple[str, ...]
    entry: str | None
    partial: bool


def python_reference(reference: object) -> PythonReference:
    """Raises BadReference, also for a test that is not Python."""
    values = fields(reference, ("tests", "entry", "partial"), PYTHON_WANTED)
    tests: Any = [values["tests"]] if isinstance(values.get("tests"), str) else values.get("tests")
    entry, partial = values.get("entry"), values.get("partial", False)
    shaped = isinstance(tests, list | tuple) and 0 < len(tests) <= TESTS_MAX and all(isinstance(t, str) for t in tests)
    if not shaped or not (entry is None or isinstance(entry, str)) or not isinstance(partial, bool):
        raise BadReference(f"python needs {PYTHON_WANTED}")
    for number, test in enumerate(tests):
        try:
            ast.parse(test)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise BadReference(f"python: test {number} is not Python ({error}); mend it") from None
    return PythonReference(tuple(tests), entry, partial)


async def python(right: PythonReference, reply: str, tools: Tools) -> Judged:
    """1 where every test passes (with `partial`, the share that does)."""
    data = {"solution": code_in(reply, right.entry), "tests": right.tests}
    result = await run("tests", data, tools.limits, weak_ok=tools.weak_ok)
    weak = "" if "seccomp" in result.locks else " (network not blocked by the kernel)"
    if result.result is None:
        return 0.0, shorten(result.detail) + weak
    passed = result.result["passed"]
    share = sum(passed) / len(right.tests)
    detail = f"{sum(passed)} of {len(right.tests)} tests passed; {result.result['error'] or 'no failure'}"
    return (share if right.partial else float(share == 1)), shorten(detail) + weak


# ---------------------------------------------------------------- regex

REGEX_WANTED = (
    'a pattern, or {"pattern": "…", "on": "reply" (found anywhere) or "answer" (all of it), "ignore_case": true}'
)


@dataclass(frozen=True, slots=True)
class RegexReference:
    """A pattern to find in the reply, or to match the whole of its final answer."""

    pattern: str
    on_answer: bool
    flags: int


def regex_reference(reference: object) -> RegexReference:
    """Raises BadReference."""
    values = fields(reference, ("pattern", "on", "ignore_case"), REGEX_WANTED)
    pattern, on, folded = values.get("pattern"), values.get("on", "reply"), values.get("ignore_case", False)
    if not isinstance(pattern, str) or not pattern or on not in ("reply", "answer") or not isinstance(folded, bool):
        raise BadReference(f"regex needs {REGEX_WANTED}")
    if len(pattern) > PATTERN_CHARS_MAX:
        raise BadReference(f"regex: the pattern is over {PATTERN_CHARS_MAX} characters; shorten it")
    flags = re.IGNORECASE if folded else re.NOFLAG
    try:
        re.compile(pattern, flags)
    except (re.error, RecursionError, OverflowError) as error:
        raise BadReference(f"regex: the pattern is not one Python knows ({error}); mend it") from None
    return RegexReference(pattern, on == "answer", int(flags))


async def regex(right: RegexReference, reply: str, tools: Tools) -> Judged:
    """1 where the pattern is found. Raises BadReference where it takes for ever."""
    text = extract_answer(reply) if right.on_answer else reply
    data = {"pattern": right.pattern, "flags": right.flags, "text": text, "whole": right.on_answer}
    result = _result_of(await run("search", data, _short(tools), weak_ok=True), "regex", "pattern")
    return float(result["found"]), "found" if result["found"] else f"not found in `{shorten(text)}`"


def _short(tools: Tools) -> CodeLimits:
    return replace(tools.limits, wall_s=min(SHORT_S, tools.limits.wall_s))


def _result_of(result: SandboxResult, grader: str, what: str) -> Mapping[str, Any]:
    if result.result is None:
        raise BadReference(f"{grader}: the {what} did not finish ({result.detail}); simplify it")
    return result.result


# ---------------------------------------------------------------- json_schema

SCHEMA_WANTED = 'a JSON schema, e.g. {"type": "object", "required": ["city"]}'


def schema_reference(reference: object) -> Mapping[str, Any]:
    """Read a JSON schema. Raises BadReference where the reference is not one."""
    value = object_in(reference)
    if value is None:
        raise BadReference(f"json_schema needs {SCHEMA_WANTED}")
    schema = dict(value)
    try:
        validator_for(schema).check_schema(schema)
    except (SchemaError, RecursionError) as error:
        reason = error.message if isinstance(error, SchemaError) else "nested too deeply"
        raise BadReference(f"json_schema: not a valid schema ({shorten(reason)}); mend it") from None
    return schema


def json_in(reply: str) -> Any:
    """The JSON value a reply is, fenced or not. Raises ValueError."""
    blocks = [text for tag, text in _FENCED.findall(reply) if tag.lower() in ("", "json")]
    return json.loads(blocks[-1] if blocks else reply)


async def json_schema(right: Mapping[str, Any], reply: str, tools: Tools) -> Judged:
    """1 where the reply is JSON that the schema accepts. Raises BadReference where the schema takes for ever or refers
    to what it does not hold."""
    try:
        value = json_in(reply)
    except (ValueError, RecursionError):
        return 0.0, "the reply is not JSON"
    site = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    try:
        result = await run("schema", {"schema": right, "value": value}, _short(tools), weak_ok=True, site=site)
    except GraderFailed as error:
        raise BadReference(f"json_schema: the schema cannot be applied ({error}); keep its references inside") from None
    wrong = _result_of(result, "json_schema", "schema")["error"]
    return float(wrong is None), shorten(wrong) if wrong else "valid"


async def run(
    job: str, data: Mapping[str, Any], limits: CodeLimits, *, weak_ok: bool = False, site: Sequence[str] = ()
) -> SandboxResult:
    """`sandbox.run` for a grader. Raises GraderFailed where it cannot run."""
    try:
        return await sandbox.run(job, data, limits, weak_ok=weak_ok, site=site)
    except SandboxFailed as failed:
        raise GraderFailed(str(failed)) from None
