"""Brings a worker's reply into OpenAI's form, whole or in chunks, and marks the vendor's state in it. Pure.

Mended: content in parts; calls without id, type or index; arguments that are an object; two calls of a stream under one
index; finish reasons that OpenAI does not define; more choices than the request asked for. Ids that other vendors would
refuse, and ids of calls with state (`core/openai/vendor.py`), are replaced by ids of Baton's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.core.openai.finish import finish_reason
from gateway.core.openai.options import custom_input
from gateway.core.openai.vendor import CALL_FIELDS, MESSAGE_FIELDS, REASONING, is_portable, mark, new_id

CALLS_MAX = 128
_INPUTS = {"function": "arguments", "custom": "input"}


_PLAIN = frozenset(("role", "content", "refusal"))  # of a message that needs no mending where its content is text


@dataclass(slots=True)
class _Choice:
    """What is known of one choice of a stream. `ids` maps the vendor's ids to those of Baton."""

    marked: bool = False
    reasoned: bool = False
    vendor_ids: list[str | None] = field(default_factory=list)  # of each call, by Baton's index
    ids: list[str] = field(default_factory=list)
    index_of: dict[int, int] = field(default_factory=dict)  # the vendor's index -> Baton's
    marked_calls: set[int] = field(default_factory=set)
    customs: set[int] = field(default_factory=set)  # indices of the calls of custom tools
    inputs: dict[int, str] = field(default_factory=dict)  # their arguments so far, until those are complete


