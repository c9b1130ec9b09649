"""What the scripted model says: an answer that follows from the request alone, so that each client can be checked.

Text is echoed, tools are called and then quoted, a schema is filled in. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHELLS = {"Bash": "command", "run_shell_command": "command", "exec_command": "cmd"}  # of coding agents: its argument
CITIES = ("Paris", "Tokyo", "Lima")
TAIL = "Zürich 東京 🎼"  # two-, three- and four-byte characters
PLAN = {
    "steps": [
        {"worker": "quill", "task": "Say in a few words what matters for this request.", "see": []},
        {"worker": "atlas", "task": None, "see": [0]},
    ]
}


@dataclass(frozen=True)
class Answer:
    """One reply: a text, or calls as (name, arguments)."""

    text: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    refusal: str | None = None


def answer(worker: str, body: Mapping[str, Any]) -> Answer:
    """What `worker` replies to a chat request."""
    if worker == "planner":
        return Answer(json.dumps(PLAN, separators=(",", ":")))
    if worker == "drafter":
        return Answer("It is about a place.")
    if worker == "refuser":
        return Answer(refusal="I can't help with that.")
    messages: Sequence[Mapping[str, Any]] = body["messages"]
    results = results_of(messages)
    if calls := _calls(body, results):
        return Answer(calls=calls)
    if schema := _schema(body):
        return Answer(json.dumps(fill(schema, _words(messages) + " ".join(results), schema), ensure_ascii=False))
    if results:
        return Answer("The tool said: " + " and ".join(results))
    return Answer(f"You said: {_asked(messages)} {TAIL}")


def results_of(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The results of the latest calls, in order."""
    latest: list[str] = []
    for message in messages:
        if message.get("role") == "assistant":
            latest = []
        elif message.get("role") in ("tool", "function"):
            latest.append(_text(message.get("content")))
    return latest


def _calls(body: Mapping[str, Any], results: Sequence[str]) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Each tool once: the named one; else the first that was not called before, while any is due."""
    tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or () if "function" in tool}
    choice = body.get("tool_choice", "auto")
    if not tools or choice == "none":
        return ()
    words = _words(body["messages"])
    if commands := re.findall(r"\[\[(.+?)\]\]", words):
        return () if results else _shell_calls(tools, commands[-1])
    if isinstance(choice, Mapping):
        named = choice["function"]["name"]
        return ((named, _arguments(tools[named], words)),)
    fresh = [name for name in tools if name not in _called(body["messages"])]
    if not fresh or (results and choice != "required"):
        return ()
    cities = [city for city in CITIES if city in _asked(body["messages"])]
    if len(cities) > 1 and body.get("parallel_tool_calls", True):
        return tuple((fresh[0], _arguments(tools[fresh[0]], city)) for city in cities)
    return ((fresh[0], _arguments(tools[fresh[0]], words)),)


def _shell_calls(tools: Mapping[str, Any], command: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """The call of a coding agent's shell; none where the tools hold no shell."""
    return tuple((name, {argument: command}) for name, argument in SHELLS.items() if name in tools)[:1]


def _called(messages: Sequence[Mapping[str, Any]]) -> set[str]:
    return {call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()}


def _arguments(function: Mapping[str, Any], words: str) -> dict[str, Any]:
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    filled = fill(schema, words, schema)
    assert isinstance(filled, dict)
    return filled


def _schema(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    wanted = body.get("response_format") or {}
    if wanted.get("type") == "json_object":
        named = re.search(r"with '(\w+)' and '(\w+)' keys", _words(body["messages"]))
        kinds = dict.fromkeys(named.groups(), "string") if named else {"city": "string", "millions": "integer"}
        return {"type": "object", "properties": {name: {"type": kind} for name, kind in kinds.items()}}
    found: Mapping[str, Any] | None = (wanted.get("json_schema") or {}).get("schema")
    return found


def fill(schema: Mapping[str, Any], words: str, root: Mapping[str, Any]) -> Any:
    """A value of the schema. A string is the city that the words name, a number the first number in them."""
    if "$ref" in schema:
        found: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        return fill(found, words, root)
    for name in ("const", "default"):
        if name in schema:
            return schema[name]
    if "enum" in schema:
        return schema["enum"][0]
    for name in ("anyOf", "oneOf", "allOf"):
        if name in schema:
            return fill(schema[name][0], words, root)
    return _of_type(schema, words, root)


def _of_type(schema: Mapping[str, Any], words: str, root: Mapping[str, Any]) -> Any:
    kind = schema.get("type", "object")
    number = re.search(r"\d+", words)
    match kind[0] if isinstance(kind, list) else kind:
        case "string":
            named = re.search(r"named '([^']+)'", words)
            return named[1] if named else next((city for city in CITIES if city in words), CITIES[0])
        case "integer" | "number":
            return int(number[0]) if number else 7
        case "boolean":
            return True
        case "array":
            return [fill(schema.get("items", {"type": "string"}), words, root)]
        case "null":
            return None
    return {name: fill(inner, words, root) for name, inner in (schema.get("properties") or {}).items()}


def _asked(messages: Sequence[Mapping[str, Any]]) -> str:
    """The last thing the user said."""
    users = [message for message in messages if message.get("role") == "user"]
    return _text(users[-1].get("content")) if users else ""


def _words(messages: Sequence[Mapping[str, Any]]) -> str:
    return _asked(messages) + " "


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return " ".join(str(part.get("text", f"[{part.get('type')}]")) for part in content or ())


def pieces(text: str) -> Iterator[str]:
    """A text in the tokens it is streamed by."""
    yield from re.findall(r"\s*\S+|\s+$", text)
