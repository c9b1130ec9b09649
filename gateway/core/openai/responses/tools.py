"""Converts function tools of the Responses API (flat) and `tool_choice` to those of a chat request (nested). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.openai.shapes import FLAG, FREE_TEXT, OBJECT, WRONG_TYPE, Properties, Reader, array, bad_value, text
from gateway.errors import BadRequest

CHAT = ("name", "description", "parameters", "strict")
NAME_CHARS_MAX = 64
_TOOL: Properties = {
    "type": FREE_TEXT,
    "name": (text(NAME_CHARS_MAX, r"[a-zA-Z0-9_-]+"), f"1 to {NAME_CHARS_MAX} letters, digits, _ or -"),
    "description": FREE_TEXT,
    "parameters": OBJECT,
    "strict": FLAG,
    "defer_loading": FLAG,
    "async": FLAG,
    "output_schema": OBJECT,
    "allowed_callers": (array(0, 8, str), "a list of strings"),
}


def read_tools(raw: Sequence[Any], reader: Reader) -> list[dict[str, Any]]:
    """Check and return function tools. Raises BadRequest, which names the tool, for hosted tools and for options that
    Baton does not support."""
    return [_tool(tool, f"tools[{at}]", reader) for at, tool in enumerate(raw)]


def _tool(raw: Any, where: str, reader: Reader) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise bad_value(where, "an object", WRONG_TYPE)
    if raw.get("type") != "function":
        spot, kind = f"{where}.type", str(raw.get("type"))[:64]
        problem = f"`{spot}`: tool '{kind}' is not supported; Baton runs no hosted tools, send tools of type function"
        raise BadRequest(problem, param=spot, code="unsupported_tool")
    tool = reader.object(raw, where, _TOOL, ("name",))
    unsupported = [name for name in ("defer_loading", "async", "output_schema") if tool.get(name)]
    if "direct" not in (tool.get("allowed_callers") or ["direct"]):
        unsupported.append("allowed_callers")
    if unsupported:
        spot = f"{where}.{unsupported[0]}"
        raise BadRequest(f"`{spot}` is not supported; leave it out", param=spot, code="unsupported_parameter")
    return tool


def chat_tools(tools: Sequence[Mapping[str, Any]], names: frozenset[str] | None = None) -> list[dict[str, Any]]:
    """Convert function tools to a chat request's form. `names`: convert only these; None: all."""
    chosen = [tool for tool in tools if names is None or tool["name"] in names]
    return [{"type": "function", "function": {name: tool[name] for name in CHAT if name in tool}} for tool in chosen]


def chat_tool_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> tuple[Any, frozenset[str] | None]:
    """Convert `tool_choice`; return (the chat request's `tool_choice`, names of the allowed tools or None for all).
    Raises BadRequest."""
    if choice is None or choice in ("none", "auto", "required"):
        if choice == "required" and not tools:
            raise _invalid("tool_choice", "is `required`, which needs `tools`")
        return choice, None
    if not isinstance(choice, Mapping):
        raise _invalid("tool_choice", "must be none, auto, required or an object")
    names = {tool["name"] for tool in tools}
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": _tool_name(choice, names, "tool_choice")}}, None
    if choice.get("type") != "allowed_tools":
        raise _invalid("tool_choice.type", "must be function or allowed_tools; Baton runs no hosted tools")
    allowed, mode = choice.get("tools"), choice.get("mode", "auto")
    if not isinstance(allowed, list) or not allowed or not all(isinstance(tool, Mapping) for tool in allowed):
        raise _invalid("tool_choice.tools", "must be a list of tools")
    if mode not in ("auto", "required"):
        raise _invalid("tool_choice.mode", "must be auto or required")
    allowed_names = [_tool_name(tool, names, f"tool_choice.tools[{index}]") for index, tool in enumerate(allowed)]
    return mode, frozenset(allowed_names)


def _tool_name(choice: Mapping[str, Any], names: set[Any], where: str) -> str:
    name = choice.get("name")
    if not isinstance(name, str) or name not in names:
        raise _invalid(f"{where}.name", f"'{str(name)[:NAME_CHARS_MAX]}' not found in 'tools'")
    return name


def _invalid(where: str, text: str) -> BadRequest:
    return BadRequest(f"`{where}` {text}", param=where, code="invalid_value")
