"""OpenAI's Chat Completions on the wire."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tests.upstreams.server import Request, event
from tests.upstreams.vendor import ToolCall, Vendor, words


class OpenAI(Vendor):
    """POST /v1/chat/completions."""

    @property
    def base(self) -> str:
        """What a pool file's `url` holds."""
        return f"{self.url}/v1"

    def complaint(self, request: Request) -> str | None:
        if request.path != "/v1/chat/completions":
            return f"no such path: {request.path}"
        return None if {"messages", "model"} <= set(request.body) else "you must provide messages and a model"

    def whole(self, request: Request) -> Mapping[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.script.text or None}
        if self.script.tool_calls:
            message["tool_calls"] = [_tool_call(call) for call in self.script.tool_calls]
        choice = {"index": 0, "message": message, "finish_reason": self.script.reason, "logprobs": None}
        return {**self._head(request, "chat.completion"), "choices": [choice], "usage": self._usage()}

    def events(self, request: Request) -> Iterator[bytes]:
        head = self._head(request, "chat.completion.chunk")
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": word} for word in words(self.script.text)]
        for index, call in enumerate(self.script.tool_calls):
            deltas.append({"tool_calls": [{"index": index, **_tool_call(call)}]})
        for delta in deltas:
            yield event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        yield event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": self.script.reason}]})
        if (request.body.get("stream_options") or {}).get("include_usage"):
            yield event({**head, "choices": [], "usage": self._usage()})
        yield event("[DONE]")

    def error(self, status: int, message: str) -> Mapping[str, Any]:
        return {"error": {"message": message, "type": "an_error", "param": "messages", "code": "some_code"}}

    def _head(self, request: Request, kind: str) -> dict[str, Any]:
        return {"id": "chatcmpl-1", "object": kind, "created": 1_760_000_000, "model": request.body["model"]}

    def _usage(self) -> dict[str, int]:
        prompt, completion = self.script.prompt_tokens, self.script.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}
