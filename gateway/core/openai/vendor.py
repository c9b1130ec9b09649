"""What a vendor hands out with a reply and needs back: signatures, encrypted reasoning, the ids of its calls. Pure.

The state travels with the message. A message that has any carries `extra_content.baton.origin`, the origin of the
worker that wrote it (`WorkerSpec.origin`), and a call of it an id of Baton's own. Before a message goes to a worker,
`for_worker` removes what another origin wrote and gives the worker its own ids back. A client that returns messages
unchanged needs nothing else. Most clients return only what OpenAI defines; then the id of a call is the only trace,
and the gateway keeps the state under it (`states_of`, `restore`): a signature has thousands of characters, and clients
and vendors allow 40 in an id, so no encoding into the id is possible.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gateway.core.openai import marks
from gateway.core.openai.shapes import refuse_inside

Message = Mapping[str, Any]
States = Mapping[str, Mapping[str, Any]]  # id of a call -> {"message": fields, "call": fields}
MESSAGE_FIELDS = ("thinking_blocks", "reasoning_details", "provider_specific_fields", "extra_content")
REASONING = ("reasoning_content", "reasoning")  # text; beside tool calls some vendors need it back
CALL_FIELDS = ("provider_specific_fields", "extra_content")
PROGRESS = "[baton] "  # begins each line of reasoning that tells what Baton does; no worker gets it back
OURS = "baton"  # the property of `extra_content` that is Baton's own
ID_CHARS_MAX = 40  # what OpenAI allows in the id of a call
VENDOR_ID_CHARS_MAX = 4096
SEAL = "btn1."  # begins a sealed state
SEALED_BYTES_MAX = 4 * 2**20  # of a state that is read
ITEMS_MAX = 256  # of a list of thinking blocks or reasoning details
_PORTABLE = re.compile(rf"[A-Za-z0-9_-]{{1,{ID_CHARS_MAX}}}")
_OURS = re.compile(r"call_btn[a-z2-7]{24}")
_ORIGIN = re.compile(r"[0-9a-f]{12}")
_THINKING = {"thinking": ("thinking", "signature"), "redacted_thinking": ("data",)}
_DETAILS = ("type", "id", "format", "index", "text", "summary", "data", "signature")
_SIGNATURES = ("thought_signature", "thought_signatures")


def new_id(*, with_state: bool) -> str:
    """A new id for a call. `with_state`: of the form that `ids_with_state` finds."""
    return ("call_btn" if with_state else "call_") + _base32(secrets.token_bytes(15))


def is_portable(call_id: str) -> bool:
    """Whether every vendor accepts the id of a call."""
    return _PORTABLE.fullmatch(call_id) is not None


def mark(fields: Message, origin: str, vendor_id: str | None = None) -> dict[str, Any]:
    """The `extra_content` of a message or call, with its origin and the vendor's own id of the call."""
    extra = fields.get("extra_content")
    name = {} if vendor_id is None else {"id": vendor_id}
    return {**(extra if isinstance(extra, Mapping) else {}), OURS: {"origin": origin, **name}}


# ---------------------------------------------------------------- to a worker


def for_worker(messages: Sequence[Message], origin: str, items: Collection[str] | None = None) -> list[dict[str, Any]]:
    """The messages for a worker of that origin: with its own state and ids, without any other's. `items`: the types of
    clients' items that it takes beside marks (core/openai/marks.py); None: it takes no marks."""
    ids: dict[str, str] = {}
    made = [_for_worker(message, origin, ids) for message in messages]
    if not any(marks.FIELD in message for message in made):
        return made
    return [marks.without(one) if items is None else marks.for_worker(one, items) for one in made]


