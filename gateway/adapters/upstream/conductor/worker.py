"""A worker of the pool as the conductor: any model that a worker kind can reach can plan, including LiteLLM's vendors.

Such a model reports no token ids and usually no log-probs, so its plans are logged for audit but not for learning. The
`params` of its pool entry are sent, such as `reasoning_effort`; only the bound on its tokens is the planner's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Literal

from gateway.adapters.upstream.client import Breaker, Items, guarded
from gateway.core.loop.plan import portable_schema
from gateway.core.money.amounts import Usage
from gateway.core.openai.finish import finish_reason
from gateway.core.openai.vendors.usage import read_usage
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import BatonError, ConductorError, UpstreamError, UpstreamTimeout
from gateway.service.ports.request import ConductorCall, ConductorChunk, ConductorEnd, WorkerCall, Workers

Structured = Literal["json_schema", "json_object", "none"]


class WorkerConductor:
    """Implements the Conductor port over the Workers port."""

    def __init__(
        self, workers: Workers, spec: WorkerSpec, structured: Structured, breaker: Breaker | None = None
    ) -> None:
        self._breaker = breaker or Breaker()
        self._workers = workers
        self._spec = spec
        self._structured = structured

    async def decode(self, call: ConductorCall) -> Items:
        """See `ports.Conductor.decode`. Raises ConductorError(slow | down) for every failure of the worker."""
        async with aclosing(guarded(self._breaker, call, self._decode(call))) as items:
            async for item in items:
                yield item

    async def _decode(self, call: ConductorCall) -> Items:
        usage, text_chars, finish = None, 0, "stop"
        try:
            async with asyncio.timeout(call.timeout_s):
                async for chunk in self._workers.stream(self._worker_call(call)):
                    usage = read_usage(chunk) or usage
                    text, finish = _text(chunk), _finish(chunk) or finish
                    text_chars += len(text)
                    if text:
                        yield ConductorChunk(text, tokens=(text,))
        except (UpstreamTimeout, TimeoutError):
            raise ConductorError("slow", f"worker {self._spec.name} gave no plan in time") from None
        except BatonError as error:
            unbilled = isinstance(error, UpstreamError) and (error.upstream_status is not None or not error.dispatched)
            free = unbilled and text_chars == 0
            raise ConductorError("down", f"worker {self._spec.name}: {error.message}", billable=not free) from None
        yield ConductorEnd(
            self._spec.name, usage or Usage(0, -(-text_chars // 4), estimated=True), finish_reason=finish
        )

    async def ready(self) -> bool:
        """Always True: Baton learns from each call whether a hosted model works."""
        return True

    async def close(self) -> None:
        """Do nothing: the owner of the workers closes them."""

    def _worker_call(self, call: ConductorCall) -> WorkerCall:
        body: dict[str, Any] = {
            "messages": [dict(message) for message in call.messages],
            tokens_name(self._spec): call.sampling.tokens_max,
        }
        if "temperature" not in (*self._spec.params, *self._spec.cannot):
            body["temperature"] = call.sampling.temperature
        if self._structured == "json_schema":
            schema = {"name": "plan", "strict": False, "schema": portable_schema(call.schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif self._structured == "json_object":
            body["response_format"] = {"type": "json_object"}
        return WorkerCall(self._spec, body, call.timeout_s, "planning", "plan")


def tokens_name(spec: WorkerSpec) -> str:
    """The property by which a worker's reply is bounded: `max_completion_tokens` where its pool entry has that."""
    newer = "max_completion_tokens" in spec.params or "max_tokens" in spec.cannot
    return "max_completion_tokens" if newer else "max_tokens"


def _finish(chunk: Mapping[str, Any]) -> str | None:
    reason = (chunk.get("choices") or [{}])[0].get("finish_reason")
    return finish_reason(reason)


def _text(chunk: Mapping[str, Any]) -> str:
    choices = chunk.get("choices") or [{}]
    content = (choices[0].get("delta") or {}).get("content")
    return content if isinstance(content, str) else ""
