"""The policy versions of one server: several models side by side, each under its own name, on the same threads.

A version is loaded whole (checked, merged, warmed up, proven by its probe) before its name appears, and one at a time.
Unloading takes the name away at once; requests in flight keep the model until they end, and it counts as memory until
then.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policy.serve.engine import Engine, Job, Slots
from policy.serve.lora import merged
from policy.serve.manifest import Manifest, read_manifest
from policy.serve.runtime import Runtime
from policy.serve.shape import Array, ModelError, load_shape, load_weights
from policy.serve.tokens import Tokens

VERSIONS_MAX = 8
DRIFT_MAX = 0.005  # nats; float32 here and in the trainer differ by about 1e-5
WEIGHTS_FILE = "model.safetensors"
ANY_IDS = (1, 2, 3, 5, 8, 13, 21, 34, 55)


@dataclass(frozen=True, slots=True)
class Version:
    """One loaded version. `drift`: how far its probe was off, in nats."""

    name: str
    directory: Path
    engine: Engine
    manifest: Manifest
    drift: float
    loaded_s: int

    @property
    def about(self) -> dict[str, Any]:
        """The public part of its manifest."""
        return self.manifest.public()


class Versions:
    """What a server serves. At most `versions_max` at once, those included whose last requests still run."""

    def __init__(self, slots: Slots, versions_max: int = VERSIONS_MAX, drift_max: float = DRIFT_MAX) -> None:
        self.slots = slots
        self._versions_max = versions_max
        self._drift_max = drift_max
        self._loaded: dict[str, Version] = {}
        self._leaving: list[Engine] = []
        self._loading = asyncio.Lock()

    def get(self, name: str) -> Version | None:
        """The version of that name, while it is served."""
        return self._loaded.get(name)

    def all(self) -> list[Version]:
        """Every version served, oldest first."""
        return list(self._loaded.values())

    def start_with(self, name: str, directory: Path) -> Version:
        """The version a server starts with. Blocks. Raises ModelError."""
        version = self._loaded[name] = self.open(name, directory)
        return version

    async def load(self, name: str, directory: Path) -> Version:
        """Serve `directory` as `name` beside the others; again does nothing. Raises ModelError."""
        async with self._loading:
            known = self._loaded.get(name)
            if known:
                if known.directory != directory:
                    raise ModelError(
                        f"{name} is {known.directory} already; give other weights another version", "taken"
                    )
                return known
            self._leaving = [engine for engine in self._leaving if engine.in_flight]
            if len(self._loaded) + len(self._leaving) >= self._versions_max:
                raise ModelError(f"{', '.join(self._loaded)}: as many as fit in memory; unload one first", "full")
            version = await asyncio.to_thread(self.open, name, directory)
            self._loaded[name] = version
            return version

    def unload(self, name: str) -> None:
        """Serve `name` no longer; nothing where it is not served. Raises ModelError(held) for the last one."""
        if name in self._loaded:
            if len(self._loaded) == 1:
                raise ModelError(f"{name} is all that is served; load another version first", "held")
            self._leaving.append(self._loaded.pop(name).engine)

    def open(self, name: str, directory: Path) -> Version:
        """Read, build, warm up and prove one version. Blocks. Raises ModelError."""
        manifest = read_manifest(directory)
        home, weights = (directory, None) if manifest.kind == "full" else self._merged(directory, manifest)
        runtime = Runtime(home, weights=weights)
        engine = Engine(runtime, Tokens(home, runtime.shape), slots=self.slots)
        _warm_up(engine)
        drift = _drift(engine, manifest.probe)
        if drift > self._drift_max:
            raise ModelError(
                f"manifest.json: the probe's log-probs are off by up to {drift:.4g} (at most {self._drift_max:g}): "
                "these are not the weights it was made with, or not on this base; publish it again",
                "probe",
            )
        return Version(name, directory, engine, manifest, drift, int(time.time()))

    def _merged(self, directory: Path, manifest: Manifest) -> tuple[Path, dict[str, Array]]:
        """The base's directory and its weights with the adapter in them. The base is a version served here, or lies
        beside the adapter under its name."""
        if not manifest.base_sha256:
            raise ModelError("manifest.json: an adapter must name its base's sha256; train it again", "base")
        for version in self.all():
            if version.manifest.sha256.get(WEIGHTS_FILE) == manifest.base_sha256:
                return version.directory, merged(directory, version.engine.runtime.weights)
        beside = directory.parent / Path(manifest.base).name
        if not (manifest.base and (beside / "manifest.json").is_file()):
            raise ModelError(
                f"manifest.json: its base {manifest.base or 'without a name'} is not here; load it", "base"
            )
        if read_manifest(beside).sha256.get(WEIGHTS_FILE) != manifest.base_sha256:
            raise ModelError(f"manifest.json: {beside} is not the base it was made for", "base")
        return beside, merged(directory, load_weights(beside, load_shape(beside)))

    def close(self) -> None:
        """Let running sequences end and stop the threads."""
        self.slots.close()


def _warm_up(engine: Engine) -> None:
    """The first grammar and the first pass cost more than all others: spend that before anybody waits."""
    ids = engine.tokens.encode_chat([{"role": "user", "content": "."}])
    for _ in engine.decode(Job(ids, {"type": "object"}, 0.0, 1.0, 0, 4)):
        pass


def _drift(engine: Engine, probe: Mapping[str, Any]) -> float:
    """Largest |Δ log-prob| of the probe's tokens. Without a probe: 0 where any sequence gets numbers. Raises
    ModelError for a probe that cannot be scored."""
    if not probe:
        return 0.0 if all(map(math.isfinite, engine.scored(ANY_IDS).logprobs)) else math.inf
    try:
        prompt, tokens, expected = probe["prompt_ids"], probe["token_ids"], probe["logprobs"]
        shape = engine.runtime.shape
        fits = len(prompt) > 0 < len(tokens) == len(expected) and len(prompt) + len(tokens) <= shape.context
        if not fits or not all(0 <= token < shape.vocab for token in (*prompt, *tokens)):
            raise ValueError("its lengths or its tokens do not fit the model")
        found = engine.scored([*prompt, *tokens], first=len(prompt)).logprobs
        off = [abs(ours - float(theirs)) for ours, theirs in zip(found, expected, strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"manifest.json: no usable probe ({error!r}); train or export it again") from error
    return max(off) if all(map(math.isfinite, off)) else math.inf
