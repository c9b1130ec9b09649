"""Roles and turns of a conversation as a worker's chat template takes them. Pure.

OpenAI takes any order of any roles. Templates of open models refuse `developer`, a system message behind the first
turn, or two turns of one role; some vendors refuse names and empty texts. What a worker does not take is written in a
form that it does: nothing is left out, and nothing moves to another place in the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
SYSTEMS = ("system", "developer")
NOTHING = "(empty)"  # stands for a text that is empty
PAUSE = "…"  # stands for a turn that is missing


@dataclass(frozen=True, slots=True)
class Template:
    """What a worker takes, beside turns of the user and the assistant."""

    developer: bool = True
    system: bool = True
    late_system: bool = True  # system messages behind the first message
    repeated_roles: bool = True  # turns of one role in a row, and an assistant's turn at the beginning
    name: bool = True
    empty_content: bool = True
    tools: bool = True  # calls and their results


ANY = Template()


def for_template(messages: Sequence[Message], template: Template) -> list[dict[str, Any]]:
    """The messages as the template takes them."""
    turns = [dict(message) for message in messages]
    if template == ANY:
        return turns
    if not template.developer:
        turns = [{**turn, "role": "system"} if turn["role"] == "developer" else turn for turn in turns]
    if not template.tools:
        turns = [_without_tools(turn) for turn in turns]
    if not template.name:
        turns = [_without_name(turn) if "name" in turn and turn["role"] in _NAMED else turn for turn in turns]
    if not (template.late_system and template.system):
        turns = _with_systems_first(turns, template.system)
    if not template.empty_content:
        turns = [full for turn in turns if (full := _filled(turn)) is not None]
    return turns if template.repeated_roles else _alternating(turns)


_NAMED = ("user", "assistant", *SYSTEMS)


def _without_name(turn: Message) -> dict[str, Any]:
    """The turn with the name in its text, if it is a user's; an assistant would go on to write its own."""
    rest = {field: value for field, value in turn.items() if field != "name"}
    return _with_text(rest, f"{turn['name']}: ", "") if turn["role"] == "user" else rest


def _without_tools(turn: Message) -> dict[str, Any]:
    """A call as the assistant's text, and a result as the user's."""
    if turn["role"] in ("tool", "function"):
        return _with_text({"role": "user", "content": turn.get("content")}, "[result] ", "")
    calls = turn.get("tool_calls")
    if not calls:
        return dict(turn)
    rest = {field: value for field, value in turn.items() if field != "tool_calls"}
    details = [call.get(call.get("type", "function")) or {} for call in calls]
    texts = [f"[{one.get('name')}] {one.get('arguments', one.get('input'))}" for one in details]
    return _with_text({**rest, "content": rest.get("content") or ""}, "", "\n".join(texts))


def _with_systems_first(turns: Sequence[dict[str, Any]], has_role: bool) -> list[dict[str, Any]]:
    """The system messages at the beginning as one, later ones in the user's turn beside them, marked as what they
    are."""
    begin = next((at for at, turn in enumerate(turns) if turn["role"] not in SYSTEMS), len(turns))
    later: list[dict[str, Any]] = []
    was_system = False
    for turn in turns[begin:]:
        is_system = turn["role"] in SYSTEMS
        turn = _marked(turn) if is_system else turn
        if later and later[-1]["role"] == turn["role"] == "user" and (is_system or was_system):
            later[-1] = _joined(later[-1], turn)
        else:
            later.append(turn)
        was_system = is_system
    if begin == 0:
        return later
    first = turns[0]
    for turn in turns[1:begin]:
        first = _joined(first, turn)
    if has_role:
        return [first, *later]
    first = {**first, "role": "user"}
    return [_joined(first, later[0]), *later[1:]] if later and later[0]["role"] == "user" else [first, *later]


def _marked(turn: Message) -> dict[str, Any]:
    return _with_text({**turn, "role": "user"}, "<system>\n", "\n</system>")


def _filled(turn: dict[str, Any]) -> dict[str, Any] | None:
    """The turn without empty texts; None where nothing is left of one that nobody misses."""
    content = turn.get("content")
    if isinstance(content, list):
        content = [part for part in content if part.get("type") != "text" or (part.get("text") or "").strip()]
    elif isinstance(content, str) and not content.strip():
        content = None
    if content:
        return turn if content is turn["content"] else {**turn, "content": content}
    if turn["role"] == "assistant":
        kept = any(value for field, value in turn.items() if field not in ("role", "content", "name"))
        return {**turn, "content": None} if kept else None
    return None if turn["role"] in SYSTEMS else {**turn, "content": NOTHING}


def _alternating(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns of user and assistant by turns: two of one role become one, and one that is missing is a pause. Calls
    and their results do not count, as in the templates that want this."""
    made: list[dict[str, Any]] = []
    last = ""  # the role of the last turn that counts
    for turn in turns:
        role = turn["role"]
        counts = role in ("user", "assistant") and not turn.get("tool_calls")
        if counts and role == last and made[-1]["role"] == role and not made[-1].get("tool_calls"):
            made[-1] = _joined(made[-1], turn)
            continue
        if counts and role == (last or "assistant"):
            made.append({"role": "user" if role == "assistant" else "assistant", "content": PAUSE})
        last = role if counts else last
        made.append(turn)
    return made


def _joined(one: Message, other: Message) -> dict[str, Any]:
    """Two turns of one role as one."""
    texts = [one.get("content"), other.get("content")]
    if all(isinstance(text, str | None) for text in texts):
        return {**other, **one, "content": "\n\n".join(text for text in texts if text)}
    return {**other, **one, "content": [part for text in texts for part in _parts(text)]}


def _with_text(turn: Message, before: str, behind: str) -> dict[str, Any]:
    """The turn with texts around its content."""
    content = turn.get("content")
    if isinstance(content, list):
        around = [[{"type": "text", "text": text}] if text else [] for text in (before, behind)]
        return {**turn, "content": [*around[0], *content, *around[1]]}
    return {**turn, "content": f"{before}{_text(content)}{behind}"}


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "" if content is None else json.dumps(content)
