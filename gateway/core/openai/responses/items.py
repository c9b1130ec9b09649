"""Converts items of the Responses API to chat messages and back. Pure.

Baton stores a conversation as chat messages, because workers get messages and the log holds them; it makes items from
them when a client asks. An item's id names the response that the item belongs to, so that a reference can be resolved.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gateway.core.openai import marks
from gateway.core.openai.responses.bodies import NO_NAMES, PREFIXES, Message, Names, item_id
from gateway.core.openai.responses.output import output_of
from gateway.core.openai.responses.tools import chat_name
from gateway.core.openai.shapes import (
    FREE_TEXT,
    OBJECT,
    WRONG_TYPE,
    Properties,
    Reader,
    any_of,
    bad_value,
    one_of,
    refuse_inside,
    text,
)
from gateway.core.openai.shapes import array as list_of
from gateway.core.openai.shapes import missing_parameter as missing_error
from gateway.core.openai.vendor import SEAL, unsealed
from gateway.errors import BadRequest, NotFound

Item = Mapping[str, Any]
ROLES = ("user", "system", "developer", "assistant")
KINDS = (
    *("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning"),
    "item_reference",
)
PASSED = (*marks.HOSTED, *marks.NATIVE)  # no chat message holds them: they go to workers of this API as they came
PARTS = {"user": ("input_text", "input_image", "input_file"), "assistant": ("output_text", "refusal")}
INPUT_IDS = 0x800000  # the ordinals of input items start here, those of output items at 0
ID_CHARS_MAX = 64
_NAME = text(ID_CHARS_MAX), f"a string of at most {ID_CHARS_MAX} characters"
_STATUS = one_of("in_progress", "completed", "incomplete"), "in_progress, completed or incomplete"
_CONTENT = any_of(text(2**31), list_of(1, 2**31)), "a string or a list of content parts"
_ANY = (lambda value: None), "anything"
_ITEM: Properties = {"type": FREE_TEXT, "id": _NAME, "status": _STATUS}
_ITEMS: Mapping[str, Properties] = {
    "message": {**_ITEM, "role": (one_of(*ROLES), f"one of {', '.join(ROLES)}"), "content": _CONTENT, "phase": _NAME},
    "function_call": {
        **_ITEM, "call_id": _NAME, "name": (text(256), "a string"), "arguments": FREE_TEXT, "caller": OBJECT,
        "namespace": _NAME,
    },
    "custom_tool_call": {
        **_ITEM, "call_id": _NAME, "name": (text(256), "a string"), "input": FREE_TEXT, "caller": OBJECT,
        "namespace": _NAME,
    },
    "custom_tool_call_output": {
        **_ITEM, "call_id": _NAME, "output": _CONTENT, "caller": OBJECT, "name": (text(256), "a string"),
    },
    "function_call_output": {
        **_ITEM, "call_id": _NAME, "output": _CONTENT, "caller": OBJECT, "name": (text(256), "a string"),
    },
    "reasoning": {**_ITEM, "summary": _ANY, "content": _ANY, "encrypted_content": FREE_TEXT},
    "item_reference": {"type": FREE_TEXT, "id": _NAME},
}  # fmt: skip
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "item_reference": ("id",),
}
_PART: Properties = {"type": FREE_TEXT, "prompt_cache_breakpoint": OBJECT}
_PARTS: Mapping[str, tuple[Properties, tuple[str, ...]]] = {
    "input_text": ({**_PART, "text": FREE_TEXT}, ("text",)),
    "input_image": ({**_PART, "image_url": FREE_TEXT, "detail": _NAME, "file_id": FREE_TEXT}, ()),
    "input_file": (
        {**_PART, "file_data": FREE_TEXT, "filename": (text(512), "a string of at most 512 characters"),
         "file_id": FREE_TEXT, "file_url": FREE_TEXT, "detail": _NAME},
        (),
    ),
    "output_text": ({**_PART, "text": FREE_TEXT, "annotations": _ANY, "logprobs": _ANY}, ("text",)),
    "refusal": ({**_PART, "refusal": FREE_TEXT}, ("refusal",)),
}  # fmt: skip
_ID = re.compile(r"[a-z]{1,8}_([0-9a-f]{32})[0-9a-f]{6}")


def response_of(an_item_id: str) -> str | None:
    """The id of the response that an item id names, or None if it names none."""
    match = _ID.fullmatch(an_item_id)
    return f"resp_{match[1]}" if match else None


def kind_of(item: Item) -> str:
    """The kind of an item. A message or a reference may omit `type`."""
    kind = item.get("type")
    if kind is None:
        return "message" if "role" in item else "item_reference" if "id" in item else ""
    return kind if isinstance(kind, str) else ""


def parse_items(raw: Any, items_max: int, reader: Reader) -> list[Item]:
    """Read `input` as items and check each one by itself; a string becomes one user message. Raises BadRequest with the
    path of the first invalid value."""
    if isinstance(raw, str):
        return [{"type": "message", "role": "user", "content": raw}]
    if not isinstance(raw, list):
        raise bad_value("input", "a string or a list of items", WRONG_TYPE)
    if len(raw) > items_max:
        problem = f"`input` holds {len(raw)} items; at most {items_max} are accepted"
        raise BadRequest(problem, param="input", code="array_above_max_length")
    return [_item(item, f"input[{at}]", reader) for at, item in enumerate(raw)]


def _item(raw: Any, where: str, reader: Reader) -> Item:
    if not isinstance(raw, dict):
        raise bad_value(where, "an object", WRONG_TYPE)
    kind = kind_of(raw)
    if kind in PASSED:
        refuse_inside(raw, where)
        return dict(raw)
    if kind not in KINDS:
        raise bad_value(f"{where}.type", f"one of {', '.join(KINDS)}", "invalid_value")
    item = reader.object(raw, where, _ITEMS[kind], _REQUIRED.get(kind, ()))
    if kind == "reasoning" and not str(item.get("encrypted_content") or SEAL).startswith(SEAL):
        reader.drop(f"{where}.encrypted_content")  # of a vendor that the client asked itself
    if kind == "message":
        role = item["role"]
        kinds = PARTS.get(role, ("input_text",))
        return item | {"type": kind, "content": _parts(item["content"], f"{where}.content", kinds, reader)}
    if kind in ("function_call_output", "custom_tool_call_output"):
        return item | {"output": _parts(item["output"], f"{where}.output", PARTS["user"], reader)}
    return item | {"type": kind}


def _parts(content: Any, where: str, kinds: Sequence[str], reader: Reader) -> Any:
    if isinstance(content, str):
        return content
    reader.count_parts(len(content), where)
    return [_part(part, f"{where}[{at}]", kinds, reader) for at, part in enumerate(content)]


def _part(raw: Any, where: str, kinds: Sequence[str], reader: Reader) -> Item:
    if not isinstance(raw, dict):
        raise bad_value(where, "an object", WRONG_TYPE)
    kind = raw.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise bad_value(f"{where}.type", " or ".join(kinds), "invalid_value")
    part = reader.object(raw, where, *_PARTS[kind])
    name = {"input_image": "image_url", "input_file": "file_data"}.get(kind)
    if "file_id" in part:
        spot = f"{where}.file_id"
        raise BadRequest(f"`{spot}`: Baton keeps no files; send `{name}`", param=spot, code="unsupported_value")
    if name == "file_data" and name not in part and "file_url" in part:
        if part["file_url"][:6].lower() != "https:":
            raise bad_value(f"{where}.file_url", "an `https:` URL", "invalid_value")
        return {**part, name: part["file_url"]}
    if name is not None and name not in part:
        raise missing_error(f"{where}.{name}")
    return part


def references(items: Iterable[Item]) -> dict[int, str]:
    """The ids that `item_reference` items point at, by the index of the item."""
    return {at: str(item["id"]) for at, item in enumerate(items) if item["type"] == "item_reference"}


def no_such_item(an_item_id: str, index: int) -> NotFound:
    """The error for a reference to an item that does not exist."""
    fix = "Only items of stored responses can be referred to; send the item itself."
    return NotFound(f"Item with id '{an_item_id[:ID_CHARS_MAX]}' not found. {fix}", param=f"input[{index}].id")


# ---------------------------------------------------------------- items → messages


def to_messages(items: Sequence[Item]) -> tuple[list[Message], list[int]]:
    """Convert items to chat messages; return them with, for each, the index of the item that began it.

    Of reasoning items only the state of a vendor goes on, as that of its turn. The calls and the text of one assistant
    turn are separate items but one message. Marks hold what a chat message has no place for.
    """
    messages: list[Message] = []
    origins: list[int] = []
    state: Message = {}  # of the turn that begins
    call_states: dict[str, Message] = {}
    passed: list[Message] = []  # marks of items that stand before the next message
    states = {at: unsealed(str(item.get("encrypted_content") or "")) for at, item in _of_kinds(items, ("reasoning",))}
    sealed = {response_of(str(items[at].get("id"))) for at, (fields, _) in states.items() if fields} - {None}
    sealed |= {one.get("id") for fields, _ in states.values() for one in fields.get("reasoning_details") or ()}
    for index, item in enumerate(items):
        if state and messages and messages[-1]["role"] == "assistant" and "extra_content" not in messages[-1]:
            messages[-1].update(state)
            state = {}
        if item["type"] == "reasoning":
            fields, calls = states[index]
            state, call_states = fields or state, call_states | calls
        elif item["type"] in PASSED:
            own = str(item.get("id"))
            if own not in sealed and response_of(own) not in sealed:  # else it comes with the state of its turn
                passed.append({"type": marks.ITEM, "item": dict(item)})
        else:
            _add(messages, item)
        if passed and len(messages) > len(origins):
            messages[-1][marks.FIELD] = [*passed, *messages[-1].get(marks.FIELD, ())]
            passed = []
        origins += [index] * (len(messages) - len(origins))
    if messages:
        messages[-1].update(state if messages[-1]["role"] == "assistant" else {})
        messages[-1] = with_items(messages[-1], [mark["item"] for mark in passed])
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        call.update(call_states.get(str(call["id"]), {}))
    return messages, origins


def _of_kinds(items: Sequence[Item], kinds: Collection[str]) -> Iterator[tuple[int, Item]]:
    return ((at, item) for at, item in enumerate(items) if item["type"] in kinds)


def with_items(message: Mapping[str, Any], items: Sequence[Item]) -> Message:
    """The last message of a conversation with the items behind it that no chat message holds."""
    behind = {"content": len(message.get("content") or "")}
    placed = [{"type": marks.ITEM, "item": dict(item), "at": behind} for item in items if item["type"] in PASSED]
    return {**message} | ({marks.FIELD: [*message.get(marks.FIELD, ()), *placed]} if placed else {})


def _add(messages: list[Message], item: Item) -> None:
    """Add a message, a call or the result of one."""
    if item["type"] == "message":
        _add_message(messages, item)
    elif item["type"] in ("function_call", "custom_tool_call"):
        _assistant(messages).setdefault("tool_calls", []).append(_call(item))
    elif item["type"] in ("function_call_output", "custom_tool_call_output"):
        content = _input_content(item["output"])
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})


def check_calls(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises BadRequest unless each tool result follows its call and each call has a result, as workers require."""
    waiting: dict[str, None] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            waiting[str(call.get("id"))] = None
        if message.get("role") != "tool":
            continue
        call_id = message["tool_call_id"]
        if call_id not in waiting:
            problem = f"No tool call found for function call output with call_id {call_id[:ID_CHARS_MAX]}."
            raise BadRequest(problem, param="input", code="tool_call_not_found")
        del waiting[call_id]
    for call_id in waiting:
        problem = f"No tool output found for function call {call_id[:ID_CHARS_MAX]}."
        raise BadRequest(problem, param="input", code="tool_output_not_found")


