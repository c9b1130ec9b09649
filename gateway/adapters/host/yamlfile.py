"""YAML for people: plain data plus the line of every value, and one-line errors that name file, line and fix.

It is stricter than YAML where that catches mistakes: no tabs, duplicate keys, aliases, custom tags or second documents.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from gateway.errors import ConfigError

FILE_BYTES_MAX = 1 << 18
VALUES_MAX = 10_000
NESTING_MAX = 16
Loc = tuple[str | int, ...]


@dataclass
class Document:
    """The content of a file: `data` as plain Python; `lines`: the 1-based line of each value (or its key)."""

    path: Path
    data: Any = None
    lines: dict[Loc, int] = field(default_factory=dict)

    def error(self, loc: Loc, what: str) -> ConfigError:
        """The error for one value. An unknown place (a missing key) gets the line of its parent."""
        return self._at(self.line(loc), loc, what)

    def line(self, loc: Loc) -> int:
        """The line of a value, or of the nearest thing around it in the file."""
        while loc and loc not in self.lines:
            loc = loc[:-1]
        return self.lines.get(loc, 1)

    def _at(self, line: int, loc: Loc, what: str) -> ConfigError:
        place = dotted(loc)
        return ConfigError(f"{self.path}:{line}: {place + ': ' if place else ''}{' '.join(what.split())}")


def dotted(loc: Loc) -> str:
    """`("workers", 0, "handle")` → `workers[0].handle`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


def read(path: Path, text_keys: Collection[str] = ()) -> Document:
    """Parse a file. Values of keys in `text_keys` stay the text that was written (`1.10` is not 1.1, nor a float).

    Raises ConfigError, one line, for anything wrong.
    """
    document = Document(path)
    try:
        raw = path.read_bytes() if path.stat().st_size <= FILE_BYTES_MAX else None
    except OSError as error:
        raise ConfigError(f"{path}:1: cannot be read ({error.strerror}); check the path") from None
    if raw is None:
        raise ConfigError(f"{path}:1: larger than {FILE_BYTES_MAX} bytes; is it the right file?")
    root = _compose(document, raw)
    if root is None:
        raise document.error((), "the file is empty; start from an example in deploy/pools/")
    document.data = _Builder(document, frozenset(text_keys)).build(root, ())
    return document


def _compose(document: Document, raw: bytes) -> yaml.Node | None:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise document._at(line, (), "not UTF-8; save the file as UTF-8") from None
    for number, line_text in enumerate(text.splitlines(), start=1):
        if "\t" in line_text[: len(line_text) - len(line_text.lstrip())]:
            raise document._at(number, (), "indented with a tab; use spaces")
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        began = f", {error.context} from line {error.context_mark.line + 1}" if error.context_mark else ""
        raise document._at(line, (), f"not YAML: {error.problem}{began}; fix it there or above") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise document._at(1, (), f"not YAML: {error}; fix the file") from None


class _Builder:
    """Walks YAML's node tree once and records lines. Size and depth are bounded, against alias bombs."""

    def __init__(self, document: Document, text_keys: frozenset[str]) -> None:
        self._document = document
        self._text_keys = text_keys
        self._seen: set[int] = set()
        self._scalars = SafeConstructor()

    def build(self, node: yaml.Node, loc: Loc) -> Any:
        self._document.lines.setdefault(loc, node.start_mark.line + 1)
        if id(node) in self._seen:
            raise self._document.error(loc, "aliases (*name) are not used here; write the value out")
        self._seen.add(id(node))
        if len(self._seen) > VALUES_MAX or len(loc) > NESTING_MAX:
            raise self._document.error(loc, "too many values or too deeply nested; is it the right file?")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, loc)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*loc, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, loc)

    def _mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, Any]:
        built: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._document._at(line, loc, "a key must be plain text; quote it")
            key = str(key_node.value)
            if key in built:
                raise self._document._at(line, (*loc, key), "given twice; keep one")
            self._document.lines[(*loc, key)] = line
            built[key] = self.build(value_node, (*loc, key))
        return built

    def _scalar(self, node: yaml.Node, loc: Loc) -> Any:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind == "null":
            return None
        if kind in ("str", "timestamp") or (loc and loc[-1] in self._text_keys and kind in ("int", "float")):
            return node.value
        convert = {
            "int": self._scalars.construct_yaml_int,
            "float": self._scalars.construct_yaml_float,
            "bool": self._scalars.construct_yaml_bool,
        }.get(kind)
        if convert is None or not isinstance(node, yaml.ScalarNode):
            raise self._document.error(loc, f"the tag {node.tag} is not used here; write a plain value")
        try:
            return convert(node)
        except (ValueError, KeyError):
            raise self._document.error(loc, f"`{node.value}` is not a {kind}; quote it if it is text") from None
