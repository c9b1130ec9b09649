"""Anthropic's Messages API on the wire (version 2023-06-01)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tests.upstreams.server import Request, event
from tests.upstreams.vendor import Vendor, words

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error", 529: "overloaded_error"}


class Anthropic(Vendor):
    """POST /v1/messages with `x-api-key`."""

    key_header = "x-api-key"
    key_prefix = ""

    @property
    def base(self) -> str:
        """What a pool file's `url` holds."""
        return self.url

    def complaint(self, request: Request) -> str | None:
        if request.path != "/v1/messages":
            return f"no such path: {request.path}"
        if "anthropic-version" not in request.headers:
            return "anthropic-version: header is required"
        if any(message["role"] not in ("user", "assistant") for message in request.body["messages"]):
            return "messages: roles must be user or assistant"
        return None if isinstance(request.body.get("max_tokens"), int) else "max_tokens: Field required"

    def whole(self, request: Request) -> Mapping[str, Any]:
        stop = {"stop_reason": REASONS[self.script.reason], "stop_sequence": None}
        usage = {"input_tokens": self.script.prompt_tokens, "output_tokens": self.script.completion_tokens}
        return {**self._head(request), "content": self._blocks(), **stop, "usage": usage}

    def events(self, request: Request) -> Iterator[bytes]:
        usage = {"input_tokens": self.script.prompt_tokens, "output_tokens": 1}
        start = {**self._head(request), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield event({"type": "message_start", "message": start}, "message_start")
        yield event({"type": "ping"}, "ping")
        for index, block in enumerate(self._blocks()):
            yield from _block_events(index, block)
        delta = {"stop_reason": REASONS[self.script.reason], "stop_sequence": None}
        total = {"output_tokens": self.script.completion_tokens}
        yield event({"type": "message_delta", "delta": delta, "usage": total}, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def error(self, status: int, message: str) -> Mapping[str, Any]:
        return {"type": "error", "error": {"type": ERRORS.get(status, "api_error"), "message": message}}

    def _head(self, request: Request) -> dict[str, Any]:
        return {"id": "msg_01", "type": "message", "role": "assistant", "model": request.body["model"]}

    def _blocks(self) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = [{"type": "text", "text": self.script.text}] if self.script.text else []
        for call in self.script.tool_calls:
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)})
        return blocks


def _block_events(index: int, block: Mapping[str, Any]) -> Iterator[bytes]:
    empty: dict[str, Any]
    deltas: list[dict[str, Any]]
    if block["type"] == "text":
        empty = {**block, "text": ""}
        deltas = [{"type": "text_delta", "text": word} for word in words(block["text"])]
    elif block["type"] == "thinking":
        empty = {**block, "thinking": "", "signature": ""}
        deltas = [{"type": "thinking_delta", "thinking": word} for word in words(block["thinking"])]
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
    else:
        empty = {**block, "input": {}}
        deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    yield event({"type": "content_block_start", "index": index, "content_block": empty}, "content_block_start")
    for delta in deltas:
        yield event({"type": "content_block_delta", "index": index, "delta": delta}, "content_block_delta")
    yield event({"type": "content_block_stop", "index": index}, "content_block_stop")
