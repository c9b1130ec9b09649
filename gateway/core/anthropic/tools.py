"""Converts Anthropic's tools and `tool_choice` to those of a chat request. Pure.

Tools with an `input_schema` become functions. Tools that Anthropic's server runs, or whose schema only its models know,
go to workers that have them; a request that forces one of them is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.anthropic.native import BLOCK, CACHE
from gateway.core.openai.options import NAME_CHARS_MAX
from gateway.core.openai.shapes import (
    FLAG,
    FREE_TEXT,
    OBJECT,
    Properties,
    Reader,
    array,
    missing_parameter,
    one_of,
    refuse_inside,
    text,
)
from gateway.errors import BadRequest

_TOOL: Properties = {
    "type": FREE_TEXT,
    "name": (text(NAME_CHARS_MAX, r"[a-zA-Z0-9_-]+"), f"1 to {NAME_CHARS_MAX} letters, digits, _ or -"),
    "description": FREE_TEXT,
    "input_schema": OBJECT,
    "strict": FLAG,
    CACHE: OBJECT,
    "eager_input_streaming": FLAG,
    "defer_loading": FLAG,
    "allowed_callers": (array(0, 8, str), "a list of strings"),
    "input_examples": (array(0, 64, dict), "a list of objects"),
}
_NATIVE = ("eager_input_streaming", "defer_loading", "allowed_callers", "input_examples")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_CHOICE: Properties = {
    "type": (one_of(*_CHOICES, "tool"), "auto, any, tool or none"),
    "name": (text(256), "a string"),
    "disable_parallel_tool_use": FLAG,
}


Tool = Mapping[str, Any]


def chat_tools(raw: Sequence[Tool], reader: Reader) -> tuple[list[dict[str, Any]], list[int], tuple[Tool, ...]]:
    """(functions, the index of each in the request, the tools that are none) of a list of tools. Raises BadRequest,
    which names the tool."""
    customs = [at for at, tool in enumerate(raw) if tool.get("type") in (None, "custom")]
    own = tuple(tool for tool in raw if tool.get("type") not in (None, "custom"))
    refuse_inside([*own], "tools")
    functions = [(at, function) for at in customs if (function := _function(raw[at], f"tools[{at}]", reader))]
    return [function for _, function in functions], [at for at, _ in functions], own


def with_natives(functions: Sequence[Tool], raw: Sequence[Tool], indices: Sequence[int]) -> list[Tool]:
    """The functions with what only Anthropic's wire has of each."""
    natives = [{name: raw[at][name] for name in _NATIVE if raw[at].get(name) is not None} for at in indices]
    pairs = zip(functions, natives, strict=True)
    return [{**function, BLOCK: native} if native else function for function, native in pairs]


def _function(raw: Tool, where: str, reader: Reader) -> dict[str, Any] | None:
    """The function of a tool; None for one that the client's model cannot call, which is left out and named."""
    tool = reader.object(raw, where, _TOOL, ("name", "input_schema"))
    if "direct" not in (tool.get("allowed_callers") or ["direct"]):
        reader.drop(where)
        return None
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    cache = {name: tool[name] for name in (CACHE,) if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}, **cache}


def chat_choice(raw: Any, tools: Sequence[Mapping[str, Any]], reader: Reader) -> dict[str, Any]:
    """`tool_choice` and `parallel_tool_calls` of a chat request with these functions. Raises BadRequest for a choice
    that the functions do not allow."""
    choice = reader.object(raw, "tool_choice", _CHOICE, ("type",))
    kind, names = choice["type"], {tool["function"]["name"] for tool in tools}
    if kind == "tool":
        if "name" not in choice:
            raise missing_parameter("tool_choice.name")
        if choice["name"] not in names:
            problem = f"`tool_choice.name`: '{choice['name'][:NAME_CHARS_MAX]}' is no tool that Baton can pass on"
            raise BadRequest(problem, param="tool_choice.name", code="invalid_value")
    if kind == "any" and not tools:
        problem = "`tool_choice` is `any`, which needs a tool that Baton can pass on"
        raise BadRequest(problem, param="tool_choice", code="invalid_value")
    if not tools:
        return {}
    function = {"type": "function", "function": {"name": choice.get("name")}}
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return {"tool_choice": function if kind == "tool" else _CHOICES[kind], **parallel}
