"""A policy on the embedded runtime, in this process: the served engine without its HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from gateway.core.money.amounts import Usage
from gateway.errors import ConductorError
from gateway.service.ports.request import ConductorCall, ConductorChunk, ConductorEnd
from policy.engines.directory import ConductorDirectory
from policy.engines.port import LoggedPlan, PlanEngine, check_sampling, reading
from policy.serve.engine import DecodeRequest, Engine, TokenSample
from policy.serve.lora import merge_adapter
from policy.serve.runtime import Runtime
from policy.serve.shape import load_shape, load_weights
from policy.serve.tokens import BadSchema, TextStream, Tokens


def load_runtime(directory: ConductorDirectory) -> tuple[Runtime, Tokens]:
    """The weights in memory, an adapter merged into its base's. Raises VersionRefused."""
    home = directory.home
    weights = load_weights(home, load_shape(home))
    merged = merge_adapter(directory.policy.directory, weights) if directory.base else weights
    runtime = Runtime(home, weights=merged)
    return runtime, Tokens(home, runtime.shape)


def open_runtime(directory: ConductorDirectory, threads: int) -> OnnxEngine:
    """The engine of a directory, on the running loop. Raises VersionRefused."""
    return OnnxEngine(Engine(*load_runtime(directory), threads), directory.manifest.id, threads)


class OnnxEngine(PlanEngine):
    """`PlanEngine` on `threads` threads, which share one cache of prompts. `name` is what rollouts call the version."""

    def __init__(self, engine: Engine, name: str, threads: int = 1) -> None:
        self.calls_max = threads
        self._engine = engine
        self._name = name
        self._scoring = asyncio.Semaphore(threads)

    @property
    def plan_ms(self) -> float | None:
        engine = self._engine
        return 1000 * engine.busy_s / engine.decoded if engine.decoded else None

    async def decode(self, call: ConductorCall) -> AsyncIterator[ConductorChunk | ConductorEnd]:
        """As the port says. Raises ConductorError(refused) for a prompt that leaves no room for a plan."""
        tokens, sampling = self._engine.tokens, call.sampling
        check_sampling(sampling)
        try:
            prompt_ids = tokens.encode_chat(call.messages)
            tokens.matcher(call.schema)
        except (ValueError, BadSchema) as error:
            raise ConductorError("refused", str(error)) from None
        room = self._engine.runtime.shape.context - len(prompt_ids)
        if room < 1:
            raise ConductorError("refused", f"a prompt of {len(prompt_ids)} tokens fills the conductor's context")
        tokens_max = min(sampling.tokens_max, room)
        job = DecodeRequest(prompt_ids, call.schema, sampling.temperature, sampling.top_p, sampling.seed, tokens_max)
        text, count, finish = TextStream(), 0, None
        async with aclosing(self._engine.stream(job)) as stream:
            async for batch in stream:
                count, finish = count + len(batch), batch[-1].finish
                yield self._chunk(text, batch)
        usage = Usage(len(prompt_ids), count)
        yield ConductorEnd(self._name, usage, tuple(prompt_ids), finish or "stop")

    def _chunk(self, text: TextStream, batch: list[TokenSample]) -> ConductorChunk:
        tokens = self._engine.tokens
        data = b"".join(tokens.token_bytes(sampled.token) for sampled in batch)
        return ConductorChunk(
            text.feed(data, final=batch[-1].finish is not None),
            tuple(sampled.token for sampled in batch),
            tuple(sampled.logprob for sampled in batch),
            tuple(tokens.token_text(sampled.token) for sampled in batch),
        )

    async def score(self, plans: Sequence[LoggedPlan]) -> list[list[float]]:
        """As the port says, each plan on one thread."""
        return list(await asyncio.gather(*(self._score(plan) for plan in plans)))

    async def _score(self, plan: LoggedPlan) -> list[float]:
        async with self._scoring:
            return await self._engine.on_thread(lambda: self.propensities(plan))

    def propensities(self, plan: LoggedPlan) -> list[float]:
        """The score of one plan, on the calling thread."""
        read = reading(self._engine.tokens, plan)
        indices = [decision.index for decision in read.decisions]
        return read.of_logits(self._engine.walk(plan.prompt_ids, plan.plan_ids, indices))

    async def ready(self) -> bool:
        """Return True: the weights are loaded."""
        return True

    async def close(self) -> None:
        """Let running plans end and stop the threads."""
        await asyncio.to_thread(self._engine.close)
