"""Google's Gemini API on the wire (`generateContent`, v1beta)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.upstreams.server import Request, event
from tests.upstreams.vendor import Vendor, words

REASONS = {"stop": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP"}
STATUSES = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}


class Gemini(Vendor):
    """POST /v1beta/models/<model>:generateContent, or :streamGenerateContent?alt=sse."""

    key_header = "x-goog-api-key"
    key_prefix = ""

    @property
    def base(self) -> str:
        """What a pool file's `url` holds."""
        return f"{self.url}/v1beta"

    def streams(self, request: Request) -> bool:
        return ":streamGenerateContent" in request.path

    def complaint(self, request: Request) -> str | None:
        path, _, query = request.path.partition("?")
        if not path.endswith((":generateContent", ":streamGenerateContent")) or "/v1beta/models/" not in path:
            return f"no such path: {path}"
        if self.streams(request) and "alt=sse" not in query:
            return "alt=sse is missing"
        return None if request.body.get("contents") else "contents is not specified"

    def whole(self, request: Request) -> Mapping[str, Any]:
        return self._response(self._parts(), REASONS[self.script.reason])

    def events(self, request: Request) -> Iterator[bytes]:
        pieces = [{"text": word} for word in words(self.script.text)]
        parts: list[dict[str, Any]] = [*pieces, *self._parts()[1 if self.script.text else 0 :]]
        for part in parts[:-1]:
            yield event(self._response([part], None))
        yield event(self._response(parts[-1:], REASONS[self.script.reason]))

    def error(self, status: int, message: str) -> Mapping[str, Any]:
        return {"error": {"code": status, "message": message, "status": STATUSES.get(status, "INTERNAL")}}

    def _parts(self) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = [{"text": self.script.text}] if self.script.text else []
        for call in self.script.tool_calls:
            parts.append({"functionCall": {"name": call.name, "args": dict(call.arguments)}})
        return parts

    def _response(self, parts: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
        candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
        if reason:
            candidate["finishReason"] = reason
        prompt, completion = self.script.prompt_tokens, self.script.completion_tokens
        usage = {"promptTokenCount": prompt, "candidatesTokenCount": completion, "totalTokenCount": prompt + completion}
        return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "gemini", "responseId": "r1"}
