"""The Responses API as the wire to a worker: chat bodies become its requests, its replies and events become chat. Pure.

A worker whose pool entry says `api: responses` is asked that way. What it needs back of a turn (encrypted reasoning,
items of hosted tools) travels in `reasoning_details` of the message, in order, under FORMAT; core/openai/vendor.py
gives them back to workers of its origin alone. Nothing is stored with the worker's vendor (`store: false`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.core.openai import marks
from gateway.core.openai.finish import CUT, finish_reason
from gateway.core.openai.reply import ReplyBuilder
from gateway.core.openai.responses.items import passed_items, to_input_items
from gateway.core.openai.responses.output import ENCRYPTED, FORMAT, HOSTED_ITEM, hosted_item, output_of

INCLUDE_STATE = "reasoning.encrypted_content"
INCLUDE_LOGPROBS = "message.output_text.logprobs"
STATUSES = {"rate_limit_exceeded": 429, "server_error": 500, "invalid_prompt": 400}  # of errors in a reply
OWN_ITEMS = ("message", "function_call", "custom_tool_call", "reasoning")
FACTS = (  # of a Response object, that only the worker knows; Baton's own are in reply.py
    *("billing", "moderation", "prompt_cache_retention", "reasoning", "temperature", "top_p", "presence_penalty"),
    *("frequency_penalty", "text", "tool_usage", "tools", "truncation", "top_logprobs", "max_tool_calls"),
    "content_filters",
)
_DROPPED = ("messages", "stream_options", "n", "store", "top_logprobs", "logprobs", "max_tokens", "metadata")
_HEX = "0" * 32  # of ids that are taken off again
_EMPTY: Mapping[str, Any] = {"type": "object", "properties": {}}


def to_request(chat: Mapping[str, Any], *, with_state: bool) -> dict[str, Any]:
    """A chat request's body as one of the Responses API; properties that chat does not have stay. `with_state`: ask for
    what the model needs back of its reasoning, which models refuse that do not reason."""
    body = {name: value for name, value in chat.items() if name not in (*_DROPPED, *_CHANGED)}
    for name, change in _CHANGED.items():
        if chat.get(name) is not None:
            for into, value in change(chat[name]).items():
                own_value = body.get(into)
                body[into] = (
                    {**own_value, **value} if isinstance(own_value, dict) and isinstance(value, dict) else value
                )
    if "max_tokens" in chat:
        body.setdefault("max_output_tokens", chat["max_tokens"])
    include = [name for name in chat.get("include") or () if with_state or name != INCLUDE_STATE]
    include += [INCLUDE_STATE] if with_state else []
    if chat.get("logprobs"):
        include.append(INCLUDE_LOGPROBS)
        body["top_logprobs"] = chat.get("top_logprobs") or 0
    if include:
        body["include"] = list(dict.fromkeys(include))
    return {**body, "input": _items(chat["messages"]), "store": False}


def _text_format(value: Mapping[str, Any]) -> dict[str, Any]:
    inner = value.get("json_schema")
    return {"text": {"format": {"type": value.get("type"), **(inner if isinstance(inner, Mapping) else {})}}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    inner = tool.get(str(kind))
    if not isinstance(inner, Mapping):
        return dict(tool)  # a hosted one, in the form of this API
    if kind == "function":
        return {"type": kind, "parameters": _EMPTY, "strict": False, **inner}
    format_ = inner.get("format")
    grammar = format_.get("grammar") if isinstance(format_, Mapping) else None
    flat = {"format": {"type": "grammar", **grammar}} if isinstance(grammar, Mapping) else {}
    return {"type": kind, **inner, **flat}


def _choice(choice: Any) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    inner = choice.get(str(choice.get("type")))
    if not isinstance(inner, Mapping):
        return choice
    if choice["type"] == "allowed_tools":
        return {"type": "allowed_tools", **inner, "tools": [_choice(tool) for tool in inner.get("tools") or ()]}
    return {"type": choice["type"], **inner}


_CHANGED: Mapping[str, Any] = {
    "max_completion_tokens": lambda value: {"max_output_tokens": value},
    "reasoning_effort": lambda value: {"reasoning": {"effort": value}},
    "verbosity": lambda value: {"text": {"verbosity": value}},
    "response_format": _text_format,
    "tools": lambda tools: {"tools": [_tool(tool) for tool in tools]},
    "tool_choice": lambda choice: {"tool_choice": _choice(choice)},
}


def _items(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    customs: set[str] = set()
    for message in messages:
        items += passed_items(message, behind=False)
        if message["role"] == "assistant":
            output = output_of(message)
            customs |= {one["call_id"] for one in output.items if one["type"] == "custom_tool_call"}
            sent = (_sent_back(one, output.states.get(at), output.is_marked) for at, one in enumerate(output.items))
            items += [one for one in sent if one is not None]
        else:
            for item in to_input_items([marks.without(message)], _HEX):
                del item["id"]
                if item["type"] == "function_call_output" and item["call_id"] in customs:
                    item = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": item["output"]}
                items.append(item)
        items += passed_items(message, behind=True)
    return items


def _sent_back(item: dict[str, Any], detail: Mapping[str, Any] | None, is_marked: bool) -> dict[str, Any] | None:
    """An item of the worker's own, as it goes back; None for one that says nothing, or that nobody could read."""
    kind = item["type"]
    if kind == "reasoning":
        if detail is None:
            return None
        own = {"id": detail["id"]} if detail.get("id") else {}
        return {"type": kind, **own, "summary": item["summary"], "encrypted_content": detail["data"]}
    if detail is not None:
        return hosted_item(detail)
    if kind == "message":  # parts of output need the id of a stored one
        text = "".join(part.get("text") or part.get("refusal") or "" for part in item["content"])
        phase = {"phase": item["phase"]} if is_marked and item.get("phase") else {}
        return {"type": "message", "role": "assistant", "content": text, **phase} if text else None
    return {name: value for name, value in item.items() if name != "id"}


