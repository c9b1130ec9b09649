"""References in the schemas of a request, for vendors to which LiteLLM sends schemas without them. Pure.

LiteLLM copies the target of each `$ref` to its place after a call was measured and paid for, so that 2 KB of schema
become megabytes. Baton makes the copies itself, before anything is held: the body that is measured is the one that
leaves, and LiteLLM finds no reference in it. A schema that would grow too far is refused by name.

A definition that holds itself is copied once on each path; deeper, its type stands for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gateway.errors import BadRequest

GROWTH_BYTES_MAX = 1 << 18  # of all copies in one request
Follows = frozenset[str]  # in which schemas: of `tools`, of tools in `old_tools` drafts alone, of replies (`formats`)
COPIES_MAX = 5_000  # of definitions in one request
DEPTH_MAX = 90  # of a schema with its copies; LiteLLM's own walks end at 100
_DEFINITIONS = ("$defs", "definitions")
_LEGACY = ("definitions", "components")  # where older drafts have definitions
_NAMED = ("properties", "patternProperties", "dependentSchemas")  # whose own names are no keywords


def refers(follows: Follows, body: Mapping[str, Any]) -> bool:
    """Whether a body holds a reference that LiteLLM would follow."""
    return any(True for _ in _schemas(follows, body))


def without_references(follows: Follows, body: dict[str, Any], worker: str) -> dict[str, Any]:
    """The body as LiteLLM must get it for a worker, with definitions in place of references to them. Raises BadRequest
    with the path of a schema that grows over the bounds."""
    growth, changed = _Growth(worker), dict(body)
    for place, schema in _schemas(follows, body):
        _put(changed, place, growth.inlined(schema, _path(place)))
    return changed


Place = tuple[str | int, ...]  # of a schema in a body: names and positions


def _schemas(follows: Follows, body: Mapping[str, Any]) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """The schemas whose references LiteLLM follows, and where they are."""
    for name, within in (("tools", ("function",)), ("functions", ())):
        items = body.get(name) if follows else None
        for at, item in enumerate(items if isinstance(items, list) else ()):
            place: Place = (name, at, *within, "parameters")
            schema = _at(item, place[2:])
            if isinstance(schema, Mapping) and _is_followed(follows, schema) and _may_refer(schema):
                yield place, schema
    place = ("response_format", "json_schema", "schema")
    schema = _at(body, place) if "formats" in follows else None
    if isinstance(schema, Mapping) and _may_refer(schema):
        yield place, schema


def _is_followed(follows: Follows, schema: Mapping[str, Any]) -> bool:
    return "tools" in follows or ("old_tools" in follows and any(name in schema for name in _LEGACY))


def _at(value: Any, place: Place) -> Any:
    for step in place:
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _put(body: dict[str, Any], place: Place, value: Any) -> None:
    """Put a value in a body of which only the outermost object is a copy so far."""
    holder: Any = body
    for step in place[:-1]:
        holder[step] = list(holder[step]) if isinstance(holder[step], list) else dict(holder[step])
        holder = holder[step]
    holder[place[-1]] = value


def _path(place: Place) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).removeprefix(".")


def _may_refer(schema: Mapping[str, Any]) -> bool:
    try:
        return b'"$ref"' in msgspec.json.encode(schema)
    except (TypeError, ValueError):  # half a surrogate pair, a number beyond 64 bits
        return True


class _Growth:
    """Copies the targets of references, and counts what it copies over all schemas of a request."""

    def __init__(self, worker: str) -> None:
        self._copies = 0
        self._worker, self._bytes_left = worker, GROWTH_BYTES_MAX
        self._root: Mapping[str, Any] = {}
        self._where = ""
        self._names: dict[str, Any] | None = None  # definitions by name, once one is looked for

    def inlined(self, schema: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The schema without references and definitions. Raises BadRequest."""
        self._root, self._where, self._names = schema, where, None
        plain: dict[str, Any] = self._walk(schema, (), 0)
        return plain

    def _walk(self, value: Any, path: tuple[str, ...], depth: int) -> Any:
        """`value` without references; `path` has those that lead to it."""
        if depth > DEPTH_MAX:
            raise self._refusal(f"nests deeper than {DEPTH_MAX} levels")
        if isinstance(value, Mapping):
            if isinstance(reference := value.get("$ref"), str):
                return self._target(value, reference, path, depth)
            names = [name for name in value if name not in _DEFINITIONS or not isinstance(value[name], Mapping)]
            self._count(path, sum(len(name) + 4 for name in names))
            return {
                name: (self._members if name in _NAMED else self._walk)(value[name], path, depth + 1) for name in names
            }
        if isinstance(value, list):
            self._count(path, 2 + len(value))
            return [self._walk(item, path, depth + 1) for item in value]
        self._count(path, len(value) + 2 if isinstance(value, str) else 8)
        return value

    def _members(self, value: Any, path: tuple[str, ...], depth: int) -> Any:
        """Schemas by the names of properties, which may be any text, `$ref` and `definitions` too."""
        if not isinstance(value, Mapping):
            return self._walk(value, path, depth)
        self._count(path, sum(len(name) + 4 for name in value))
        return {
            name: self._walk(one, path, depth + 1) for name, one in value.items() if name != "$ref" or _is_schema(one)
        }

    def _target(self, value: Mapping[str, Any], reference: str, path: tuple[str, ...], depth: int) -> Any:
        """What stands at a reference: its target and what is written beside it."""
        target = _pointed(self._root, reference)
        if target is None:
            target = self._by_name(reference.rpartition("/")[2])
        beside = {name: one for name, one in value.items() if name != "$ref"}
        if not isinstance(target, Mapping):
            return self._walk(beside, path, depth)
        if reference in path:
            kind = target.get("type")
            return self._walk({"type": kind if isinstance(kind, str) else "object", **beside}, path, depth)
        self._copies += 1
        if self._copies > COPIES_MAX:
            raise self._refusal(f"has more than {COPIES_MAX} references to copy")
        return self._walk({**target, **beside}, (*path, reference), depth + 1)

    def _by_name(self, name: str) -> Any:
        """The definition of that name, wherever it stands, which is how LiteLLM looks for it."""
        if self._names is None:
            self._names = _definitions(self._root)
        return self._names.get(name)

    def _count(self, path: tuple[str, ...], size: int) -> None:
        if path:
            self._bytes_left -= size
            if self._bytes_left < 0:
                raise self._refusal(f"grows by more than {GROWTH_BYTES_MAX} bytes")

    def _refusal(self, problem: str) -> BadRequest:
        what = f"`{self._where}` {problem} where its `$ref`s are replaced by what they refer to"
        need = f"worker {self._worker} takes schemas only so"
        return BadRequest(
            f"{what}, and {need}; refer to fewer definitions", param=self._where, code="invalid_json_schema"
        )


def _pointed(root: Mapping[str, Any], reference: str) -> Any:
    """The place of a schema that a reference into it names; None where there is none."""
    if not reference.startswith("#"):
        return None
    place: Any = root
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping):
            place = place.get(name)
        elif isinstance(place, Sequence) and not isinstance(place, str) and name.isascii() and name.isdigit():
            place = place[int(name)] if int(name) < len(place) else None
        else:
            return None
    return place


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping | bool)


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """All definitions of a schema by their names alone; of two, the outer one."""
    by_name: dict[str, Any] = {}
    level: list[Any] = [schema]
    while level:
        for value in level:
            for holder in (value.get(name) for name in _DEFINITIONS) if isinstance(value, Mapping) else ():
                for name, one in holder.items() if isinstance(holder, Mapping) else ():
                    by_name.setdefault(name, one)
        level = [item for value in level for item in _children(value)]
    return by_name


def _children(value: Any) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else ()
