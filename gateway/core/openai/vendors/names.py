"""Names of tools as a worker takes them, and back: longer names and other characters than its vendor allows. Pure.

OpenAI and most servers take 64 characters, Anthropic 128. A name that a worker does not take is told to it in a shorter
form, the same in each turn, and a call of it comes back under its own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

CHARS_MAX = 64
_OTHERS = re.compile(r"[^a-zA-Z0-9_-]")
_DIGITS = 8  # of the hash that ends a changed name


def told_name(name: str, chars_max: int = CHARS_MAX) -> str:
    """The name under which a worker is told of a tool."""
    if len(name) <= chars_max and not _OTHERS.search(name):
        return name
    end = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:_DIGITS]
    return f"{_OTHERS.sub('_', name)[: chars_max - _DIGITS - 1]}_{end}"


def told_names(body: Mapping[str, Any], chars_max: int = CHARS_MAX) -> dict[str, str]:
    """The names of a body that its worker does not take, by those that it is told."""
    return {told: name for name in _names(body) if (told := told_name(name, chars_max)) != name}


def _names(body: Mapping[str, Any]) -> Iterator[str]:
    for tool in body.get("tools") or ():
        if (details := tool.get(tool.get("type"))) and isinstance(details, Mapping):
            yield details["name"]
    for function in body.get("functions") or ():
        yield function["name"]
    for message in body.get("messages") or ():
        for call in message.get("tool_calls") or ():
            yield call[call["type"]]["name"]
        if message.get("function_call"):
            yield message["function_call"]["name"]


def with_told_names(body: Mapping[str, Any], told: Mapping[str, str]) -> dict[str, Any]:
    """The body with the names that its worker is told. `told`: of `told_names`."""
    by_name = {name: short for short, name in told.items()}

    def renamed(value: Any) -> Any:
        """A value in which each object of a name has the name that is told."""
        if isinstance(value, list):
            return [renamed(item) for item in value]
        if not isinstance(value, Mapping):
            return value
        changed = {field: renamed(value[field]) if field in _HOLDERS else value[field] for field in value}
        if changed.get("name") in by_name:
            changed["name"] = by_name[changed["name"]]
        return changed

    named = {field: renamed(body[field]) for field in _NAMED if field in body}
    messages = [_message(message, renamed) for message in body["messages"]]
    return {**body, **named, "messages": messages}


_NAMED = ("tools", "functions", "tool_choice", "function_call")
_HOLDERS = ("function", "custom", "allowed_tools", "tools")


def _message(message: Mapping[str, Any], renamed: Any) -> Mapping[str, Any]:
    fields = {field: renamed(message[field]) for field in ("tool_calls", "function_call") if field in message}
    if message.get("role") in ("tool", "function") and "name" in message:
        fields["name"] = renamed({"name": message["name"]})["name"]
    return {**message, **fields} if fields else message
