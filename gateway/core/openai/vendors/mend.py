"""Brings a worker's reply into OpenAI's form, whole or in chunks, and marks the vendor's state in it. Pure.

Mended: content in parts or as an object; calls without id, type, index or arguments; arguments that are an object; two
calls under one id or index; a name in each piece of a call; one call in the form of functions; `stop` beside calls and
finish reasons that OpenAI does not define; more choices than the request asked for. Ids that other vendors would
refuse, and ids of calls with state (`core/openai/vendor.py`), are replaced by ids of Baton's own.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gateway.core.openai.finish import finish_reason
from gateway.core.openai.options import custom_input
from gateway.core.openai.vendor import CALL_FIELDS, MESSAGE_FIELDS, REASONING, is_portable, mark, new_id
from gateway.core.openai.vendors.forms import as_list, has_state, with_text

CALLS_MAX = 128
_INPUTS = {"function": "arguments", "custom": "input"}
NO_ARGUMENTS = "{}"
NO_NAMES: Mapping[str, Any] = MappingProxyType({})


_PLAIN = frozenset(("role", "content", "refusal"))  # of a message that needs no mending where its content is text


@dataclass(slots=True)
class _Call:
    """What has come of one call of a stream. `vendor_id`: the worker's own id of it."""

    id: str
    vendor_id: str | None
    name: str = ""  # as the worker says it
    text: str = ""  # its arguments
    is_marked: bool = False
    is_custom: bool = False  # a custom tool stands behind its function

    def is_other(self, vendor_id: str | None, name: str, text: str) -> bool:
        """Whether a piece under this call's index begins another call. It does where it has a name and this one is
        complete; a name that comes again before that is a repetition."""
        if not name:
            return False
        has_other_id = None not in (vendor_id, self.vendor_id) and vendor_id != self.vendor_id
        if _is_json(self.text):
            return bool(text.strip()) or name != self.name or has_other_id
        return name != self.name and (has_other_id or bool(self.text))


@dataclass(slots=True)
class _Choice:
    """What is known of one choice of a stream."""

    marked: bool = False
    reasoned: bool = False
    calls: list[_Call] = field(default_factory=list)
    index_of: dict[int, int] = field(default_factory=dict)  # the vendor's index -> Baton's
    inputs: dict[int, str] = field(default_factory=dict)  # of custom tools, until those are complete

    def place(self, vendor_id: str | None) -> int | None:
        """Baton's index of the call with that id."""
        return next((at for at, call in enumerate(self.calls) if vendor_id and call.vendor_id == vendor_id), None)


class Mender:
    """Mends the reply to one call: give it the whole body once, or each chunk in order. `origin`: of the worker.
    `customs`: names of the functions that stand for custom tools; their calls become calls of those. `names`: the
    tools' own names by those that the worker was told. `params`: the client's, which say what form it expects."""

    def __init__(
        self,
        origin: str,
        choices: int = 1,
        customs: frozenset[str] = frozenset(),
        names: Mapping[str, str] = NO_NAMES,
        params: Mapping[str, Any] = NO_NAMES,
    ) -> None:
        self._origin = origin
        self._customs = customs
        self._names = names
        self._has_tools = "tools" in params
        choice = params.get("tool_choice")
        self._is_forced = isinstance(choice, Mapping) and choice.get("type") != "allowed_tools"
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
        message = self._with_calls(with_text(choice.get("message") or {}))
        calls = [call for call in as_list(message.get("tool_calls")) if isinstance(call, Mapping)][:CALLS_MAX]
        state = has_state(message, MESSAGE_FIELDS) or (bool(calls) and has_state(message, REASONING))
        if calls:
            ids: set[str] = set()
            mended = [self._call(_without_index(call), state, ids) for call in calls]
            message["tool_calls"] = mended
            state = state or any(has_state(call, CALL_FIELDS) for call in mended)
        elif "tool_calls" in message:
            del message["tool_calls"]
        if state:
            message["extra_content"] = mark(message, self._origin)
        choice = _with_finish({**choice, "message": message})
        reason = choice.get("finish_reason") or ("stop" if calls else None)
        return {**choice, "finish_reason": self._reason(reason, bool(calls), "function_call" in message)}

    def _with_calls(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The message or delta, a call in the form of functions as one of tools where the client sent tools."""
        if not (self._has_tools and isinstance(fields.get("function_call"), Mapping)):
            return fields
        call = fields.pop("function_call")
        return fields if fields.get("tool_calls") else fields | {"tool_calls": [{"index": 0, "function": call}]}

    def _reason(self, reason: str | None, has_calls: bool, is_function: bool) -> str | None:
        """Why a choice ended, in OpenAI's words: a reply with calls did not just stop, unless the client had named the
        tool."""
        if has_calls and (reason == "function_call" or (reason == "stop" and not self._is_forced)):
            return "tool_calls"
        return "function_call" if is_function and reason == "stop" else reason

    def _call(self, call: Mapping[str, Any], state: bool, ids: set[str]) -> dict[str, Any]:
        our_id, vendor_id = self._id(call, state, ids)
        ids.add(vendor_id or our_id)
        call = self._custom(call)
        mended = {**call, "id": our_id, "type": _kind(call)}
        mended[mended["type"]] = self._rename(_details(call, whole=True))
        if vendor_id or has_state(call, CALL_FIELDS):
            mended["extra_content"] = mark(call, self._origin, vendor_id)
        return mended

    def _custom(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        """A whole call, as one of a custom tool where its function stands for one."""
        details = self._rename(_details(call, whole=True))
        if _kind(call) == "custom" or details["name"] not in self._customs:
            return call
        text = custom_input(details["arguments"])
        rest = {name: value for name, value in call.items() if name != "function"}
        custom = {"name": details["name"], "input": details["arguments"] if text is None else text}
        return {**rest, "type": "custom", "custom": custom}

    def _rename(self, details: dict[str, Any]) -> dict[str, Any]:
        """A call's details with the name that the client knows."""
        name = self._names.get(details.get("name") or "")
        return details if name is None else details | {"name": name}

    def _id(self, call: Mapping[str, Any], state: bool, ids: Container[str]) -> tuple[str, str | None]:
        """(the id that the client gets, the vendor's id that it replaces). `ids`: of the calls before."""
        vendor_id = call.get("id")
        state = state or has_state(call, CALL_FIELDS)
        if not isinstance(vendor_id, str) or not vendor_id or vendor_id in ids:
            return new_id(with_state=state), None
        if is_portable(vendor_id) and not state:
            return vendor_id, None
        return new_id(with_state=True), vendor_id

    # ------------------------------------------------------------ in chunks

    def _piece(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        progress = self._choices.setdefault(_index(choice), _Choice())
        delta = self._with_calls(with_text(choice.get("delta") or {}))
        calls = [call for call in as_list(delta.pop("tool_calls", None)) if isinstance(call, Mapping)]
        progress.reasoned = progress.reasoned or has_state(delta, REASONING)
        state = has_state(delta, MESSAGE_FIELDS) or any(has_state(call, CALL_FIELDS) for call in calls)
        state = state or (bool(calls) and progress.reasoned)
        marks_now = state and not progress.marked
        progress.marked = progress.marked or state
        pieces = [piece for call in calls if (piece := self._call_piece(call, progress)) is not None]
        choice = _with_finish({**choice, "delta": delta})
        if reason := choice.get("finish_reason"):
            pieces += _last_pieces(progress)
            is_function = bool(delta.get("function_call"))
            choice["finish_reason"] = self._reason(reason, bool(progress.calls), is_function)
        if pieces:
            delta["tool_calls"] = pieces
            if not progress.marked and any("extra_content" in piece for piece in pieces):
                progress.marked = marks_now = True
        if marks_now:
            delta["extra_content"] = mark(delta, self._origin)
        return choice

    def _call_piece(self, call: Mapping[str, Any], progress: _Choice) -> dict[str, Any] | None:
        kind = _kind(call)
        details = _details(call, whole=False)
        at = _position(call, details, progress)
        if at is None:
            return None
        piece: dict[str, Any] = {name: value for name, value in call.items() if name not in ("id", "type", "index")}
        if at < len(progress.calls):
            return self._next_piece(call, at, piece | ({kind: details} if kind in call else {}), progress)
        known = _Call("", call.get("id") or None, details.get("name") or "", details.get(_INPUTS[kind]) or "")
        details = self._rename(details)
        piece |= {kind: details} if kind in call else {}
        known.is_custom = kind == "custom" or details.get("name") in self._customs
        known.id, replaced = self._id(call, progress.marked, [one.vendor_id or "" for one in progress.calls])
        progress.calls.append(known)
        if known.is_custom and kind != "custom":
            kind, piece = "custom", _custom_piece(piece, at, progress)
        if replaced or has_state(call, CALL_FIELDS):
            known.is_marked = True
            piece["extra_content"] = mark(call, self._origin, replaced)
        piece.setdefault(kind, {})
        return {"index": at, "id": known.id, "type": kind, **piece}

    def _next_piece(
        self, call: Mapping[str, Any], at: int, piece: dict[str, Any], progress: _Choice
    ) -> dict[str, Any] | None:
        """A piece of a call that has begun. A name that comes again is left out, for clients join the names of all
        pieces."""
        known, kind = progress.calls[at], _kind(call)
        if details := piece.get(kind):
            name = details.pop("name", None)
            if name and name != known.name:  # names come in pieces, too
                known.name += name
                details["name"] = name
            known.text += details.get(_INPUTS[kind]) or ""
        if known.is_custom and kind != "custom":
            piece = _custom_piece(piece, at, progress)
        if has_state(call, CALL_FIELDS) and not known.is_marked:  # once: clients join the texts of all pieces
            known.is_marked = True
            piece["extra_content"] = mark(call, self._origin)
        return {"index": at, **piece}


def missing_ends(choices: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The ends of choices that have none, of a stream that its worker said to be over."""
    return [
        {"index": one["index"], "delta": {}, "finish_reason": "stop"} for one in choices if "finish_reason" not in one
    ]


def _last_pieces(progress: _Choice) -> list[dict[str, Any]]:
    """The pieces that complete the calls of a choice that ends: inputs that were waited for, and arguments where none
    came."""
    pieces: list[dict[str, Any]] = [{"index": at, "custom": {"input": text}} for at, text in progress.inputs.items()]
    progress.inputs.clear()
    for at, call in enumerate(progress.calls):
        if not (call.is_custom or call.text.strip()):
            call.text = NO_ARGUMENTS
            pieces.append({"index": at, "function": {"arguments": NO_ARGUMENTS}})
    return pieces


def _position(call: Mapping[str, Any], details: Mapping[str, Any], state: _Choice) -> int | None:
    """Baton's index of the call that a piece belongs to; that of a new call equals the number of calls. None: the
    piece belongs to none, or to one too many."""
    vendor_id, index, count = call.get("id") or None, call.get("index"), len(state.calls)
    index = index if isinstance(index, int) else None
    name, text = details.get("name") or "", details.get(_INPUTS[_kind(call)]) or ""
    at = state.index_of.get(index) if index is not None else None
    by_id = state.place(vendor_id)
    if by_id is not None and (index is None or (at is not None and state.calls[at].vendor_id != vendor_id)):
        at = by_id
    elif index is None and count and not (vendor_id and name):
        at = count - 1
    if at is not None and not state.calls[at].is_other(vendor_id, name, text):
        return at
    if count >= CALLS_MAX:
        return None
    if index is not None:
        state.index_of[index] = count
    return count


def _custom_piece(piece: dict[str, Any], at: int, state: _Choice) -> dict[str, Any]:
    """A piece of a call whose function stands for a custom tool. The input comes in one piece, once it is complete:
    inside JSON a character may be cut anywhere."""
    function = piece.pop("function", None) or {}
    state.inputs[at] = state.inputs.get(at, "") + (function.get("arguments") or "")
    text = custom_input(state.inputs[at])
    custom = {"name": function["name"]} if function.get("name") else {}
    if text is not None:
        del state.inputs[at]
        custom["input"] = text
    return {**piece, "custom": custom} if custom else piece


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


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
    if not whole:
        return details
    if kind == "function" and not details.get("arguments"):
        details["arguments"] = NO_ARGUMENTS
    return {"name": "", _INPUTS[kind]: "", **details}


def _with_finish(choice: dict[str, Any]) -> dict[str, Any]:
    reason = choice.get("finish_reason")
    known = finish_reason(reason)
    return choice if known is reason else {**choice, "finish_reason": known}


def _without_index(call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != "index"}


def _index(choice: Mapping[str, Any]) -> int:
    index = choice.get("index")
    return index if isinstance(index, int) else 0
