"""Tools of MCP servers in a step: one call that the plan spells, or a model that calls them while it works.

Each call of a tool is a call of its worker: drawn from the meter, announced on disk, settled, logged as an attempt of
its step. A model's rounds, calls, seconds and bytes are bounded; at a bound, and where the request's caps leave one
more call, the model is asked to answer without tools. What a tool answers is data: it goes back to the model in a
block that it cannot close, and never anywhere as an instruction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.core.log.rollout import StepRecord
from gateway.core.loop.compose import quoted_result
from gateway.core.loop.plan import Step
from gateway.core.openai.parts import without_media
from gateway.core.openai.reply import merge, reply_text
from gateway.core.openai.vendor import for_worker, without_state
from gateway.core.pool.tools import Tool, asked_call
from gateway.core.pool.workers import MODEL_KINDS, Price, WorkerSpec
from gateway.errors import CapReached, UpstreamError, UpstreamProtocol
from gateway.service.loop.calls import Calls, Saw
from gateway.service.loop.checks import Ask, add_cost
from gateway.service.loop.state import Loop, StepRun
from gateway.service.ports.request import Toolboxes

Fit = Callable[[Sequence[dict[str, Any]]], Awaitable[list[dict[str, Any]]]]  # messages behind a step's own → all
ROUNDS_MAX = 6  # of a model's calls of tools in one step
CALLS_MAX = 16  # of tools in one step
RESULTS_CHARS_MAX = 65_536  # of all that tools answer in one step
TOOLS_S_MAX = 120.0  # from a step's first call of a tool to its last
NAME_CHARS_MAX = 64
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(slots=True)
class Kit:
    """The functions that the model of one step may call, and what is left of their bounds."""

    functions: Mapping[str, tuple[WorkerSpec, Tool]]
    until_s: float  # on the clock's monotonic scale
    rounds: int = 0
    calls: int = 0
    chars: int = 0
    seen: list[dict[str, Any]] = field(default_factory=list)  # the messages of calls and results

    @property
    def declared(self) -> list[dict[str, Any]]:
        """The functions as a model is told of them."""
        return [
            {
                "type": "function",
                "function": {"name": name, "description": tool.description, "parameters": dict(tool.schema)},
            }
            for name, (_, tool) in self.functions.items()
        ]


def kit_of(calls: Calls, loop: Loop, run: StepRun, answers: bool) -> Kit | None:
    """The tools that the plan gives a step's model, as far as they are there. None where there are none, where the
    model takes none, and where the client's own tools or several choices are wanted of the reply."""
    if not run.step.tools or run.spec.kind not in MODEL_KINDS or "tools" in run.spec.cannot:
        return None
    if answers and (
        loop.endpoint != "chat" or loop.params.keys() & {"tools", "functions"} or loop.params.get("n", 1) > 1
    ):
        return None
    functions: dict[str, tuple[WorkerSpec, Tool]] = {}
    for spec in sorted(loop.workers, key=lambda spec: spec.name):  # one order, for the provider's prompt cache
        if spec.kind == "mcp" and spec.handle in run.step.tools:
            for tool in calls.toolboxes.tools(spec, loop.record.pool_revision or ""):
                name = _NO_NAME.sub("_", f"{spec.handle}_{tool.name}")[:NAME_CHARS_MAX]
                functions.setdefault(name, (spec, tool))
    return Kit(functions, calls.clock.monotonic_s() + TOOLS_S_MAX) if functions else None


def boxes_of(toolboxes: Toolboxes, loop: Loop) -> dict[str, tuple[Tool, ...]]:
    """The tools of each worker of kind mcp that may be called now, by its name."""
    revision = loop.record.pool_revision or ""
    return {spec.name: toolboxes.tools(spec, revision) for spec in loop.workers if spec.kind == "mcp"}


def priced(spec: WorkerSpec, name: str) -> WorkerSpec:
    """The worker with the price and the time of one of its tools."""
    tool = spec.tools[name]
    price = spec.price if tool.call_usd is None else Price(call_usd=tool.call_usd)
    return spec.model_copy(update={"price": price, "timeout_s": tool.timeout_s or spec.timeout_s})


