"""The lines of a batch: checks those of the input file, and writes those of the output and the error file. Pure.

A line of the input is one request: `{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.core.openai.batches.objects import BatchLine, LineResult, LineTokens
from gateway.core.openai.body import decode_json
from gateway.core.openai.reply import json_bytes
from gateway.errors import BatonError

LINES_MAX = 50_000
ERRORS_MAX = 100
CUSTOM_ID_CHARS_MAX = 512
EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")
BROKEN = ("internal_error", "This request met an error of the gateway each time it was tried.")
CANCELLED = ("batch_cancelled", "This request was not executed because the batch was cancelled.")


@dataclass(slots=True)
class InputReader:
    """Reads and checks the lines of one input file, which comes in pieces. `errors`: at most ERRORS_MAX, as OpenAI
    shows them."""

    batch_id: str
    endpoint: str
    line_bytes_max: int
    lines_max: int = LINES_MAX
    errors: list[Mapping[str, Any]] = field(default_factory=list)
    count: int = 0
    _rest: bytes = b""
    _ended: bool = False
    _ids: set[str] = field(default_factory=set)

    def feed(self, piece: bytes) -> list[BatchLine]:
        """The good lines that end in this piece."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        good = self._read(lines)
        if len(self._rest) > self.line_bytes_max:  # nobody waits for the end of such a line
            self._read([self._rest])
            self._rest, self._ended = b"", True
        return good

    def end(self) -> list[BatchLine]:
        """The last line, if it has no end. A file without requests is an error."""
        good = self._read([self._rest])
        if not self._ids and not self.errors:
            problem = "The input file is empty. Please ensure that the batch contains requests."
            self.note("empty_file", problem, line=None)
        return good

    def _read(self, texts: Iterable[bytes]) -> list[BatchLine]:
        good: list[BatchLine] = []
        for text in texts:
            self.count += not self._ended
            if self._ended or not text.strip():
                continue
            if len(self._ids) == self.lines_max:
                self.note("too_many_lines", f"The file has more than {self.lines_max} requests; split it.", line=None)
                self._ended = True
            elif (custom_id := self._check(text)) is not None:
                good.append(BatchLine(self.batch_id, self.count - 1, custom_id, text))
        return good

    def note(self, code: str, message: str, param: str | None = None, *, line: int | None = -1) -> None:
        """Note an error; without `line`, of the current line."""
        if len(self.errors) < ERRORS_MAX:
            at = self.count if line == -1 else line
            self.errors.append({"code": code, "message": message, "param": param, "line": at})

    def _check(self, text: bytes) -> str | None:
        """The custom id of a line, or None for a wrong one."""
        if len(text) > self.line_bytes_max:
            self.note("line_too_large", f"This line has over {self.line_bytes_max} bytes.")
            return None
        try:
            line = decode_json(bytearray(text))
        except BatonError:
            self.note("invalid_json_line", "This line is not parseable as valid JSON.")
            return None
        if not isinstance(line, dict):
            self.note("invalid_json_line", "This line is not a JSON object.")
            return None
        custom_id = line.get("custom_id")
        if wrong := self._wrong(line, custom_id):
            self.note(*wrong)
            return None
        self._ids.add(str(custom_id))
        return str(custom_id)

    def _wrong(self, line: Mapping[str, Any], custom_id: Any) -> tuple[str, str, str] | None:
        """(code, message, param) of the first thing that is wrong with a line."""
        for name in ("custom_id", "method", "url", "body"):
            if line.get(name) is None:
                return "missing_required_parameter", f"Missing required parameter: '{name}'.", name
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= CUSTOM_ID_CHARS_MAX:
            return "invalid_value", f"`custom_id` must be a text of 1 to {CUSTOM_ID_CHARS_MAX} characters.", "custom_id"
        if custom_id in self._ids:
            return "duplicate_custom_id", f"The custom_id `{custom_id[:64]}` was used before.", "custom_id"
        if line["method"] != "POST":
            return "invalid_method", "`method` must be POST.", "method"
        if line["url"] != self.endpoint:
            return "mismatched_endpoint", f"The url must be the batch's endpoint, {self.endpoint}.", "url"
        if not isinstance(line["body"], dict):
            return "invalid_value", "`body` must be an object.", "body"
        if line["body"].get("stream"):
            return "invalid_value", "A line of a batch cannot be streamed; leave `stream` out.", "body.stream"
        return None


def replied(line: BatchLine, status: int, request_id: str, body: Any) -> LineResult:
    """The result of a line that was served: an output line for a success, else one of the error file."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    ok = 200 <= status < 300
    return LineResult(_text(line, response, None), failed=not ok, tokens=_tokens(body) if ok else LineTokens())


def not_served(line: BatchLine, reason: tuple[str, str]) -> LineResult:
    """The result of a line that was not served, for this (code, message)."""
    code, message = reason
    return LineResult(_text(line, None, {"code": code, "message": message}), failed=True)


def body_of(line: BatchLine) -> Any:
    """The body of the request in a line."""
    return json.loads(line.request)["body"]


def _text(line: BatchLine, response: Any, error: Any) -> bytes:
    result_id = f"batch_req_{line.batch_id.removeprefix('batch_')}{line.n:05d}"
    result = {"id": result_id, "custom_id": line.custom_id, "response": response, "error": error}
    return json_bytes(result) + b"\n"


def _tokens(body: Any) -> LineTokens:
    """The tokens of a reply of any endpoint."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return LineTokens()
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    completion = usage.get("completion_tokens", usage.get("output_tokens"))
    of_prompt = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
    of_reply = usage.get("completion_tokens_details", usage.get("output_tokens_details"))
    cached, reasoning = _detail(of_prompt, "cached_tokens"), _detail(of_reply, "reasoning_tokens")
    return LineTokens(*(value if isinstance(value, int) else 0 for value in (prompt, completion, cached, reasoning)))


def _detail(details: Any, name: str) -> Any:
    return details.get(name) if isinstance(details, dict) else None
