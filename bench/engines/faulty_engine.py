"""vLLM's routes over real weights in this process, with one fault: what a self-test of propensities must catch.

It samples without a grammar and scores sequences, as vLLM does with `--logprobs-mode processed_logprobs`, and holds
adapters under their own names. A fault is a flag or a file of the server: a request cannot take it off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from policy.engines.directory import read_conductors
from policy.engines.embedded import load_runtime
from policy.serve.engine import Engine
from policy.serve.sampling import LogProbs, draw, log_softmax
from policy.serve.shape import Array


@dataclass(frozen=True)
class Fault:
    """What the server does otherwise than it is asked. `adapter`: it loads this one, whichever is named. `chat_prefix`:
    its chat template begins with it. `first_token`: its tokenizer puts this token first."""

    temperature: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    adapter: Path | None = None
    chat_prefix: str = ""
    first_token: int | None = None


@dataclass
class FaultyEngine:
    """The server, its base being the policy at `base`."""

    base: Path
    fault: Fault = field(default_factory=Fault)
    name: str = "conductor"
    loras: dict[str, Path] = field(default_factory=dict)
    _loaded: dict[Path, Engine] = field(default_factory=dict)

    def client(self) -> httpx.AsyncClient:
        """Return a client that calls it without a socket."""
        return httpx.AsyncClient(transport=httpx.MockTransport(self._answer))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content or b"{}")
        if path == "/v1/load_lora_adapter":
            self.loras[body["lora_name"]] = Path(body["lora_path"])
        elif path == "/v1/unload_lora_adapter":
            del self.loras[body["lora_name"]]
        elif path == "/v1/models":
            loras = [{"id": name, "root": str(root), "parent": self.name} for name, root in self.loras.items()]
            base = {"id": self.name, "owned_by": "vllm", "root": str(self.base), "parent": None}
            return _json({"data": [base, *loras]})
        elif path == "/v1/completions":
            return _json(self._score(body))
        elif path == "/v1/chat/completions":
            return _json(self._sample(body))
        return _json({})

    def _model(self, name: str) -> Engine:
        place = self.base if name == self.name else self.fault.adapter or self.loras[name]
        if place not in self._loaded:
            self._loaded[place] = Engine(*load_runtime(read_conductors([self.base, place])[place]), threads=1)
        return self._loaded[place]

    def _sample(self, body: Mapping[str, Any]) -> dict[str, Any]:
        engine = self._model(body["model"])
        runtime, tokens = engine.runtime, engine.tokens
        messages = [dict(message) for message in body["messages"]]
        messages[0]["content"] = self.fault.chat_prefix + messages[0]["content"]
        prompt = tokens.encode_chat(messages)
        prompt = prompt if self.fault.first_token is None else [self.fault.first_token, *prompt]
        random, ids, drawn_logprobs = np.random.default_rng(body["seed"]), list(prompt), list[float]()
        logits, cache = runtime.forward(ids, runtime.empty())
        for _ in range(body["max_tokens"]):
            logprobs = self._processed(logits, ids)
            token = draw(logprobs, 1.0, random)
            ids.append(token)
            drawn_logprobs.append(float(logprobs[token]))
            logits, cache = runtime.forward([token], cache)
        content = [{"token": "", "logprob": logprob} for logprob in drawn_logprobs]
        choice = {"index": 0, "token_ids": ids[len(prompt) :], "logprobs": {"content": content}}
        return {"prompt_token_ids": prompt, "choices": [choice]}

    def _processed(self, logits: Array, ids: list[int]) -> LogProbs:
        """As vLLM orders it: penalty, temperature, min_p, top_k."""
        scores = logits.astype(np.float64)
        if self.fault.repetition_penalty != 1.0:
            seen = np.unique(ids)
            above = scores[seen] > 0
            scores[seen] = np.where(
                above, scores[seen] / self.fault.repetition_penalty, scores[seen] * self.fault.repetition_penalty
            )
        scores /= self.fault.temperature
        if self.fault.min_p:
            scores[scores < scores.max() + np.log(self.fault.min_p)] = -np.inf
        if self.fault.top_k:
            scores[scores < np.sort(scores)[-self.fault.top_k]] = -np.inf
        return log_softmax(scores)

    def _score(self, body: Mapping[str, Any]) -> dict[str, Any]:
        ids = list(body["prompt"])
        scores = self._model(body["model"]).scored(ids).logprobs
        named = [{str(token): {"logprob": score}} for token, score in zip(ids[1:], scores, strict=True)]
        entries: list[dict[str, Any] | None] = [None, *named]
        return {"choices": [{"prompt_logprobs": entries}]}


def _json(body: Mapping[str, Any]) -> httpx.Response:
    content = json.dumps(body).encode()
    return httpx.Response(200, stream=httpx.ByteStream(content), headers={"content-type": "application/json"})
