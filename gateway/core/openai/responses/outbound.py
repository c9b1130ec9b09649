"""The Responses API as the wire to a worker: chat bodies become its requests, its replies and events become chat. Pure.

A worker whose pool entry says `api: responses` is asked that way. What it needs back of a turn (encrypted reasoning,
items of hosted tools) travels in `reasoning_details` of the message, in order, under FORMAT; core/openai/vendor.py
gives them back to workers of its origin alone. Nothing is stored with the worker's vendor (`store: false`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.openai.finish import CUT, finish_reason
from gateway.core.openai.responses.items import to_input_items

FORMAT = "openai-responses-v1"
REASONING, HOSTED_ITEM = "reasoning.encrypted", "responses.item"  # types of details
INCLUDE_STATE = "reasoning.encrypted_content"
INCLUDE_LOGPROBS = "message.output_text.logprobs"
STATUSES = {"rate_limit_exceeded": 429, "server_error": 500, "invalid_prompt": 400}  # of errors in a reply
OWN_ITEMS = ("message", "function_call", "custom_tool_call", "reasoning")
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
    include = [*(chat.get("include") or ()), *([INCLUDE_STATE] if with_state else ())]
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
        calls = message.get("tool_calls") or ()
        customs |= {str(call.get("id")) for call in calls if call.get("type") == "custom"}
        items += [item for detail in message.get("reasoning_details") or () if (item := _returned(detail))]
        for item in to_input_items([message], _HEX):
            del item["id"]
            item.pop("phase", None)
            if item["type"] == "message" and item["role"] == "assistant":  # parts of output need the id of a stored one
                texts = [part.get("text") or part.get("refusal") or "" for part in item["content"]]
                item = {"type": "message", "role": "assistant", "content": "".join(texts)}
            if item["type"] == "function_call_output" and item["call_id"] in customs:
                item = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": item["output"]}
            items.append(item)
    return items


def _returned(detail: Mapping[str, Any]) -> dict[str, Any] | None:
    """The item of a detail that came from this API; None for another one."""
    data = detail.get("data")
    if detail.get("format") != FORMAT or not isinstance(data, str):
        return None
    if detail.get("type") == REASONING:
        name = {"id": detail["id"]} if detail.get("id") else {}
        return {"type": "reasoning", **name, "summary": [], "encrypted_content": data}
    return hosted_item(detail)


def hosted_item(detail: Mapping[str, Any]) -> dict[str, Any] | None:
    """The item of a hosted tool that a detail holds; None for another one."""
    if detail.get("type") != HOSTED_ITEM or detail.get("format") != FORMAT:
        return None
    try:
        item = json.loads(detail["data"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return item if isinstance(item, dict) and isinstance(item.get("type"), str) else None


# ---------------------------------------------------------------- from the worker


def to_completion(response: Mapping[str, Any]) -> dict[str, Any]:
    """A Response object as a chat completion, or as `{"error": …}` where it failed."""
    if error := _error(response):
        return {"error": error}
    maker = Chunks()
    message: dict[str, Any] = {"role": "assistant", "content": None}
    logprobs: list[Any] = []
    for at, item in enumerate(_objects(response.get("output"))):
        if item.get("type") == "message":
            for part in _objects(item.get("content")):
                _add_part(message, part)
                logprobs += _objects(part.get("logprobs"))
        elif item.get("type") == "reasoning" and (text := _reasoning_text(item)):
            message["reasoning_content"] = "\n\n".join(filter(None, (message.get("reasoning_content"), text)))
        for delta in maker.item_done({"output_index": at, "item": item}):
            for name, more in delta.items():
                message[name] = [*message.get(name, ()), *more]
    choice = {"index": 0, "message": message, "finish_reason": maker.finish_reason(response)}
    return {
        "id": response.get("id"),
        "object": "chat.completion",
        "created": response.get("created_at"),
        "model": response.get("model"),
        "choices": [choice | ({"logprobs": {"content": logprobs, "refusal": None}} if logprobs else {})],
        "usage": response.get("usage"),
        **_tier(response),
    }


def _add_part(message: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add a part of the reply's text, or of a refusal, with what it cites."""
    for name, kind, text in (
        ("content", "output_text", part.get("text")),
        ("refusal", "refusal", part.get("refusal")),
    ):
        if part.get("type") == kind and isinstance(text, str):
            message[name] = (message.get(name) or "") + text
    if cited := [_citation(one) for one in _objects(part.get("annotations")) if _is_cited(one)]:
        message["annotations"] = [*message.get("annotations", ()), *cited]


