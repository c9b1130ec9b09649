"""Function tools of the Responses API (flat) → chat tools (nested), and who may be chosen. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.errors import BadRequest

KEPT = ("name", "description", "parameters", "strict")
HARMLESS = {  # what else a function tool may say, and the values that ask for nothing
    "defer_loading": (None, False),
    "async": (None, False),
    "output_schema": (None,),
}
NAME_CHARS_MAX = 128


def chat_tools(tools: Sequence[Any], only: frozenset[str] | None = None) -> list[dict[str, Any]]:
    """Function tools as a chat request has them, those named in `only` where that is given.

    Raises BadRequest naming the tool for hosted ones and for what Baton would have to ignore.
    """
    found = []
    for index, tool in enumerate(tools):
        _check(tool, f"tools[{index}]")
        if only is None or tool["name"] in only:
            function = {name: tool[name] for name in KEPT if tool.get(name) is not None}
            found.append({"type": "function", "function": function})
    return found


def _check(tool: Any, where: str) -> None:
    if not isinstance(tool, dict):
        raise BadRequest(f"`{where}` must be an object", param=where, code="invalid_type")
    if tool.get("type") != "function":
        spot, kind = f"{where}.type", str(tool.get("type"))[:64]
        text = f"`{spot}`: tool '{kind}' is not supported; Baton runs no hosted tools, send tools of type function"
        raise BadRequest(text, param=spot, code="unsupported_tool")
    name = tool.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
        spot = f"{where}.name"
        raise BadRequest(f"`{spot}` must be a string of 1 to {NAME_CHARS_MAX} characters", param=spot)
    for field, good in (("parameters", dict), ("description", str), ("strict", bool)):
        if not isinstance(tool.get(field), good | None):
            spot = f"{where}.{field}"
            raise BadRequest(f"`{spot}` is of the wrong type", param=spot, code="invalid_type")
    asks = [field for field, values in HARMLESS.items() if tool.get(field) not in values]
    if "direct" not in (tool.get("allowed_callers") or ["direct"]):
        asks.append("allowed_callers")
    if asks:
        spot = f"{where}.{asks[0]}"
        raise BadRequest(f"`{spot}` is not supported; leave it out", param=spot, code="unsupported_parameter")


def chat_tool_choice(choice: Any, tools: Sequence[Any]) -> tuple[Any, frozenset[str] | None]:
    """`tool_choice` as a chat request has it, and the names of the tools it leaves, where it leaves some out."""
    if choice is None or choice in ("none", "auto", "required"):
        if choice == "required" and not tools:
            raise _bad("tool_choice", "`required` needs `tools`")
        return choice, None
    if not isinstance(choice, Mapping):
        raise _bad("tool_choice", "must be none, auto, required or an object")
    names = {tool.get("name") for tool in tools if isinstance(tool, Mapping)}
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": _named(choice, names, "tool_choice")}}, None
    if choice.get("type") != "allowed_tools":
        raise _bad("tool_choice.type", "must be function or allowed_tools; Baton runs no hosted tools")
    allowed, mode = choice.get("tools"), choice.get("mode", "auto")
    if not isinstance(allowed, list) or not allowed or not all(isinstance(tool, Mapping) for tool in allowed):
        raise _bad("tool_choice.tools", "must be a list of tools")
    if mode not in ("auto", "required"):
        raise _bad("tool_choice.mode", "must be auto or required")
    left = [_named(tool, names, f"tool_choice.tools[{index}]") for index, tool in enumerate(allowed)]
    return mode, frozenset(left)


def _named(choice: Mapping[str, Any], names: set[Any], where: str) -> str:
    name = choice.get("name")
    if not isinstance(name, str) or name not in names:
        raise _bad(f"{where}.name", f"'{str(name)[:NAME_CHARS_MAX]}' not found in 'tools'")
    return name


def _bad(where: str, text: str) -> BadRequest:
    return BadRequest(f"`{where}` {text}", param=where, code="invalid_value")
