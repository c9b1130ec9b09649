"""Workers that are programs, and answer a step: kinds `tool` and `mcp`.

`builtin:vote` runs here, `builtin:python` in the jail (`sandbox/`), and `builtin:judge` asks the model that its
`params` name. Kind mcp calls a tool of its server (`mcp/servers.py`). Every other tool answers over HTTP: Baton sends
POST `{"task": text, "seen": [{"handle", "task", "reply"}, …]}`, and the tool answers with status 200 and
`{"content": text}`, and with a `usage` that is billed at its token prices.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import httpx

from gateway.adapters.upstream import client as upstream
from gateway.adapters.upstream import replies
from gateway.adapters.upstream.client import http_client
from gateway.adapters.upstream.http1.ways import Way
from gateway.adapters.upstream.sandbox import run_python, run_vote, trial_verdicts
from gateway.core.access import depth
from gateway.core.loop.compose import plain_message, task_text
from gateway.core.loop.replies.judging import RUBRIC, judge_messages, judgement, trial_judgement
from gateway.core.money.amounts import Usage
from gateway.core.openai.reply import reply_text
from gateway.core.openai.vendors.usage import read_usage
from gateway.core.pool.workers import JUDGE_URL, PYTHON_URL, VOTE_URL
from gateway.errors import UpstreamProtocol, UpstreamRefused
from gateway.service.ports.pools import NO_SERVERS, ToolServers
from gateway.service.ports.request import WorkerCall, WorkerReply

JUDGE_TOKENS = 300  # that a judge may write
JUDGE_TOKENS_MIN = 60
JUDGE_PROMPT_TOKENS = 400  # of its instructions and rubric: taken off its output, for which money is held
Ask = Callable[[str, WorkerCall], Awaitable[WorkerReply]]  # a call of the model worker of that name


class ToolWorkers:
    """`ports.Workers` for kind `tool`. `secrets` maps worker names to keys, which are sent as bearer tokens."""

    def __init__(
        self,
        secrets: Mapping[str, str],
        depth_secret: bytes,
        *,
        client: httpx.AsyncClient | None = None,
        ways: Mapping[str, Way] = MappingProxyType({}),
        reply_bytes_max: int = 4 << 20,
        ask: Ask | None = None,
        servers: ToolServers = NO_SERVERS,
    ) -> None:
        self._ask_model = ask
        self.servers = servers  # of the workers of kind mcp
        self._secrets = dict(secrets)
        self._depth_secret = depth_secret
        self._client = client or http_client()
        self._ways = ways  # to workers whose entries say more than the environment
        self._reply_bytes_max = reply_bytes_max

    def asking(self, ask: Ask) -> ToolWorkers:
        """The same tools over the same connections, with judges that ask their models through `ask`."""
        other = copy(self)
        other._ask_model = ask
        return other

    async def close(self) -> None:
        """Close every connection, and end the MCP servers."""
        await asyncio.gather(self._client.aclose(), self.servers.close())

    async def complete(self, call: WorkerCall) -> WorkerReply:
        """See `ports.Workers.complete`. The reply is an OpenAI completion with the tool's answer as its content."""
        if call.worker.kind == "mcp":
            content = await self._call_tool(call)
            return WorkerReply(upstream.tool_completion(call, content, Usage()), Usage())
        if call.worker.url == JUDGE_URL:
            return await self._judge(call)
        if call.worker.url == VOTE_URL:
            content, usage = await run_vote(call), Usage()
        elif call.worker.url == PYTHON_URL:
            content, usage = await run_python(call), Usage()
        else:
            content, usage = await self._ask(call)
        return WorkerReply(upstream.tool_completion(call, content, usage), usage)

    async def stream(self, call: WorkerCall) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the complete reply as one chunk, then the usage."""
        reply = await self.complete(call)
        head = {"id": reply.body["id"], "object": "chat.completion.chunk", "created": 0, "model": call.worker.name}
        message = reply.body["choices"][0]["message"]
        yield {**head, "choices": [{"index": 0, "delta": message, "finish_reason": "stop"}]}
        yield {**head, "choices": [], "usage": reply.body["usage"]}

    async def _call_tool(self, call: WorkerCall) -> str:
        """What a tool of an MCP server answers. Raises UpstreamError."""
        arguments = call.body.get("tool_call")
        if not isinstance(arguments, Mapping):
            raise UpstreamRefused(f"worker {call.worker.name} is asked by the name of a tool", dispatched=False)
        return await self.servers.call(call.worker.name, arguments["name"], arguments["arguments"], call.timeout_s)

    async def _judge(self, call: WorkerCall) -> WorkerReply:
        """Ask the judge's model about the replies seen. Of two programs a run says more, where `run_code` allows it.
        Raises UpstreamError, also where the model gives no verdict."""
        replies, name = len(call.saw), "max_completion_tokens" if "max_completion_tokens" in call.body else "max_tokens"
        rubric = str(call.worker.params.get("rubric") or RUBRIC)
        room = int(call.body.get(name) or 0) - JUDGE_PROMPT_TOKENS - len(rubric.encode())
        if not replies or room < JUDGE_TOKENS_MIN or self._ask_model is None:
            why = "sees no reply; let its step see one or two" if not replies else "has too few tokens left"
            raise UpstreamRefused(f"judge {why}", dispatched=False)
        if replies > 1 and call.worker.params.get("run_code") is True:
            ran = await trial_verdicts([reply for *_, reply in call.saw[-2:]], call.timeout_s)
            if (verdict := ran.get((0, 1), "unknown")) != "unknown":
                return WorkerReply(upstream.tool_completion(call, trial_judgement(verdict), Usage()), Usage())
        messages = judge_messages([*map(plain_message, call.body["messages"])], rubric, replies)
        body = {"messages": messages, "max_tokens": min(room, JUDGE_TOKENS)}
        reply = await self._ask_model(str(call.worker.params["model"]), replace(call, body=body, saw=()))
        try:
            content = json.dumps(judgement(reply_text(reply.body), replies), ensure_ascii=False)
        except ValueError as error:
            raise UpstreamProtocol(str(error)) from None
        return WorkerReply(upstream.tool_completion(call, content, reply.usage), reply.usage, cost_nano=reply.cost_nano)

    async def _ask(self, call: WorkerCall) -> tuple[str, Usage]:
        """Call an HTTP tool; return its answer and usage. Raises UpstreamError."""
        secret = self._secrets.get(call.worker.name)
        steps = [{"handle": handle, "task": task, "reply": reply} for handle, task, reply in call.saw]
        headers = {"accept-encoding": "identity", "content-type": "application/json"}
        headers[depth.DEPTH_HEADER] = depth.sign(call.depth, self._depth_secret)
        if secret:
            headers["authorization"] = f"Bearer {secret}"
        request = self._client.build_request(
            "POST",
            call.worker.url or "",
            content=json.dumps(
                {**call.worker.params, "task": task_text(call.body.get("messages") or ()), "seen": steps}
            ).encode(),
            headers=headers,
            extensions={"way": self._ways.get(call.worker.name)},
        )
        with replies.transport_errors():
            async with asyncio.timeout(call.timeout_s):
                response = await self._client.send(request, stream=True)
                async with aclosing(response):
                    if response.status_code != 200:
                        raw = await replies.error_body(response)
                        raise upstream.status_error(response.status_code, response.headers, raw, secret)
                    raw = await replies.bounded_body(response, self._reply_bytes_max)
        answer = upstream.parse_object(raw)
        if not isinstance(answer.get("content"), str):
            raise UpstreamProtocol("the tool's reply has no text under `content`")
        return answer["content"], read_usage(answer) or Usage()
