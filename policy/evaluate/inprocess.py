"""A policy directory as a conductor in this process: the served engine without its HTTP server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from decimal import Decimal
from pathlib import Path

from gateway.core.loop.prompt import PROMPT_VERSION, Profile, profile_of, prompt_hash
from gateway.core.money.amounts import Usage
from gateway.core.pool.workers import Price
from gateway.errors import ConductorError, ConfigError
from policy.environments.base import (
    ConductorCall,
    ConductorChunk,
    ConductorEnd,
    ConductorPlanner,
    ConductorSettings,
)
from policy.serve.engine import Engine, Job, Sampled
from policy.serve.manifest import Manifest, read_manifest
from policy.serve.runtime import Runtime
from policy.serve.shape import ModelError
from policy.serve.tokens import BadSchema, TextStream, Tokens

FREE = Price(input_usd_per_mtok=Decimal(0), output_usd_per_mtok=Decimal(0))
TIMEOUT_S = 600.0  # of one plan: a busy machine must not change a figure


class EngineConductor:
    """`ports.Conductor` over an engine. `name` is what rollouts call the version."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name

    async def decode(self, call: ConductorCall) -> AsyncIterator[ConductorChunk | ConductorEnd]:
        """As the port says. Raises ConductorError(refused) for a prompt that leaves no room for a plan."""
        tokens = self._engine.tokens
        try:
            prompt_ids = tokens.encode_chat(call.messages)
            tokens.matcher(call.schema)
        except (ValueError, BadSchema) as error:
            raise ConductorError("refused", str(error)) from None
        room = self._engine.runtime.shape.context - len(prompt_ids)
        if room < 1:
            raise ConductorError("refused", f"a prompt of {len(prompt_ids)} tokens fills the conductor's context")
        sampling = call.sampling
        tokens_max = min(sampling.tokens_max, room)
        job = Job(prompt_ids, call.schema, sampling.temperature, sampling.top_p, sampling.seed, tokens_max)
        text, count, finish = TextStream(), 0, None
        async with aclosing(self._engine.stream(job)) as stream:
            async for batch in stream:
                count, finish = count + len(batch), batch[-1].finish
                yield self._chunk(text, batch)
        usage = Usage(len(prompt_ids), count)
        yield ConductorEnd(self._name, usage, tuple(prompt_ids), finish or "stop")

    def _chunk(self, text: TextStream, batch: list[Sampled]) -> ConductorChunk:
        tokens = self._engine.tokens
        data = b"".join(tokens.token_bytes(sampled.token) for sampled in batch)
        return ConductorChunk(
            text.feed(data, final=batch[-1].finish is not None),
            tuple(sampled.token for sampled in batch),
            tuple(sampled.logprob for sampled in batch),
            tuple(tokens.token_text(sampled.token) for sampled in batch),
        )

    async def ready(self) -> bool:
        """It was loaded."""
        return True


class ConductorDirectory:
    """A policy directory: checked when made, loaded when opened."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError naming the directory and what is wrong with it."""
        self.path = path
        try:
            self.manifest = read_manifest(path)
        except ModelError as error:
            raise ConfigError(f"{path}/{error}") from None
        self._profile = _profile(path, self.manifest)

    def open(self, threads: int, quality: int | None = None) -> tuple[Engine, ConductorPlanner]:
        """A planner at temperature 0 and the engine to close after it. `quality`: the dial; None: the manifest's own.
        Raises ConfigError."""
        quality = self.manifest.quality if quality is None else quality
        try:
            runtime = Runtime(self.path)
            engine = Engine(runtime, Tokens(self.path, runtime.shape), threads)
        except ModelError as error:
            raise ConfigError(f"{self.path}/{error}") from None
        conductor = EngineConductor(engine, f"{self.manifest.name}@{self.manifest.version}")
        return engine, ConductorPlanner(conductor, ConductorSettings(self._profile, FREE, TIMEOUT_S, quality=quality))


def _profile(path: Path, manifest: Manifest) -> Profile:
    """The prompt profile it was trained on. Raises ConfigError where this code renders another prompt."""
    profile = profile_of(manifest.prompt_version)
    if manifest.prompt_version == f"{profile}-{PROMPT_VERSION}" and manifest.prompt_hash == prompt_hash(profile):
        return profile
    raise ConfigError(
        f"{path}: refused: its weights were trained on prompt {manifest.prompt_version} "
        f"({manifest.prompt_hash[:12]}…), this code renders {profile}-{PROMPT_VERSION} ({prompt_hash(profile)[:12]}…); "
        "retrain them, or evaluate with the code they came with"
    )