def without_state(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages without any vendor's state, with the ids that the client knows; for logs."""
    return [
        _without(message, (*MESSAGE_FIELDS, marks.FIELD)) | _calls(message, lambda call: _without(call, CALL_FIELDS))
        for message in messages
    ]


def _for_worker(message: Message, origin: str, ids: dict[str, str]) -> dict[str, Any]:
    if message.get("role") == "tool":
        call_id = str(message.get("tool_call_id"))
        return {**message, "tool_call_id": ids.get(call_id) or _portable(call_id)}
    if message.get("role") != "assistant":
        return dict(message)

    def call_for_worker(call: Message) -> dict[str, Any]:
        marker = _marker(call)
        own = marker.get("origin") == origin
        call_id = str(call.get("id"))
        ids[call_id] = (own and marker.get("id")) or _portable(call_id)
        return _unmarked(call) | {"id": ids[call_id]} if own else _without(call, CALL_FIELDS) | {"id": ids[call_id]}

    message = _without_progress(message)
    marker = _marker(message)
    if marker.get("origin") == origin:
        return _unmarked(message) | _calls(message, call_for_worker)
    reasoning = REASONING if marker else ("reasoning",)  # without a marker clients rely on `reasoning_content`
    return _without(message, (*MESSAGE_FIELDS, *reasoning)) | _calls(message, call_for_worker)


def _without_progress(message: Message) -> Message:
    """The message without the lines about plans and steps that a stream put into its reasoning."""
    text = message.get("reasoning_content")
    if not isinstance(text, str) or PROGRESS not in text:
        return message
    rest = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(PROGRESS))
    return _without(message, ("reasoning_content",)) | ({"reasoning_content": rest} if rest else {})


def _calls(message: Message, change: Any) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {"tool_calls": [change(call) for call in calls]} if isinstance(calls, list) else {}


def _portable(call_id: str) -> str:
    """The id itself where every vendor accepts it, else a short one that is the same each time."""
    return call_id if is_portable(call_id) else "call_" + _base32(hashlib.sha256(call_id.encode()).digest()[:15])


def _marker(fields: Message) -> Mapping[str, Any]:
    extra = fields.get("extra_content")
    marker = extra.get(OURS) if isinstance(extra, Mapping) else None
    return marker if isinstance(marker, Mapping) else {}


def _unmarked(fields: Message) -> dict[str, Any]:
    extra = {name: value for name, value in (fields.get("extra_content") or {}).items() if name != OURS}
    return _without(fields, ("extra_content",)) | ({"extra_content": extra} if extra else {})