class Chunks:
    """Makes the chunks of one streamed reply from its events. It never raises, and ignores whatever does not have
    OpenAI's form."""

    def __init__(self) -> None:
        self._calls: dict[Any, int] = {}  # output index -> index of the call
        self._begun: set[int] = set()  # calls with a piece of their input
        self._details = 0
        self._head: dict[str, Any] = {"object": "chat.completion.chunk"}

    def chunk(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """The chunk of an event; one without choices where it says nothing of the reply."""
        return self._head | self._body(event)

    def _body(self, event: Mapping[str, Any]) -> dict[str, Any]:
        kind = event.get("type")
        if kind == "response.created":
            response = _object(event.get("response"))
            fields = {"id": response.get("id"), "created": response.get("created_at"), "model": response.get("model")}
            self._head |= {name: value for name, value in fields.items() if value is not None}
        deltas: list[dict[str, Any]] = []
        if kind in ("response.completed", "response.incomplete", "response.failed", "response.cancelled"):
            return self._last(_object(event.get("response")), str(kind))
        if kind == "error" or "error" in event:
            return {"error": _described(_object(event.get("error")) or event)}
        if text := event.get("delta"):
            deltas = self._piece(str(kind), text, event)
        elif kind == "response.reasoning_summary_part.added" and event.get("summary_index"):
            deltas = [{"reasoning_content": "\n\n"}]
        elif kind == "response.output_item.added":
            deltas = self._call_begun(event)
        elif kind == "response.output_item.done":
            deltas = self.item_done(event)
        elif kind == "response.output_text.annotation.added" and _is_cited(_object(event.get("annotation"))):
            deltas = [{"annotations": [_citation(event["annotation"])]}]
        choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        if choices and kind == "response.output_text.delta" and _objects(event.get("logprobs")):
            choices[0]["logprobs"] = {"content": _objects(event["logprobs"]), "refusal": None}
        return {"choices": choices}

    def _piece(self, kind: str, text: Any, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        if not isinstance(text, str):
            return []
        name = _TEXTS.get(kind)
        if name is not None:
            return [{name: text}]
        at, call = self._calls.get(event.get("output_index")), _INPUTS.get(kind)
        if call is None or at is None:
            return []
        self._begun.add(at)
        return [{"tool_calls": [{"index": at, call[0]: {call[1]: text}}]}]

    def _call_begun(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        item, place = _object(event.get("item")), event.get("output_index")
        kind, name = _KINDS.get(str(item.get("type")), ("", ""))
        if not kind or place in self._calls:
            return []
        at = self._calls[place] = len(self._calls)
        details = {"name": item.get("name"), name: ""}
        return [{"tool_calls": [{"index": at, "id": item.get("call_id"), "type": kind, kind: details}]}]

    def item_done(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The deltas of an item that is complete, without what came of it in pieces."""
        item = _object(event.get("item"))
        if str(item.get("type")) in _KINDS:
            begun = self._call_begun(event)
            at, (kind, name) = self._calls[event.get("output_index")], _KINDS[item["type"]]
            text = item.get(name)
            if at in self._begun or not isinstance(text, str):
                return begun
            if begun:
                begun[0]["tool_calls"][0][kind][name] = text
                return begun
            return [{"tool_calls": [{"index": at, kind: {name: text}}]}]
        if item.get("type") == "reasoning":
            data, details = item.get("encrypted_content"), {"type": REASONING}
        elif isinstance(item.get("type"), str) and item["type"] not in OWN_ITEMS:
            data, details = json.dumps(item), {"type": HOSTED_ITEM}
        else:
            return []
        if not isinstance(data, str) or not data:
            return []
        index, self._details = self._details, self._details + 1
        own = {"id": item["id"]} if isinstance(item.get("id"), str) else {}
        return [{"reasoning_details": [{**details, **own, "format": FORMAT, "index": index, "data": data}]}]

    def finish_reason(self, response: Mapping[str, Any]) -> str:
        """Why the reply ended, in chat's words."""
        reason = finish_reason(_object(response.get("incomplete_details")).get("reason"))
        if response.get("status") == "incomplete" and reason in CUT:
            return str(reason)
        return "tool_calls" if self._calls else "stop"

    def _last(self, response: Mapping[str, Any], kind: str) -> dict[str, Any]:
        if kind in ("response.failed", "response.cancelled"):
            return {"error": _error({"status": "failed", **response})}
        end = {"index": 0, "delta": {}, "finish_reason": self.finish_reason(response)}
        return {"choices": [end], "usage": response.get("usage"), **_tier(response)}


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


def _reasoning_text(item: Mapping[str, Any]) -> str:
    """What a reasoning item shows: its summary, else its text."""
    for name in ("summary", "content"):
        texts = [part["text"] for part in _objects(item.get(name)) if isinstance(part.get("text"), str)]
        if texts:
            return "\n\n".join(texts)
    return ""


def _is_cited(annotation: Mapping[str, Any]) -> bool:
    return annotation.get("type") == "url_citation" and isinstance(annotation.get("url"), str)


def _citation(annotation: Mapping[str, Any]) -> dict[str, Any]:
    inner = {name: value for name, value in annotation.items() if name != "type"}
    return {"type": "url_citation", "url_citation": inner}


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []
