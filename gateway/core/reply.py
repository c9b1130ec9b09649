"""OpenAI's chat-completions replies, whole and in chunks: a worker's choices under Baton's id and usage. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.money import Usage


def usage_json(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object with both details present."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def completion(
    worker_body: Mapping[str, Any], *, completion_id: str, created_s: int, model: str, usage: Usage
) -> dict[str, Any]:
    """The client's reply: the worker's choices under our id and model, with the whole tree's usage."""
    body = {
        "id": completion_id,
        "object": "chat.completion",
        "created": created_s,
        "model": model,
        "choices": [_whole_choice(choice, index) for index, choice in enumerate(worker_body.get("choices", ()))],
        "usage": usage_json(usage),
        "service_tier": worker_body.get("service_tier") or "default",
    }
    if worker_body.get("system_fingerprint"):
        body["system_fingerprint"] = worker_body["system_fingerprint"]
    return body


def _whole_choice(choice: Mapping[str, Any], index: int) -> dict[str, Any]:
    message = {"role": "assistant", "content": None, "refusal": None, **choice.get("message", {})}
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)  # clients with strict schemas reject null
    return {
        "index": choice.get("index", index),
        "message": message,
        "finish_reason": choice.get("finish_reason") or "stop",
        "logprobs": choice.get("logprobs"),
    }


def reply_text(worker_body: Mapping[str, Any]) -> str:
    """Text of the first choice: what later steps see. Empty where there is none."""
    choices = worker_body.get("choices") or [{}]
    content = (choices[0].get("message") or {}).get("content")
    return content if isinstance(content, str) else ""


def chunk(choices: Sequence[Mapping[str, Any]], *, completion_id: str, created_s: int, model: str) -> dict[str, Any]:
    """One SSE chunk with OpenAI's keys on every choice."""
    return {
        "id": completion_id,
        "object": "chat.completion.chunk",
        "created": created_s,
        "model": model,
        "service_tier": "default",
        "choices": [
            {
                "index": choice.get("index", 0),
                "delta": _delta(choice.get("delta") or {}),
                "finish_reason": choice.get("finish_reason"),
                "logprobs": choice.get("logprobs"),
            }
            for choice in choices
        ],
    }


def _delta(delta: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in delta.items() if value is not None or name in ("content", "refusal")}


def chunks_of(worker_body: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """A whole completion as the choices of the chunks a stream would have carried: role, content, finish."""
    pieces: list[list[dict[str, Any]]] = []
    for index, choice in enumerate(worker_body.get("choices", ())):
        whole = _whole_choice(choice, index)
        at, message = whole["index"], dict(whole["message"])
        role = {"role": message.pop("role"), "content": "", "refusal": None}
        message.pop("refusal", None)
        calls = [{"index": i, **call} for i, call in enumerate(message.pop("tool_calls", ()))]
        delta = {name: value for name, value in message.items() if value is not None}
        if calls:
            delta["tool_calls"] = calls
        pieces += [
            [{"index": at, "delta": role}],
            [{"index": at, "delta": delta, "logprobs": whole["logprobs"]}],
            [{"index": at, "delta": {}, "finish_reason": whole["finish_reason"]}],
        ]
    return pieces


class Collected:
    """Grows one completion body out of chunks, so that a streamed reply is logged like a whole one."""

    def __init__(self) -> None:
        self._choices: dict[int, dict[str, Any]] = {}
        self.finished = False

    @property
    def started(self) -> bool:
        """Whether anything has come at all."""
        return bool(self._choices)

    def add(self, chunk_choices: Sequence[Mapping[str, Any]]) -> None:
        """Take in the choices of one chunk."""
        for choice in chunk_choices:
            kept = self._choices.setdefault(choice.get("index", 0), {"message": {"role": "assistant", "content": None}})
            delta = choice.get("delta") or {}
            for name in ("content", "refusal", "reasoning_content"):
                if isinstance(delta.get(name), str):
                    kept["message"][name] = (kept["message"].get(name) or "") + delta[name]
            for call in delta.get("tool_calls") or ():
                _merge_call(kept["message"].setdefault("tool_calls", []), call)
            if choice.get("finish_reason"):
                kept["finish_reason"] = choice["finish_reason"]
                self.finished = True

    def body(self) -> dict[str, Any]:
        """The completion so far."""
        return {"choices": [{"index": index, **choice} for index, choice in sorted(self._choices.items())]}


def _merge_call(calls: list[dict[str, Any]], delta: Mapping[str, Any]) -> None:
    index = delta.get("index", len(calls))
    while len(calls) <= index < 128:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    if not 0 <= index < len(calls):
        return
    call = calls[index]
    call["id"] = delta.get("id") or call["id"]
    for name, piece in (delta.get("function") or {}).items():
        if isinstance(piece, str):
            call["function"][name] = call["function"].get(name, "") + piece