class ToolCalls:
    """Calls tools for steps. `ask` makes worker calls."""

    def __init__(self, calls: Calls, ask: Ask) -> None:
        self._shared, self._ask = calls, ask

    async def step(self, loop: Loop, run: StepRun, text: str) -> Mapping[str, Any]:
        """The reply of a step that is one call of a tool, which `text` spells. Raises as `StepCall.complete`."""
        tools = self._shared.toolboxes.tools(run.spec, loop.record.pool_revision or "")
        if not tools:
            problem = f"worker {run.spec.name}: its MCP server is not there"
            raise UpstreamError(problem, dispatched=False, code="tool_unavailable")
        tool, arguments = asked_call(text, tools)
        return await self._call(loop, run, run.spec, tool, arguments)

    async def work(
        self, loop: Loop, run: StepRun, body: dict[str, Any], saw: Saw, kit: Kit, fit: Fit
    ) -> Mapping[str, Any]:
        """The reply of a model that may call tools first. `fit` gives the step's messages with those of calls and
        results behind them, cut where they fill the model's context. Raises as `StepCall.complete`."""
        body["tools"] = kit.declared
        while True:
            if kit.seen:
                body["messages"] = await fit(kit.seen)
            run.record.messages = without_state(without_media(body["messages"]))
            if last := self._is_last(loop, kit):
                body["tool_choice"] = "none"
            reply = merge(await self._ask(loop, run, [body], saw))
            message = _message(reply)
            wanted = message.get("tool_calls") or []
            if last or not wanted:
                return _without_calls(run, reply)
            kit.rounds += 1
            results = [await self._result(loop, run, kit, call) for call in wanted]
            turn = {
                "role": "assistant",
                "content": message.get("content"),
                **_vendor_fields(message),
                "tool_calls": wanted,
            }
            kit.seen += for_worker([turn, *results], run.spec.origin)

    def _is_last(self, loop: Loop, kit: Kit) -> bool:
        """Whether the next reply must be the answer: a bound is reached, or the request's cap leaves one call."""
        spent = kit.rounds >= ROUNDS_MAX or kit.calls >= CALLS_MAX or kit.chars >= RESULTS_CHARS_MAX
        late = self._shared.clock.monotonic_s() >= kit.until_s
        return spent or late or loop.caps.calls - loop.tree.meter.calls <= 1

    async def _result(self, loop: Loop, run: StepRun, kit: Kit, call: Mapping[str, Any]) -> dict[str, Any]:
        """The message that answers one call of a tool."""
        text = await self._answer(loop, run, kit, call.get("function") or {})
        room = max(0, RESULTS_CHARS_MAX - kit.chars)
        kit.chars += len(text)
        text = text if len(text) <= room else f"{text[:room]}\n(cut: this step's tools have answered enough)"
        return {"role": "tool", "tool_call_id": str(call.get("id")), "content": quoted_result(text)}

    async def _answer(self, loop: Loop, run: StepRun, kit: Kit, function: Mapping[str, Any]) -> str:
        """What a tool answers, or why it was not called or failed."""
        found = kit.functions.get(str(function.get("name")))
        if found is None:
            return "error: there is no tool of that name"
        if kit.calls >= CALLS_MAX or loop.caps.calls - loop.tree.meter.calls <= 1:
            return "not called: no more calls of tools are allowed; answer now"
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (TypeError, ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return "error: the arguments must be a JSON object"
        kit.calls += 1
        spec, tool = found
        own = StepRecord(run.record.round, run.index, spec.name, spec.handle, spec.kind, spec.version, None, [])
        beside = StepRun(run.index, Step(spec.handle, None), spec, own, dispatches=run.dispatches)
        try:
            return reply_text(await self._call(loop, beside, spec, tool, arguments))
        except (CapReached, UpstreamError) as error:
            return f"error: {error.message}"
        finally:
            add_cost(run, beside)

    async def _call(
        self, loop: Loop, run: StepRun, spec: WorkerSpec, tool: Tool, arguments: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Call a tool as the worker call of `run`, and note it with its attempts."""
        run.spec = priced(spec, tool.name)
        body = {"messages": [], "max_tokens": 1, "tool_call": {"name": tool.name, "arguments": dict(arguments)}}
        before, chars = len(run.record.attempts), None
        try:
            reply = merge(await self._ask(loop, run, [body], []))
            chars = len(reply_text(reply))
            return reply
        finally:
            for attempt in run.record.attempts[before:]:
                answered = chars if attempt.error is None else None
                attempt.tool = {"name": tool.name, "arguments": dict(arguments), "chars": answered}
            loop.tell("tool_called", step=run.index, worker=spec.name, tool=tool.name, ok=chars is not None)


def _message(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    return (reply.get("choices") or [{}])[0].get("message") or {}


def _vendor_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """What a vendor wants back of its own message beside text and calls."""
    return {name: value for name, value in message.items() if name not in ("role", "content", "tool_calls", "refusal")}


def _without_calls(run: StepRun, reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reply without calls of the gateway's tools, which are not the client's. Raises UpstreamProtocol where nothing
    is left."""
    message = _message(reply)
    if not message.get("tool_calls"):
        return reply
    if not reply_text(reply).strip():
        raise UpstreamProtocol(f"worker {run.spec.name} goes on to call tools and gives no answer", retryable=False)
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    choice = {**reply["choices"][0], "message": plain, "finish_reason": "stop"}
    return {**reply, "choices": [choice]}
