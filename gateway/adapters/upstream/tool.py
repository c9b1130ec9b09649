"""Tool workers: programs that answer a step. `builtin:vote` here; any other over HTTP.

HTTP protocol: POST `{"task": text, "seen": [{"handle", "task", "reply"}, …]}`, answered with 200 and
`{"content": text}`; an optional `usage` object is billed where the pool file gives the tool a price per token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

import httpx

from gateway.adapters.upstream import client as upstream
from gateway.adapters.upstream.http import http_client
from gateway.core.loop import depth
from gateway.core.loop.digest import majority
from gateway.core.money.amounts import Usage
from gateway.core.openai.usage import read_usage, usage_body
from gateway.errors import UpstreamProtocol, UpstreamRefused
from gateway.service.ports.request import WorkerCall, WorkerReply

VOTE = "builtin:vote"


class ToolWorkers:
    """`ports.Workers` for kind `tool`. `secrets`: worker name → key, sent as a bearer token."""

    def __init__(
        self,
        secrets: Mapping[str, str],
        depth_secret: bytes,
        *,
        client: httpx.AsyncClient | None = None,
        reply_bytes_max: int = 4 << 20,
    ) -> None:
        self._secrets = dict(secrets)
        self._depth_secret = depth_secret
        self._client = client or http_client()
        self._reply_bytes_max = reply_bytes_max

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def complete(self, call: WorkerCall) -> WorkerReply:
        """As `ports.Workers.complete`: an OpenAI completion whose content is what the tool said."""
        content, usage = _vote(call) if call.worker.url == VOTE else await self._ask(call)
        return WorkerReply(_completion(call, content, usage), usage)

    async def stream(self, call: WorkerCall) -> AsyncIterator[Mapping[str, Any]]:
        """The whole reply as one chunk, then the usage."""
        reply = await self.complete(call)
        head = {"id": reply.body["id"], "object": "chat.completion.chunk", "created": 0, "model": call.worker.name}
        message = reply.body["choices"][0]["message"]
        yield {**head, "choices": [{"index": 0, "delta": message, "finish_reason": "stop"}]}
        yield {**head, "choices": [], "usage": reply.body["usage"]}

    async def _ask(self, call: WorkerCall) -> tuple[str, Usage]:
        """What an HTTP tool answers."""
        secret = self._secrets.get(call.worker.name)
        seen = [{"handle": handle, "task": task, "reply": reply} for handle, task, reply in call.saw]
        headers = {"accept-encoding": "identity", "content-type": "application/json"}
        headers[depth.HEADER] = depth.sign(call.depth, self._depth_secret)
        if secret:
            headers["authorization"] = f"Bearer {secret}"
        request = self._client.build_request(
            "POST",
            call.worker.url or "",
            content=json.dumps({**call.worker.params, "task": task_text(call.body), "seen": seen}).encode(),
            headers=headers,
        )
        with upstream.transport_errors():
            async with asyncio.timeout(call.timeout_s):
                response = await self._client.send(request, stream=True)
                async with aclosing(response):
                    if response.status_code != 200:
                        raw = await upstream.error_body(response)
                        raise upstream.status_error(response.status_code, response.headers, raw, secret)
                    raw = await upstream.bounded_body(response, self._reply_bytes_max)
        answer = upstream.parse_object(raw)
        if not isinstance(answer.get("content"), str):
            raise UpstreamProtocol("the tool's reply has no text under `content`")
        return answer["content"], read_usage(answer) or Usage()


def task_text(body: Mapping[str, Any]) -> str:
    """The text of the last user message: what the step was told to do. Empty where there is none."""
    for message in reversed(body.get("messages") or ()):
        if message.get("role") == "user":
            content = message.get("content")
            parts = [{"text": content}] if isinstance(content, str) else content or ()
            return "\n".join(str(part["text"]) for part in parts if part.get("text"))
    return ""


def _vote(call: WorkerCall) -> tuple[str, Usage]:
    """The reply that most of the replies seen agree with, whole; ties to the earliest."""
    if not call.saw:
        raise UpstreamRefused("vote sees no replies; let its step see at least one", dispatched=False)
    replies = [reply for _, _, reply in call.saw]
    return replies[majority(replies)], Usage()


def _completion(call: WorkerCall, content: str, usage: Usage) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    head = {"id": f"tool-{call.rollout_id}-{call.step_id}", "object": "chat.completion", "created": 0}
    return {**head, "model": call.worker.name, "choices": [choice], "usage": usage_body(usage)}
