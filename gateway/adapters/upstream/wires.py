"""The APIs by which model workers are asked, and how each puts a chat request and reads its reply.

A call of a chat worker goes by the API of its worker, any other call by OpenAI's endpoint of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.core.anthropic.inbound import MessageChunks
from gateway.core.anthropic.inbound import to_completion as message_to_completion
from gateway.core.anthropic.native import BETAS
from gateway.core.anthropic.outbound import to_request as to_message_request
from gateway.core.openai.chat import Endpoint
from gateway.core.openai.responses.outbound import Chunks, to_completion, to_request
from gateway.core.pool.models import model_of
from gateway.core.pool.workers import ANTHROPIC_URL, WorkerSpec
from gateway.service.ports.request import WorkerCall

Body = dict[str, Any]
ANTHROPIC_VERSION = "2023-06-01"
OAUTH_KEY, OAUTH_BETA = "sk-ant-oat", "oauth-2025-04-20"  # a subscription's token, and what it needs
PATHS: Mapping[Endpoint, str] = {
    "chat": "chat/completions",
    "completions": "completions",
    "embeddings": "embeddings",
    "moderations": "moderations",
    "rerank": "rerank",
    "images": "images/generations",
    "speech": "audio/speech",
    "transcriptions": "audio/transcriptions",
    "translations": "audio/translations",
}


class ChunkMaker(Protocol):
    """Makes chat chunks of the events of one reply."""

    def chunk(self, event: Mapping[str, Any]) -> Body:
        """The chunk of an event; one without choices where it says nothing of the reply."""
        ...


class _ResponseChunks(Chunks):
    """Those of a response, which may come whole."""

    def chunk(self, event: Mapping[str, Any]) -> Body:
        return to_completion(event) if event.get("object") == "response" else super().chunk(event)


def _plain_headers(secret: str | None, body: Mapping[str, Any]) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"} if secret else {}


def _anthropic_headers(secret: str | None, body: Mapping[str, Any]) -> dict[str, str]:
    """The key, the version, and the betas that the client or the pool file chose."""
    betas = [str(name) for name in body.get(BETAS) or ()]
    key = {"x-api-key": secret} if secret else {}
    if secret and secret.startswith(OAUTH_KEY):
        key, betas = {"authorization": f"Bearer {secret}"}, [*betas, OAUTH_BETA]
    return {"anthropic-version": ANTHROPIC_VERSION, **key, **({"anthropic-beta": ",".join(betas)} if betas else {})}


def _anthropic_base(url: str) -> str:
    """The base of a URL as LiteLLM takes it, with or without the path."""
    return (url or ANTHROPIC_URL).removesuffix("/messages").removesuffix("/v1") + "/v1"


@dataclass(frozen=True, slots=True)
class Wire:
    """One API. `request`: the body to send, of a chat body; `completion`: a chat completion, or `{"error": …}`, of its
    reply. `path` is below `base` of the worker's URL."""

    path: str
    request: Callable[[WorkerSpec, Body], Body]
    completion: Callable[[Mapping[str, Any]], Body]
    chunks: Callable[[], ChunkMaker]
    headers: Callable[[str | None, Mapping[str, Any]], dict[str, str]] = _plain_headers
    base: Callable[[str], str] = str


RESPONSES = Wire(
    "responses",
    lambda spec, body: to_request(body, with_state=model_of(spec).completion_tokens),
    to_completion,
    _ResponseChunks,
)
MESSAGES = Wire(
    "messages",
    lambda spec, body: to_message_request(body),
    message_to_completion,
    MessageChunks,
    _anthropic_headers,
    _anthropic_base,
)


def wire_of(call: WorkerCall) -> Wire | None:
    """The API that the call goes by; None for OpenAI's endpoint of its name."""
    if call.worker.speaks_messages and call.endpoint in ("chat", "completions"):
        return MESSAGES
    return RESPONSES if call.worker.api == "responses" and call.endpoint == "chat" else None
