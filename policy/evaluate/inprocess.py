"""A policy directory as a conductor in this process: the served engine without its HTTP server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from gateway.adapters.engines.sealed import SealedPolicy
from gateway.core.loop.prompt import Profile
from gateway.core.money.amounts import Usage
from gateway.core.policies.manifest import Manifest, check_prompt
from gateway.core.pool.workers import Price
from gateway.errors import ConductorError
from gateway.service.loop.conducting import ConductorPlanner, ConductorSettings
from gateway.service.ports.request import ConductorCall, ConductorChunk, ConductorEnd
from policy.serve.engine import DecodeRequest, Engine, TokenSample
from policy.serve.lora import base_of, merge_adapter
from policy.serve.manifest import read_complete
from policy.serve.runtime import Runtime
from policy.serve.shape import load_shape, load_weights
from policy.serve.tokens import BadSchema, TextStream, Tokens

FREE = Price()
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

    async def ready(self) -> bool:
        """Return True: the engine is loaded."""
        return True


@dataclass(frozen=True, slots=True)
class ConductorDirectory:
    """A sealed policy as a contestant; `open` loads its weights. `base`: of an adapter, the policy that it changes."""

    policy: SealedPolicy
    profile: Profile
    base: SealedPolicy | None = None

    @property
    def manifest(self) -> Manifest:
        """Return the policy's own manifest, also where it is an adapter."""
        return self.policy.manifest

    @property
    def sha256(self) -> Mapping[str, str]:
        """Digest of every file that decides its plans, those of an adapter's base among them."""
        return {**(self.base.manifest.sha256 if self.base else {}), **self.manifest.sha256}

    def load(self) -> tuple[Runtime, Tokens]:
        """The weights in memory, an adapter merged into its base's. Raises VersionRefused."""
        home = (self.base or self.policy).files
        weights = load_weights(home, load_shape(home))
        runtime = Runtime(home, weights=merge_adapter(self.policy.directory, weights) if self.base else weights)
        return runtime, Tokens(home, runtime.shape)

    def open(self, threads: int, quality: int | None = None) -> tuple[Engine, ConductorPlanner]:
        """A planner at temperature 0 and the engine to close after it. `quality`: the dial; None: the manifest's own.
        Raises VersionRefused."""
        quality = self.manifest.quality if quality is None else quality
        engine = Engine(*self.load(), threads)
        conductor = EngineConductor(engine, self.manifest.id)
        return engine, ConductorPlanner(conductor, ConductorSettings(self.profile, FREE, TIMEOUT_S, quality=quality))


def read_conductors(paths: Iterable[Path]) -> dict[Path, ConductorDirectory]:
    """The policy directories by path, each read once; any of them may be the base of another. Raises VersionRefused."""
    policies = {path: read_complete(path) for path in dict.fromkeys(paths)}
    known = list(policies.values())
    conductors: dict[Path, ConductorDirectory] = {}
    for path, policy in policies.items():
        profile, base = check_prompt(policy.manifest, path), None
        if policy.manifest.kind == "adapter":
            base = base_of(policy, known)
            known.append(base)
        conductors[path] = ConductorDirectory(policy, profile, base)
    return conductors