class Mender:
    """Mends the reply to one call: give it the whole body once, or each chunk in order. `origin`: of the worker.
    `customs`: names of the functions that stand for custom tools; their calls become calls of those."""

    def __init__(self, origin: str, choices: int = 1, customs: frozenset[str] = frozenset()) -> None:
        self._origin = origin
        self._customs = customs
        self._choices_max = choices
        self._choices: dict[int, _Choice] = {}

    def body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The whole reply, mended. Keeps the choices that were asked for."""
        choices = [choice for choice in body.get("choices") or () if isinstance(choice, Mapping)]
        return {**body, "choices": [self._mend_choice(choice) for choice in choices[: self._choices_max]]}

    def wants(self, index: int) -> bool:
        """Whether the choice of this index was asked for. A piece of its text needs no mending."""
        return 0 <= index < self._choices_max

    def chunk(self, chunk: Mapping[str, Any]) -> dict[str, Any]:
        """One chunk of a stream, mended."""
        choices = [choice for choice in chunk.get("choices") or () if isinstance(choice, Mapping)]
        own_choices = [choice for choice in choices if self.wants(_index(choice))]
        return {**chunk, "choices": [self._piece(choice) for choice in own_choices]}

    # ------------------------------------------------------------ whole

    def _mend_choice(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        plain = choice.get("message")
        if type(plain) is dict and _PLAIN.issuperset(plain) and isinstance(plain.get("content"), str):
            return _with_finish({**choice, "message": dict(plain)})
        message = _with_text(choice.get("message") or {})
        calls = [call for call in _list(message.get("tool_calls")) if isinstance(call, Mapping)][:CALLS_MAX]
        state = _has_state(message, MESSAGE_FIELDS) or (bool(calls) and _has_state(message, REASONING))
        if calls:
            mended = [self._call(_without_index(call), state) for call in calls]
            message["tool_calls"] = mended
            state = state or any(_has_state(call, CALL_FIELDS) for call in mended)
        elif "tool_calls" in message:
            del message["tool_calls"]
        if state:
            message["extra_content"] = mark(message, self._origin)
        return _with_finish({**choice, "message": message})

    def _call(self, call: Mapping[str, Any], state: bool) -> dict[str, Any]:
        our_id, vendor_id = self._id(call, state)
        call = self._custom(call)
        mended = {**call, "id": our_id, "type": _kind(call)}
        mended[mended["type"]] = _details(call, whole=True)
        if vendor_id or _has_state(call, CALL_FIELDS):
            mended["extra_content"] = mark(call, self._origin, vendor_id)
        return mended

    def _custom(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        """A whole call, as one of a custom tool where its function stands for one."""
        details = _details(call, whole=True)
        if _kind(call) == "custom" or details["name"] not in self._customs:
            return call
        text = custom_input(details["arguments"])
        rest = {name: value for name, value in call.items() if name != "function"}
        custom = {"name": details["name"], "input": details["arguments"] if text is None else text}
        return {**rest, "type": "custom", "custom": custom}

    def _id(self, call: Mapping[str, Any], state: bool) -> tuple[str, str | None]:
        """(the id that the client gets, the vendor's id that it replaces)."""
        vendor_id = call.get("id")
        state = state or _has_state(call, CALL_FIELDS)
        if not isinstance(vendor_id, str) or not vendor_id:
            return new_id(with_state=state), None
        if is_portable(vendor_id) and not state:
            return vendor_id, None
        return new_id(with_state=True), vendor_id

    # ------------------------------------------------------------ in chunks

    def _piece(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        progress = self._choices.setdefault(_index(choice), _Choice())
        delta = _with_text(choice.get("delta") or {})
        calls = [call for call in _list(delta.pop("tool_calls", None)) if isinstance(call, Mapping)]
        progress.reasoned = progress.reasoned or _has_state(delta, REASONING)
        state = _has_state(delta, MESSAGE_FIELDS) or any(_has_state(call, CALL_FIELDS) for call in calls)
        state = state or (bool(calls) and progress.reasoned)
        marks_now = state and not progress.marked
        progress.marked = progress.marked or state
        pieces = [piece for call in calls if (piece := self._call_piece(call, progress)) is not None]
        if choice.get("finish_reason"):
            pieces += [{"index": at, "custom": {"input": text}} for at, text in progress.inputs.items()]
            progress.inputs.clear()
        if pieces:
            delta["tool_calls"] = pieces
            if not progress.marked and any("extra_content" in piece for piece in pieces):
                progress.marked = marks_now = True
        if marks_now:
            delta["extra_content"] = mark(delta, self._origin)
        return _with_finish({**choice, "delta": delta})

    def _call_piece(self, call: Mapping[str, Any], progress: _Choice) -> dict[str, Any] | None:
        at = _position(call, progress)
        if at is None:
            return None
        piece: dict[str, Any] = {name: value for name, value in call.items() if name not in ("id", "type", "index")}
        kind = _kind(call)
        if kind in call:
            piece[kind] = _details(call, whole=False)
        if at in progress.customs or (at == len(progress.ids) and piece.get(kind, {}).get("name") in self._customs):
            kind = "custom"
            piece = _custom_piece(piece, at, progress)
        state = _has_state(call, CALL_FIELDS)
        if at < len(progress.ids):
            if state and at not in progress.marked_calls:  # once: clients join the texts of all pieces
                progress.marked_calls.add(at)
                piece["extra_content"] = mark(call, self._origin)
            return {"index": at, **piece}
        our_id, replaced = self._id(call, progress.marked)
        progress.ids.append(our_id)
        progress.vendor_ids.append(call.get("id") or None)
        if replaced or state:
            progress.marked_calls.add(at)
            piece["extra_content"] = mark(call, self._origin, replaced)
        piece.setdefault(kind, {})
        return {"index": at, "id": our_id, "type": kind, **piece}


def _position(call: Mapping[str, Any], state: _Choice) -> int | None:
    """Baton's index of the call that a piece belongs to; that of a new call equals the number of calls. None: the
    piece belongs to none, or to one too many."""
    vendor_id, index, count = call.get("id") or None, call.get("index"), len(state.ids)
    index = index if isinstance(index, int) else None
    if index in state.index_of:
        at = state.index_of[index]
        if vendor_id is None or state.vendor_ids[at] in (None, vendor_id):
            return at
    elif index is None:
        if vendor_id is not None and vendor_id in state.vendor_ids:
            return state.vendor_ids.index(vendor_id)
        if vendor_id is None and count and not _begins(call):
            return count - 1
    if count >= CALLS_MAX:
        return None
    if index is not None:
        state.index_of[index] = count
    return count


def _custom_piece(piece: dict[str, Any], at: int, state: _Choice) -> dict[str, Any]:
    """A piece of a call whose function stands for a custom tool. The input comes in one piece, once it is complete:
    inside JSON a character may be cut anywhere."""
    function = piece.pop("function", None) or {}
    state.customs.add(at)
    state.inputs[at] = state.inputs.get(at, "") + (function.get("arguments") or "")
    text = custom_input(state.inputs[at])
    custom = {"name": function["name"]} if function.get("name") else {}
    if text is not None:
        del state.inputs[at]
        custom["input"] = text
    return {**piece, "custom": custom} if custom else piece


def _begins(call: Mapping[str, Any]) -> bool:
    """Whether a piece without id and index begins a call: it names a function."""
    details = call.get(_kind(call))
    return isinstance(details, Mapping) and bool(details.get("name"))


def _kind(call: Mapping[str, Any]) -> str:
    return "custom" if call.get("type") == "custom" or ("custom" in call and "function" not in call) else "function"


def _details(call: Mapping[str, Any], *, whole: bool) -> dict[str, Any]:
    """The name of a call and its arguments as text. Only a whole call gets what is missing."""
    kind = _kind(call)
    raw = call.get(kind)
    fields = raw if isinstance(raw, Mapping) else {}
    details = {name: fields[name] for name in ("name", _INPUTS[kind]) if name in fields}
    count = details.get(_INPUTS[kind])
    if count is not None and not isinstance(count, str):
        details[_INPUTS[kind]] = json.dumps(count, ensure_ascii=False)
    elif count is None:
        details = {name: value for name, value in details.items() if value is not None}
    return {"name": "", _INPUTS[kind]: "{}" if kind == "function" else "", **details} if whole else details


def _with_text(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A message or delta whose content is text. Parts that think become `reasoning_content`."""
    content = fields.get("content")
    if content is None or isinstance(content, str):
        return dict(fields)
    parts = [part for part in _list(content) if isinstance(part, Mapping)]
    texts = [_part_text(part, "text") for part in parts if part.get("type") != "thinking"]
    thinking = "".join(_part_text(part, "thinking") for part in parts if part.get("type") == "thinking")
    reasoning = {"reasoning_content": thinking} if thinking and not _has_state(fields, REASONING) else {}
    return {**fields, "content": "".join(texts) if texts else None, **reasoning}


def _part_text(part: Mapping[str, Any], name: str) -> str:
    value = part.get(name)
    inner = [_part_text(one, "text") for one in _list(value) if isinstance(one, Mapping)]
    return value if isinstance(value, str) else "".join(inner)


def _with_finish(choice: dict[str, Any]) -> dict[str, Any]:
    reason = choice.get("finish_reason")
    known = finish_reason(reason)
    return choice if known is reason else {**choice, "finish_reason": known}


def _without_index(call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != "index"}


def _has_state(fields: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    return any(fields.get(name) for name in names)


def _index(choice: Mapping[str, Any]) -> int:
    index = choice.get("index")
    return index if isinstance(index, int) else 0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
