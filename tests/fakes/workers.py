"""A scripted `ports.Workers`: every worker answers from its script, call by call; each call made is kept."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.core.money.amounts import Usage
from gateway.core.openai.texts import inputs_of
from gateway.core.openai.vendors.usage import usage_body
from gateway.errors import UpstreamProtocol
from gateway.service.ports.request import WorkerCall, WorkerReply


@dataclass(frozen=True)
class Says:
    """A reply: text (streamed in `pieces`) and/or tool calls, after `delay_s`; `dies_after` cuts it after so many."""

    text: str | None = "ok"
    tool_calls: Sequence[Mapping[str, Any]] = ()
    finish_reason: str = "stop"
    usage: Usage = field(default_factory=lambda: Usage(10, 5))
    delay_s: float = 0.0
    piece_delay_s: float = 0.0
    dies_after: int | None = None
    model: str | None = None  # that the reply names; None: the one asked for


Scripted = Says | Exception | Callable[[WorkerCall], "Says | Exception"]


class FakeWorkers:
    """Answers by worker name; a script's last entry repeats. A worker without a script says `ok`.

    `calls` holds every call, `cancelled` the names of workers whose call was cancelled, `in_flight` how many run now
    and `in_flight_peak` the most that ran at once.
    """

    def __init__(self, scripts: Mapping[str, Scripted | Sequence[Scripted]] | None = None) -> None:
        self._scripts = {name: _as_list(script) for name, script in (scripts or {}).items()}
        self._turns: dict[str, itertools.count[int]] = defaultdict(itertools.count)
        self.calls: list[WorkerCall] = []
        self.cancelled: list[str] = []
        self.in_flight = 0
        self.in_flight_peak = 0

    async def complete(self, call: WorkerCall) -> WorkerReply:
        says = await self._begun(call)
        try:
            await self._pause(call, says.delay_s)
            if says.dies_after is not None:
                raise UpstreamProtocol("the worker hung up before its reply was complete")
            return WorkerReply(completion(call, says), says.usage)
        finally:
            self.in_flight -= 1

    async def stream(self, call: WorkerCall) -> AsyncIterator[Mapping[str, Any]]:
        says = await self._begun(call)
        try:
            await self._pause(call, says.delay_s)
            for number, chunk in enumerate(chunks(call, says)):
                if number == says.dies_after:
                    raise UpstreamProtocol("the worker hung up before its reply was complete")
                yield chunk
                await self._pause(call, says.piece_delay_s)
        except GeneratorExit:
            self.cancelled.append(call.worker.name)
            raise
        finally:
            self.in_flight -= 1

    async def _begun(self, call: WorkerCall) -> Says:
        self.calls.append(call)
        script = self._scripts.get(call.worker.name) or [Says()]
        turn = next(self._turns[call.worker.name])
        entry = script[min(turn, len(script) - 1)]
        says = entry if isinstance(entry, Says | Exception) else entry(call)
        if isinstance(says, Exception):
            raise says
        self.in_flight += 1
        self.in_flight_peak = max(self.in_flight_peak, self.in_flight)
        return says

    async def _pause(self, call: WorkerCall, delay_s: float) -> None:
        try:
            await asyncio.sleep(delay_s)
        except asyncio.CancelledError:
            self.cancelled.append(call.worker.name)
            raise


def completion(call: WorkerCall, says: Says) -> dict[str, Any]:
    """The OpenAI body of a scripted reply; an embedding begins with the position of its text."""
    if call.endpoint == "embeddings":
        data = [{"index": n, "embedding": [n + 0.5, -1.0]} for n in range(inputs_of(call.body["input"]))]
        return {"object": "list", "data": data, "usage": usage_body(says.usage)}
    message: dict[str, Any] = {"role": "assistant", "content": says.text}
    if says.tool_calls:
        message["tool_calls"] = [dict(tool_call) for tool_call in says.tool_calls]
    choice = {"index": 0, "message": message, "finish_reason": says.finish_reason}
    head = {"id": "chatcmpl-fake", "object": "chat.completion", "created": 0, "model": says.model or call.worker.model}
    return {**head, "choices": [choice], "usage": usage_body(says.usage)}


def chunks(call: WorkerCall, says: Says) -> list[dict[str, Any]]:
    """The same reply as OpenAI chunks: role, words, tool calls, finish reason, usage."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": word} for word in _words(says.text or "")]
    if says.tool_calls:
        calls = [{"index": index, **tool_call} for index, tool_call in enumerate(says.tool_calls)]
        deltas.append({"tool_calls": calls})
    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": says.finish_reason})
    head = {
        "id": "chatcmpl-fake",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": says.model or call.worker.model,
    }
    last = {**head, "choices": [], "usage": usage_body(says.usage)}
    return [*({**head, "choices": [choice]} for choice in choices), last]


def _words(text: str) -> list[str]:
    parts = text.split(" ")
    return [part if index == 0 else f" {part}" for index, part in enumerate(parts)] if text else []


def _as_list(script: Scripted | Sequence[Scripted]) -> list[Scripted]:
    return list(script) if isinstance(script, Sequence) else [script]
