"""Where the gateway's pool comes from: its file, the environment and the settings that name parts of it.

One set of checks for the start and for a reload, so that what the one refuses the other does too, in the same words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from gateway.adapters.host import poolfile
from gateway.core.pool.workers import PoolFile
from gateway.errors import ConfigError
from gateway.service.ports.pools import LoadedPool

READ_S_MAX = 30.0


class PoolFileSource:
    """Port PoolSource. `default`: the pool of keys that name none, instead of the file's; `judge`: a worker that must
    be there."""

    def __init__(
        self, path: Path, environment: Callable[[], Mapping[str, str]], default: str | None, judge: str | None
    ) -> None:
        self._path = path
        self._environment = environment
        self._default = default
        self._judge = judge

    def load(self) -> LoadedPool:
        """The file with its secrets, looked up anew. Raises ConfigError."""
        env = self._environment()
        pools = self._settled(poolfile.load(self._path, env))
        if self._judge:
            judge_pool(pools, self._judge)
        return LoadedPool(pools, poolfile.secrets(pools, env))

    async def read(self) -> LoadedPool:
        """As `load`, beside the loop: disks may hang, and LiteLLM's price map is long."""
        try:
            async with asyncio.timeout(READ_S_MAX):
                return await asyncio.to_thread(self.load)
        except TimeoutError:
            raise ConfigError(
                f"{self._path}:1: not read in {READ_S_MAX:g} s; check the disk that it and its keys are on"
            ) from None

    def _settled(self, pools: PoolFile) -> PoolFile:
        name = self._default
        if name is None:
            return pools
        if name not in pools.pools:
            raise ConfigError(f"BATON_DEFAULT_POOL_NAME={name}: no such pool; there are {', '.join(pools.pools)}")
        return pools.model_copy(update={"default": name})


def judge_pool(pools: PoolFile, model: str) -> str:
    """The first pool that has the judge. Raises ConfigError."""
    for name, workers in pools.pools.items():
        if model in workers:
            return name
    raise ConfigError(f"BATON_JUDGE_MODEL={model}: no pool has such a worker")
