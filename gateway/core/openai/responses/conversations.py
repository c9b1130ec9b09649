"""Conversations that outlive a request: OpenAI's object, its items as they are stored and shown, and what a turn adds.

A conversation is a list of items of the Responses API. Items that a client adds are stored as they come; a turn adds
those of its input and output when its rollout reaches the database, made from the rollout (`turn_of`). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core.openai.responses.bodies import PREFIXES, Message, item_id
from gateway.core.openai.responses.items import INPUT_IDS, Item, to_input_items, to_messages
from gateway.core.openai.responses.reply import Head, output_items
from gateway.core.openai.responses.request import FIELDS, ResponsesRequest
from gateway.core.openai.responses.tools import tool_names
from gateway.core.openai.shapes import Reader, bad_value, missing_parameter, string_pairs
from gateway.errors import BadRequest

PREFIX = "conv_"
ITEMS_PER_REQUEST_MAX = 20
METADATA = "up to 16 pairs of strings (64 / 512 characters)"
STATE = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
_NAME = re.compile(r"conv_[0-9a-f]{32}")
_RESULTS = {"function_call_output": "function_call", "custom_tool_call_output": "custom_tool_call"}


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """What a rollout means to its conversation. `turn`: the claim that it had. `items`: what it adds; none where it has
    no reply."""

    conversation_id: str
    turn: str
    items: Sequence[Message]


def is_conversation_id(text: str) -> bool:
    """Whether the text has the form of a conversation's id."""
    return _NAME.fullmatch(text) is not None


def conversation_json(conversation_id: str, created_s: int, metadata: Mapping[str, str]) -> dict[str, Any]:
    """OpenAI's Conversation object."""
    return {"id": conversation_id, "object": "conversation", "created_at": created_s, "metadata": dict(metadata)}


def read_metadata(body: Mapping[str, Any], *, required: bool = False) -> dict[str, str]:
    """The metadata of a request about a conversation; null counts as none. Raises BadRequest."""
    if required and "metadata" not in body:
        raise missing_parameter("metadata")
    metadata = body.get("metadata")
    if metadata is None:
        return {}
    if code := string_pairs(metadata):
        raise bad_value("metadata", METADATA, code)
    return dict(metadata)


def check_includes(names: Sequence[str]) -> None:
    """Raises BadRequest for a value of `include` that OpenAI does not know."""
    _, check, description = FIELDS["include"]
    if code := check(list(names)):
        raise bad_value("include", description, code)


def stored_items(items: Sequence[Item], batch_hex: str) -> list[Message]:
    """Items that a client adds, as they are stored, with new ids that contain `batch_hex`."""
    inputs = [item for item in items if item["type"] in PREFIXES]
    return [
        {**_body(item), "id": item_id(PREFIXES[item["type"]], batch_hex, INPUT_IDS + at)}
        for at, item in enumerate(inputs)
    ]


def _body(item: Item) -> Message:
    kind = item["type"]
    if kind == "message":
        role, content = item["role"], item["content"]
        own = "output_text" if role == "assistant" else "input_text"
        parts = [{"type": own, "text": content}] if isinstance(content, str) else list(content)
        phase = {"phase": item["phase"]} if "phase" in item else {}
        parts_shown = [_part(part) for part in parts]
        return {"type": kind, "role": role, "status": item.get("status", "completed"), "content": parts_shown, **phase}
    if kind == "reasoning":
        return {"summary": [], **item}
    if kind == "custom_tool_call":
        return dict(item)
    return {"status": "completed", **item}


def _part(part: Mapping[str, Any]) -> Message:
    if part["type"] == "output_text":
        return {**part, "annotations": part.get("annotations") or [], "logprobs": part.get("logprobs") or []}
    return {**part, "detail": part.get("detail") or "auto"} if part["type"] == "input_image" else dict(part)


def shown_item(item: Mapping[str, Any], include: Collection[str]) -> Message:
    """A stored item as a client gets it: without the state of vendors and log-probabilities that it did not ask for."""
    if item["type"] == "reasoning" and STATE not in include:
        return {name: value for name, value in item.items() if name != "encrypted_content"}
    if item["type"] == "message" and LOGPROBS not in include:
        parts = [{**part, "logprobs": []} if "logprobs" in part else part for part in item["content"]]
        return {**item, "content": parts}
    return dict(item)


def history_of(items: Sequence[Item]) -> list[Message]:
    """The conversation as chat messages. The result of a call that was deleted is left out: no worker takes it."""
    calls: set[tuple[str, str]] = set()
    history: list[Item] = []
    for item in items:
        kind = item["type"]
        if kind in _RESULTS.values():
            calls.add((kind, item["call_id"]))
        if kind not in _RESULTS or (_RESULTS[kind], item["call_id"]) in calls:
            history.append(item)
    return to_messages(history)[0]


def to_log_turn(request: ResponsesRequest, conversation_id: str, turn: str, first: int) -> dict[str, Any]:
    """What the log keeps of a turn, beside its messages. `first`: the index of its own first message, the instructions
    not counted."""
    fields = {name: request.body[name] for name in ("tools", "include") if name in request.body}
    instructed = request.instructions is not None
    return {"id": conversation_id, "turn": turn, "first": first, "instructed": instructed, **fields}


def turn_of(rollout: Mapping[str, Any]) -> ConversationTurn | None:
    """What a logged rollout means to its conversation; None for one without. `rollout`: its row or record. Raises
    KeyError, TypeError or ValueError for a record of the wrong shape."""
    turn = (rollout["request"] or {}).get("conversation")
    if turn is None:
        return None
    reply = rollout["reply"] if rollout["status"] == "done" else None
    items = [] if reply is None else _turn_items(rollout, turn, reply)
    return ConversationTurn(turn["id"], turn["turn"], items)


def _turn_items(rollout: Mapping[str, Any], turn: Mapping[str, Any], reply: Mapping[str, Any]) -> list[Message]:
    request, response_id = rollout["request"], rollout["completion_id"]
    messages = request["messages"][1 if turn["instructed"] else 0 :]
    names = tool_names(turn.get("tools") or ())
    echo = {**turn, "include": [*turn.get("include", ()), STATE]}
    head = Head(response_id, 0, request["model"], None, echo, stored=True)
    before = len(to_input_items(messages[: turn["first"]], head.hex, names))
    output = [  # an id stands once in a conversation, whatever ids a worker gives
        item if item["type"] in PREFIXES else {**item, "id": item_id("ht", head.hex, at)}
        for at, item in enumerate(output_items(head, reply))
    ]
    return [*to_input_items(messages, head.hex, names)[before:], *output]


def read_items(raw: Any, reader: Reader, parse: Any) -> Sequence[Item]:
    """The items that a client adds to a conversation, checked. `parse`: reads them as those of `input`. Raises
    BadRequest."""
    if not isinstance(raw, list):
        raise bad_value("items", f"a list of at most {ITEMS_PER_REQUEST_MAX} items", "invalid_type")
    if len(raw) > ITEMS_PER_REQUEST_MAX:
        problem = f"`items` holds {len(raw)} items; at most {ITEMS_PER_REQUEST_MAX} are accepted at a time"
        raise BadRequest(problem, param="items", code="array_above_max_length")
    try:
        items: Sequence[Item] = parse(raw, ITEMS_PER_REQUEST_MAX, reader)
    except BadRequest as error:
        error.message = error.message.replace("input[", "items[")
        error.param = (error.param or "").replace("input[", "items[", 1) or None
        raise
    return items
