"""A scripted model behind the gateway: OpenAI's wire format on loopback, one worker a path (`/w/NAME/v1`).

    python -m tests.clients.upstream --port 0 --port-file F

`scribe` answers, `planner` plans two steps, `drafter` is the first of them. Others fail on purpose: `limited` is always
429, `broken` always 500, `picky` refuses by parameter, `cutter` dies in the middle of a stream, `refuser` declines.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import struct
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from tests.clients.model import Answer, answer, pieces
from tests.upstreams.server import Reply, Request, event, event_stream, json_reply, serve

CREATED_S = 1_760_000_000
BYTES_A_WRITE = 37  # an odd number: chunk borders fall inside events and inside characters
CUT_AFTER = 4
FAILURES: dict[str, tuple[int, dict[str, Any], dict[str, str]]] = {
    "limited": (
        429,
        {"message": "Rate limit reached", "type": "requests", "param": None, "code": "rate_limit_exceeded"},
        {"retry-after": "1", "retry-after-ms": "150"},
    ),
    "broken": (500, {"message": "The server had an error", "type": "server_error", "param": None, "code": None}, {}),
    "picky": (
        400,
        {
            "message": "Unsupported value: 'temperature'",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "unsupported_value",
        },
        {},
    ),
}

FAILING = (*FAILURES, "cutter", "refuser")


def handle(request: Request) -> Reply:
    """The routes, `/w/WORKER/v1/ENDPOINT`."""
    worker, _, endpoint = request.path.removeprefix("/w/").partition("/v1/")
    if endpoint == "chat/completions":
        return chat(worker, request.body)
    answers = {"completions": completions, "embeddings": embeddings}
    return answers[endpoint](request.body) if endpoint in answers else Reply(status=404)


def chat(worker: str, body: Mapping[str, Any]) -> Reply:
    """A chat completion, whole or streamed."""
    if worker in FAILURES:
        status, error, headers = FAILURES[worker]
        return json_reply({"error": error}, status, headers)
    said = answer(worker, body)
    if not body.get("stream"):
        return json_reply(whole(said, body))
    if worker == "cutter":
        return event_stream(islice(stream(said, body), CUT_AFTER), cut=True)
    events = b"".join(stream(said, body))
    return event_stream(events[at : at + BYTES_A_WRITE] for at in range(0, len(events), BYTES_A_WRITE))


def whole(said: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a reply that is not streamed."""
    text, reason = _bounded(said, body)
    message: dict[str, Any] = {"role": "assistant", "content": text or None, "refusal": said.refusal}
    if said.calls:
        message |= {"content": None, "tool_calls": [_call(said, index) for index in range(len(said.calls))]}
    choices = [
        {"index": index, "message": message, "finish_reason": reason, "logprobs": _logprobs(list(pieces(text)), body)}
        for index in range(body.get("n") or 1)
    ]
    return {**_head(body, "chat.completion"), "choices": choices, "usage": _usage(text)}


