"""Structured replies: the schema that a client asks for, and the check of a reply against it. Pure.

Schemas come from clients and replies from workers, so both are hostile. References stay inside the schema (nothing is
fetched), patterns run on an engine whose time is linear in the text (Rust's `regex`, through pydantic), and one check
takes at most `STEPS_MAX` steps. A schema that cannot be checked within these rules is refused before any money is
spent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import jsonschema
from jsonschema.protocols import Validator
from jsonschema.validators import extend
from pydantic_core import SchemaError as PatternError
from pydantic_core import SchemaValidator, core_schema
from pydantic_core import ValidationError as PatternMismatch
from referencing import Registry

from gateway.core.openai import marks
from gateway.core.openai.finish import CUT
from gateway.errors import BadRequest

NODES_MAX = 4_000  # objects in one schema
STEPS_MAX = 50_000  # keywords evaluated for one reply, about 5 µs each
REF_STEPS = 20  # the steps that one reference counts as
PROBLEM_CHARS_MAX = 300
REPETITION_MAX = 1_000  # of nested counts in a pattern: such a one takes half a second for 100,000 characters
CHECKED_FORMATS = ("date", "email", "ipv4", "ipv6", "uuid")
_EXTERNAL = ("$id", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$vocabulary")
_UNBOUNDED = ("patternProperties", "unevaluatedProperties", "unevaluatedItems")
_NAMED_SCHEMAS = ("properties", "$defs", "definitions", "dependentSchemas")
_DATA = ("enum", "const", "default", "examples", "required", "dependentRequired", "type")
_TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<least>\d{1,9})(?:,(?P<most>\d{1,9})?)?\}\??|.", re.DOTALL)
_steps_left: ContextVar[list[int]] = ContextVar("steps_left")


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """The structure that a reply must have. `schema` None: any JSON object."""

    schema: Mapping[str, Any] | None = None

    def problem(self, choice: Mapping[str, Any]) -> str | None:
        """Describe in one line what is wrong with one choice of a completion. None if the choice fits, or is no answer
        at all (a refusal, a tool call, a cut reply)."""
        message = choice.get("message") or {}
        cut = choice.get("finish_reason") in CUT  # the client gets it, with that reason
        if cut or message.get("refusal") or message.get("tool_calls") or message.get("function_call"):
            return None
        try:
            value = json.loads(marks.answer(message) or "", parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return "it is not JSON"
        if self.schema is None:
            return None if isinstance(value, dict) else "it is not a JSON object"
        return _mismatch(self.schema, value)

    def fits(self, body: Mapping[str, Any]) -> bool:
        """Whether every choice of a completion has this structure."""
        return all(self.problem(choice) is None for choice in body.get("choices") or ())

    def description(self) -> str:
        """The words in which a worker is asked for this structure."""
        return (
            "one JSON object" if self.schema is None else f"JSON that keeps to this schema: {json.dumps(self.schema)}"
        )


def chat_reply(params: Mapping[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """The reply for a chat client, without marks. Where it was promised a structure, and the worker's reply has several
    messages, its text is that of the last one."""
    if not any(marks.FIELD in (choice.get("message") or {}) for choice in body.get("choices") or ()):
        return body
    shape = shape_of(params)
    choices = []
    for choice in body["choices"]:
        message = marks.without(choice["message"])
        last = None if shape is None else marks.answer(choice["message"])
        choices.append({**choice, "message": message | ({"content": last} if last else {})})
    return {**body, "choices": choices}


def shape_of(params: Mapping[str, Any]) -> ReplyShape | None:
    """The structure that a chat request's `response_format` promises its client, or None. In other requests it is the
    name of a format."""
    format_ = params.get("response_format") or {}
    if isinstance(format_, str):
        return None
    if format_.get("type") == "json_object":
        return ReplyShape()
    schema = format_.get("json_schema") or {}
    strict = format_.get("type") == "json_schema" and schema.get("strict") is True
    return ReplyShape(schema["schema"]) if strict else None


def check_schema(schema: Mapping[str, Any], where: str) -> None:
    """Raises BadRequest(invalid_json_schema) for a schema that this file cannot check replies against."""
    try:
        _validator(json.dumps(schema))
    except (ValueError, RecursionError) as error:
        problem = f"Invalid schema for response_format: {str(error)[:PROBLEM_CHARS_MAX]}"
        raise BadRequest(problem, param=where, code="invalid_json_schema") from None


def schema_problem(text: str) -> str | None:
    """What is wrong with a schema, given as JSON text, that a plan checks replies against; None where nothing is."""
    try:
        _validator(text)
    except (ValueError, RecursionError) as error:
        return str(error)[:PROBLEM_CHARS_MAX]
    return None


def json_problem(schema: str, text: str) -> str | None:
    """What is wrong with a text that must be JSON of this schema (JSON text, too); None where nothing is."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return "it is not JSON"
    return _mismatch(json.loads(schema), value)


