"""Reads the tools of a Responses request and converts them to a chat request's. Pure.

Functions and custom tools become a chat request's, those of a namespace under a name that joins both. Baton runs no
hosted tools: declarations of them go to workers whose server runs them, and are left out elsewhere and named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core.openai.options import TOOLS_MAX
from gateway.core.openai.shapes import (
    FLAG,
    FREE_TEXT,
    OBJECT,
    WRONG_TYPE,
    Properties,
    Reader,
    array,
    bad_value,
    one_of,
    text,
)
from gateway.errors import BadRequest

_SECRET = ("authorization", "headers")  # of an MCP server
CHAT = ("name", "description", "parameters", "strict")
NAME_CHARS_MAX = 64
_NAME = text(NAME_CHARS_MAX, r"[a-zA-Z0-9_-]+"), f"1 to {NAME_CHARS_MAX} letters, digits, _ or -"
_LOADING: Properties = {"defer_loading": FLAG, "allowed_callers": (array(0, 8, str), "a list of strings")}
_FUNCTION: Properties = {
    "type": FREE_TEXT,
    "name": _NAME,
    "description": FREE_TEXT,
    "parameters": OBJECT,
    "strict": FLAG,
    "async": FLAG,
    "output_schema": OBJECT,
    **_LOADING,
}
_CUSTOM: Properties = {"type": FREE_TEXT, "name": _NAME, "description": FREE_TEXT, "format": OBJECT, **_LOADING}
_FORMAT: Properties = {
    "type": (one_of("text", "grammar"), "text or grammar"),
    "syntax": (one_of("lark", "regex"), "lark or regex"),
    "definition": FREE_TEXT,
}
_NAMESPACE: Properties = {
    "type": FREE_TEXT,
    "name": _NAME,
    "description": FREE_TEXT,
    "tools": (array(0, TOOLS_MAX), f"up to {TOOLS_MAX} tools"),
}


@dataclass(frozen=True, slots=True)
class ToolName:
    """A tool as the client names it."""

    name: str
    namespace: str | None = None


def read_tools(raw: Sequence[Any], reader: Reader) -> list[dict[str, Any]]:
    """Check and return the tools that Baton passes on: functions, custom tools and namespaces of both. Raises
    BadRequest, which names the tool, for options that Baton does not support."""
    return [_tool(tool, f"tools[{at}]", reader) for at, tool in enumerate(raw) if not _is_hosted(tool)]


def hosted_tools(raw: Any) -> tuple[Mapping[str, Any], ...]:
    """The hosted tools that a request declares, as they came. They go to servers that run them, and nowhere else."""
    return tuple(tool for tool in raw or () if _is_hosted(tool))


def shown_hosted(hosted: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The declarations of hosted tools as a reply repeats them: without what lets somebody in."""
    return [{name: value for name, value in tool.items() if name not in _SECRET} for tool in hosted]


def chosen_hosted(
    choice: Any, hosted: Sequence[Mapping[str, Any]], tools: Sequence[Any]
) -> Mapping[str, Any] | str | None:
    """The `tool_choice` of a request that chose one of its hosted tools, or among them where all of its `tools` are
    hosted; None for any other."""
    if isinstance(choice, Mapping) and choice.get("type") in [tool["type"] for tool in hosted]:
        return choice
    return choice if isinstance(choice, str) and hosted and len(hosted) == len(tools) else None


