"""The engines that the contract suite runs against, each with its conductor and a maker of versions for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.engines.policies import manifest_of, reseal, write_adapter, write_full
from gateway.adapters.upstream.conductor.client import HttpConductor
from gateway.core.policies.manifest import WEIGHTS_FILE
from gateway.service.ports.policies import PolicyEngine
from gateway.service.ports.request import Conductor, ConductorCall, ConductorChunk, ConductorEnd
from tests.contract.conductors import LONG_SCHEMA, planning_call
from tests.fakes.engine import FakeEngine, fake_logprobs


@dataclass(frozen=True, slots=True)
class Scene:
    """An engine under test. `make(seed)` writes a new good version; `restart` kills it and starts it again."""

    engine: PolicyEngine
    conductor: Conductor
    make: Callable[[int], Path]
    restart: Callable[[], None]
    stop: Callable[[], None]
    at_start: frozenset[str]  # versions that it has whatever happens


def maker(base: Path, directory: Path, kind: str) -> Callable[[int], Path]:
    """Writes versions over `base`, each in a directory of its own."""
    write = write_adapter if kind == "adapter" else write_full

    def make(seed: int) -> Path:
        return write(base, directory / f"{kind}-{seed}-{random.getrandbits(48):x}", seed)

    return make


def fake_maker(base: Path, directory: Path) -> Callable[[int], Path]:
    """As `maker`, with the probe that the fake's weights give."""
    make = maker(base, directory, "full")

    def make_fake(seed: int) -> Path:
        made = make(seed)
        manifest = manifest_of(made)
        probe = manifest["probe"]
        weights = manifest["sha256"][WEIGHTS_FILE]
        reseal(made, probe=probe | {"logprobs": fake_logprobs(weights, probe["token_ids"])})
        return made

    return make_fake


def fake_scene(base: Path, directory: Path) -> Scene:
    engine = FakeEngine(lambda call: "x" * 4000, base=base, gap_s=0.001)

    def stop() -> None:
        engine.down = True

    return Scene(engine, engine.conductor, fake_maker(base, directory), engine.restart, stop, frozenset())


def probe_of(directory: Path) -> Mapping[str, Any]:
    probe: dict[str, Any] = manifest_of(directory)["probe"]
    return probe


def asking(version: str, *, tokens_max: int = 12, temperature: float = 0.0) -> ConductorCall:
    """A plan that never ends before its bound, decoded by `version`."""
    call = planning_call(schema=LONG_SCHEMA, tokens_max=tokens_max, temperature=temperature, seed=3)
    return replace(call, model=version)


async def ask(conductor: Conductor, version: str, tokens_max: int = 12) -> tuple[str, ConductorEnd]:
    """The text and the end of a greedy plan. Raises ConductorError."""
    items = [item async for item in conductor.decode(asking(version, tokens_max=tokens_max))]
    end = items[-1]
    assert isinstance(end, ConductorEnd)
    return "".join(item.text for item in items if isinstance(item, ConductorChunk)), end


async def close(conductor: Conductor) -> None:
    if isinstance(conductor, HttpConductor):
        await conductor.close()
