"""OpenAI's Responses API on the wire. What it sends is checked against the types of OpenAI's SDK (`checked`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.upstreams.server import Request, event
from tests.upstreams.vendor import Vendor, words

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = {"cached_tokens": 4, "cache_write_tokens": 2}
CHAT_ONLY = ("messages", "max_tokens", "max_completion_tokens", "n", "stop", "response_format", "stream_options")


class OpenAIResponses(Vendor):
    """POST /v1/responses. `before`: items that come before the message and the calls, such as reasoning."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.before: list[dict[str, Any]] = []
        self.facts: Mapping[str, Any] = {}  # what the response says of itself beside that
        self.fails: Mapping[str, Any] | None = None  # the error of a response that failed after it had begun

    def complaint(self, request: Request) -> str | None:
        if request.path != "/v1/responses":
            return f"no such path: {request.path}"
        wrong = [name for name in CHAT_ONLY if name in request.body]
        return f"Unknown parameter: '{wrong[0]}'." if wrong else None

    def whole(self, request: Request) -> Mapping[str, Any]:
        if self.fails:
            return self._response(request, [], "failed") | {"error": self.fails}
        return self._response(request, self._output(), self._status)

    def events(self, request: Request) -> Iterator[bytes]:
        number = 0

        def made(kind: str, **fields: Any) -> bytes:
            nonlocal number
            payload = {"type": kind, "sequence_number": number, **fields}
            number += 1
            EVENT.validate_python(payload)
            return event(payload, kind)

        yield made("response.created", response=self._response(request, [], "in_progress"))
        if self.fails:
            failed = self._response(request, [], "failed") | {"error": self.fails}
            yield made("response.failed", response=failed)
            return
        output = self._output()
        for at, item in enumerate(output):
            yield made("response.output_item.added", output_index=at, item=_begun(item))
            place = {"output_index": at, "item_id": item["id"]}
            for kind, fields in _STATES.get(item["type"]) or _pieces(item):
                yield made(kind, **place, **fields)
            yield made("response.output_item.done", output_index=at, item=item)
        kind = "response.incomplete" if self._status == "incomplete" else "response.completed"
        yield made(kind, response=self._response(request, output, self._status))

    def error(self, status: int, message: str) -> Mapping[str, Any]:
        return {"error": {"message": message, "type": "an_error", "param": "input", "code": "some_code"}}

    @property
    def _status(self) -> str:
        return "incomplete" if self.script.reason == "length" else "completed"

    def _output(self) -> list[dict[str, Any]]:
        items = list(self.before)
        if self.script.text:
            part = {"type": "output_text", "text": self.script.text, "annotations": [], "logprobs": []}
            message = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
            items.append({"id": "msg_1", **message})
        for call in self.script.tool_calls:
            arguments = json.dumps(call.arguments)
            named = {"call_id": call.id, "name": call.name, "arguments": arguments, "status": "completed"}
            items.append({"id": f"fc_{call.id}", "type": "function_call", **named})
        return items

    def _response(self, request: Request, output: list[dict[str, Any]], status: str) -> dict[str, Any]:
        prompt, completion = self.script.prompt_tokens, self.script.completion_tokens
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": USAGE,
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 3},
            "total_tokens": prompt + completion,
        }
        response = {
            "id": "resp_1",
            "object": "response",
            "created_at": 1_760_000_000,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None,
            "metadata": {},
            "model": request.body["model"],
            "output": output,
            "parallel_tool_calls": True,
            "service_tier": "default",
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            **self.facts,
            "usage": usage if status in ("completed", "incomplete") else None,
        }
        Response.model_validate(response)
        return response


_STATES: Mapping[str, Sequence[tuple[str, dict[str, Any]]]] = {
    "web_search_call": [(f"response.web_search_call.{name}", {}) for name in ("in_progress", "searching", "completed")]
}


def _begun(item: dict[str, Any]) -> dict[str, Any]:
    empty: dict[str, dict[str, Any]] = {
        "message": {"content": []},
        "function_call": {"arguments": ""},
        "reasoning": {"summary": []},
    }
    status = {} if item["type"] == "reasoning" else {"status": "in_progress"}
    return {**item, **empty.get(item["type"], {}), **status}


def _pieces(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    if item["type"] == "message":
        for at, part in enumerate(item["content"]):
            place = {"content_index": at}
            yield "response.content_part.added", {**place, "part": {**part, "text": "", "annotations": []}}
            for word in words(part["text"]):
                yield "response.output_text.delta", {**place, "delta": word, "logprobs": []}
            for n, annotation in enumerate(part["annotations"]):
                named = {**place, "annotation_index": n, "annotation": annotation}
                yield "response.output_text.annotation.added", named
            yield "response.output_text.done", {**place, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**place, "part": part}
    elif item["type"] == "function_call":
        for at in range(0, len(item["arguments"]), 4):
            yield "response.function_call_arguments.delta", {"delta": item["arguments"][at : at + 4]}
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield "response.function_call_arguments.done", done
    elif item["type"] == "reasoning":
        for at, part in enumerate(item["summary"]):
            place = {"summary_index": at}
            yield "response.reasoning_summary_part.added", {**place, "part": {**part, "text": ""}}
            yield "response.reasoning_summary_text.delta", {**place, "delta": part["text"]}
            yield "response.reasoning_summary_text.done", {**place, "text": part["text"]}
            yield "response.reasoning_summary_part.done", {**place, "part": part}
