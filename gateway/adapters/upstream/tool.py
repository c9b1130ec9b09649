"""Tool workers: programs that answer a step. `builtin:vote` runs here, every other tool answers over HTTP.

The HTTP protocol: Baton sends POST `{"task": text, "seen": [{"handle", "task", "reply"}, …]}`, and the tool answers
with status 200 and `{"content": text}`. An optional `usage` object is billed if the pool file has token prices for the
tool.
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
    """`ports.Workers` for kind `tool`. `secrets` maps worker names to keys, which are sent as bearer tokens."""

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
        """See `ports.Workers.complete`. The reply is an OpenAI completion with the tool's answer as its content."""
        content, usage = _vote(call) if call.worker.url == VOTE else await self._ask(call)
        return WorkerReply(_completion(call, content, usage), usage)

    async def stream(self, call: WorkerCall) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the complete reply as one chunk, then the usage."""
        reply = await self.complete(call)
        head = {"id": reply.body["id"], "object": "chat.completion.chunk", "created": 0, "model": call.worker.name}
        message = reply.body["choices"][0]["message"]
        yield {**head, "choices": [{"index": 0, "delta": message, "finish_reason": "stop"}]}
        yield {**head, "choices": [], "usage": reply.body["usage"]}

    async def _ask(self, call: WorkerCall) -> tuple[str, Usage]:
        """Call an HTTP tool; return its answer and usage. Raises UpstreamError."""
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
    """The text of the last user message, which is the step's task. Empty if there is none."""
    for message in reversed(body.get("messages") or ()):
        if message.get("role") == "user":
            content = message.get("content")
            parts = [{"text": content}] if isinstance(content, str) else content or ()
            return "\n".join(str(part["text"]) for part in parts if part.get("text"))
    return ""


def _vote(call: WorkerCall) -> tuple[str, Usage]:
    """The first of the seen replies that give the most common answer. Raises UpstreamRefused without any reply."""
    if not call.saw:
        raise UpstreamRefused("vote sees no replies; let its step see at least one", dispatched=False)
    replies = [reply for _, _, reply in call.saw]
    return replies[majority(replies)], Usage()


def _completion(call: WorkerCall, content: str, usage: Usage) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    head = {"id": f"tool-{call.rollout_id}-{call.step_id}", "object": "chat.completion", "created": 0}
    return {**head, "model": call.worker.name, "choices": [choice], "usage": usage_body(usage)}
