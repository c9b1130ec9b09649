"""Converts the content blocks of an Anthropic conversation to chat messages. Pure.

An Anthropic user turn carries tool results, text and media together; a chat conversation has one `tool` message for
each result, and one user message for the rest. What chat cannot say (citations, results of hosted tools, the order of
blocks) goes along for workers that speak Anthropic's own wire (`core/anthropic/native.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.core.anthropic.native import BLOCK, BLOCKS, CACHE, IS_ERROR, THOUGHTS, layout
from gateway.core.anthropic.thinking import with_thinking
from gateway.core.openai.shapes import (
    FLAG,
    FREE_TEXT,
    OBJECT,
    WRONG_TYPE,
    Properties,
    Reader,
    any_of,
    array,
    bad_value,
    missing_parameter,
    one_of,
    refuse_if_dangerous,
    refuse_inside,
    text,
)
from gateway.errors import BadRequest

Block = dict[str, Any]
ROLES = ("user", "assistant", "system")
ID_CHARS_MAX = 512
_TEXT_OR_LIST = any_of(text(2**31), array(0, 2**31)), "a string or a list of content blocks"
_CACHE: Properties = {CACHE: OBJECT}
_TYPE: Properties = {"type": FREE_TEXT}
_NATIVE: Properties = {  # what chat has no place for
    name: ((lambda value: None), "anything") for name in ("citations", "caller", "toolset_name", "transformations")
}
_ID = text(ID_CHARS_MAX), f"a string of at most {ID_CHARS_MAX} characters"
# The properties of each block beside _NATIVE, and the required ones.
_BLOCKS: Mapping[str, tuple[Properties, tuple[str, ...]]] = {
    "text": ({**_TYPE, "text": FREE_TEXT, **_CACHE}, ("text",)),
    "image": ({**_TYPE, "source": OBJECT, **_CACHE}, ("source",)),
    "document": ({**_TYPE, "source": OBJECT, "title": FREE_TEXT, "context": FREE_TEXT, **_CACHE}, ("source",)),
    "search_result": (
        {
            **_TYPE,
            **_CACHE,
            "source": FREE_TEXT,
            "title": FREE_TEXT,
            "content": (array(0, 2**31), "a list of text blocks"),
        },
        ("source", "title", "content"),
    ),
    "tool_result": (
        {**_TYPE, "tool_use_id": _ID, "content": _TEXT_OR_LIST, "is_error": FLAG, **_CACHE},
        ("tool_use_id",),
    ),
    "tool_use": (
        {**_TYPE, "id": _ID, "name": (text(256), "a string"), "input": OBJECT, **_CACHE},
        ("id", "name", "input"),
    ),
    "thinking": ({**_TYPE, "thinking": FREE_TEXT, "signature": FREE_TEXT}, ("thinking",)),
    "redacted_thinking": ({**_TYPE, "data": FREE_TEXT}, ("data",)),
}
_MEDIA = ("text", "image", "document", "search_result")
_ROLE_BLOCKS = {
    "user": (*_MEDIA, "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
_HOSTED = ("server_tool_use", "mcp_tool_use", "container_upload", "tool_reference", "browser_state", "compaction")
_SOURCES: Mapping[str, tuple[Properties, tuple[str, ...]]] = {
    "base64": ({**_TYPE, "media_type": FREE_TEXT, "data": FREE_TEXT}, ("media_type", "data")),
    "url": ({**_TYPE, "url": FREE_TEXT}, ("url",)),
    "text": ({**_TYPE, "media_type": FREE_TEXT, "data": FREE_TEXT}, ("data",)),
    "content": ({**_TYPE, "content": _TEXT_OR_LIST}, ("content",)),
}
_SOURCE_TYPES = {"image": ("base64", "url"), "document": ("base64", "url", "text", "content")}


@dataclass(frozen=True, slots=True)
class Turn:
    """A chat message, the path of the property that it was made from, and the path of each of its content parts.
    `native`: properties of the message, and `blocks`: of each part the block, that only Anthropic's wire has."""

    message: Mapping[str, Any]
    where: str
    parts: tuple[str, ...] = ()
    native: Mapping[str, Any] = field(default_factory=dict)
    blocks: tuple[Block | None, ...] = ()

    def with_native(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message as chat has read it, with what only Anthropic's wire has."""
        content = message.get("content")
        if not isinstance(content, list) or not any(block is not None for block in self.blocks):
            return {**message, **self.native} if self.native else message
        parts = [
            part if block is None else {**part, BLOCK: block} for part, block in zip(content, self.blocks, strict=True)
        ]
        return {**message, **self.native, "content": parts}


@dataclass(frozen=True, slots=True)
class _Part:
    """A content part of a chat message, and the path of the block that it was made from. `block`: that block where
    chat cannot say all of it; empty where the part is said elsewhere."""

    part: Block
    where: str
    block: Block | None = None


def system_turn(raw: Any, reader: Reader) -> list[Turn]:
    """The system message of a request, as a list of one turn; an empty list if it holds no text."""
    return _message("system", _parts(raw, "system", _ROLE_BLOCKS["system"], reader), "system")


def conversation(raw: Sequence[Any], reader: Reader) -> list[Turn]:
    """The turns of a list of messages. Raises BadRequest with the path of the first invalid value, and for a tool call
    without a result right behind it."""
    turns: list[Turn] = []
    for at, message in enumerate(raw):
        turns += _turns(message, f"messages[{at}]", reader)
    _check_results(turns)
    return turns


def _turns(raw: Any, where: str, reader: Reader) -> list[Turn]:
    properties: Properties = {"role": (one_of(*ROLES), ", ".join(ROLES)), "content": _TEXT_OR_LIST}
    message = reader.object(raw, where, properties, ("role", "content"))
    role, content, spot = message["role"], message["content"], f"{where}.content"
    if role == "assistant":
        return _assistant(_blocks(content, spot, _ROLE_BLOCKS[role], reader), where)
    if role == "system":
        return _message(role, _parts(content, spot, _ROLE_BLOCKS[role], reader), where)
    results: list[Turn] = []
    parts: list[_Part] = []
    for block, place in _blocks(content, spot, _ROLE_BLOCKS[role], reader):
        if block["type"] == "tool_result":
            results.append(_result(block, place, reader))
        else:
            parts += _chat_parts(block, place, reader)
    return [*results, *_message(role, parts, where)]


def _message(role: str, parts: Sequence[_Part], where: str) -> list[Turn]:
    """One message of these parts; none without parts. A single text becomes a string, which every worker takes."""
    if not parts:
        return []
    return [_turn({"role": role}, parts, where)]


def _turn(message: Block, parts: Sequence[_Part], where: str, native: Mapping[str, Any] | None = None) -> Turn:
    """The turn of a message with these parts as its content."""
    places, blocks = tuple(part.where for part in parts), tuple(part.block for part in parts)
    return Turn({**message, "content": _content(parts)}, where, places, native or {}, blocks)


def _content(parts: Sequence[_Part]) -> str | list[Block]:
    if not parts:
        return ""
    first = parts[0]
    if len(parts) < 2 and first.part.keys() == {"type", "text"} and first.block is None:
        return str(first.part["text"])
    return [part.part for part in parts]


def _assistant(blocks: Iterable[tuple[Block, str]], where: str) -> list[Turn]:
    """One assistant message: its text, its tool calls, and the thinking in front of them."""
    texts: list[_Part] = []
    calls: list[Block] = []
    thoughts: list[Block] = []
    blocks = list(blocks)
    for block, place in blocks:
        kind = block["type"]
        if kind == "text":
            texts.append(_Part(_text_part(block["text"], block), place))
        elif kind == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind in THOUGHTS:
            thoughts.append(block)
    message: Block = {"role": "assistant", "content": _content(texts) if texts else None}
    message |= {"tool_calls": calls} if calls else {}
    if not texts and not calls:
        message["content"] = ""
    order = layout([block for block, _ in blocks])
    native = {} if order is None else {BLOCKS: order}
    return [Turn(with_thinking(message, thoughts), where, tuple(part.where for part in texts), native)]


def _result(block: Block, where: str, reader: Reader) -> Turn:
    """The tool message of a result. One that failed says so in its text, too: chat has no property for it."""
    parts = _parts(block.get("content") or "", f"{where}.content", _MEDIA, reader)
    failed = {IS_ERROR: True} if block.get("is_error") else {}
    if failed:
        parts.insert(0, _Part({"type": "text", "text": "Error: "}, where, {}))
    return _turn({"role": "tool", "tool_call_id": block["tool_use_id"], **failed}, parts, where, _cache(block))


# ---------------------------------------------------------------- blocks


def _blocks(content: Any, where: str, kinds: Sequence[str], reader: Reader) -> list[tuple[Block, str]]:
    """(block without unknown properties, its path) for each block of a content. Raises BadRequest."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)] if content else []
    reader.count_parts(len(content), where)
    return [(_block(raw, f"{where}[{at}]", kinds, reader), f"{where}[{at}]") for at, raw in enumerate(content)]


def _block(raw: Any, where: str, kinds: Sequence[str], reader: Reader) -> Block:
    """The block without unknown properties; one of a hosted tool as it is."""
    if not isinstance(raw, dict):
        raise bad_value(where, "an object", WRONG_TYPE)
    kind = raw.get("type")
    if kind is None:
        raise missing_parameter(f"{where}.type")
    if isinstance(kind, str) and (kind in _HOSTED or (kind.endswith("_tool_result"))):
        for name in raw:
            refuse_if_dangerous(name, f"{where}.{name}")
        return raw
    if not isinstance(kind, str) or kind not in kinds:
        raise bad_value(f"{where}.type", " or ".join(kinds), "invalid_value")
    properties, required = _BLOCKS[kind]
    block = reader.object(raw, where, {**properties, **_NATIVE}, required)
    refuse_inside({name: block[name] for name in _NATIVE if name in block}, where)
    return block


def _parts(content: Any, where: str, kinds: Sequence[str], reader: Reader) -> list[_Part]:
    blocks = _blocks(content, where, kinds, reader)
    return [part for block, place in blocks for part in _chat_parts(block, place, reader)]


def _chat_parts(block: Block, where: str, reader: Reader) -> list[_Part]:
    """The chat parts of a text, an image, a document or a search result; of a hosted tool's block an empty text."""
    kind = block["type"]
    if kind == "text":
        return [_Part(_text_part(block["text"], block), where, block if block.get("citations") else None)]
    if kind == "search_result":
        inner = _blocks(block["content"], f"{where}.content", ("text",), reader)
        lines = [f"{block['title']} ({block['source']})", *(part["text"] for part, _ in inner)]
        return [_Part(_text_part("\n".join(lines), block), where, block)]
    if kind not in _MEDIA:
        return [_Part({"type": "text", "text": ""}, where, block)]
    source = _source(block["source"], kind, f"{where}.source", reader)
    if kind == "image":
        return [_Part({"type": "image_url", "image_url": {"url": _link(source)}, **_cache(block)}, where)]
    heads = [block[name] for name in ("title", "context") if block.get(name)]
    if source["type"] == "text":
        return [_Part(_text_part("\n".join([*heads, source["data"]]), block), where, block)]
    if source["type"] == "content":
        inner = _blocks(source["content"], f"{where}.source.content", ("text", "image"), reader)
        parts = [part for one, place in inner for part in _chat_parts(one, place, reader)]
        parts = [*(_Part({"type": "text", "text": head}, where) for head in heads), *parts]
        return [replace(part, block={} if at else block) for at, part in enumerate(parts)]
    file = {"file_data": _link(source), "filename": block.get("title") or "document.pdf"}
    extras = any(block.get(name) for name in ("title", "context", "citations"))
    return [_Part({"type": "file", "file": file, **_cache(block)}, where, block if extras else None)]


def _source(raw: Any, kind: str, where: str, reader: Reader) -> Block:
    type_ = raw.get("type")
    if type_ == "file":
        problem = f"`{where}.type`: no file of an id is kept here; send the data itself"
        raise BadRequest(problem, param=f"{where}.type", code="unsupported_value")
    if type_ not in _SOURCE_TYPES[kind]:
        raise bad_value(f"{where}.type", " or ".join(_SOURCE_TYPES[kind]), "invalid_value")
    return reader.object(raw, where, *_SOURCES[type_])


def _link(source: Block) -> str:
    return str(source["url"]) if "url" in source else f"data:{source['media_type']};base64,{source['data']}"


def _text_part(content: str, block: Mapping[str, Any]) -> Block:
    return {"type": "text", "text": content, **_cache(block)}


def _cache(block: Mapping[str, Any]) -> Block:
    return {name: block[name] for name in (CACHE,) if name in block}


def _check_results(turns: Sequence[Turn]) -> None:
    """Raises BadRequest unless the results of all calls, and only those, follow each assistant turn."""
    waiting: dict[str, str] = {}  # the id of a call without a result → the path of the turn that made it
    for turn in turns:
        message = turn.message
        if message["role"] == "tool":
            if waiting.pop(message["tool_call_id"], None) is None:
                name = f"{turn.where}.tool_use_id"
                problem = f"`{name}`: no `tool_use` block in the previous message has this id"
                raise BadRequest(problem, param=name, code="invalid_value")
            continue
        _check_none_waits(waiting)
        waiting = {call["id"]: turn.where for call in message.get("tool_calls") or ()}
    _check_none_waits(waiting)


def _check_none_waits(waiting: Mapping[str, str]) -> None:
    if waiting:
        where = next(iter(waiting.values()))
        ids = ", ".join(waiting)[:256]
        problem = f"`{where}`: `tool_use` ids without `tool_result` blocks immediately after: {ids}"
        raise BadRequest(problem, param=where, code="invalid_value")
