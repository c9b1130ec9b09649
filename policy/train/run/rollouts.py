"""Plans sampled by a vLLM beside the trainer (`--rollouts URL`), which gets the adapter anew after each update.

Each update is written as a policy directory and loaded under a name of its own, and the one before it is unloaded: a
plan never changes weights on its way, and no cache of vLLM holds keys and values of other weights. An adapter is proven
twice: a fixed plan has the log-probs that the trainer gives it, and what vLLM samples has the log-probs that it scores.
The rows are learnt from with the log-probs that vLLM reports.
"""

from __future__ import annotations

import secrets
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway.adapters.engines.http import EngineApi
from gateway.adapters.engines.vllm import VllmLora
from gateway.core.policies.manifest import ADAPTER_FILES
from gateway.errors import ConductorError, ConfigError, Unavailable
from gateway.service.ports.request import ConductorCall, ConductorChunk, ConductorEnd
from policy.engines.endpoint import TIMEOUT_S, PatientConductor, client_of
from policy.engines.port import EngineLost
from policy.environments.base import rng_for
from policy.serve.manifest import write_manifest
from policy.train.run.export import probe_of, rescored
from policy.train.run.initial import Initial
from policy.train.sources.sampled import RolloutsLost
from policy.train.step.masks import Masks
from policy.train.weights.lora import save_adapter
from policy.train.weights.small import changes

CALLS_MAX = 1024  # at a time: the server makes batches of them
SEEDS = 1 << 31


class ServedConductor:
    """The conductor of a run whose plans a vLLM at `url` (…/v1) samples. `name` is what rollouts call the version.
    Adapters lie in `directory`, at a path that the vLLM can read too."""

    def __init__(
        self,
        url: str,
        initial: Initial,
        masks: Masks,
        directory: Path,
        name: str,
        drift_max: float,
    ) -> None:
        if initial.lora is None:
            raise ConfigError(
                "--rollouts: vLLM takes an adapter in each step: give --set lora_rank=16, or another rank"
            )
        self.name = name
        self.decoding_s: float | None = None
        self.model = ""  # vLLM's name of the weights
        self._initial, self._masks, self._alpha = initial, masks, initial.lora.alpha
        self._directory = directory.resolve()
        server = url.rstrip("/").removesuffix("/v1")
        self._engine = VllmLora(EngineApi(server, timeout_s=TIMEOUT_S), drift_max=drift_max, rank_max=initial.lora.rank)
        self._conductor = PatientConductor(client_of(f"{server}/v1", name, None), f"--rollouts {url}", CALLS_MAX)
        self._probe: Mapping[str, Any] = {}
        self._loaded = -1  # `changes` of the weights that vLLM has
        self._run, self._count = secrets.token_hex(4), 0
        self._lineage = initial.lineage

    async def refresh(self) -> None:
        """Give vLLM the weights as they are. Raises EngineDown, VersionRefused where it would sample from others."""
        version = changes(self._initial.weights.model)
        if version == self._loaded:
            return
        if not self.model:
            await self._clear()
        before, self._count = self.model, self._count + 1
        name = f"rollouts-{self._run}-{self._count}"
        await self._engine.load(name, self._written(name))
        self.model, self._loaded = name, version
        if before:
            await self._drop(before)

    def of(self, *key: object) -> _Episode:
        """The conductor of one episode; equal keys ask for equal seeds."""
        return _Episode(self, self._conductor, key)

    def prompt_ids(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """A prompt in tokens. Raises ConductorError(refused)."""
        try:
            return tuple(self._initial.tokens.encode_chat(messages))
        except ValueError as error:
            raise ConductorError("refused", str(error)) from None

    async def close(self) -> None:
        """Take the last adapter off vLLM, if it lives, and close every connection."""
        try:
            if self.model:
                await self._drop(self.model)
        except Unavailable:
            pass
        finally:
            await self._conductor.close()
            await self._engine.close()

    def _written(self, name: str) -> Path:
        """The weights as they are, as a policy directory that an engine takes. Raises Unavailable on a full disk."""
        initial, directory = self._initial, self._directory / name
        if self._probe:
            self._probe = rescored(initial.weights, self._probe)
        else:
            self._probe = probe_of(initial.weights, initial.tokens, self._masks, initial.profile)
        try:
            directory.mkdir(parents=True)
            size = save_adapter(directory, initial.weights.model, self._lineage["base"], self._alpha)
            about = replace(initial.manifest, kind="adapter", source="", params=size, probe=dict(self._probe))
            write_manifest(directory, replace(about, **self._lineage), ADAPTER_FILES)
        except OSError as error:
            raise Unavailable(f"{directory}: cannot be written ({error.strerror}); make room and run again") from None
        return directory

    async def _drop(self, name: str) -> None:
        """Unload first: vLLM reads an adapter again from a path that is still loaded."""
        await self._engine.unload(name)
        shutil.rmtree(self._directory / name, ignore_errors=True)

    async def _clear(self) -> None:
        """Take away what a run that was killed left behind."""
        for path in sorted(self._directory.glob("rollouts-*")):
            await self._drop(path.name)


class _Episode:
    """`ports.Conductor` of one episode: asks for the weights of the step, with a seed of its own for each call."""

    def __init__(self, served: ServedConductor, conductor: PatientConductor, key: tuple[object, ...]) -> None:
        self._served = served
        self._conductor = conductor
        self._key = key
        self._asked: Counter[str] = Counter()

    async def decode(self, call: ConductorCall) -> AsyncIterator[ConductorChunk | ConductorEnd]:
        """As the port says; the plan comes in one piece. Raises RolloutsLost for the server, ConductorError(refused |
        unparseable) for this prompt."""
        prompt = str(call.messages)
        self._asked[prompt] += 1
        random = rng_for("plan", *self._key, prompt, self._asked[prompt])
        sampling = replace(call.sampling, seed=random.randrange(SEEDS))
        try:
            async for item in self._conductor.decode(replace(call, model=self._served.model, sampling=sampling)):
                yield replace(item, model=self._served.name) if isinstance(item, ConductorEnd) else item
        except EngineLost as lost:
            raise RolloutsLost(str(lost)) from None

    async def ready(self) -> bool:
        """Whether the server answers."""
        return await self._conductor.ready()
