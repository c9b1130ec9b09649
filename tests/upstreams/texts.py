"""OpenAI's text completions and embeddings on the wire."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.core.openai.chat import choices_in
from gateway.core.openai.texts import inputs_of
from tests.upstreams.base import Seen, data, words
from tests.upstreams.openai import OpenAI


class Texts(OpenAI):
    """POST /v1/completions and /v1/embeddings. `knows`: the one encoding of embeddings that it has, if it has one;
    `vector`: every embedding."""

    knows: str | None = None
    vector: Any = (0.5, -1.0, 0.25)

    def complaint(self, seen: Seen) -> str | None:
        needed = {"/v1/completions": "prompt", "/v1/embeddings": "input"}.get(seen.path)
        if needed is None:
            return f"no such path: {seen.path}"
        return None if needed in seen.body and "messages" not in seen.body else f"you must provide {needed} alone"

    def whole(self, seen: Seen) -> Mapping[str, Any]:
        if seen.path == "/v1/embeddings":
            return self._embeddings(seen)
        choices = [
            {"index": n, "text": self.script.text, "finish_reason": self.script.reason, "logprobs": _logprobs(seen)}
            for n in range(choices_in(seen.body))
        ]
        return {**self._head(seen, "text_completion"), "choices": choices, "usage": self._usage()}

    def events(self, seen: Seen) -> Iterator[bytes]:
        head = self._head(seen, "text_completion")
        for word in words(self.script.text):
            choice = {"index": 0, "text": word, "finish_reason": None, "logprobs": None}
            yield data({**head, "choices": [choice]})
        end = {"index": 0, "text": "", "finish_reason": self.script.reason, "logprobs": None}
        yield data({**head, "choices": [end]})
        if (seen.body.get("stream_options") or {}).get("include_usage"):
            yield data({**head, "choices": [], "usage": self._usage()})
        yield data("[DONE]")

    def _embeddings(self, seen: Seen) -> Mapping[str, Any]:
        encoding = self.knows or seen.body.get("encoding_format", "float")
        vector = list(self.vector) if isinstance(self.vector, tuple) else self.vector
        if encoding == "base64" and isinstance(vector, list):
            vector = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        items = [{"object": "embedding", "index": n, "embedding": vector} for n in range(inputs_of(seen.body["input"]))]
        tokens = self.script.prompt_tokens
        told = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": items, "model": seen.body["model"], "usage": told}


def _logprobs(seen: Seen) -> dict[str, Any] | None:
    if seen.body.get("logprobs") is None:
        return None
    return {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}], "text_offset": [0]}