def pattern_problem(pattern: str) -> str | None:
    """Why a pattern cannot be used; None where it can."""
    try:
        _regex(pattern)
    except ValueError as error:
        return str(error)
    return None


def pattern_matches(pattern: str, text: str) -> bool:
    """Whether a pattern that `pattern_problem` allows is found in a text."""
    try:
        _regex(pattern).validate_python(text)
    except PatternMismatch:
        return False
    return True


def _mismatch(schema: Mapping[str, Any], value: Any) -> str | None:
    token = _steps_left.set([STEPS_MAX])
    try:
        error = next(iter(_validator(json.dumps(schema)).iter_errors(value)), None)
        return None if error is None else f"{error.json_path}: {error.message}"[:PROBLEM_CHARS_MAX]
    except (_TooManySteps, RecursionError):
        return "it takes too long to check against its schema"
    finally:
        _steps_left.reset(token)


@lru_cache(maxsize=256)
def _validator(text: str) -> Validator:
    """The validator of a schema, given as text. Raises ValueError with what is wrong with the schema."""
    schema = json.loads(text)
    schema.pop("$schema", None)  # every schema is checked as 2020-12, whichever dialect it names
    for number, node in enumerate(_nodes(schema), 1):
        if number > NODES_MAX:
            raise ValueError(f"more than {NODES_MAX} objects")
        _check_node(node, schema)
    return _validator_class()(schema, registry=Registry(), format_checker=jsonschema.FormatChecker(CHECKED_FORMATS))


def _nodes(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every object in a schema that is itself a schema; property maps and data are not."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            yield node
            for key, value in node.items():
                if key in _NAMED_SCHEMAS and isinstance(value, dict):
                    waiting += value.values()
                elif key not in _DATA:
                    waiting.append(value)


def _check_node(node: Mapping[str, Any], root: Mapping[str, Any]) -> None:
    """Raises ValueError for a keyword that is not permitted, or whose value JSON Schema does not accept."""
    for name, value in node.items():
        if name in _EXTERNAL or name in _UNBOUNDED:
            raise ValueError(f"`{name}` is not permitted")
        if name in _KEYWORDS and not _KEYWORDS[name](value):
            raise ValueError(f"`{name}` has a value that JSON Schema does not accept")
    if "$ref" in node and not _is_schema(_resolve(root, node["$ref"])):
        raise ValueError("`$ref` may only point at a schema inside the schema (`#/$defs/…`)")
    if "pattern" in node:
        _regex(node["pattern"])


def _resolve(root: Mapping[str, Any], reference: str) -> Any:
    """The value that a reference such as `#/a/b` points at, or None."""
    head, *path = reference.split("/")
    target: Any = root if head == "#" else None
    for part in path:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list):
            target = target[int(name)] if name.isdigit() and int(name) < len(target) else None
        else:
            target = target.get(name) if isinstance(target, Mapping) else None
    return target


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping | bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _are_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_schema, value.values()))


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_type(value: Any) -> bool:
    return all(item in _TYPES for item in value) if _are_strings(value) else isinstance(value, str) and value in _TYPES


