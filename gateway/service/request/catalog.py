"""What a key may ask for: the models it sees, and what each name turns into (a policy over which workers)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.core.access.keys import Principal
from gateway.core.openai.chat import Endpoint
from gateway.core.policies.versions import Pick
from gateway.core.pool.workers import PoolFile, Task, WorkerSpec, revision_of
from gateway.errors import BadRequest, Forbidden, NotFound
from gateway.service.loop.routers import FixedPlanner
from gateway.service.loop.state import Planner

OURS = "baton/"
CONDUCTOR = "baton/conductor"
FIXED_PREFIX = "baton/fixed:"


class AskedVersions(Protocol):
    """The policy versions that a request may name."""

    def asked(self, version: str) -> Pick | None:
        """How `conductor@7` is asked; None where no request may name it now."""
        ...

    def names(self) -> Sequence[str]:
        """All of them."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """A model name resolved: who plans, who plans when that fails (None: nobody), and over which workers."""

    name: str
    planner: Planner
    fallback: Planner | None
    pool: str
    workers: tuple[WorkerSpec, ...]
    version: Pick | None = None  # the policy version asked for by its number
    revision: str = ""  # of the pool file


class Catalog:
    """Resolves model names. `planners` maps `baton`, `baton/conductor`, `baton/rule` … to planner and fallback;
    `versions` knows what `baton/conductor@7` may stand for."""

    def __init__(
        self,
        pools: PoolFile,
        planners: dict[str, tuple[Planner, Planner | None]],
        versions: AskedVersions | None = None,
    ) -> None:
        self._planners = planners
        self._versions = versions
        self.adopt(pools)

    def adopt(self, pools: PoolFile) -> None:
        """What is resolved from now on is of this file; what was resolved before stays as it is."""
        self._pools, self._revision = pools, revision_of(pools)

    def resolve(self, principal: Principal, model: str, pool: str | None, endpoint: Endpoint = "chat") -> Choice:
        """Raises NotFound(model_not_found) for anything this key may not use: it does not say whether it exists. Only
        chat is planned; the other endpoints take a worker by its name."""
        pool_name = self._pool_name(principal, pool)
        workers = self._workers(principal, pool_name, "embeddings" if endpoint == "embeddings" else "chat")
        if endpoint != "chat":
            return self._named(model, pool_name, workers, endpoint)
        if model in self._planners:
            planner, fallback = self._planners[model]
            return Choice(model, planner, fallback, pool_name, workers, revision=self._revision)
        version = self._versions.asked(model.removeprefix(OURS)) if self._versions and model.startswith(OURS) else None
        if version is not None:
            return Choice(model, *self._planners[CONDUCTOR], pool_name, workers, version, self._revision)
        return self._named(model, pool_name, workers, endpoint)

    def _named(self, model: str, pool_name: str, workers: tuple[WorkerSpec, ...], endpoint: Endpoint) -> Choice:
        """One worker and nobody else."""
        wanted = model.removeprefix(FIXED_PREFIX)
        spec = next((spec for spec in workers if spec.name == wanted), None)
        if spec is None or (spec.kind in ("self", "tool") and (model == wanted or endpoint != "chat")):
            beside = "" if endpoint == "chat" else f", or it does no {endpoint}"
            raise NotFound(
                f"The model `{model[:128]}` does not exist or you do not have access to it{beside}.",
                param="model",
                code="model_not_found",
            )
        return Choice(model, FixedPlanner(spec.name), None, pool_name, workers, revision=self._revision)

    def models(self, principal: Principal, pool: str | None = None) -> list[str]:
        """Every name this key may send as `model`."""
        pool_name = self._pool_name(principal, pool)
        workers = self._workers(principal, pool_name)
        embedding = [spec.name for spec in self._workers(principal, pool_name, "embeddings")]
        callable_ = [spec.name for spec in workers if spec.kind in ("openai", "litellm")]
        versions = [OURS + name for name in self._versions.names()] if self._versions else []
        return [*self._planners, *versions, *(FIXED_PREFIX + name for name in callable_), *callable_, *embedding]

    def pools(self, principal: Principal) -> Sequence[str]:
        """The pools this key may use, its default first."""
        return principal.pools or (self._pools.default,)

    def _pool_name(self, principal: Principal, asked: str | None) -> str:
        mine = self.pools(principal)
        if asked is not None and asked not in mine:
            raise Forbidden(
                f"this key may not use pool `{asked[:64]}`; it may use {', '.join(mine)}", param="x-baton-pool"
            )
        name = asked or mine[0]
        if name not in self._pools.pools:
            raise BadRequest(
                f"pool `{name}` is no longer in the pool file", param="x-baton-pool", code="pool_not_found"
            )
        return name

    def _workers(self, principal: Principal, pool: str, task: Task = "chat") -> tuple[WorkerSpec, ...]:
        every = self._pools.pool(pool, task)
        if not principal.workers:
            return every
        return tuple(spec for spec in every if spec.name in principal.workers)
