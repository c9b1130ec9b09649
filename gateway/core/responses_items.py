"""Items of the Responses API ↔ chat messages. Pure.

A conversation is kept as chat messages, which is what workers are sent and what the log holds; items are made of them
when a client asks. An item's id names the response it belongs to, so that a reference to it can be looked up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.errors import BadRequest, NotFound

Item = Mapping[str, Any]
Message = dict[str, Any]
ROLES = ("user", "system", "developer", "assistant")
INPUT_PARTS = ("input_text", "input_image", "input_file")
OUTPUT_PARTS = ("output_text", "refusal")
KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
INPUT_IDS = 0x800000  # ordinals of input items begin here, those of output items at 0
TEXT_CHARS_MAX = 10_485_760
ID_CHARS_MAX = 64
_ID = re.compile(r"(?:msg|fc|fco|rs)_([0-9a-f]{32})[0-9a-f]{6}")


def item_id(prefix: str, response_hex: str, ordinal: int) -> str:
    """The id of an item: what it is, whose it is, which one it is."""
    return f"{prefix}_{response_hex}{ordinal:06x}"


def response_of(an_item_id: str) -> str | None:
    """The id of the response that an item id names, None where it names none."""
    found = _ID.fullmatch(an_item_id)
    return f"resp_{found[1]}" if found else None


def kind_of(item: Item) -> str:
    """What an item is; `type` may be left out of a message and of a reference."""
    kind = item.get("type")
    if kind is None:
        return "message" if "role" in item else "item_reference" if "id" in item else ""
    return kind if isinstance(kind, str) else ""


def parse_items(raw: Any, items_max: int) -> list[Item]:
    """`input` as items; a string is one message of the user. Raises BadRequest naming what is wrong with its shape."""
    if isinstance(raw, str):
        return [{"type": "message", "role": "user", "content": raw}]
    if not isinstance(raw, list):
        raise BadRequest("`input` must be a string or a list of items", param="input", code="invalid_type")
    if len(raw) > items_max:
        raise BadRequest(f"`input` holds {len(raw)} items; at most {items_max} are accepted", param="input")
    for index, item in enumerate(raw):
        if not isinstance(item, dict):
            raise _bad(f"input[{index}]", "an object", "invalid_type")
        if kind_of(item) not in KINDS:
            raise _bad(f"input[{index}].type", f"one of {', '.join(KINDS)}", "invalid_value")
    return raw


def references(items: Iterable[Item]) -> dict[int, str]:
    """The ids that `item_reference` items point at, by index. Raises BadRequest."""
    found = {}
    for index, item in enumerate(items):
        if kind_of(item) == "item_reference":
            found[index] = _string(item, "id", f"input[{index}]", ID_CHARS_MAX)
    return found


def no_such_item(an_item_id: str, index: int) -> NotFound:
    """The error for a reference that leads nowhere."""
    fix = "Only items of stored responses can be referred to; send the item itself."
    return NotFound(f"Item with id '{an_item_id[:ID_CHARS_MAX]}' not found. {fix}", param=f"input[{index}].id")


# ---------------------------------------------------------------- items → messages


def to_messages(items: Sequence[Item]) -> list[Message]:
    """The chat messages that items stand for; reasoning is left out. Raises BadRequest naming the item's field.

    Calls and text of one assistant turn are separate items and one message.
    """
    messages: list[Message] = []
    for index, item in enumerate(items):
        where, kind = f"input[{index}]", kind_of(item)
        if kind == "message":
            _add_message(messages, item, where)
        elif kind == "function_call":
            _assistant(messages).setdefault("tool_calls", []).append(_call(item, where))
        elif kind == "function_call_output":
            messages.append(_output(item, where))
    return messages


def check_calls(messages: Sequence[Mapping[str, Any]]) -> None:
    """Every result belongs to a call before it and every call has its result, as workers insist. Raises BadRequest."""
    waiting: dict[str, None] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            waiting[str(call.get("id"))] = None
        if message.get("role") != "tool":
            continue
        call_id = message["tool_call_id"]
        if call_id not in waiting:
            text = f"No tool call found for function call output with call_id {call_id[:ID_CHARS_MAX]}."
            raise BadRequest(text, param="input", code="tool_call_not_found")
        del waiting[call_id]
    for call_id in waiting:
        text = f"No tool output found for function call {call_id[:ID_CHARS_MAX]}."
        raise BadRequest(text, param="input", code="tool_output_not_found")


def _assistant(messages: list[Message]) -> Message:
    """The assistant message that is being put together, begun where there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _add_message(messages: list[Message], item: Item, where: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise _bad(f"{where}.role", f"one of {', '.join(ROLES)}", "invalid_value")
    content = item.get("content")
    if role != "assistant":
        messages.append({"role": role, "content": _input_content(content, f"{where}.content")})
        return
    said = _said(content, f"{where}.content")
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and last.get("tool_calls") and last.get("content") is None:
        last.update(said)
    else:
        messages.append({"role": "assistant", **said})


def _said(content: Any, where: str) -> Message:
    """Content and refusal of an assistant message."""
    if isinstance(content, str):
        return {"content": content}
    texts: dict[str, list[str]] = {"output_text": [], "refusal": []}
    for part, spot in _parts(content, where, OUTPUT_PARTS):
        texts[part["type"]].append(_string(part, "refusal" if part["type"] == "refusal" else "text", spot))
    refusal = {"refusal": "".join(texts["refusal"])} if texts["refusal"] else {}
    return {"content": "".join(texts["output_text"]) if texts["output_text"] else None, **refusal}


def _input_content(content: Any, where: str) -> str | list[Message]:
    """Content of a user's, system's or developer's message, or of a result: lone text as a string."""
    if isinstance(content, str):
        return content
    parts = [_input_part(part, spot) for part, spot in _parts(content, where, INPUT_PARTS)]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return parts


def _parts(content: Any, where: str, allowed: Sequence[str]) -> Iterable[tuple[Item, str]]:
    if not isinstance(content, list) or not content:
        raise _bad(where, "a string or a list of content parts", "invalid_type")
    for index, part in enumerate(content):
        spot = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise _bad(spot, "an object", "invalid_type")
        if part.get("type") not in allowed:
            raise _bad(f"{spot}.type", f"one of {', '.join(allowed)}", "invalid_value")
        yield part, spot


def _input_part(part: Item, where: str) -> Message:
    if part["type"] == "input_text":
        return {"type": "text", "text": _string(part, "text", where)}
    for name in ("file_id", "file_url"):
        if part.get(name) is not None:
            spot = f"{where}.{name}"
            fix = "send `image_url`" if part["type"] == "input_image" else "send `file_data`"
            raise BadRequest(
                f"`{spot}`: no files are kept or fetched here; {fix}", param=spot, code="unsupported_value"
            )
    if part["type"] == "input_image":
        image = {"url": _string(part, "image_url", where)}
        if part.get("detail") is not None:
            image["detail"] = _string(part, "detail", where, ID_CHARS_MAX)
        return {"type": "image_url", "image_url": image}
    file = {"file_data": _string(part, "file_data", where)}
    if part.get("filename") is not None:
        file["filename"] = _string(part, "filename", where, 1024)
    return {"type": "file", "file": file}


def _call(item: Item, where: str) -> Message:
    function = {name: _string(item, name, where) for name in ("name", "arguments")}
    return {"id": _string(item, "call_id", where, ID_CHARS_MAX), "type": "function", "function": function}


def _output(item: Item, where: str) -> Message:
    content = _input_content(item.get("output"), f"{where}.output")
    media = [n for n, part in enumerate(content) if isinstance(part, dict) and part["type"] != "text"]
    if media:
        spot = f"{where}.output[{media[0]}].type"
        text = f"`{spot}`: workers take text as a tool's result; send images and files in a message"
        raise BadRequest(text, param=spot, code="unsupported_value")
    return {"role": "tool", "tool_call_id": _string(item, "call_id", where, ID_CHARS_MAX), "content": content}


def _string(of: Item, name: str, where: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    value = of.get(name)
    if value is None:
        spot = f"{where}.{name}"
        raise BadRequest(f"Missing required parameter: '{spot}'.", param=spot, code="missing_required_parameter")
    if not isinstance(value, str) or len(value) > chars_max:
        raise _bad(f"{where}.{name}", f"a string of at most {chars_max} characters", "invalid_type")
    return value


def _bad(where: str, good: str, code: str) -> BadRequest:
    return BadRequest(f"`{where}` must be {good}", param=where, code=code)


# ---------------------------------------------------------------- messages → items


def to_input_items(messages: Iterable[Mapping[str, Any]], response_hex: str) -> list[Message]:
    """The items that a stored conversation stands for, oldest first, with ids of that response."""
    items: list[Message] = []
    for message in messages:
        for prefix, body in _bodies(message):
            items.append({"id": item_id(prefix, response_hex, INPUT_IDS + len(items)), **body})
    return items


def _bodies(message: Mapping[str, Any]) -> Iterable[tuple[str, Message]]:
    role, content = message.get("role"), message.get("content")
    if role == "tool":
        output = content if isinstance(content, str) else [_as_input(part) for part in content or ()]
        call_id = message.get("tool_call_id")
        yield "fco", {"type": "function_call_output", "call_id": call_id, "output": output, "status": "completed"}
    elif role == "assistant":
        parts = said_parts(message)
        if parts:
            yield "msg", {"type": "message", "role": "assistant", "status": "completed", "content": parts}
        for call in message.get("tool_calls") or ():
            yield "fc", call_body(call, "completed")
    else:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
        shown = [_as_input(part) for part in parts]
        yield "msg", {"type": "message", "role": role, "status": "completed", "content": shown}


def _as_input(part: Mapping[str, Any]) -> Message:
    if part.get("type") == "image_url":
        image = part["image_url"]
        return {"type": "input_image", "image_url": image.get("url"), "detail": image.get("detail") or "auto"}
    if part.get("type") == "file":
        return {"type": "input_file", **part["file"]}
    return {"type": "input_text", "text": part.get("text") or ""}


def said_parts(message: Mapping[str, Any]) -> list[Message]:
    """The content parts of what an assistant said: text, refusal, both or none."""
    parts: list[Message] = []
    if isinstance(message.get("content"), str) and message["content"]:
        parts.append(text_part(message["content"]))
    if isinstance(message.get("refusal"), str) and message["refusal"]:
        parts.append({"type": "refusal", "refusal": message["refusal"]})
    return parts


def text_part(text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> Message:
    """Text that was generated."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def call_body(call: Mapping[str, Any], status: str) -> Message:
    """A chat tool call as a `function_call` item without its id."""
    function = call.get("function")
    function = function if isinstance(function, Mapping) else {}
    told = {"call_id": call.get("id"), "name": function.get("name"), "arguments": function.get("arguments")}
    texts = {name: value if isinstance(value, str) else "" for name, value in told.items()}
    return {"type": "function_call", **texts, "status": status}