def _is_hosted(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind not in ("function", "custom", "namespace")


def _tool(raw: Any, where: str, reader: Reader) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise bad_value(where, "an object", WRONG_TYPE)
    kind = raw.get("type")
    if kind == "namespace":
        space = reader.object(raw, where, _NAMESPACE, ("name", "tools"))
        inner = [_tool(tool, f"{where}.tools[{at}]", reader) for at, tool in enumerate(space["tools"])]
        return space | {"tools": inner}
    if kind == "custom":
        tool = reader.object(raw, where, _CUSTOM, ("name",))
        if "format" in tool:
            tool["format"] = reader.object(tool["format"], f"{where}.format", _FORMAT, ("type",))
    elif kind == "function":
        tool = reader.object(raw, where, _FUNCTION, ("name",))
    else:
        raise bad_value(f"{where}.type", "function, custom, namespace or a hosted tool's", "invalid_value")
    unsupported = ["async"] if tool.get("async") else []
    if "direct" not in (tool.get("allowed_callers") or ["direct"]):
        unsupported.append("allowed_callers")
    if unsupported:
        spot = f"{where}.{unsupported[0]}"
        raise BadRequest(f"`{spot}` is not supported; leave it out", param=spot, code="unsupported_parameter")
    return tool


def chat_name(name: str, namespace: str | None = None) -> str:
    """The name of a tool in a chat request. One of a namespace joins both names, shortened where it is too long."""
    joined = name if namespace is None else f"{namespace}__{name}"
    if len(joined) <= NAME_CHARS_MAX:
        return joined
    return f"{joined[: NAME_CHARS_MAX - 9]}_{hashlib.sha256(joined.encode()).hexdigest()[:8]}"


def _each(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    """Yield (namespace, tool) of every function and custom tool."""
    for tool in tools:
        if tool["type"] == "namespace":
            yield from ((tool["name"], inner) for inner in tool["tools"])
        else:
            yield None, tool


def tool_names(tools: Sequence[Mapping[str, Any]]) -> dict[str, ToolName]:
    """The tools as the client names them, by their names in a chat request."""
    return {chat_name(tool["name"], space): ToolName(tool["name"], space) for space, tool in _each(tools)}


def chat_tools(tools: Sequence[Mapping[str, Any]], names: frozenset[str] | None = None) -> list[dict[str, Any]]:
    """Convert tools to a chat request's form. `names`: in the chat request, of those to convert; None: all."""
    tools_named = [(chat_name(tool["name"], space), tool) for space, tool in _each(tools)]
    return [_chat_tool(name, tool) for name, tool in tools_named if names is None or name in names]


def _chat_tool(name: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool["type"] == "function":
        return {"type": "function", "function": {key: tool[key] for key in CHAT if key in tool} | {"name": name}}
    custom = {key: tool[key] for key in ("description",) if key in tool} | {"name": name}
    format_ = tool.get("format") or {"type": "text"}
    if format_["type"] == "grammar":
        grammar = {key: format_[key] for key in ("syntax", "definition") if key in format_}
        custom["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": "custom", "custom": custom}


def chat_tool_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> tuple[Any, frozenset[str] | None]:
    """Convert `tool_choice`, but for one of a hosted tool; return (the chat request's `tool_choice`, names of the
    allowed tools or None for all). Raises BadRequest."""
    if choice is None or choice in ("none", "auto", "required"):
        if choice == "required" and not tools:
            raise _invalid("tool_choice", "is `required`, which needs `tools`")
        return choice, None
    if not isinstance(choice, Mapping):
        raise _invalid("tool_choice", "must be none, auto, required or an object")
    names = {name: tool["type"] for name, tool in ((chat_name(one["name"], space), one) for space, one in _each(tools))}
    if choice.get("type") in ("function", "custom"):
        name = _tool_name(choice, names, "tool_choice")
        return {"type": names[name], names[name]: {"name": name}}, None
    if choice.get("type") != "allowed_tools":
        raise _invalid("tool_choice.type", "must be function, custom, allowed_tools or the type of one of `tools`")
    allowed, mode = choice.get("tools"), choice.get("mode", "auto")
    if not isinstance(allowed, list) or not allowed or not all(isinstance(tool, Mapping) for tool in allowed):
        raise _invalid("tool_choice.tools", "must be a list of tools")
    if mode not in ("auto", "required"):
        raise _invalid("tool_choice.mode", "must be auto or required")
    allowed_names = [
        _tool_name(tool, names, f"tool_choice.tools[{index}]")
        for index, tool in enumerate(allowed)
        if not _is_hosted(tool)
    ]
    return mode, frozenset(allowed_names)


def _tool_name(choice: Mapping[str, Any], names: Mapping[str, str], where: str) -> str:
    name, space = choice.get("name"), choice.get("namespace")
    name = chat_name(name, space if isinstance(space, str) else None) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in names:
        raise _invalid(f"{where}.name", f"'{str(name)[:NAME_CHARS_MAX]}' not found in 'tools'")
    return name


def _invalid(where: str, text: str) -> BadRequest:
    return BadRequest(f"`{where}` {text}", param=where, code="invalid_value")
