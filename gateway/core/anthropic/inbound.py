"""Anthropic's Messages API as the wire to a worker: its replies and events become chat completions and chunks. Pure.

Text, thinking and calls become chat's own. What chat has no place for (blocks of hosted tools, citations, where one
text ends and the next begins) goes along as BLOCKS of the message or delta (`core/anthropic/native.py`): a whole reply
has the layout of its turn there. A delta has what begins with it: `{"type": …}` alone closes the block before,
`citations_delta` cites in the block that is open, any other is a whole block of a hosted tool.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from gateway.core.anthropic.native import BLOCKS, NATIVE_FINISH, NATIVE_USAGE, THOUGHTS, layout
from gateway.core.anthropic.outbound import JSON_TOOL
from gateway.core.openai.finish import finish_reason

Block = dict[str, Any]
STATUSES = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
_COUNTS = (  # of its usage, that chat's has too
    *("input_tokens", "output_tokens", "output_tokens_details"),
    *("cache_creation", "cache_creation_input_tokens", "cache_read_input_tokens"),
)


def to_completion(message: Mapping[str, Any]) -> Block:
    """A Message as a chat completion, or as `{"error": …}` where it is an error. A chat completion stays one: some
    servers of this API answer in that form."""
    if "choices" in message:
        return dict(message)
    if message.get("type") == "error" or "content" not in message:
        return {"error": _error(message)}
    content = _objects(message.get("content"))
    blocks = [_as_text(block) if block.get("name") == JSON_TOOL else block for block in content]
    texts = [str(block.get("text") or "") for block in blocks if block.get("type") == "text"]
    thoughts = [dict(block) for block in blocks if block.get("type") in THOUGHTS]
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    fields: Block = {"role": "assistant", "content": "".join(texts) if texts else None}
    fields |= {"reasoning_content": text} if (text := _joined(thoughts, "thinking")) else {}
    fields |= {"thinking_blocks": thoughts} if thoughts else {}
    fields |= {"tool_calls": calls} if calls else {}
    fields |= {"annotations": cited} if (cited := _annotations(blocks)) else {}
    fields |= {BLOCKS: order} if (order := layout(blocks)) is not None else {}
    return {
        "id": message.get("id"),
        "object": "chat.completion",
        "created": 0,
        "model": message.get("model"),
        "choices": [{"index": 0, "message": fields, **_ending(message, called=bool(calls))}],
        "usage": _usage(_object(message.get("usage"))),
    }


def _joined(blocks: Iterable[Mapping[str, Any]], name: str) -> str:
    return "".join(text for block in blocks if isinstance(text := block.get(name), str))


def _as_text(block: Mapping[str, Any]) -> Block:
    return {"type": "text", "text": json.dumps(block.get("input"), ensure_ascii=False)}


def _call(block: Mapping[str, Any]) -> Block:
    arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
    return {
        "id": block.get("id"),
        "type": "function",
        "function": {"name": block.get("name"), "arguments": arguments},
    }


def _ending(end: Mapping[str, Any], *, called: bool) -> Block:
    """What a choice says of its end: chat's reason, Anthropic's, and the stop sequence under vLLM's name."""
    reason = end.get("stop_reason")
    finish = finish_reason(reason) or "stop"
    ending: Block = {"finish_reason": "stop" if finish == "tool_calls" and not called else finish}
    sequence = end.get("stop_sequence")
    ending |= {NATIVE_FINISH: reason} if isinstance(reason, str) else {}
    beside = {name: value for name, value in _object(end.get("usage")).items() if name not in _COUNTS}
    ending |= {NATIVE_USAGE: told} if (told := {name: one for name, one in beside.items() if one is not None}) else {}
    return ending | ({"stop_reason": sequence} if isinstance(sequence, str) else {})


def _usage(usage: Mapping[str, Any]) -> Block:
    """Anthropic's counts in OpenAI's sense: the prompt holds what was read from the cache and written to it."""
    counts = {name: count for name, count in usage.items() if isinstance(count, int)}
    read, written = counts.get("cache_read_input_tokens"), counts.get("cache_creation_input_tokens")
    hour = _object(usage.get("cache_creation")).get("ephemeral_1h_input_tokens")
    thought = _object(usage.get("output_tokens_details")).get("thinking_tokens")
    prompt = counts.get("input_tokens", 0) + (read or 0) + (written or 0)
    details = {"cached_tokens": read, "cache_write_tokens": written, "cache_write_1h_tokens": hour}
    body = {
        "prompt_tokens": prompt,
        "completion_tokens": counts.get("output_tokens", 0),
        "total_tokens": prompt + counts.get("output_tokens", 0),
        "prompt_tokens_details": {name: count for name, count in details.items() if count is not None},
    }
    return body | ({} if thought is None else {"completion_tokens_details": {"reasoning_tokens": thought}})


def _error(body: Mapping[str, Any]) -> Block:
    error = _object(body.get("error"))
    status = STATUSES.get(str(error.get("type")))
    known = {} if status is None else {"status": status}
    return {"message": error.get("message") or "the reply is no message", **known}


