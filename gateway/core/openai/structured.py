"""Structured replies: the schema a client asks for, and whether a reply keeps to it. Pure.

Schemas come from clients and replies from workers, so both are hostile: references stay inside the schema (nothing is
fetched), patterns run on an engine whose time is linear in the text (Rust's `regex`, through pydantic), and a check may
take so many steps and no more. What cannot be checked like that is refused before anything is spent.
"""

from __future__ import annotations

import json
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

from gateway.errors import BadRequest

NODES_MAX = 4_000  # objects in one schema
STEPS_MAX = 50_000  # keywords tried on one reply; some 5 µs each
REF_STEPS = 20  # a reference costs as much as so many
PROBLEM_CHARS_MAX = 300
CHECKED_FORMATS = ("date", "email", "ipv4", "ipv6", "uuid")
_OUTSIDE = ("$id", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$vocabulary")
_UNBOUNDED = ("patternProperties", "unevaluatedProperties", "unevaluatedItems")
_NAMED_SCHEMAS = ("properties", "$defs", "definitions", "dependentSchemas")
_DATA = ("enum", "const", "default", "examples", "required", "dependentRequired", "type")
_UNJUDGED = ("length", "content_filter")  # cut short, by design or by a filter: the client is told so as it is
_steps_left: ContextVar[list[int]] = ContextVar("steps_left")


@dataclass(frozen=True, slots=True)
class Shape:
    """What the reply must be. `schema` None: any JSON object."""

    schema: Mapping[str, Any] | None = None

    def problem(self, choice: Mapping[str, Any]) -> str | None:
        """What is wrong with one choice of a completion, in a line; None where it is as asked for, or no answer at all
        (a refusal, a tool call, cut short)."""
        message = choice.get("message") or {}
        cut = choice.get("finish_reason") in _UNJUDGED
        if cut or message.get("refusal") or message.get("tool_calls") or message.get("function_call"):
            return None
        content = message.get("content")
        try:
            value = json.loads(content if isinstance(content, str) else "", parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return "it is not JSON"
        if self.schema is None:
            return None if isinstance(value, dict) else "it is not a JSON object"
        return _mismatch(self.schema, value)

    def kept(self, body: Mapping[str, Any]) -> bool:
        """Whether every choice of a completion has it."""
        return all(self.problem(choice) is None for choice in body.get("choices") or ())

    def described(self) -> str:
        """As a worker is told of it."""
        return (
            "one JSON object" if self.schema is None else f"JSON that keeps to this schema: {json.dumps(self.schema)}"
        )


def shape_of(params: Mapping[str, Any]) -> Shape | None:
    """The shape that a chat request's `response_format` promises its client; None where it promises none."""
    wanted = params.get("response_format") or {}
    if wanted.get("type") == "json_object":
        return Shape()
    schema = wanted.get("json_schema") or {}
    return Shape(schema["schema"]) if wanted.get("type") == "json_schema" and schema.get("strict") is True else None


def check_schema(schema: Mapping[str, Any], where: str) -> None:
    """Raises BadRequest(invalid_json_schema) for a schema that replies cannot be checked against."""
    try:
        _validator(json.dumps(schema))
    except (ValueError, RecursionError) as error:
        said = f"Invalid schema for response_format: {str(error)[:PROBLEM_CHARS_MAX]}"
        raise BadRequest(said, param=where, code="invalid_json_schema") from None


def _mismatch(schema: Mapping[str, Any], value: Any) -> str | None:
    token = _steps_left.set([STEPS_MAX])
    try:
        error = next(iter(_validator(json.dumps(schema)).iter_errors(value)), None)
        return None if error is None else f"{error.json_path}: {error.message}"[:PROBLEM_CHARS_MAX]
    except (_TooLong, RecursionError):
        return "it takes too long to check against its schema"
    finally:
        _steps_left.reset(token)


@lru_cache(maxsize=256)
def _validator(text: str) -> Validator:
    """The validator of a schema as text. Raises ValueError saying what is wrong with it."""
    schema = json.loads(text)
    schema.pop("$schema", None)  # whatever dialect it names, 2020-12 is what is checked
    for number, node in enumerate(_nodes(schema), 1):
        if number > NODES_MAX:
            raise ValueError(f"more than {NODES_MAX} objects")
        _check_node(node, schema)
    return _validator_class()(schema, registry=Registry(), format_checker=jsonschema.FormatChecker(CHECKED_FORMATS))


def _nodes(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Every object of a schema that is a schema; names of properties and data are none."""
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
    """Raises ValueError for a keyword that is not permitted, or not as JSON Schema has it."""
    for name, value in node.items():
        if name in _OUTSIDE or name in _UNBOUNDED:
            raise ValueError(f"`{name}` is not permitted")
        if name in _KEYWORDS and not _KEYWORDS[name](value):
            raise ValueError(f"`{name}` is not what JSON Schema takes there")
    if "$ref" in node and not _is_schema(_pointed(root, node["$ref"])):
        raise ValueError("`$ref` may only point at a schema inside the schema (`#/$defs/…`)")
    if "pattern" in node:
        _regex(node["pattern"])


def _pointed(root: Mapping[str, Any], reference: str) -> Any:
    """What `#/a/b` points at; None where it is nothing."""
    head, *path = reference.split("/")
    found: Any = root if head == "#" else None
    for part in path:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if name.isdigit() and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


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
    """JSON Schema 2020-12 with our patterns, and every keyword counted."""
    keywords = {**jsonschema.Draft202012Validator.VALIDATORS, "pattern": _pattern}
    counted = {name: _counted(rule, REF_STEPS if name == "$ref" else 1) for name, rule in keywords.items()}
    kind: type[Validator] = extend(jsonschema.Draft202012Validator, validators=counted)  # type: ignore[no-untyped-call]
    return kind


def _counted(rule: Callable[..., Any], steps: int) -> Callable[..., Any]:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        left = _steps_left.get()
        left[0] -= steps
        if left[0] < 0:
            raise _TooLong
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
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, strict=True))
    except PatternError:
        raise ValueError(f"pattern {pattern[:80]!r} is not a regular expression without look-around") from None


class _TooLong(Exception):
    """A reply took more steps to check than there are."""


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
