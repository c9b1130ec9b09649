"""OpenAI's text completions and embeddings on the wire."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.core.openai.chat import choices_in
from gateway.core.openai.texts import inputs_of
from tests.upstreams.openai import OpenAI
from tests.upstreams.server import Request, event
from tests.upstreams.vendor import words


class Texts(OpenAI):
    """POST /v1/completions and /v1/embeddings. `knows`: the one encoding of embeddings that it has, if it has one;
    `vector`: every embedding."""

    knows: str | None = None
    vector: Any = (0.5, -1.0, 0.25)

    def complaint(self, request: Request) -> str | None:
        needed = {"/v1/completions": "prompt", "/v1/embeddings": "input"}.get(request.path)
        if needed is None:
            return f"no such path: {request.path}"
        return None if needed in request.body and "messages" not in request.body else f"you must provide {needed} alone"

    def whole(self, request: Request) -> Mapping[str, Any]:
        if request.path == "/v1/embeddings":
            return self._embeddings(request)
        choices = [
            {"index": n, "text": self.script.text, "finish_reason": self.script.reason, "logprobs": _logprobs(request)}
            for n in range(choices_in(request.body))
        ]
        return {**self._head(request, "text_completion"), "choices": choices, "usage": self._usage()}

    def events(self, request: Request) -> Iterator[bytes]:
        head = self._head(request, "text_completion")
        for word in words(self.script.text):
            choice = {"index": 0, "text": word, "finish_reason": None, "logprobs": None}
            yield event({**head, "choices": [choice]})
        end = {"index": 0, "text": "", "finish_reason": self.script.reason, "logprobs": None}
        yield event({**head, "choices": [end]})
        if (request.body.get("stream_options") or {}).get("include_usage"):
            yield event({**head, "choices": [], "usage": self._usage()})
        yield event("[DONE]")

    def _embeddings(self, request: Request) -> Mapping[str, Any]:
        encoding = self.knows or request.body.get("encoding_format", "float")
        vector = list(self.vector) if isinstance(self.vector, tuple) else self.vector
        if encoding == "base64" and isinstance(vector, list):
            vector = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        inputs = inputs_of(request.body["input"])
        items = [{"object": "embedding", "index": index, "embedding": vector} for index in range(inputs)]
        tokens = self.script.prompt_tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": items, "model": request.body["model"], "usage": usage}


def _logprobs(request: Request) -> dict[str, Any] | None:
    if request.body.get("logprobs") is None:
        return None
    return {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}], "text_offset": [0]}