# ---------------------------------------------------------------- from the worker


def to_completion(response: Mapping[str, Any]) -> dict[str, Any]:
    """A Response object as a chat completion, or as `{"error": …}` where it failed."""
    if error := _error(response):
        return {"error": error}
    maker, built = Chunks(), ReplyBuilder()
    for at, item in enumerate(_objects(response.get("output"))):
        for event in whole_events(at, item):
            built.add(maker.chunk(event).get("choices") or ())
    last = maker.chunk({"type": "response.completed", "response": response})
    built.add(last["choices"])
    head = {"id": response.get("id"), "object": "chat.completion", "created": response.get("created_at")}
    return {**head, "model": response.get("model"), "usage": None, **_without_choices(last), **built.body()}


def _without_choices(chunk: Mapping[str, Any]) -> dict[str, Any]:
    return {name: chunk[name] for name in ("usage", "service_tier") if name in chunk}


def whole_events(at: int, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events that an item that came whole would have come in."""
    place = {"output_index": at}
    yield {"type": "response.output_item.added", **place, "item": {**item, "encrypted_content": None}}
    if item.get("type") == "message":
        for index, part in enumerate(_objects(item.get("content"))):
            yield {"type": "response.content_part.added", **place, "content_index": index, "part": part}
            for kind, name in (("output_text", "text"), ("refusal", "refusal")):
                if part.get("type") == kind and part.get(name):
                    logprobs = {"logprobs": part.get("logprobs")}
                    yield {"type": f"response.{kind}.delta", **place, "delta": part[name], **logprobs}
            for one in _objects(part.get("annotations")):
                yield {"type": "response.output_text.annotation.added", **place, "annotation": one}
    if item.get("type") == "reasoning":
        for name, (begin, delta) in _REASONING_PARTS.items():
            for index, part in enumerate(_objects(item.get(name))):
                yield {"type": begin, **place, "part": part, "summary_index": index}
                yield {"type": delta, **place, "delta": part.get("text")}
    yield {"type": "response.output_item.done", **place, "item": item}


class Chunks:
    """Makes the chunks of one streamed reply from its events. It never raises, and ignores whatever does not have
    OpenAI's form."""

    def __init__(self) -> None:
        self._calls: dict[int, int] = {}  # output index -> index of the call
        self._begun: set[int] = set()  # calls with a piece of their input
        self._details = 0
        self._items: set[int] = set()  # output indices of the items that have begun
        self._parts = 0  # of the message that has begun
        self._reasoned = False  # whether some reasoning text has come
        self._held: list[dict[str, Any]] | None = []  # marks before anything was said: till then another may answer
        self._head: dict[str, Any] = {"object": "chat.completion.chunk"}

    def chunk(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """The chunk of an event; one without choices where it says nothing of the reply."""
        return self._head | self._body(event)

    def _body(self, event: Mapping[str, Any]) -> dict[str, Any]:
        kind = str(event.get("type"))
        if kind == "response.created":
            response = _object(event.get("response"))
            fields = {"id": response.get("id"), "created": response.get("created_at"), "model": response.get("model")}
            self._head |= {name: value for name, value in fields.items() if value is not None}
        if kind in ("response.completed", "response.incomplete", "response.failed", "response.cancelled"):
            return self._last(_object(event.get("response")), kind)
        if kind == "error" or "error" in event:
            return {"error": _described(_object(event.get("error")) or event)}
        deltas = self._deltas(kind, event)
        if self._held is not None:
            self._held += deltas
            if all(delta.keys() == {marks.FIELD} for delta in deltas):
                return {"choices": []}
            deltas, self._held = self._held, None
        choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        if choices and kind == "response.output_text.delta" and _objects(event.get("logprobs")):
            choices[-1]["logprobs"] = {"content": _objects(event["logprobs"]), "refusal": None}
        return {"choices": choices}

    def _deltas(self, kind: str, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        if kind == "response.output_item.added":
            return self._item_begun(event)
        if kind == "response.output_item.done":
            return self._item_begun(event) + self._item_done(event)
        if kind in _PARTS_BEGIN:
            return self._part_begun(kind, event)
        if kind == "response.output_text.annotation.added" and (cited := _object(event.get("annotation"))):
            return [{"annotations": [_citation(cited)]}] if isinstance(cited.get("type"), str) else []
        name = _TEXTS.get(kind)
        if name is None and kind not in _INPUTS:
            return [{marks.EVENTS: [event]}] if kind.startswith(_PROGRESS) else []
        text = event.get("delta")
        if not isinstance(text, str) or not text:
            return []
        if name is not None:
            self._reasoned = self._reasoned or name == "reasoning_content"
            return [{name: text}]
        at, call = self._calls.get(_place(event)), _INPUTS[kind]
        if at is None:
            return []
        self._begun.add(at)
        return [{"tool_calls": [{"index": at, call[0]: {call[1]: text}}]}]

    def _item_begun(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The delta in which an item begins: its mark, and the head of a call."""
        item, place = _object(event.get("item")), _place(event)
        kind = item.get("type")
        if place in self._items or not isinstance(kind, str):
            return []
        self._items.add(place)
        self._parts = 0
        if kind in _KINDS:
            name, content = _KINDS[kind]
            at = self._calls[place] = len(self._calls)
            details = {"name": item.get("name"), content: ""}
            call = {"index": at, "id": item.get("call_id"), "type": name, name: details}
            return [{marks.FIELD: [{"type": marks.CALL}], "tool_calls": [call]}]
        if kind == "message":
            phase = {"phase": item["phase"]} if "phase" in item else {}
            return [{marks.FIELD: [{"type": marks.MESSAGE, **phase}]}]
        if kind == "reasoning":
            return [{marks.FIELD: [{"type": marks.REASONING}]}]
        begun = [] if event.get("type") == "response.output_item.done" else [{marks.EVENTS: [event]}]
        return [{marks.FIELD: [{"type": marks.STATE}]}, *begun]

    def _part_begun(self, kind: str, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The deltas in which a part of a message or of reasoning begins."""
        part = _object(event.get("part")).get("type")
        if part in ("output_text", "refusal"):
            self._parts += 1
            return [{marks.FIELD: [{"type": marks.PART}]}] if self._parts > 1 else []
        mark = {"summary_text": marks.SUMMARY, "reasoning_text": marks.TEXT}.get(str(part))
        if mark is None:
            return []
        gap = {marks.FIELD: [{"type": marks.GAP}], "reasoning_content": "\n\n"}
        return [*([gap] if self._reasoned else []), {marks.FIELD: [{"type": mark}]}]

    def _item_done(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The deltas of an item that is complete, without what came of it in pieces."""
        item = _object(event.get("item"))
        kind = item.get("type")
        if not isinstance(kind, str):
            return []
        if kind in _KINDS:
            at, (name, content) = self._calls.get(_place(event)), _KINDS[kind]
            text = item.get(content)
            if at is None or at in self._begun or not isinstance(text, str):
                return []
            return [{"tool_calls": [{"index": at, name: {content: text}}]}]
        if kind == "reasoning":
            data, details = item.get("encrypted_content"), {"type": ENCRYPTED}
        elif kind not in OWN_ITEMS:
            data, details = json.dumps(item), {"type": HOSTED_ITEM}
        else:
            return []
        if not isinstance(data, str) or not data:
            return []
        index, self._details = self._details, self._details + 1
        own = {"id": item["id"]} if isinstance(item.get("id"), str) else {}
        return [{"reasoning_details": [{**details, **own, "format": FORMAT, "index": index, "data": data}]}]

    def _last(self, response: Mapping[str, Any], kind: str) -> dict[str, Any]:
        if kind in ("response.failed", "response.cancelled"):
            return {"error": _error({"status": "failed", **response})}
        facts = {name: response[name] for name in FACTS if name in response}
        delta = {marks.FIELD: [{"type": marks.RESPONSE, "facts": facts}]} if facts else {}
        end = {"index": 0, "delta": delta, "finish_reason": self._finish_reason(response)}
        held = [{"index": 0, "delta": one, "finish_reason": None} for one in self._held or ()]
        return {"choices": [*held, end], "usage": response.get("usage"), **_tier(response)}

    def _finish_reason(self, response: Mapping[str, Any]) -> str:
        """Why the reply ended, in chat's words."""
        reason = finish_reason(_object(response.get("incomplete_details")).get("reason"))
        if response.get("status") == "incomplete" and reason in CUT:
            return str(reason)
        return "tool_calls" if self._calls else "stop"


_TEXTS = {
    "response.output_text.delta": "content",
    "response.refusal.delta": "refusal",
    "response.reasoning_summary_text.delta": "reasoning_content",
    "response.reasoning_text.delta": "reasoning_content",
}
_INPUTS = {
    "response.function_call_arguments.delta": ("function", "arguments"),
    "response.custom_tool_call_input.delta": ("custom", "input"),
}
_KINDS = {"function_call": ("function", "arguments"), "custom_tool_call": ("custom", "input")}
_PARTS_BEGIN = (
    *("response.content_part.added", "response.reasoning_summary_part.added", "response.reasoning_part.added"),
)
_REASONING_PARTS = {  # lists of a reasoning item: the events of their parts
    "summary": ("response.reasoning_summary_part.added", "response.reasoning_summary_text.delta"),
    "content": ("response.content_part.added", "response.reasoning_text.delta"),
}
_PROGRESS = tuple(
    f"response.{tool}"
    for tool in ("web_search_call.", "file_search_call.", "code_interpreter_call", "image_generation_call.", "mcp_",
                 "shell_call", "local_shell_call", "apply_patch_call", "tool_search_call", "computer_call")
)  # fmt: skip


def _error(response: Mapping[str, Any]) -> dict[str, Any] | None:
    """The error of a response that failed; None for any other."""
    if response.get("status") not in ("failed", "cancelled"):
        return None
    return _described(_object(response.get("error")))


def _described(error: Mapping[str, Any]) -> dict[str, Any]:
    code, message = error.get("code"), error.get("message")
    status = {"status": STATUSES[code]} if isinstance(code, str) and code in STATUSES else {}
    return {"message": message or "the response failed", "code": code, "param": error.get("param"), **status}


def _tier(response: Mapping[str, Any]) -> dict[str, Any]:
    return {"service_tier": response["service_tier"]} if isinstance(response.get("service_tier"), str) else {}


def _citation(annotation: Mapping[str, Any]) -> dict[str, Any]:
    """An annotation in the form of chat, which has an object of that name beside the type."""
    kind, inner = annotation["type"], {name: value for name, value in annotation.items() if name != "type"}
    return {"type": kind, kind: inner}


def _place(event: Mapping[str, Any]) -> int:
    """The index of an event's item; one that no item has where it does not say."""
    place = event.get("output_index")
    return place if isinstance(place, int) else -1


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []
