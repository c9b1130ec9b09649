"""vLLM's routes for weights, as vLLM 0.32 answers them, in memory: it fails on cue, as a real one cannot.

Weights are directories; what a probe gets is the log-probs in the manifest of the directory that is loaded.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.engines.policies import manifest_of


@dataclass(frozen=True, slots=True)
class FakePlan:
    """A plan as the fake decodes it: tokens with their log-probs, and their texts."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    texts: Sequence[str]


class FakeVllm:
    """`calls`: the paths asked for, in order. `fails`: path → status it answers; `dies_at`: the path that kills it."""

    def __init__(self, base: Path, name: str = "conductor") -> None:
        self.base = base
        self.name = name
        self.owner = "vllm"
        self.calls: list[str] = []
        self.bodies: list[Any] = []
        self.fails: dict[str, int] = {}
        self.dies_at = ""
        self.nan = False
        self.sampled_off = 0.0  # added to the log-probs that it samples with: top_k, a temperature, a penalty
        self.token_off = 0.0  # added to the first token that it samples with seed 0: another kernel's rounding
        self.prompt_ids: list[int] = []  # of every chat; empty: those of the probe
        self.plan: Callable[[Mapping[str, Any]], FakePlan] | None = None  # what a streamed chat decodes
        self.hold: dict[str, asyncio.Event] = {}  # path → answered once set
        self.restart()

    def restart(self) -> None:
        """Start again, with the base weights and no adapters."""
        self.dead = self.paused = False
        self.label, self.weights = "default", self.base
        self.loras: dict[str, str] = {}

    def client(self) -> httpx.AsyncClient:
        """Return a client that calls it without a socket."""
        return httpx.AsyncClient(transport=httpx.MockTransport(self._answer))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content or b"null")
        if path == self.dies_at:
            self.dead = True
        if self.dead:
            raise httpx.ConnectError("connection refused")
        self.calls.append(path)
        self.bodies.append(body)
        if path in self.hold:
            await self.hold[path].wait()
        if path in self.fails:
            return unread(_error(self.fails[path], f"{path} fails"))
        return unread(self._route(path, body))

    def _route(self, path: str, body: Any) -> httpx.Response:
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        elif path == "/collective_rpc":
            self.weights = Path(body["kwargs"]["weights_path"])
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        elif path == "/v1/load_lora_adapter":
            if body["lora_name"] in self.loras:
                return _error(400, "has already been loaded")
            self.loras[body["lora_name"]] = body["lora_path"]
        elif path == "/v1/unload_lora_adapter":
            del self.loras[body["lora_name"]]
        reading: dict[str, Callable[[], httpx.Response]] = {
            "/weight_info": lambda: httpx.Response(200, json={"weight_version": self.label}),
            "/v1/models": lambda: httpx.Response(200, json={"data": self._models()}),
            "/v1/completions": lambda: self._score(body),
            "/v1/chat/completions": lambda: self._stream(body) if body.get("stream") else self._sample(body),
        }
        return reading.get(path, lambda: httpx.Response(200, json={}))()

    def _models(self) -> list[dict[str, Any]]:
        loras = [{"id": name, "root": path, "parent": self.name} for name, path in self.loras.items()]
        return [{"id": self.name, "owned_by": self.owner, "root": str(self.base), "parent": None}, *loras]

    def _sample(self, body: Mapping[str, Any]) -> httpx.Response:
        """The probe's last tokens with the log-probs that `_score` gives them."""
        directory = self.weights if body["model"] == self.name else Path(self.loras.get(body["model"], "/nowhere"))
        if not directory.is_dir():
            return _error(404, "The model does not exist")
        probe = manifest_of(directory)["probe"]
        logprobs = (probe.get("logprobs") or [-1.0, -1.0])[-2:]
        content: list[dict[str, Any]] = [{"token": "x", "logprob": one + self.sampled_off} for one in logprobs]
        if body.get("seed") == 0:
            content[0]["logprob"] += self.token_off
        choice = {"index": 0, "token_ids": [7] * len(content), "logprobs": {"content": content}}
        own = list(probe.get("prompt_ids") or [1])
        ids = self.prompt_ids or (own if probe.get("messages") else own + [1] * len(probe.get("logprobs") or []))
        return httpx.Response(200, json={"prompt_token_ids": ids, "choices": [choice]})

    def _stream(self, body: Mapping[str, Any]) -> httpx.Response:
        """A plan in one event, and the usage in another."""
        if body["model"] not in self.loras:
            return _error(404, "The model does not exist")
        assert self.plan is not None
        plan = self.plan(body)
        content = [{"token": text, "logprob": logprob} for text, logprob in zip(plan.texts, plan.logprobs, strict=True)]
        choice = {
            "index": 0,
            "delta": {"content": "".join(plan.texts)},
            "token_ids": list(plan.token_ids),
            "logprobs": {"content": content},
            "finish_reason": "stop",
        }
        usage = {"prompt_tokens": len(plan.prompt_ids), "completion_tokens": len(plan.token_ids)}
        events: list[dict[str, Any]] = [
            {"prompt_token_ids": list(plan.prompt_ids), "choices": [choice]},
            {"choices": [], "usage": usage},
        ]
        lines = [*(json.dumps({"model": body["model"], **event}) for event in events), "[DONE]"]
        return httpx.Response(200, content="".join(f"data: {line}\n\n" for line in lines).encode())

    def _score(self, body: Mapping[str, Any]) -> httpx.Response:
        if self.nan:
            return _error(500, "Out of range float values are not JSON compliant")
        directory = self.weights if body["model"] == self.name else Path(self.loras.get(body["model"], "/nowhere"))
        if not directory.is_dir():
            return _error(404, "The model does not exist")
        known = manifest_of(directory)["probe"].get("logprobs") or [-1.0] * len(body["prompt"])
        entries: list[dict[str, Any] | None] = [None] * len(body["prompt"])
        for at, logprob in enumerate(reversed(known[: len(body["prompt"]) - 1]), 1):
            entries[-at] = {str(body["prompt"][-at]): {"logprob": logprob, "rank": 1, "decoded_token": "x"}}
        return httpx.Response(200, json={"choices": [{"prompt_logprobs": entries}]})


def unread(response: httpx.Response) -> httpx.Response:
    """Return the same response unread, as from a socket."""
    return httpx.Response(response.status_code, stream=httpx.ByteStream(response.content))


def _error(status: int, message: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "type": "x", "param": None, "code": status}})
