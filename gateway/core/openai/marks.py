"""Where the items of a reply lie in its chat message. Pure.

Baton's unit is a chat message: it joins the texts of a reply, and lists its calls. A reply of the Responses API is an
ordered list of items. So a message, and a delta of one, has `output_items`: one mark for each item, in order, with what
a chat message has no place for. `at` of a mark is how much of each field stood before its item; `pieces` cuts the
message there. A message without marks is one piece. Workers that are asked by the Responses API get and give marks, and
the clients of that API; nobody else does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

FIELD = "output_items"
EVENTS = "output_events"  # of a delta: events of a hosted tool's progress, which no message holds
MARKS_MAX = 4096  # of one message
MESSAGE, PART, REASONING, SUMMARY, TEXT, GAP, CALL, STATE = (
    *("message", "part", "reasoning", "summary", "text"),  # an item or a part of one begins
    *("gap", "call", "state"),  # what stands between parts in a chat message alone; a call; a detail with a whole item
)
ITEM, RESPONSE = "item", "response"  # an item that a client gave; facts of the worker's Response object
KINDS = (MESSAGE, PART, REASONING, SUMMARY, TEXT, GAP, CALL, STATE, ITEM)  # of a message that comes back
HOSTED = (  # items of hosted tools: they go to workers that run some
    *("web_search_call", "file_search_call", "computer_call", "computer_call_output", "code_interpreter_call"),
    *("image_generation_call", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
    *("apply_patch_call", "apply_patch_call_output", "tool_search_call", "tool_search_output"),
    *("mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
)
NATIVE = ("compaction", "compaction_summary", "additional_tools")  # other items that chat has no message for
LISTS = ("reasoning_details", "annotations", "tool_calls")
TEXTS = ("reasoning_content", "content", "refusal")
Message = Mapping[str, Any]


def place(choice: dict[str, Any], delta: Message) -> None:
    """Add the marks of a delta, if it has any, to a choice that is being built, where its message ends now."""
    if FIELD not in delta:
        return
    message = choice["message"]
    ends = {name: len(message[name]) for name in (*TEXTS, *LISTS) if message.get(name)}
    if logprobs := (choice.get("logprobs") or {}).get("content"):
        ends["logprobs"] = len(logprobs)
    kept = message.setdefault(FIELD, [])
    kept += [{**mark, "at": ends} for mark in _marks(delta[FIELD])][: MARKS_MAX - len(kept)]


def pieces(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a whole choice in pieces, as choices of chunks: what stands before the first mark, then each mark with what
    stands between it and the next."""
    message = choice.get("message") or {}
    marks = _marks(message.get(FIELD))
    whole = {name: value for name in (*TEXTS, *LISTS) if isinstance(value := message.get(name), str | list)}
    if "reasoning_content" not in whole and isinstance(text := message.get("reasoning"), str):
        whole["reasoning_content"] = text
    logprobs = (choice.get("logprobs") or {}).get("content")
    whole |= {"logprobs": logprobs} if isinstance(logprobs, list) else {}
    begins: list[Mapping[str, int]] = [{}]
    for one in marks:
        before, at = begins[-1], _ends(one)
        begins.append({name: max(before.get(name, 0), at.get(name, 0)) for name in {**before, **at}})
    for number, mark in enumerate((None, *marks)):
        ends = begins[number + 1] if number + 1 < len(begins) else None
        delta: dict[str, Any] = {
            name: part
            for name, value in whole.items()
            if (part := value[begins[number].get(name, 0) : None if ends is None else ends.get(name, 0)])
        }
        tokens = delta.pop("logprobs", None)
        delta |= {} if mark is None else {FIELD: [mark]}
        if delta:
            yield {"delta": delta} | ({"logprobs": {"content": tokens}} if tokens else {})


def answer(message: Message) -> str | None:
    """The text of the last message of a reply: of all of it where its message has no marks."""
    text = message.get("content")
    marks = [mark for mark in _marks(message.get(FIELD)) if mark.get("type") == MESSAGE]
    if not isinstance(text, str):
        return None
    return text[_ends(marks[-1]).get("content", 0) :] if marks else text


def facts(message: Message) -> dict[str, Any]:
    """The facts of the worker's Response object, where it said some."""
    said = [mark.get("facts") for mark in _marks(message.get(FIELD)) if mark.get("type") == RESPONSE]
    return dict(said[-1]) if said and isinstance(said[-1], Mapping) else {}


def without(message: Message) -> dict[str, Any]:
    """The message for those who get no marks."""
    return {name: value for name, value in message.items() if name not in (FIELD, EVENTS)}


def for_worker(message: Message, items: Collection[str]) -> dict[str, Any]:
    """The message for a worker that takes marks, with the items of clients of these types."""
    if FIELD not in message:
        return dict(message)
    marks = [mark for mark in message[FIELD] if mark["type"] != ITEM or mark["item"]["type"] in items]
    return without(message) | ({FIELD: marks} if marks else {})


def read(raw: Any) -> list[dict[str, Any]]:
    """The marks that came with a message, as far as they have the form of marks."""
    return [
        {name: mark[name] for name in ("type", "id", "phase") if isinstance(mark.get(name), str)}
        | ({"item": mark["item"]} if mark["type"] == ITEM else {})
        | {"at": _ends(mark)}
        for mark in _marks(raw)[:MARKS_MAX]
        if mark.get("type") in KINDS and (mark["type"] != ITEM or _is_item(mark.get("item")))
    ]


def _marks(raw: Any) -> list[Mapping[str, Any]]:
    return [mark for mark in raw if isinstance(mark, Mapping)] if isinstance(raw, list) else []


def _is_item(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") in (*HOSTED, *NATIVE)


def _ends(mark: Mapping[str, Any]) -> dict[str, int]:
    at = mark.get("at")
    ends = ((name, at.get(name)) for name in (*TEXTS, *LISTS, "logprobs")) if isinstance(at, Mapping) else ()
    return {name: end for name, end in ends if type(end) is int and end >= 0}