def _assistant(messages: list[Message]) -> Message:
    """The assistant message at the end of the list; appends one if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _add_message(messages: list[Message], item: Item) -> None:
    if item["role"] != "assistant":
        messages.append({"role": item["role"], "content": _input_content(item["content"])})
        return
    content = _assistant_content(item["content"])
    mark = {"type": marks.MESSAGE, "phase": item["phase"]} if "phase" in item else None
    last = messages[-1] if messages else {}
    if last.get("tool_calls") and last.get("content") is None and "refusal" not in last:
        last.update(content)
        behind = {**(mark or {"type": marks.MESSAGE}), "at": {"tool_calls": len(last["tool_calls"])}}
        last[marks.FIELD] = [*last.get(marks.FIELD, ()), {"type": marks.CALL}, behind]
    else:
        messages.append({"role": "assistant", **content} | ({marks.FIELD: [mark]} if mark else {}))


def _assistant_content(content: Any) -> Message:
    """`content` and `refusal` of an assistant message."""
    if isinstance(content, str):
        return {"content": content}
    texts = [part["text"] for part in content if part["type"] == "output_text"]
    refusals = [part["refusal"] for part in content if part["type"] == "refusal"]
    return {"content": "".join(texts) if texts else None} | ({"refusal": "".join(refusals)} if refusals else {})


def _input_content(content: Any) -> str | list[Message]:
    """The content of a user, system or developer message or of a tool result. A single text becomes a string."""
    if isinstance(content, str):
        return content
    parts = [_chat_part(part) for part in content]
    return str(parts[0]["text"]) if len(parts) == 1 and parts[0].keys() == {"type", "text"} else parts


def _chat_part(part: Item) -> Message:
    cache = {name: part[name] for name in ("prompt_cache_breakpoint",) if name in part}
    if part["type"] == "input_text":
        return {"type": "text", "text": part["text"], **cache}
    if part["type"] == "input_image":
        detail = {"detail": part["detail"]} if "detail" in part else {}
        return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}, **cache}
    file = {name: part[name] for name in ("file_data", "filename") if name in part}
    return {"type": "file", "file": file, **cache}


def _call(item: Item) -> Message:
    name = chat_name(item["name"], item.get("namespace"))
    if item["type"] == "custom_tool_call":
        return {"id": item["call_id"], "type": "custom", "custom": {"name": name, "input": item["input"]}}
    return {"id": item["call_id"], "type": "function", "function": {"name": name, "arguments": item["arguments"]}}


# ---------------------------------------------------------------- messages → items


def to_input_items(messages: Iterable[Mapping[str, Any]], response_hex: str, names: Names = NO_NAMES) -> list[Message]:
    """Convert a stored conversation to input items, oldest first, with ids of the given response. `names`: of the
    tools, by their names in the messages."""
    items: list[Message] = []
    customs: set[str] = set()
    for message in messages:
        customs |= {str(call.get("id")) for call in message.get("tool_calls") or () if call.get("type") == "custom"}
        before, behind = passed_items(message, behind=False), passed_items(message, behind=True)
        for body in (*before, *_bodies(message, names, customs), *behind):
            prefix = PREFIXES.get(body["type"], "ht")
            items.append({**body, "id": item_id(prefix, response_hex, INPUT_IDS + len(items))})
    return items


def passed_items(message: Mapping[str, Any], *, behind: bool) -> list[Message]:
    """The items that a client gave before a message, or behind the last one."""
    given = (mark for mark in message.get(marks.FIELD) or () if mark["type"] == marks.ITEM)
    return [dict(mark["item"]) for mark in given if bool(mark.get("at")) == behind]


def _bodies(message: Mapping[str, Any], names: Names, customs: set[str]) -> Iterable[Message]:
    """Yield the items of a message. `customs`: ids of the custom calls."""
    role, content = message.get("role"), message.get("content")
    if role == "tool":
        output = content if isinstance(content, str) else [_input_part(part) for part in content or ()]
        call_id = message.get("tool_call_id")
        if call_id in customs:
            yield {"type": "custom_tool_call_output", "call_id": call_id, "output": output}
        else:
            yield {"type": "function_call_output", "call_id": call_id, "output": output, "status": "completed"}
    elif role == "assistant":
        items = output_of(message, names).items
        yield from (item for item in items if item["type"] != "reasoning" and item.get("content", True))
    else:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
        inputs = [_input_part(part) for part in parts]
        yield {"type": "message", "role": role, "status": "completed", "content": inputs}


def _input_part(part: Mapping[str, Any]) -> Message:
    cache = {name: part[name] for name in ("prompt_cache_breakpoint",) if name in part}
    if part.get("type") == "image_url":
        image = part["image_url"]
        return {"type": "input_image", "image_url": image.get("url"), "detail": image.get("detail") or "auto", **cache}
    if part.get("type") == "file":
        file = dict(part["file"])
        if str(file.get("file_data"))[:6].lower() == "https:":
            file["file_url"] = file.pop("file_data")
        return {"type": "input_file", **file, **cache}
    return {"type": "input_text", "text": part.get("text") or "", **cache}