def stream(said: Answer, body: Mapping[str, Any]) -> Iterator[bytes]:
    """The events of one that is."""
    text, reason = _bounded(said, body)
    head = _head(body, "chat.completion.chunk")
    with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    if with_usage:
        head["usage"] = None
    for index in range(body.get("n") or 1):
        opening = {"role": "assistant", "content": None if said.calls else "", "refusal": None}
        yield event({**head, "choices": [_choice(index, opening)]})
        for piece in pieces(text):
            yield event({**head, "choices": [_choice(index, {"content": piece}, _logprobs([piece], body))]})
        if said.refusal:
            yield event({**head, "choices": [_choice(index, {"refusal": said.refusal})]})
        for delta in _call_deltas(said):
            yield event({**head, "choices": [_choice(index, {"tool_calls": [delta]})]})
        yield event({**head, "choices": [{"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}]})
    if with_usage:
        yield event({**head, "choices": [], "usage": _usage(text)})
    yield event("[DONE]")


def _call_deltas(said: Answer) -> Iterator[dict[str, Any]]:
    """As OpenAI streams calls: a head with the name, then the arguments in parts that bear nothing but the index."""
    for index in range(len(said.calls)):
        call = _call(said, index)
        arguments = call["function"]["arguments"]
        yield {"index": index, **call, "function": {"name": call["function"]["name"], "arguments": ""}}
        for at in range(0, len(arguments), 5):
            yield {"index": index, "function": {"arguments": arguments[at : at + 5]}}


def _call(said: Answer, index: int) -> dict[str, Any]:
    name, arguments = said.calls[index]
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{name}_{index}", "type": "function", "function": function}


def _bounded(said: Answer, body: Mapping[str, Any]) -> tuple[str, str]:
    """The text as far as `max_tokens` and `stop` let it go, and why it ends."""
    if said.calls:
        return "", "tool_calls"
    text = said.text
    stops = body.get("stop") or []
    for stop in [stops] if isinstance(stops, str) else stops:
        text = text.partition(stop)[0]
    tokens = list(pieces(text))
    most = body.get("max_completion_tokens") or body.get("max_tokens") or len(tokens)
    return "".join(tokens[:most]), "length" if len(tokens) > most else "stop"


def _logprobs(tokens: list[str], body: Mapping[str, Any]) -> dict[str, Any] | None:
    if not body.get("logprobs"):
        return None
    entries = [{"token": token, "bytes": list(token.encode()), "logprob": -0.25} for token in tokens]
    top = body.get("top_logprobs") or 0
    return {"content": [{**entry, "top_logprobs": [entry] * min(top, 1)} for entry in entries], "refusal": None}


def _choice(index: int, delta: Mapping[str, Any], logprobs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _head(body: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-scripted", "object": kind, "created": CREATED_S, "model": body["model"]}


def _usage(text: str) -> dict[str, Any]:
    said = max(1, len(list(pieces(text))))
    return {
        "prompt_tokens": 12,
        "completion_tokens": said,
        "total_tokens": 12 + said,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }


def completions(body: Mapping[str, Any]) -> Reply:
    """A legacy completion, whole or streamed."""
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    head = {"id": "cmpl-scripted", "object": "text_completion", "created": CREATED_S, "model": body["model"]}
    usage = {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    choices: list[dict[str, Any]] = [
        {"index": index, "text": f" and so on: {prompt}", "logprobs": None, "finish_reason": "stop"}
        for index, prompt in enumerate(prompts)
    ]
    if not body.get("stream"):
        return json_reply({**head, "choices": choices, "usage": usage})
    chunks: list[dict[str, Any]] = []
    for choice in choices:
        chunks += [{"choices": [{**choice, "text": text, "finish_reason": None}]} for text in pieces(choice["text"])]
        chunks.append({"choices": [{**choice, "text": ""}]})
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({"choices": [], "usage": usage})
    return event_stream([*(event({**head, **chunk}) for chunk in chunks), event("[DONE]")])


def embeddings(body: Mapping[str, Any]) -> Reply:
    """Vectors that tell texts apart by their length."""
    texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
    vectors = [[float(len(text)), 1.0, -0.5, 0.25][: body.get("dimensions") or 4] for text in texts]
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, body.get("encoding_format"))}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": 3 * len(texts), "total_tokens": 3 * len(texts)}
    return json_reply({"object": "list", "data": data, "model": body["model"], "usage": usage})


def _encoded(vector: list[float], encoding: str | None) -> list[float] | str:
    """OpenAI's SDKs ask for base64 unless told otherwise: little-endian float32."""
    packed = struct.pack(f"<{len(vector)}f", *vector)
    return base64.b64encode(packed).decode() if encoding == "base64" else vector


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--port-file", type=Path, required=True)
    options = parser.parse_args()
    asyncio.run(serve(handle, options.port, options.port_file))


if __name__ == "__main__":
    main()
