"""Converts the content blocks of an Anthropic conversation to chat messages. Pure.

An Anthropic user turn carries tool results, text and media together; a chat conversation has one `tool` message for
each result, and one user message for the rest. Blocks that only Anthropic's own server can read (results of its hosted
tools) are left out, and the request names them among its dropped properties.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    text,
)
from gateway.errors import BadRequest

Block = dict[str, Any]
ROLES = ("user", "assistant", "system")
ID_CHARS_MAX = 512
_TEXT_OR_LIST = any_of(text(2**31), array(0, 2**31)), "a string or a list of content blocks"
_CACHE: Properties = {"cache_control": OBJECT}
_TYPE: Properties = {"type": FREE_TEXT}
_ID = text(ID_CHARS_MAX), f"a string of at most {ID_CHARS_MAX} characters"
# The properties of each block, and the required ones. Properties that are in _UNSENT are read and not passed on.
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
        {**_TYPE, "id": _ID, "name": (text(256), "a string"), "input": OBJECT},
        ("id", "name", "input"),
    ),
    "thinking": ({**_TYPE, "thinking": FREE_TEXT, "signature": FREE_TEXT}, ("thinking",)),
    "redacted_thinking": ({**_TYPE, "data": FREE_TEXT}, ("data",)),
}
_UNSENT = ("citations", "caller", "toolset_name", "transformations")
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
    """A chat message, the path of the property that it was made from, and the path of each of its content parts."""

    message: Mapping[str, Any]
    where: str
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Part:
    """A content part of a chat message, and the path of the block that it was made from."""

    part: Block
    where: str


def system_turn(raw: Any, reader: Reader) -> list[Turn]:
    """The system message of a request, as a list of one turn; an empty list if it holds no text."""
    return _message("system", _parts(raw, "system", "system", reader), "system")


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
        return _message(role, _parts(content, spot, role, reader), where)
    results: list[Turn] = []
    parts: list[_Part] = []
    for block, place in _blocks(content, spot, _ROLE_BLOCKS[role], reader):
        if block["type"] == "tool_result":
            result, media = _result(block, place, reader)
            results.append(result)
            parts += media
        else:
            parts += _chat_parts(block, place, reader)
    return [*results, *_message(role, parts, where)]


def _message(role: str, parts: Sequence[_Part], where: str) -> list[Turn]:
    """One message of these parts; none without parts. A single text becomes a string, which every worker takes."""
    if not parts:
        return []
    return [Turn({"role": role, "content": _content(parts)}, where, tuple(part.where for part in parts))]


def _content(parts: Sequence[_Part]) -> str | list[Block]:
    first = parts[0].part if parts else {"type": "text", "text": ""}
    if len(parts) < 2 and first.keys() == {"type", "text"}:
        return str(first["text"])
    return [part.part for part in parts]


def _assistant(blocks: Iterable[tuple[Block, str]], where: str) -> list[Turn]:
    """One assistant message: its text, its tool calls, and the thinking in front of them."""
    texts: list[_Part] = []
    calls: list[Block] = []
    thoughts: list[Block] = []
    for block, place in blocks:
        kind = block["type"]
        if kind == "text":
            texts.append(_Part(_text_part(block["text"], block), place))
        elif kind == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
            calls.append({"id": block["id"], "type": "function", "function": function})
        else:
            thoughts.append(block)
    message: Block = {"role": "assistant", "content": _content(texts) if texts else None}
    message |= {"tool_calls": calls} if calls else {}
    if not texts and not calls:
        message["content"] = ""
    return [Turn(with_thinking(message, thoughts), where, tuple(part.where for part in texts))]


def _result(block: Block, where: str, reader: Reader) -> tuple[Turn, list[_Part]]:
    """(the tool message of a result, its media parts). Workers take only text as a tool's result, so media follow in
    the user's message, behind a sentence that says where they belong."""
    texts: list[_Part] = []
    media: list[_Part] = []
    for inner, place in _blocks(block.get("content") or "", f"{where}.content", _MEDIA, reader):
        for part in _chat_parts(inner, place, reader):
            (texts if part.part["type"] == "text" else media).append(part)
    if block.get("is_error"):
        texts.insert(0, _Part({"type": "text", "text": "Error: "}, where))
    if "cache_control" in block:
        texts = texts or [_Part({"type": "text", "text": ""}, where)]
        texts[-1].part["cache_control"] = block["cache_control"]
    call_id = block["tool_use_id"]
    failed = {"is_error": True} if block.get("is_error") else {}
    message = {"role": "tool", "tool_call_id": call_id, "content": _content(texts), **failed}
    turn = Turn(message, where, tuple(part.where for part in texts))
    note = _Part({"type": "text", "text": f"The result of tool call {call_id} also holds:"}, where)
    return turn, [note, *media] if media else []