def _annotations(blocks: Iterable[Mapping[str, Any]], start: int = 0) -> list[Block]:
    """The pages that texts cite, as OpenAI's chat completions name them. `start`: where the first text begins."""
    cited: list[Block] = []
    for block in blocks:
        if block.get("type") != "text":
            continue
        end = start + len(str(block.get("text") or ""))
        for one in _objects(block.get("citations")):
            if isinstance(url := one.get("url"), str):
                page = {"url": url, "title": one.get("title") or "", "start_index": start, "end_index": end}
                cited.append({"type": "url_citation", "url_citation": page})
        start = end
    return cited


class MessageChunks:
    """Makes the chunks of one streamed reply from its events. It never raises, and ignores whatever does not have
    Anthropic's form."""

    def __init__(self) -> None:
        self._head: Block = {"object": "chat.completion.chunk"}
        self._usage: Block = {}
        self._open: Block = {}  # the block that has begun; of text and of a hosted tool with all that came of it
        self._input: list[str] = []  # pieces of its input, of a hosted tool
        self._marked = False  # whether its beginning was told
        self._calls = 0
        self._chars = 0  # of the text

    def chunk(self, event: Mapping[str, Any]) -> Block:
        """The chunk of an event; one without choices where it says nothing of the reply."""
        kind = event.get("type")
        if kind == "message" or "choices" in event:  # the whole of it, or a chunk of chat's
            return to_completion(event)
        if kind == "error" or "error" in event:
            return {"error": _error(event)}
        if kind == "message_start":
            message = _object(event.get("message"))
            self._head |= {name: message[name] for name in ("id", "model") if message.get(name)}
            return self._head | {"choices": [], **self._counted(message)}
        if kind == "message_delta":
            counted = self._counted(event)
            ending = _ending({**_object(event.get("delta")), "usage": self._usage}, called=bool(self._calls))
            return self._head | {"choices": [{"index": 0, "delta": {}, **ending}], **counted}
        delta: Block = {}
        if kind == "content_block_start":
            delta = self._begun(_object(event.get("content_block")))
        elif kind == "content_block_delta":
            delta = self._piece(_object(event.get("delta")))
        elif kind == "content_block_stop":
            delta = self._ended()
        return self._head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}] if delta else []}

    def _counted(self, event: Mapping[str, Any]) -> Block:
        usage = {name: count for name, count in _object(event.get("usage")).items() if count is not None}
        self._usage |= usage
        return {"usage": _usage(self._usage)} if usage else {}

    def _begun(self, block: Mapping[str, Any]) -> Block:
        before, kind = self._open.get("type"), block.get("type")
        self._open, self._input = {**block}, []
        known = kind in ("text", "thinking", "redacted_thinking", "tool_use")
        follows = before is not None and (kind == before or self._calls > 0)
        self._marked = known and (follows or block.get("citations") is not None)
        marker = {BLOCKS: [{"type": kind, **self._cites()}]} if self._marked else {}
        if kind == "tool_use" and block.get("name") != JSON_TOOL:
            self._calls += 1
            function = {"name": block.get("name"), "arguments": ""}
            call = {"index": self._calls - 1, "id": block.get("id"), "type": "function", "function": function}
            return marker | {"tool_calls": [call]}
        if kind == "redacted_thinking":
            return marker | {"thinking_blocks": [dict(block)]}
        text = block.get("text") or block.get("thinking")
        return marker | (self._text(str(kind), text) if isinstance(text, str) and text else {})

    def _cites(self) -> Block:
        return {"citations": []} if self._open.get("citations") is not None else {}

    def _piece(self, delta: Mapping[str, Any]) -> Block:
        kind = self._open.get("type")
        if isinstance(text := delta.get("text") or delta.get("thinking"), str) and text:
            return self._text(str(kind), text)
        if isinstance(signature := delta.get("signature"), str):
            return {"thinking_blocks": [{"type": "thinking", "thinking": "", "signature": signature}]}
        if isinstance(citation := delta.get("citation"), Mapping):
            self._open["citations"] = [*(self._open.get("citations") or ()), citation]
            return {BLOCKS: [{"type": "citations_delta", "citation": citation}]}
        if not isinstance(piece := delta.get("partial_json"), str) or not piece:
            return {}
        if kind != "tool_use":
            self._input.append(piece)
            return {}
        if self._open.get("name") == JSON_TOOL:
            return self._text("text", piece)
        return {"tool_calls": [{"index": self._calls - 1, "function": {"arguments": piece}}]}

    def _text(self, kind: str, text: str) -> Block:
        if kind == "thinking":
            return {
                "reasoning_content": text,
                "thinking_blocks": [{"type": "thinking", "thinking": text, "signature": ""}],
            }
        self._chars += len(text)
        self._open["length"] = self._open.get("length", 0) + len(text)
        return {"content": text}

    def _ended(self) -> Block:
        block = self._open
        kind = block.get("type")
        if kind == "text":
            start, text = self._chars - block.get("length", 0), " " * block.get("length", 0)
            cited = _annotations([{**block, "text": text}], start)
            empty = {BLOCKS: [{"type": "text", **self._cites()}]} if not (text or self._marked) else {}
            return empty | ({"annotations": cited} if cited else {})
        if kind is None or kind in (*THOUGHTS, "tool_use"):
            return {}
        return {BLOCKS: [{**block, **self._whole_input()}]}

    def _whole_input(self) -> Block:
        try:
            return {"input": json.loads("".join(self._input))} if self._input else {}
        except (ValueError, RecursionError):
            return {}


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []
