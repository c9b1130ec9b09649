"""The models that a key may use, and what each model name stands for: a policy over a pool's workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Protocol, get_args

from gateway.core.access.keys import Principal
from gateway.core.log.rollout import RolloutRecord
from gateway.core.openai.chat import Endpoint
from gateway.core.policies.versions import Pick
from gateway.core.pool.models import is_checker, vendor_params
from gateway.core.pool.revision import revision_of
from gateway.core.pool.workers import (
    EVERY_POOL,
    MODEL_KINDS,
    TOOL_KINDS,
    Capability,
    PoolFile,
    Task,
    WorkerSpec,
    pool_hash,
)
from gateway.errors import BadRequest, Forbidden, NotFound
from gateway.service.loop.routers import AutoPlanner, CheckedRouter, FixedPlanner
from gateway.service.loop.state import Planner

OFFERS_MAX = 256  # kept; of a large pool one has the size of its list
AUTO = "baton"  # the policy of the settings
OURS = "baton/"
CONDUCTOR = "baton/conductor"
FIXED_PREFIX = "baton/fixed:"
CHECKED_PREFIX = "baton/checked:"
RULE = "baton/rule"
TASKS: Mapping[Endpoint, Task] = {  # of the worker that serves it
    "chat": "chat",
    "completions": "chat",
    "embeddings": "embeddings",
    "moderations": "moderation",
    "rerank": "rerank",
    "images": "images",
    "speech": "speech",
    "transcriptions": "transcription",
    "translations": "transcription",
}
OTHER_TASKS: tuple[Task, ...] = tuple(task for task in get_args(Task) if task != "chat")


class NamedVersions(Protocol):
    """The policy versions that a request may name."""

    def by_name(self, name: str) -> Pick | None:
        """The version of a name such as `conductor@7`, or None if no request may name it now."""
        ...

    def names(self) -> Sequence[str]:
        """The names of all of them."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """What a model name stands for: the planner, the planner to fall back to (None: there is none), and the workers."""

    name: str
    planner: Planner | AutoPlanner
    fallback: Planner | None
    pool: str
    workers: tuple[WorkerSpec, ...]
    version: Pick | None = None  # the policy version that the request names
    revision: str = ""  # hash of the pool file
    pool_workers: tuple[WorkerSpec, ...] = ()  # of the whole pool, where `workers` are candidates or one
    pool_hash: str = ""  # of `pool_workers`; empty: of `workers`
    drawn: Mapping[str, float] = field(default_factory=dict)  # of the candidates, those at random: the probability
    reserve: tuple[WorkerSpec, ...] = ()  # in quarantine or at rest: asked only where every other worker failed
    resting: Mapping[str, str] = field(default_factory=dict)  # of those: why they rest, by name
    worth: Mapping[str, float] | None = None  # of a right answer, as the pool file says: usd, seconds
    standing: str = ""  # how far the next rung is, for a header
    summarizers: tuple[WorkerSpec, ...] = ()  # who may sum up what a prompt has no room for, the cheapest first


def no_standing(pool: str, org: str) -> str:
    """Nobody counts outcomes."""
    return ""


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares of requests that are there to learn from, in [0, 1]: `explore` is planned at temperature 1; `trial`
    goes, under `auto`, to the planner that is not in charge. While `short`, the log has too few requests to train on,
    and both rise to `most`; a share of 0 stays 0."""

    explore: float
    trial: float = 0.0
    most: float = 0.0
    short: Callable[[], bool] = bool

    def planner_of(self, choice: Choice, record: RolloutRecord, draw: Random | None) -> tuple[Planner, bool]:
        """The planner of a request, and whether it explores: never with `train: false`. What the conductor plans on
        trial always explores, for it can learn of such plans alone. The rule keeps its own base share: it logs the
        propensity of each plan, so all of them teach."""
        planner = choice.planner
        explores, on_trial = (draw.random(), draw.random()) if draw is not None and record.train else (1.0, 1.0)
        usual: Planner | AutoPlanner = planner
        if isinstance(planner, AutoPlanner):
            trial, kind = on_trial < self._now(self.trial), (record.org, record.pool_name, record.task_type)
            usual, planner = planner.choose(*kind, trial=False), planner.choose(*kind, trial=trial)
        if f"{OURS}{planner.name}" != CONDUCTOR:
            return planner, explores < self.explore
        return planner, planner is not usual or explores < self._now(self.explore)

    def _now(self, share: float) -> float:
        return max(share, self.most) if share and self.short() else share


class _Offer:
    """The workers of a pool that a key may use for a task. `planned`: those of a planned request, without the models
    that only plan, unless there is no other model; `rest`: all of them, if `planned` is fewer."""

    def __init__(self, workers: tuple[WorkerSpec, ...]) -> None:
        self.workers = workers
        answering = tuple(spec for spec in workers if spec.answers)
        self.planned = answering if any(spec.kind in MODEL_KINDS for spec in answering) else workers
        self.rest = workers if len(self.planned) < len(workers) else ()
        self.by_name = {spec.name: spec for spec in workers}
        self.hash = pool_hash(workers)


