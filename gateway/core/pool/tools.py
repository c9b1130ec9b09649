"""Tools of an MCP server: what the pool file says of each, and what of a server's list may be called. Pure.

What a server says of its tools is a hint by somebody else. Only tools that the pool file lists are offered. A tool
changes its world unless the pool file, or else the server, says that it only reads; only one that reads, or that may
be repeated, is ever called again after a failure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from hashlib import sha256
from typing import Any

from pydantic import Field

from gateway.core.pool.prices import FrozenModel
from gateway.errors import UpstreamRefused

SCHEMA_CHARS_MAX = 16_384  # of a tool's input schema, which every call of a model with the tool pays for
DESCRIPTION_CHARS_MAX = 1_000
TOOLS_MAX = 64  # of one worker
_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,39}")
_FENCE = re.compile(r"^\s*```(?:json)?[^\S\n]*\n(.*?)\n?```\s*$", re.DOTALL)


class ToolSpec(FrozenModel):
    """A tool that may be called, in the pool file. What is left out is the worker's, or what the server says."""

    call_usd: Decimal | None = Field(default=None, ge=0, le=1_000, description="for each call; else the worker's")
    timeout_s: float | None = Field(default=None, gt=0, le=3600, description="of one call; else the worker's")
    side_effects: bool | None = Field(
        default=None, description="whether a call changes anything; else as the server says, else yes"
    )
    idempotent: bool | None = Field(
        default=None, description="whether a repeated call changes nothing more; else as the server says, else no"
    )
    description: str = Field(default="", max_length=400, description="shown in place of the server's words")


@dataclass(frozen=True, slots=True)
class ListedTool:
    """A tool as its server lists it. `read_only` and `idempotent`: its annotations, None where it has none."""

    name: str
    description: str
    schema: Mapping[str, Any]
    read_only: bool | None = None
    idempotent: bool | None = None

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of all that a model reads of the tool and that decides on its use."""
        text = json.dumps([self.description, self.schema, self.read_only, self.idempotent], sort_keys=True)
        return sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that may be called now."""

    name: str
    description: str
    schema: Mapping[str, Any]
    side_effects: bool = True
    idempotent: bool = False

    @property
    def repeatable(self) -> bool:
        """Whether a call of which nothing is known may be made again."""
        return self.idempotent or not self.side_effects

    @property
    def signature(self) -> str:
        """The name and the parameters in one line: `convert(amount: number, to: string, from?: string)`."""
        properties = self.schema.get("properties")
        needed = self.schema.get("required")
        required = needed if isinstance(needed, list) else []
        kinds = dict(properties) if isinstance(properties, Mapping) else {}
        parts = [
            f"{name}{'' if name in required else '?'}: {_type(kind)}"
            for name, kind in kinds.items()
            if _PARAMETER.fullmatch(str(name))  # a planner reads them: no room for prose
        ]
        return f"{self.name}({', '.join(parts)})"


def _type(schema: Any) -> str:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return kind if isinstance(kind, str) and kind.isalpha() else "any"


@dataclass(frozen=True, slots=True)
class Offer:
    """What a server offers: `tools` that may be called, and `problems`: a line for each tool of the pool file that may
    not."""

    tools: tuple[Tool, ...] = ()
    problems: tuple[str, ...] = ()


def offer_of(wanted: Mapping[str, ToolSpec], listed: Sequence[ListedTool], digests: Mapping[str, str]) -> Offer:
    """The tools of the pool file that the server has. `digests`: of the tools as they were first read; one that has
    changed since is not offered, for nobody has looked at what it says now."""
    by_name = {tool.name: tool for tool in listed}
    tools: list[Tool] = []
    problems: list[str] = []
    for name, spec in wanted.items():
        tool = by_name.get(name)
        problem = _problem(tool, digests.get(name))
        if problem is not None or tool is None:
            problems.append(f"{name}: {problem}")
        else:
            tools.append(_tool(tool, spec))
    return Offer(tuple(tools), tuple(problems))


def _problem(tool: ListedTool | None, first: str | None) -> str | None:
    if tool is None:
        return "the server has no such tool"
    if first is not None and tool.digest != first:
        return "the server changed it since it was first read; look at it, then reload the pool"
    if tool.schema.get("type") != "object" or len(json.dumps(tool.schema)) > SCHEMA_CHARS_MAX:
        return f"its schema is not of an object, or is over {SCHEMA_CHARS_MAX} characters"
    return None


def _tool(tool: ListedTool, spec: ToolSpec) -> Tool:
    effects = not tool.read_only if spec.side_effects is None else spec.side_effects
    repeats = bool(tool.idempotent) if spec.idempotent is None else spec.idempotent
    words = spec.description or " ".join(tool.description[:DESCRIPTION_CHARS_MAX].split())
    return Tool(tool.name, words, tool.schema, effects, repeats)


def asked_call(text: str, tools: Sequence[Tool]) -> tuple[Tool, dict[str, Any]]:
    """The call that a step's task spells: `{"tool": NAME, "arguments": {…}}`, the name left out where there is one
    tool. Where that tool takes one text, any other task is this text. Raises UpstreamRefused."""
    fence = _FENCE.match(text)
    try:
        value = json.loads(fence[1] if fence else text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and value and set(value) <= {"tool", "arguments"}:
        name, arguments = value.get("tool"), value.get("arguments", {})
        tool = next((one for one in tools if one.name == name or (name is None and len(tools) == 1)), None)
        if tool is not None and isinstance(arguments, dict):
            return tool, arguments
    elif len(tools) == 1 and (parameter := _only_text(tools[0])):
        return tools[0], {parameter: text}
    names = ", ".join(tool.name for tool in tools) or "none now"
    problem = f'the step names no tool; its task must be {{"tool": NAME, "arguments": {{…}}}} with one of: {names}'
    raise UpstreamRefused(problem, dispatched=False, code="tool_unknown")


def _only_text(tool: Tool) -> str | None:
    """The parameter that must be given, where it is the only one and a text."""
    required, properties = tool.schema.get("required"), tool.schema.get("properties")
    if not isinstance(required, list) or len(required) != 1 or not isinstance(properties, Mapping):
        return None
    return required[0] if _type(properties.get(required[0])) == "string" else None
