"""The policy versions of one server: several models side by side, each under its own name, on the same threads.

A version is loaded whole (checked, merged, warmed up, proven by its probe) before its name appears, and one at a time.
Unloading takes the name away at once; requests in flight keep the model until they end, and it counts as memory until
then.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from gateway.adapters.engines.sealed import SealedPolicy
from gateway.core.policies.manifest import FIX
from gateway.errors import VersionRefused
from policy.serve.engine import DecodeRequest, Engine, Slots
from policy.serve.lora import base_of, merge_adapter
from policy.serve.manifest import read_complete
from policy.serve.runtime import Runtime
from policy.serve.shape import Array, load_shape, load_weights
from policy.serve.tokens import Tokens

VERSIONS_MAX = 8
DRIFT_MAX = 0.005  # nats; float32 here and in the trainer differ by about 1e-5
ANY_IDS = (1, 2, 3, 5, 8, 13, 21, 34, 55)


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """One loaded version. `drift`: how far its probe was off, in nats."""

    name: str
    policy: SealedPolicy
    engine: Engine
    drift: float
    loaded_s: int

    @property
    def about(self) -> dict[str, Any]:
        """The public part of its manifest."""
        return self.policy.manifest.public()


class Versions:
    """What a server serves. At most `versions_max` at once, those included whose last requests still run."""

    def __init__(
        self,
        slots: Slots,
        versions_max: int = VERSIONS_MAX,
        drift_max: float = DRIFT_MAX,
        bases: Sequence[Path] = (),  # where the base of an adapter may lie
    ) -> None:
        self.slots = slots
        self._versions_max = versions_max
        self._drift_max = drift_max
        self._bases = bases
        self._loaded: dict[str, LoadedVersion] = {}
        self._leaving: list[Engine] = []
        self._loading = asyncio.Lock()

    def get(self, name: str) -> LoadedVersion | None:
        """The version of that name, while it is served."""
        return self._loaded.get(name)

    def all(self) -> list[LoadedVersion]:
        """Every version served, oldest first."""
        return list(self._loaded.values())

    def start_with(self, name: str, directory: Path) -> LoadedVersion:
        """The version a server starts with. Blocks. Raises VersionRefused."""
        version = self._loaded[name] = self.open(name, directory)
        return version

    async def load(self, name: str, directory: Path) -> LoadedVersion:
        """Serve `directory` as `name` beside the others; again does nothing. Raises VersionRefused."""
        async with self._loading:
            old_version = self._loaded.get(name)
            if old_version:
                if old_version.policy.directory != directory:
                    raise VersionRefused(
                        "taken", f"{name} is {old_version.policy.directory} already; give other weights another version"
                    )
                return old_version
            self._leaving = [engine for engine in self._leaving if engine.in_flight]
            if len(self._loaded) + len(self._leaving) >= self._versions_max:
                raise VersionRefused("full", f"{', '.join(self._loaded)}: as many as fit in memory; unload one first")
            version = await asyncio.to_thread(self.open, name, directory)
            self._loaded[name] = version
            return version

    def unload(self, name: str) -> None:
        """Serve `name` no longer; nothing where it is not served. Raises VersionRefused(held) for the last one."""
        if name in self._loaded:
            if len(self._loaded) == 1:
                raise VersionRefused("held", f"{name} is all that is served; load another version first")
            self._leaving.append(self._loaded.pop(name).engine)

    def open(self, name: str, directory: Path) -> LoadedVersion:
        """Read, build, warm up and prove one version. Blocks. Raises VersionRefused."""
        policy = read_complete(directory)
        home, runtime = self._runtime(policy)
        engine = Engine(runtime, Tokens(home, runtime.shape), slots=self.slots)
        _warm_up(engine)
        drift = _drift(engine, policy)
        if drift > self._drift_max:
            raise VersionRefused(
                "probe",
                f"{directory}: the probe's log-probs are {drift:.4g} nats off on average (at most "
                f"{self._drift_max:g}): these are not the weights it was made with, or not on this base; publish it "
                "again",
            )
        _return_memory()
        return LoadedVersion(name, policy, engine, drift, int(time.time()))

    def _runtime(self, policy: SealedPolicy) -> tuple[Path, Runtime]:
        """The directory with the tokenizer, and the weights in memory."""
        if policy.manifest.kind != "adapter":
            return policy.files, Runtime(policy.files)
        home, weights = self._merged(policy)
        runtime = Runtime(home, weights=weights)
        runtime.forget_weights()  # merged for this version alone
        return home, runtime

    def _merged(self, policy: SealedPolicy) -> tuple[Path, dict[str, Array]]:
        """The base's directory, and its weights with the adapter in them; a base that is served is not read again."""
        served = [version.policy for version in self.all()]
        base = base_of(policy, chain(served, (read_complete(place) for place in self._bases if place.is_dir())))
        loaded = next((version for version in self.all() if version.policy is base), None)
        home = base.files
        weights = loaded.engine.runtime.weights if loaded else load_weights(home, load_shape(home), mapped=True)
        return home, merge_adapter(policy.directory, weights)

    def close(self) -> None:
        """Let running sequences end and stop the threads."""
        self.slots.close()


def _return_memory() -> None:
    """Give what loading has freed back to the system, hundreds of megabytes for an adapter. Only glibc knows how."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _warm_up(engine: Engine) -> None:
    """The first grammar and the first pass cost more than all others: spend that before anybody waits."""
    ids = engine.tokens.encode_chat([{"role": "user", "content": "."}])
    for _ in engine.decode(DecodeRequest(ids, {"type": "object"}, 0.0, 1.0, 0, 4)):
        pass


def _drift(engine: Engine, policy: SealedPolicy) -> float:
    """Mean |Δ log-prob| of the probe's tokens, in nats. Without a probe: 0 where any sequence gets numbers. Raises
    VersionRefused(engine) for a probe that cannot be scored."""
    probe = policy.manifest.probe
    if not probe:
        return 0.0 if all(map(math.isfinite, engine.scored(ANY_IDS).logprobs)) else math.inf
    try:
        prompt, tokens, expected = probe["prompt_ids"], probe["token_ids"], probe["logprobs"]
        shape = engine.runtime.shape
        fits = len(prompt) > 0 < len(tokens) == len(expected) and len(prompt) + len(tokens) <= shape.context
        if not fits or not all(0 <= token < shape.vocab for token in (*prompt, *tokens)):
            raise ValueError("its lengths or its tokens do not fit the model")
        logprobs = engine.scored([*prompt, *tokens], first=len(prompt)).logprobs
        off = [abs(ours - float(theirs)) for ours, theirs in zip(logprobs, expected, strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise VersionRefused("engine", f"{policy.directory}: no usable probe ({error!r}); {FIX}") from error
    return sum(off) / len(off) if all(map(math.isfinite, off)) else math.inf
