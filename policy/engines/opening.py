"""Which engine judges a policy directory: the one that is named, or what can serve it here."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

import policy
from gateway.adapters.host.poolfile import resolve_secret
from gateway.config.settings import data_dir, environment
from gateway.errors import ConductorError, ConfigError, VersionRefused
from policy.engines.choice import EMBEDDED, EngineChoice
from policy.engines.directory import ConductorDirectory
from policy.engines.embedded import open_runtime
from policy.engines.endpoint import open_endpoint
from policy.engines.port import EngineLost, PlanEngine
from policy.serve.lora import BASES
from policy.serve.shape import load_shape

E = TypeVar("E", bound=Exception)
TORCH_MISSING = "torch is not installed: `pip install '.[train,embedded]'` adds it"


@asynccontextmanager
async def open_engine(directory: ConductorDirectory, choice: EngineChoice) -> AsyncIterator[PlanEngine]:
    """The weights of a directory on that engine, on the running loop. Raises VersionRefused where the engine cannot
    load them, ConfigError without torch, EngineDown."""
    if choice.remote:
        key = resolve_secret(choice.key, environment()) if choice.key else None
        async with open_endpoint(directory, choice.name.rstrip("/"), key) as engine:
            yield engine
        return
    opened = await asyncio.to_thread(_local, directory, choice)
    try:
        yield opened
    finally:
        await opened.close()


async def check_engine(directories: Mapping[str, ConductorDirectory], choice: EngineChoice) -> None:
    """Find out whether the engine serves every directory, before anything is asked or paid for. `directories`: by what
    each is, such as `live version`. A server is asked for each, and an adapter is loaded there and unloaded again.
    Raises VersionRefused with that name, the version and the fix; ConfigError without torch; EngineDown."""
    for what, directory in directories.items():
        try:
            if choice.remote:
                async with open_engine(directory, choice):
                    pass
            else:
                await asyncio.to_thread(_check_local, directory, choice)
        except VersionRefused as error:
            other = "; or judge with --engine embedded or torch" if choice.remote else ""
            raise VersionRefused(
                error.reason, f"the {what} {directory.manifest.id} cannot be judged: {error.message}{other}"
            ) from None


def _check_local(directory: ConductorDirectory, choice: EngineChoice) -> None:
    directory.tokens()
    if choice.name == EMBEDDED:
        load_shape(directory.home)
    elif choice.name or not _embeds(directory):
        _check_torch()


def _local(directory: ConductorDirectory, choice: EngineChoice) -> PlanEngine:
    if choice.name == EMBEDDED or (not choice.name and _embeds(directory)):
        return open_runtime(directory, choice.threads)
    return _on_torch(directory)


def _embeds(directory: ConductorDirectory) -> bool:
    """Whether the embedded runtime can serve it. Raises VersionRefused where it cannot, and torch is not there."""
    try:
        load_shape(directory.home)
    except VersionRefused as error:
        if error.reason != "engine":
            raise
        if not _has_torch():
            raise VersionRefused("engine", f"{error.message}; or judge it with torch: {TORCH_MISSING}") from None
        return False
    return True


def _has_torch() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def _check_torch() -> None:
    if not _has_torch():
        raise ConfigError(f"--engine torch: {TORCH_MISSING}")


def _on_torch(directory: ConductorDirectory) -> PlanEngine:
    _check_torch()
    from policy.engines.pytorch import open_torch

    return open_torch(directory)


@contextmanager
def engine_losses(kept: Callable[[], str]) -> Iterator[None]:
    """Raises ConductorError(down) in place of EngineLost, in one line. `kept` says what is finished and where it is."""
    message = ""
    try:
        yield
    except* EngineLost as group:
        message = str(first_of(group))
    if message:
        raise ConductorError("down", f"{message}; {kept()}: the same command goes on from there")


def first_of(group: BaseExceptionGroup[E]) -> E:
    """The first exception in a group of groups."""
    first: E | BaseExceptionGroup[E] = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first


def places_of_bases() -> Sequence[Path]:
    """Folders with policies and pretrained models: of the data directory that the environment names, and of the
    package."""
    data = data_dir()
    return data / BASES, data / "policies", Path(policy.__file__).parent / "shipped"