_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_KEYWORDS: Mapping[str, Callable[[Any], bool]] = {
    "$ref": lambda v: isinstance(v, str),
    "type": _is_type,
    "enum": lambda v: isinstance(v, list),
    "required": _are_strings,
    "uniqueItems": lambda v: isinstance(v, bool),
    "dependentRequired": lambda v: isinstance(v, Mapping) and all(map(_are_strings, v.values())),
    "multipleOf": lambda v: _is_number(v) and v > 0,
    **dict.fromkeys(("format", "pattern"), lambda v: isinstance(v, str)),
    **dict.fromkeys(_NAMED_SCHEMAS, _are_named),
    **dict.fromkeys(("anyOf", "allOf", "oneOf", "prefixItems"), _are_schemas),
    **dict.fromkeys(
        ("items", "contains", "not", "if", "then", "else", "propertyNames", "additionalProperties"), _is_schema
    ),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _is_number),
    **dict.fromkeys(
        (f"{end}{what}" for end in ("min", "max") for what in ("Items", "Length", "Properties", "Contains")), _is_count
    ),
}


@cache
def _validator_class() -> type[Validator]:
    """A validator of JSON Schema 2020-12 that matches patterns in linear time and counts every keyword it evaluates."""
    keywords = {**jsonschema.Draft202012Validator.VALIDATORS, "pattern": _pattern}
    counted = {name: _count_steps(rule, REF_STEPS if name == "$ref" else 1) for name, rule in keywords.items()}
    kind: type[Validator] = extend(jsonschema.Draft202012Validator, validators=counted)  # type: ignore[no-untyped-call]
    return kind


def _count_steps(rule: Callable[..., Any], steps: int) -> Callable[..., Any]:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        left = _steps_left.get()
        left[0] -= steps
        if left[0] < 0:
            raise _TooManySteps
        return rule(validator, value, instance, schema)

    return check


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(instance, str):
        try:
            _regex(pattern).validate_python(instance)
        except PatternMismatch:
            yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


@lru_cache(maxsize=256)
def _regex(pattern: str) -> SchemaValidator:
    if _repetition(pattern) > REPETITION_MAX:
        raise ValueError(f"pattern {pattern[:80]!r} repeats its repetitions over {REPETITION_MAX} times")
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, strict=True))
    except PatternError:
        raise ValueError(f"pattern {pattern[:80]!r} is not a regular expression without look-around") from None


def _repetition(pattern: str) -> int:
    """How often the part of a pattern that is repeated most may occur: nested counts multiply, as in `(a{9}){9}`. 0
    where no count is nested: matching is fast then, however high a count is."""
    groups = [[(1, 0)]]  # by open group, for each of its parts: the product of the counts in it, and their number
    for token in _TOKENS.finditer(pattern):
        if token[0] == "(":
            groups.append([(1, 0)])
        elif token[0] == ")" and len(groups) > 1:
            inner = max(groups.pop())
            groups[-1].append(inner)
        elif token["least"] is not None:
            product, counts = groups[-1][-1]
            groups[-1][-1] = (product * int(token["most"] or token["least"]), counts + 1)
        else:
            groups[-1].append((1, 0))
    return max((product for group in groups for product, counts in group if counts > 1), default=0)


class _TooManySteps(Exception):
    """The check of a reply has used up its steps."""


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def strict_schema(schema: Any) -> Any:
    """Convert a schema to the subset of OpenAI's strict mode: every enum has a type, every array `items`, and there is
    no `const`."""
    if isinstance(schema, list):
        return [strict_schema(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    converted = {key: value if key == "enum" else strict_schema(value) for key, value in schema.items()}
    if "const" in converted:
        converted["enum"] = [converted.pop("const")]
    if "enum" in converted and "type" not in converted:
        converted["type"] = "integer" if all(isinstance(value, int) for value in converted["enum"]) else "string"
    if converted.get("type") == "array" and "items" not in converted:
        converted["items"] = {"type": "integer"}
    return converted