# ---------------------------------------------------------------- blocks


def _blocks(content: Any, where: str, kinds: Sequence[str], reader: Reader) -> list[tuple[Block, str]]:
    """(block without unknown properties, its path) for each block of a content. Raises BadRequest."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)] if content else []
    reader.count_parts(len(content), where)
    blocks = [(_block(raw, f"{where}[{at}]", kinds, reader), f"{where}[{at}]") for at, raw in enumerate(content)]
    return [(block, place) for block, place in blocks if block is not None]


def _block(raw: Any, where: str, kinds: Sequence[str], reader: Reader) -> Block | None:
    """The block, or None for one that is left out and named."""
    if not isinstance(raw, dict):
        raise bad_value(where, "an object", WRONG_TYPE)
    kind = raw.get("type")
    if kind is None:
        raise missing_parameter(f"{where}.type")
    if isinstance(kind, str) and (kind in _HOSTED or (kind.endswith("_tool_result"))):
        reader.drop(where)
        return None
    if not isinstance(kind, str) or kind not in kinds:
        raise bad_value(f"{where}.type", " or ".join(kinds), "invalid_value")
    for name in _UNSENT:
        if raw.get(name) not in (None, {"type": "direct"}, {"enabled": False}):
            reader.drop(f"{where}.{name}")
    fields = {name: value for name, value in raw.items() if name not in _UNSENT}
    return reader.object(fields, where, *_BLOCKS[kind])


def _parts(content: Any, where: str, role: str, reader: Reader) -> list[_Part]:
    blocks = _blocks(content, where, _ROLE_BLOCKS[role], reader)
    return [part for block, place in blocks for part in _chat_parts(block, place, reader)]


def _chat_parts(block: Block, where: str, reader: Reader) -> list[_Part]:
    """The chat parts of a text, an image, a document or a search result."""
    kind = block["type"]
    if kind == "text":
        return [_Part(_text_part(block["text"], block), where)]
    if kind == "search_result":
        inner = _blocks(block["content"], f"{where}.content", ("text",), reader)
        lines = [f"{block['title']} ({block['source']})", *(part["text"] for part, _ in inner)]
        return [_Part(_text_part("\n".join(lines), block), where)]
    source = _source(block["source"], kind, f"{where}.source", reader)
    if kind == "image":
        return [_Part({"type": "image_url", "image_url": {"url": _link(source)}, **_cache(block)}, where)]
    heads = [block[name] for name in ("title", "context") if block.get(name)]
    if source["type"] == "text":
        return [_Part(_text_part("\n".join([*heads, source["data"]]), block), where)]
    if source["type"] == "content":
        inner = _blocks(source["content"], f"{where}.source.content", ("text", "image"), reader)
        parts = [part for one, place in inner for part in _chat_parts(one, place, reader)]
        return [*(_Part({"type": "text", "text": head}, where) for head in heads), *parts]
    file = {"file_data": _link(source), "filename": block.get("title") or "document.pdf"}
    return [_Part({"type": "file", "file": file, **_cache(block)}, where)]


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
    return {name: block[name] for name in ("cache_control",) if name in block}


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
