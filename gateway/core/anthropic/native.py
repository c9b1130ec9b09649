"""What only Anthropic's own wire can say, carried through a chat request for the workers that speak it. Pure.

A chat request has three places for it. Its parameter PARAM holds properties of the request. A content part holds under
BLOCK the block that is sent in its place; an empty one is not sent. An assistant message holds under BLOCKS the layout
of its turn: all blocks in order, where `thinking` and `tool_use` stand for the next of the message's thinking blocks
and calls. Replies have the same layout. Workers with another wire get none of it, and the request names what they lack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Block = dict[str, Any]
PARAM, BLOCK, BLOCKS = "anthropic", "block", "blocks"
CACHE = "cache_control"
NATIVE_FINISH = "native_finish_reason"  # of a choice: Anthropic's own word for why it ended
NATIVE_USAGE = "native_usage"  # of a choice: what Anthropic's usage says besides tokens
IS_ERROR = "is_error"  # of a tool message
THOUGHTS = ("thinking", "redacted_thinking")
BETAS = "betas"  # names of the header `anthropic-beta`
_KINDS = {"thinking": 0, "redacted_thinking": 0, "text": 1, "tool_use": 2}  # by their place in a plain turn
_CHAT = {"text": {"type", "text", CACHE}, "tool_use": {"type", "id", "name", "input"}}


def layout(content: Sequence[Mapping[str, Any]]) -> list[Block] | None:
    """The layout of a turn; None if its chat message says it all: thinking, at most one text, then calls."""
    places = [_KINDS.get(str(block.get("type")), -1) for block in content]
    plain = -1 not in places and places == sorted(places) and places.count(1) < 2
    if plain and not any(_extras(block) or block.get("text") == "" for block in content):
        return None
    return [_placed(block) for block in content]


def _extras(block: Mapping[str, Any]) -> Block:
    """The properties of a text or a call that chat does not have."""
    known = _CHAT.get(str(block.get("type")), block)
    direct = {"type": "direct"}  # who calls a tool where nobody else is named
    return {name: value for name, value in block.items() if name not in known and value not in (None, direct)}


def _placed(block: Mapping[str, Any]) -> Block:
    kind = str(block.get("type"))
    if kind in THOUGHTS:
        return {"type": "thinking"}
    return {"type": kind, **_extras(block)} if kind == "tool_use" else dict(block)


def filled(blocks: Sequence[Mapping[str, Any]], thoughts: Sequence[Block], calls: Sequence[Block]) -> Iterator[Block]:
    """The blocks of a turn, from its layout, its thinking and its calls. What the layout has no place for follows."""
    thought, call = iter(thoughts), iter(calls)
    for block in blocks:
        if block.get("type") == "thinking":
            yield from _next(thought, {})
        elif block.get("type") == "tool_use":
            yield from _next(call, block)
        else:
            yield dict(block)
    yield from call


def _next(blocks: Iterator[Block], extras: Mapping[str, Any]) -> Iterator[Block]:
    block = next(blocks, None)
    if block is not None:
        yield {**block, **extras}


def without_native(
    messages: Sequence[Mapping[str, Any]], *, caches: bool
) -> tuple[Sequence[Mapping[str, Any]], list[str]]:
    """(the messages for a worker with another wire, the types of what it lacks). `caches`: whether it knows
    `cache_control`."""
    names = {BLOCK, BLOCKS, IS_ERROR} | (set() if caches else {CACHE})
    if not any(_has(message, names) for message in messages):
        return messages, []
    lost = [kind for message in messages for kind in _lost(message)]
    changed = [_without(message, names) if _has(message, names) else message for message in messages]
    return changed, list(dict.fromkeys(lost))


def _has(message: Mapping[str, Any], names: set[str]) -> bool:
    content = message.get("content")
    if not names.isdisjoint(message):
        return True
    return isinstance(content, list) and any(not names.isdisjoint(part) for part in content)


def _lost(message: Mapping[str, Any]) -> Iterator[str]:
    content = message.get("content")
    parts = [part[BLOCK] for part in (content if isinstance(content, list) else ()) if part.get(BLOCK)]
    for block in (*message.get(BLOCKS, ()), *parts):
        if block.get("type") not in _KINDS and block.get("type") not in ("document", "search_result"):
            yield str(block.get("type"))
        citations = block.get("citations")
        if citations and citations != {"enabled": False}:
            yield "citations"


def _without(item: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """The message or part without these properties. A single text becomes a string again, which every worker takes."""
    fields = {name: value for name, value in item.items() if name not in names}
    content = fields.get("content")
    if not isinstance(content, list):
        return fields
    parts = [_without(part, names) for part in content]
    is_text = len(parts) == 1 and parts[0].keys() == {"type", "text"}
    return fields | {"content": parts[0]["text"] if is_text else parts}