def _without(fields: Message, names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def _base32(value: bytes) -> str:
    return base64.b32encode(value).decode().lower()


# ---------------------------------------------------------------- kept for clients that do not return it


def states_of(replies: Sequence[Message]) -> dict[str, dict[str, Any]]:
    """The state of reply messages, by the id of each call that has some."""
    return {
        call["id"]: {"message": _state_of(message), "call": _only(call, CALL_FIELDS)}
        for message in replies
        for call in message.get("tool_calls") or ()
        if _OURS.fullmatch(str(call.get("id")))
    }


def ids_with_state(messages: Sequence[Message]) -> list[str]:
    """The ids of calls whose state was handed out with the reply and did not come back with the message."""
    return [call["id"] for message in messages if _lacks_state(message) for call in message["tool_calls"]]


def restore(messages: Sequence[Message], states: States) -> tuple[Message, ...]:
    """The messages with their state, as if the client had returned it."""
    return tuple(_restored(message, states) if _lacks_state(message) else message for message in messages)


def _lacks_state(message: Message) -> bool:
    calls = message.get("tool_calls") or ()
    return not _marker(message) and any(_OURS.fullmatch(str(call.get("id"))) for call in calls)


def _restored(message: Message, states: States) -> dict[str, Any]:
    signatures = [states[call["id"]] for call in message["tool_calls"] if call["id"] in states]
    fields = signatures[0]["message"] if signatures else {}
    return {**message, **fields} | _calls(message, lambda call: {**call, **states.get(call["id"], {}).get("call", {})})


def _state_of(message: Message) -> dict[str, Any]:
    """The state in the fields of a message, with the order of its items."""
    return _only(message, (*MESSAGE_FIELDS, *REASONING, marks.FIELD))


def _only(fields: Message, names: Sequence[str]) -> dict[str, Any]:
    return {name: fields[name] for name in names if name in fields}


# ---------------------------------------------------------------- as one text, for the Responses API


def sealed(message: Message) -> str | None:
    """The state of a reply message and of its calls as one opaque text; None where no vendor needs anything back."""
    calls = {str(call.get("id")): _only(call, CALL_FIELDS) for call in message.get("tool_calls") or () if _marker(call)}
    fields = _state_of(message) if _marker(message) else {}
    if not (fields or calls):
        return None
    text = json.dumps({"message": fields, "calls": calls}, separators=(",", ":")).encode()
    return SEAL + base64.urlsafe_b64encode(zlib.compress(text)).decode()


def unsealed(text: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """(the fields of a message, the fields of its calls by their ids) of a text that `sealed` made. Both empty for any
    other text: it was not made here, so no worker can read it."""
    nothing: tuple[dict[str, Any], dict[str, dict[str, Any]]] = ({}, {})
    if not text.startswith(SEAL):
        return nothing
    try:
        packed = zlib.decompressobj()
        state = json.loads(packed.decompress(base64.urlsafe_b64decode(text[len(SEAL) :]), SEALED_BYTES_MAX))
        fields, calls = dict(state["message"]), dict(state["calls"])
    except (ValueError, KeyError, TypeError, RecursionError, zlib.error):
        return nothing
    fields = _state_of(fields)
    return fields, {name: _only(call, CALL_FIELDS) for name, call in calls.items() if isinstance(call, dict)}


# ---------------------------------------------------------------- from a client


def returned_state(raw: Message, names: Sequence[str], where: str) -> tuple[dict[str, Any], list[str]]:
    """(the state that a client returned with a message or call, the names of the fields that no worker can get).

    State without a marker could be any vendor's. Of the fields with one, only the known parts are taken.
    Raises BadRequest(refused_field) for a name inside that could redirect a call.
    """
    fields = {name: raw[name] for name in names if raw.get(name) is not None}
    refuse_inside(fields, where)
    marker = _marker(raw)
    vendor_id = marker.get("id")
    if not _ORIGIN.fullmatch(str(marker.get("origin"))):
        return {}, list(fields)
    marked: dict[str, Any] = {"origin": marker["origin"]}
    if isinstance(vendor_id, str) and 0 < len(vendor_id) <= VENDOR_ID_CHARS_MAX:
        marked["id"] = vendor_id
    state: dict[str, Any] = {name: _READERS[name](value) for name, value in fields.items()}
    state["extra_content"] = {**(state.get("extra_content") or {}), OURS: marked}
    return {name: value for name, value in state.items() if value}, []


def _thinking(raw: Any) -> list[dict[str, Any]]:
    blocks = [block for block in raw[:ITEMS_MAX] if isinstance(block, dict)] if isinstance(raw, list) else []
    return [
        {"type": block["type"]}
        | {name: block[name] for name in _THINKING[block["type"]] if isinstance(block.get(name), str)}
        for block in blocks
        if isinstance(block.get("type"), str) and block["type"] in _THINKING
    ]


def _details(raw: Any) -> list[dict[str, Any]]:
    items = [item for item in raw[:ITEMS_MAX] if isinstance(item, dict)] if isinstance(raw, list) else []
    return [
        {
            name: item[name]
            for name in _DETAILS
            if name in item and isinstance(item[name], str | int | float | type(None))
        }
        for item in items
    ]


def _signatures(raw: Any) -> dict[str, Any]:
    fields = {name: raw[name] for name in _SIGNATURES if raw.get(name)} if isinstance(raw, dict) else {}
    return {
        name: value
        for name, value in fields.items()
        if isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    }


def _extra(raw: Any) -> dict[str, Any]:
    """Texts by vendor, such as `{"google": {"thought_signature": "…"}}`."""
    vendors = {name: value for name, value in raw.items() if isinstance(value, dict)} if isinstance(raw, dict) else {}
    texts = {
        vendor: {name: value for name, value in fields.items() if isinstance(value, str)}
        for vendor, fields in vendors.items()
        if vendor != OURS
    }
    return {vendor: fields for vendor, fields in texts.items() if fields}


_READERS: Mapping[str, Any] = {
    "thinking_blocks": _thinking,
    "reasoning_details": _details,
    "provider_specific_fields": _signatures,
    "extra_content": _extra,
}
