"""What items are made of: ids, text parts, citations, calls, log-probabilities. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gateway.core.openai.responses.tools import ToolName

Message = dict[str, Any]
Names = Mapping[str, ToolName]
NO_NAMES: Names = MappingProxyType({})
PREFIXES = {  # of the ids of items; those of other items have `ht`
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def item_id(prefix: str, response_hex: str, ordinal: int) -> str:
    """The id of an item: the prefix of its kind, the hex id of its response, and its ordinal in that response."""
    return f"{prefix}_{response_hex}{ordinal:06x}"


def text_part(text: str, logprobs: Sequence[Mapping[str, Any]] = (), annotations: Any = None) -> Message:
    """A part of generated text. `annotations`: those of the chat message."""
    return {"type": "output_text", "text": text, "annotations": citations(annotations), "logprobs": list(logprobs)}


def citations(annotations: Any) -> list[Message]:
    """The annotations of a chat message, in the form of a text part. Those without an object of their type are left
    out."""
    entries = [one for one in annotations or () if isinstance(one, Mapping)]
    return [_citation(kind, one[kind]) for one in entries if isinstance(one.get(kind := str(one.get("type"))), Mapping)]


def _citation(kind: str, one: Mapping[str, Any]) -> Message:
    if kind != "url_citation":
        return {"type": kind, **one}
    return {
        "type": kind,
        "url": str(one.get("url") or ""),
        "title": one.get("title") if isinstance(one.get("title"), str) else "",
        **{name: one[name] if isinstance(one.get(name), int) else 0 for name in ("start_index", "end_index")},
    }


def call_prefix(call: Mapping[str, Any]) -> str:
    """The prefix of the id of a call's item."""
    return "ctc" if call.get("type") == "custom" else "fc"


def call_body(call: Mapping[str, Any], status: str, names: Names = NO_NAMES) -> Message:
    """Convert a chat tool call to a `function_call` or `custom_tool_call` item without its id. `names`: of the tools as
    the client knows them, by their names in the chat request."""
    kind, content = ("custom", "input") if call.get("type") == "custom" else ("function", "arguments")
    details = call.get(kind)
    details = details if isinstance(details, Mapping) else {}
    fields = {"call_id": call.get("id"), "name": details.get("name"), content: details.get(content)}
    texts = {name: value if isinstance(value, str) else "" for name, value in fields.items()}
    tool = names.get(texts["name"])
    space = {"namespace": tool.namespace} if tool is not None and tool.namespace is not None else {}
    texts["name"] = texts["name"] if tool is None else tool.name
    if kind == "custom":
        return {"type": "custom_tool_call", **texts, **space}
    return {"type": "function_call", **texts, **space, "status": status}


def token_logprobs(logprobs: Any) -> list[dict[str, Any]]:
    """A chat choice's log-probabilities, token by token. Tokens that do not have OpenAI's form are left out."""
    tokens = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    return [
        {**_token(token), "top_logprobs": [_token(top) for top in token.get("top_logprobs") or () if _is_token(top)]}
        for token in tokens or ()
        if _is_token(token)
    ]


def _is_token(token: Any) -> bool:
    return isinstance(token, Mapping) and isinstance(token.get("token"), str) and "logprob" in token


def _token(token: Mapping[str, Any]) -> dict[str, Any]:
    text = token["token"]
    text_bytes = token.get("bytes")
    return {
        "token": text,
        "logprob": token["logprob"],
        "bytes": text_bytes if isinstance(text_bytes, list) else list(text.encode("utf-8", "replace")),
    }


def event_logprobs(logprobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Log-probabilities in the form of text events: without the bytes, which only complete parts carry."""
    return [{**_logprob(token), "top_logprobs": list(map(_logprob, token["top_logprobs"]))} for token in logprobs]


def _logprob(token: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": token["token"], "logprob": token["logprob"]}
