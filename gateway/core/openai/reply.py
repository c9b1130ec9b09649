"""OpenAI's chat-completions replies, complete and in chunks: a worker's choices with Baton's id and usage. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from gateway.core.money.amounts import Usage
from gateway.core.money.details import details_json
from gateway.core.openai import marks
from gateway.core.openai.body import AsMapping
from gateway.core.openai.body import json_bytes as json_bytes

TIERS = ("auto", "default", "flex", "scale", "priority", "fast")
DONE = b"data: [DONE]\n\n"  # the last event of a stream that succeeded
FACT_BYTES_MAX = 65_536  # of one property of a vendor's own, as JSON
# What Baton says itself of a reply and of a choice; all else is its worker's own and goes to the client.
_OWN = frozenset(("id", "object", "created", "model", "choices", "usage", "error", "baton", "done", "data", "type"))
_OWN |= {"obfuscation", "p", "service_tier", "system_fingerprint"}
_OWN_OF_CHOICE = frozenset(("index", "message", "delta", "finish_reason", "logprobs", "text", "error"))


def sse(body: Mapping[str, Any], event: str | None = None) -> bytes:
    """Encode one server-sent event. `event` is its name, for clients that dispatch on it."""
    return (b"" if event is None else f"event: {event}\n".encode()) + b"data: " + json_bytes(body) + b"\n\n"


def usage_json(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object with both detail objects. They hold the counts that a worker reported, and no others."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **details_json(usage.details),
    }


def completion(
    worker_body: Mapping[str, Any], *, completion_id: str, created_s: int, model: str, usage: Usage
) -> dict[str, Any]:
    """The client's reply: the worker's choices under Baton's id and model name, with the usage of all calls."""
    return {
        "id": completion_id,
        "object": "chat.completion",
        "created": created_s,
        "model": model,
        "choices": [_complete_choice(choice, index) for index, choice in enumerate(worker_body.get("choices") or ())],
        "usage": usage_json(usage),
        "service_tier": "default",
        **reply_facts(worker_body),
    }


def _complete_choice(choice: Mapping[str, Any], index: int) -> dict[str, Any]:
    message = {"role": "assistant", "content": None, "refusal": None, **(choice.get("message") or {})}
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)  # clients with strict schemas reject null
    return {
        "index": _index(choice, index),
        "message": message,
        "finish_reason": choice.get("finish_reason") or "stop",
        "logprobs": choice.get("logprobs"),
        **choice_facts(choice),
    }


def reply_facts(worker_body: Mapping[str, Any]) -> dict[str, Any]:
    """What a completion or chunk says of itself: `service_tier`, `system_fingerprint` and its vendor's own properties.
    A tier that OpenAI does not define goes under a name of its own, because clients cannot parse it."""
    if _FACTLESS.issuperset(worker_body):
        return {}
    facts = {name: value for name, value in worker_body.items() if name not in _OWN and _passes(name, value)}
    tier, fingerprint = worker_body.get("service_tier"), worker_body.get("system_fingerprint")
    if tier or "native_service_tier" in facts:
        facts |= {"service_tier": tier} if tier in TIERS else {"service_tier": None}
    if tier and tier not in TIERS:
        facts["native_service_tier"] = tier
    return facts | ({"system_fingerprint": fingerprint} if isinstance(fingerprint, str) and fingerprint else {})


_FACTLESS = _OWN - {"service_tier", "system_fingerprint"}


def _passes(name: str, value: Any) -> bool:
    """Whether a vendor's own property goes to the client: one that says something, in bounds."""
    if value is None or name.startswith("_"):
        return False
    return not isinstance(value, str | list | dict) or len(json_bytes(value)) <= FACT_BYTES_MAX


def choice_facts(choice: Mapping[str, Any]) -> dict[str, Any]:
    """The vendor's own properties of a choice, such as the findings of a filter."""
    if _OWN_OF_CHOICE.issuperset(choice):
        return {}
    return {name: value for name, value in choice.items() if name not in _OWN_OF_CHOICE and _passes(name, value)}


def merge(bodies: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Merge completions into one that has all of their choices, renumbered in order. A single one stays as it is."""
    if len(bodies) == 1:
        return bodies[0]
    choices = [choice for body in bodies for choice in body.get("choices") or ()]
    return {**bodies[0], "choices": [{**choice, "index": at} for at, choice in enumerate(choices)]}


def with_one_call(body: Mapping[str, Any], request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keep only the first tool call of each choice if the request forbids parallel calls: not every worker obeys."""
    if request.get("parallel_tool_calls") is not False:
        return body
    return {**body, "choices": [_choice_with_one_call(choice) for choice in body.get("choices") or ()]}


def _choice_with_one_call(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    for part in ("message", "delta"):
        content = _mapping(choice.get(part))
        calls = _mappings(content.get("tool_calls"))
        first_call = calls[:1] if part == "message" else [call for call in calls if _index(call, 0) == 0]
        if len(first_call) < len(calls):
            rest = {name: value for name, value in content.items() if name != "tool_calls"}
            return {**choice, part: {**rest, **({"tool_calls": first_call} if first_call else {})}}
    return choice


def reply_text(worker_body: Mapping[str, Any]) -> str:
    """The text of the first choice, which later steps see. Empty if there is none."""
    choices = worker_body.get("choices") or [{}]
    content = (choices[0].get("message") or {}).get("content")
    return content if isinstance(content, str) else ""


def chunk(choices: Sequence[Mapping[str, Any]], *, completion_id: str, created_s: int, model: str) -> dict[str, Any]:
    """One stream chunk, with all of OpenAI's keys on every choice."""
    return {
        "id": completion_id,
        "object": "chat.completion.chunk",
        "created": created_s,
        "model": model,
        "service_tier": "default",
        "choices": [
            {
                "index": _index(choice, 0),
                "delta": _delta(choice.get("delta") or {}),
                "finish_reason": choice.get("finish_reason"),
                "logprobs": choice.get("logprobs"),
                **choice_facts(choice),
            }
            for choice in choices
        ],
    }


def _delta(delta: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in delta.items() if value is not None or name in ("content", "refusal")}


def chunks_of(worker_body: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """Split a completion into the choices of stream chunks: for each choice, its role, its content and its end."""
    pieces: list[list[dict[str, Any]]] = []
    for index, choice in enumerate(worker_body.get("choices") or ()):
        complete = _complete_choice(choice, index)
        at, message = complete["index"], dict(complete["message"])
        role = {"role": message.pop("role"), "content": None if message["content"] is None else "", "refusal": None}
        calls = [{**call, "index": i} for i, call in enumerate(_mappings(message.pop("tool_calls", None)))]
        delta = {name: value for name, value in message.items() if value is not None}
        if calls:
            delta["tool_calls"] = calls
        pieces += [
            [{"index": at, "delta": role}],
            [{"index": at, "delta": delta, "logprobs": complete["logprobs"]}],
            [{"index": at, "delta": {}, "finish_reason": complete["finish_reason"], **choice_facts(choice)}],
        ]
    return pieces


class _Text(msgspec.Struct, forbid_unknown_fields=True, gc=False, kw_only=True):
    role: Literal["assistant"] | None = None  # some servers name it in each chunk; it says nothing
    content: str


class TextChoice(AsMapping, msgspec.Struct, forbid_unknown_fields=True, gc=False, eq=False):
    """A choice of a TextChunk."""

    index: int
    delta: _Text
    finish_reason: None = None
    logprobs: None = None

    def as_json(self) -> dict[str, Any]:
        """The choice as any other choice."""
        return {"index": self.index, "delta": {"content": self.delta.content}, "finish_reason": None, "logprobs": None}


class TextChunk(AsMapping, msgspec.Struct, forbid_unknown_fields=True, gc=False, eq=False):
    """A stream chunk that holds a piece of one choice's text and nothing else, as most chunks do."""

    id: str
    object: str
    created: int
    model: str
    choices: Annotated[list[TextChoice], msgspec.Meta(min_length=1, max_length=1)]
    usage: None = None

    def as_json(self) -> dict[str, Any]:
        """The chunk as any other chunk."""
        head = {"id": self.id, "object": self.object, "created": self.created, "model": self.model}
        return {**head, "choices": [self.choices[0].as_json()]}


read_text = msgspec.json.Decoder(TextChunk).decode  # raises ValueError or RecursionError for any other chunk
_CHUNK_FIELDS = frozenset(TextChunk.__struct_fields__) - {"usage"}
_CHOICE_FIELDS = frozenset(TextChoice.__struct_fields__)


def text_piece(chunk: Mapping[str, Any]) -> tuple[int, str] | None:
    """(index of the choice, text) of a chunk with a piece of one choice's text and nothing else; None for others."""
    if isinstance(chunk, TextChunk):
        piece = chunk.choices[0]
        return piece.index, piece.delta.content
    choices = chunk.get("choices")
    if not choices or len(choices) != 1 or not _CHUNK_FIELDS.issuperset(chunk):
        return None
    choice = choices[0]
    delta = choice.get("delta")
    if not delta or len(delta) != 1 or not _CHOICE_FIELDS.issuperset(choice):
        return None
    if choice.get("finish_reason") or choice.get("logprobs"):
        return None
    index, text = choice.get("index"), delta.get("content")
    return (index, text) if type(index) is int and type(text) is str else None


class ReplyBuilder:
    """Builds one completion body from chunks, so that the log holds a streamed reply in the same form as any other. It
    never raises: it ignores pieces that do not have OpenAI's form."""

    def __init__(self) -> None:
        self._choices: dict[int, dict[str, Any]] = {}
        self._pieces: dict[int, list[str]] = {}  # texts that follow the content of a choice: joined once
        self._facts: dict[str, Any] = {}

    @property
    def started(self) -> bool:
        """Whether any choice has arrived."""
        return bool(self._choices)

    @property
    def finished(self) -> bool:
        """Whether every choice that has begun has its finish_reason."""
        return self.started and all("finish_reason" in choice for choice in self._choices.values())

    def add(self, chunk_choices: Sequence[Mapping[str, Any]]) -> None:
        """Add the choices of one chunk."""
        self._join()
        for choice in chunk_choices:
            built = self._choices.setdefault(_index(choice, 0), {"message": {"role": "assistant", "content": None}})
            marks.place(built, delta := _mapping(choice.get("delta")))
            _merge_message(built["message"], delta)
            if choice.get("logprobs"):
                _merge_logprobs(built.setdefault("logprobs", {}), _mapping(choice["logprobs"]))
            if choice.get("finish_reason"):
                built["finish_reason"] = choice["finish_reason"]
            built |= choice_facts(choice)

    def add_text(self, index: int, text: str) -> None:
        """`add`, of a choice that holds no more than text."""
        pieces = self._pieces.get(index)
        if pieces is None:
            self._choices.setdefault(index, {"message": {"role": "assistant", "content": None}})
            pieces = self._pieces[index] = []
        pieces.append(text)

    def add_all(self, chunks: Sequence[dict[str, Any] | TextChunk]) -> None:
        """Add chunks that came together, with what they say about themselves."""
        for chunk in chunks:
            if not isinstance(chunk, TextChunk):
                self.add(chunk.get("choices") or ())
                self.about(chunk)
            elif (pieces := self._pieces.get((choice := chunk.choices[0]).index)) is not None:
                pieces.append(choice.delta.content)
            else:
                self.add_text(choice.index, choice.delta.content)

    def about(self, chunk: Mapping[str, Any]) -> None:
        """Add what a chunk says of itself."""
        self._facts |= reply_facts(chunk)

    def body(self) -> dict[str, Any]:
        """The completion so far."""
        self._join()
        return self._facts | {
            "choices": [{"index": index, **choice} for index, choice in sorted(self._choices.items())]
        }

    def _join(self) -> None:
        for index, pieces in self._pieces.items():
            if pieces:
                message = self._choices[index]["message"]
                message["content"] = (message["content"] or "") + "".join(pieces)
                pieces.clear()


_TEXTS = ("content", "refusal", "reasoning_content", "reasoning")
_PLAIN = frozenset((*_TEXTS, "role"))  # of a delta that holds no more than text
_CALLS_MAX = 128
_STATE_LISTS = {"thinking_blocks": ("thinking",), "reasoning_details": ("text", "summary", "data")}
_WHOLE_ITEMS = ("redacted_thinking", "reasoning.encrypted", "responses.item")


def _merge_message(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for name in _TEXTS:
        if isinstance(piece := delta.get(name), str):
            message[name] = (message.get(name) or "") + piece
    if _PLAIN.issuperset(delta):
        return
    for call in _mappings(delta.get("tool_calls")):
        _merge_call(message.setdefault("tool_calls", []), call)
    if delta.get("audio"):
        _append(message.setdefault("audio", {}), _mapping(delta["audio"]))
    if delta.get("function_call"):
        _append(message.setdefault("function_call", {}), _mapping(delta["function_call"]))
    if delta.get("annotations"):
        message.setdefault("annotations", []).extend(_mappings(delta["annotations"]))
    _merge_state(message, delta)


def _merge_call(calls: list[dict[str, Any]], delta: Mapping[str, Any]) -> None:
    index = _index(delta, len(calls))
    kind, text = ("custom", "input") if delta.get("type") == "custom" else ("function", "arguments")
    while len(calls) <= index < _CALLS_MAX:
        calls.append({"id": "", "type": kind, kind: {"name": "", text: ""}})
    if 0 <= index < len(calls):
        calls[index]["id"] = delta.get("id") or calls[index]["id"]
        kind = calls[index]["type"]
        _append(calls[index][kind], _mapping(delta.get(kind)))
        _merge_state(calls[index], delta)


def _merge_state(fields: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Add the vendor's state in a piece of a message or call (core/openai/vendor.py)."""
    for name in ("extra_content", "provider_specific_fields"):
        if delta.get(name):
            _merge_fields(fields.setdefault(name, {}), _mapping(delta[name]))
    for name, texts in _STATE_LISTS.items():
        for item in _mappings(delta.get(name)):
            _merge_item(fields.setdefault(name, []), item, texts)


def _merge_fields(fields: dict[str, Any], pieces: Mapping[str, Any]) -> None:
    for name, piece in pieces.items():
        if isinstance(piece, Mapping):
            value = fields.get(name)
            fields[name] = value if isinstance(value, dict) else {}
            _merge_fields(fields[name], piece)
        elif isinstance(piece, list) and isinstance(fields.get(name), list):
            fields[name] = fields[name] + piece
        elif piece is not None:
            fields[name] = piece


def _merge_item(items: list[dict[str, Any]], piece: Mapping[str, Any], texts: Sequence[str]) -> None:
    """Add a piece to the block that it continues: one of its type and index that is not signed yet, if it is the
    last."""
    last = items[-1] if items else {}
    same = last.get("type") == piece.get("type") and last.get("index") == piece.get("index")
    if not items or not same or last.get("signature") or piece.get("type") in _WHOLE_ITEMS:
        items.append({name: value for name, value in piece.items() if value is not None})
        return
    _append(last, {name: piece.get(name) for name in texts})
    last.update({name: value for name, value in piece.items() if name not in texts and value is not None})


def _merge_logprobs(merged: dict[str, Any], piece: Mapping[str, Any]) -> None:
    for name, items in piece.items():
        merged.setdefault(name, None)
        if isinstance(items, list):
            merged[name] = merged[name] or []
            merged[name].extend(items)


def _append(texts: dict[str, Any], pieces: Mapping[str, Any]) -> None:
    for name, piece in pieces.items():
        if isinstance(piece, str):
            texts[name] = (texts.get(name) or "") + piece


def _index(piece: Mapping[str, Any], default: int) -> int:
    return index if isinstance(index := piece.get("index"), int) else default


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