class Catalog:
    """Resolves model names. `planners` maps `baton`, `baton/conductor`, `baton/rule` … to a planner and its fallback;
    `versions` resolves names such as `baton/conductor@7`."""

    def __init__(
        self,
        pools: PoolFile,
        planners: Mapping[str, tuple[Planner | AutoPlanner, Planner | None]],
        versions: NamedVersions | None = None,
        standing: Callable[[str, str], str] = no_standing,
    ) -> None:
        """`standing`: how far the next rung of a pool's planner is for an organisation, for a header."""
        self._planners = dict(planners)
        self._versions = versions
        self._standing = standing
        self.adopt(pools)

    def adopt(self, pools: PoolFile) -> None:
        """Resolve names by this pool file from now on. Earlier results do not change. `vendor_params` are the names of
        the parameters beside OpenAI's that any of its workers takes."""
        self._pools, self._revision = pools, revision_of(pools)
        self._offers: dict[tuple[str, Task, tuple[str, ...]], _Offer] = {}
        self.vendor_params = frozenset[str]().union(*map(vendor_params, pools.workers))

    def workers(self) -> Sequence[WorkerSpec]:
        """All workers of the pool file in use."""
        return self._pools.workers

    def worker_names(self) -> Sequence[str]:
        """The names of all workers of the pool file in use."""
        return [worker.name for worker in self._pools.workers]

    def shares_experience(self, pool: str) -> bool:
        """Whether evidence of other organisations counts in a pool of the file in use."""
        return pool in self._pools.share_experience

    def has_checkers(self) -> bool:
        """Whether any worker of the pool file in use may check replies."""
        return any(map(is_checker, self._pools.workers))

    def resolve(self, principal: Principal, model: str, pool: str | None, endpoint: Endpoint = "chat") -> Choice:
        """Resolve a model name for a key. Only chat is planned; the other endpoints take a worker by its name.

        Raises NotFound(model_not_found) for everything that the key may not use, whether it exists or not; Forbidden
        and BadRequest for the pool.
        """
        pool_name = self._pool_name(principal, pool)
        offer = self._offer(principal, pool_name, TASKS[endpoint])
        if endpoint != "chat":
            return self._single_worker(model, pool_name, offer, endpoint)
        if model in self._planners:
            planner, fallback = self._planners[model]
            choice = self._planned(model, planner, fallback, pool_name, offer)
            return replace(choice, standing=self._standing(pool_name, principal.org)) if model == AUTO else choice
        if model.startswith(CHECKED_PREFIX):
            return self._checked(model, pool_name, offer)
        version = (
            self._versions.by_name(model.removeprefix(OURS)) if self._versions and model.startswith(OURS) else None
        )
        if version is not None and CONDUCTOR in self._planners:
            return replace(self._planned(model, *self._planners[CONDUCTOR], pool_name, offer), version=version)
        return self._single_worker(model, pool_name, offer, endpoint)

    def _planned(
        self, model: str, planner: Planner | AutoPlanner, fallback: Planner | None, pool: str, offer: _Offer
    ) -> Choice:
        """The choice of a request that `planner` plans, over the workers that may answer it."""
        said = self._pools.worth.get(pool)
        worth = None if said is None else said.model_dump(exclude_none=True)
        choice = Choice(model, planner, fallback, pool, offer.planned, revision=self._revision, worth=worth)
        return replace(choice, pool_workers=offer.rest, pool_hash=offer.hash)

    def _checked(self, model: str, pool_name: str, offer: _Offer) -> Choice:
        """The choice of a chain of workers and its checker; the rule answers where all of them fail. Raises NotFound
        where one of them is not there, or the last is no model."""
        router = CheckedRouter.read(model.removeprefix(CHECKED_PREFIX))
        by_name = offer.by_name
        chain = [by_name.get(name) for name in router.workers] if router is not None else []
        checked = all(spec is not None and spec.kind in MODEL_KINDS for spec in chain)
        if router is None or not checked or router.checker not in by_name or by_name[router.checker].kind == "self":
            raise NotFound(
                f"The model `{model[:128]}` does not exist or you do not have access to it: write "
                f"{CHECKED_PREFIX}CHEAP>…>BEST@CHECKER with names of workers.",
                param="model",
                code="model_not_found",
            )
        fallback = self._planners.get(RULE, (None, None))[0]
        rule = None if isinstance(fallback, AutoPlanner) else fallback
        workers = tuple(spec for spec in offer.workers if spec in offer.planned or spec.name in router.names)
        return replace(self._planned(model, router, rule, pool_name, offer), workers=workers)

    def _single_worker(self, model: str, pool_name: str, offer: _Offer, endpoint: Endpoint) -> Choice:
        """The choice of a single worker, without a fallback. Of a model the others are no candidates, so that a request
        costs the same however many there are; a loop of the gateway itself may ask them."""
        name = model.removeprefix(FIXED_PREFIX)
        spec = offer.by_name.get(name)
        if spec is None or (spec.kind in ("self", *TOOL_KINDS) and (model == name or endpoint != "chat")):
            addition = "" if endpoint == "chat" else f", or it does no {endpoint}"
            raise NotFound(
                f"The model `{model[:128]}` does not exist or you do not have access to it{addition}; "
                "GET /v1/models lists what this key may use.",
                param="model",
                code="model_not_found",
            )
        choice = Choice(model, FixedPlanner(spec.name), None, pool_name, offer.workers, revision=self._revision)
        if spec.kind not in MODEL_KINDS:
            return choice
        return replace(choice, workers=(spec,), pool_workers=offer.workers, pool_hash=offer.hash)

    def models(self, principal: Principal, pool: str | None = None) -> list[str]:
        """Every name that this key may send as `model`."""
        pool_name = self._pool_name(principal, pool)
        workers = self._workers(principal, pool_name)
        others = [spec.name for task in OTHER_TASKS for spec in self._workers(principal, pool_name, task)]
        chat = [spec.name for spec in workers if spec.kind in ("openai", "litellm")]
        versions = [OURS + name for name in self._versions.names()] if self._versions else []
        return [*self._planners, *versions, *(FIXED_PREFIX + name for name in chat), *chat, *others]

    def describe(self, principal: Principal, model: str, pool: str | None = None) -> dict[str, Any]:
        """What the workers behind a model name take and cost: the most of any of them, and each by its name. Raises as
        `resolve`."""
        pool_name = self._pool_name(principal, pool)
        name = model.removeprefix(FIXED_PREFIX)
        every = [spec for task in get_args(Task) for spec in self._workers(principal, pool_name, task)]
        named = [spec for spec in every if spec.name == name]
        planned = [spec for spec in every if spec.kind in MODEL_KINDS and spec.task == "chat"]
        workers = [_described(spec) for spec in named or planned]
        return {
            "context_tokens": max((each["context_tokens"] for each in workers), default=0),
            "output_tokens_max": max((each["output_tokens_max"] for each in workers), default=0),
            "abilities": sorted({ability for each in workers for ability in each["abilities"]}),
            "workers": workers,
        }

    def pools(self, principal: Principal) -> Sequence[str]:
        """The pools that this key may use, its default pool first."""
        if EVERY_POOL not in principal.pools:
            return principal.pools or (self._pools.default,)
        default = self._pools.default
        return (default, *(name for name in self._pools.pools if name != default))

    def _pool_name(self, principal: Principal, header: str | None) -> str:
        names = self.pools(principal)
        if header is not None and header not in names:
            raise Forbidden(
                f"this key may not use pool `{header[:64]}`; it may use {', '.join(names)}. An operator gives it more "
                f"by `baton keys update {principal.public_id} --pools {','.join(names)},…`, or '*' for all of them",
                param="x-baton-pool",
            )
        name = header or names[0]
        if name not in self._pools.pools:
            raise BadRequest(
                f"pool `{name}` is no longer in the pool file", param="x-baton-pool", code="pool_not_found"
            )
        return name

    def _workers(self, principal: Principal, pool: str, task: Task = "chat") -> tuple[WorkerSpec, ...]:
        return self._offer(principal, pool, task).workers

    def _offer(self, principal: Principal, pool: str, task: Task) -> _Offer:
        """What a key may use. Keys with the same workers share it."""
        known = pool, task, tuple(principal.workers)
        offer = self._offers.get(known)
        if offer is None:
            workers = self._pools.pool(pool, task)
            if principal.workers:
                names = frozenset(principal.workers)
                workers = tuple(spec for spec in workers if spec.name in names)
            while len(self._offers) >= OFFERS_MAX:
                self._offers.pop(next(iter(self._offers)))
            offer = self._offers[known] = _Offer(workers)
        return offer


def _described(spec: WorkerSpec) -> dict[str, Any]:
    """What a worker takes and costs. Prices are decimal numbers of dollars, as texts."""
    return {
        "name": spec.name,
        "task": spec.task,
        **({"hosted_tools": list(spec.hosted)} if spec.hosted else {}),
        "context_tokens": spec.context_tokens,
        "output_tokens_max": spec.output_tokens_max,
        "abilities": sorted(set(get_args(Capability)) - set(spec.cannot)) if spec.task == "chat" else [],
        "price": None if spec.price is None else spec.price.model_dump(mode="json", exclude_none=True),
    }
