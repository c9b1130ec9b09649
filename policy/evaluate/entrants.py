"""Policies by name: what may stand behind `--policy`, and how each becomes something that plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import policy
from gateway.core.loop.experience.likeness import content_text
from gateway.core.loop.plan import Plan, validate
from gateway.errors import ConfigError
from gateway.service.loop.routers import CascadeRouter, CheckedRouter, RulePlanner, VoteRouter
from gateway.service.loop.state import Planner, Situation
from policy.engines.directory import ConductorDirectory, read_conductors
from policy.engines.opening import places_of_bases
from policy.evaluate.endpoint import WORKER, Endpoint, is_endpoint
from policy.evaluate.stages import digest_of
from policy.simulators.arena.world import read_prompt
from policy.start.recorded.ranking import RankPlanner
from policy.start.synthetic.label import arena_label
from policy.statistics import tuning
from policy.statistics.baselines import (
    OneRoundPlanner,
    PriceCascade,
    RoutedOnce,
    cheapest_worker,
    random_plan,
    random_worker,
)

Kind = Literal["fixed", "router", "tuned", "conductor", "endpoint", "oracle"]
TUNED: Mapping[str, Callable[[Sequence[tuning.Observation], float], Planner]] = {
    "table": tuning.table,
    "vote": tuning.vote,
    "cascade": tuning.cascade,
    "moa": tuning.moa,
    "fallback": tuning.fallback,
    "knn": tuning.knn,
    "knn-words": tuning.knn_words,
    "ranks": RankPlanner,
}
RULE = RulePlanner(draws=False)
ROUTERS: Mapping[str, Callable[[int], Planner]] = {
    "random": random_worker,
    "random-plan": random_plan,
    "cheapest": lambda _seed: cheapest_worker(),
    "price-cascade": lambda _seed: PriceCascade(),
    "baton/rule": lambda _seed: RoutedOnce(RULE),
    "baton/vote": lambda _seed: VoteRouter(),
    "baton/cascade": lambda _seed: CascadeRouter(),
    "label": lambda _seed: OneRoundPlanner("label", _label),
}
ORACLE_PLAN = "oracle-plan"  # the arena's plan for the very question, not cross-fitted: each question has its own
ALIASES = {"rule": "baton/rule"}
SHIPPED = Path(policy.__file__).parent / "shipped" / "arena-3"
CONDUCTOR_SHIPPED = "conductor@shipped"
FIXED = "fixed:"
CHECKED = "baton/checked:"
ORACLE = "oracle"


def _label(situation: Situation) -> Plan:
    """The plan that the warm start teaches for this prompt: the best that a reader of the pool can give. It knows the
    arena's questions alone. Raises PlanRefused where the label does not fit the caps."""
    texts = [content_text(message.get("content")) for message in situation.conversation]
    prompt = read_prompt(situation.conversation, texts)
    return validate(
        arena_label(prompt.question, prompt.task, situation.shown, situation.allowed.steps_max), situation.allowed
    )


@dataclass(frozen=True, slots=True)
class Entrant:
    """One policy of the comparison. `name` is its key in the report, `identity` what it is, however it was spelt."""

    name: str
    kind: Kind
    identity: str
    file: Path | None = None  # what a tuned one is tuned on; None: the default source
    usd_weight: float = 0.0
    directory: ConductorDirectory | None = None
    endpoint: Endpoint | None = None
    quality: int | None = None  # of a conductor: the dial; None: its own

    @property
    def reads_experience(self) -> bool:
        """Whether what the workers did on similar questions may change what it plans."""
        return self.kind in ("conductor", "endpoint") or self.identity.startswith("baton/")

    @property
    def reads_dial(self) -> bool:
        """Whether its prompt shows the quality dial."""
        dial = self.directory.manifest.quality if self.directory else self.endpoint and self.endpoint.quality
        return dial is not None

    @property
    def worker(self) -> str:
        """Return the worker of a fixed entrant."""
        return self.identity.removeprefix(FIXED)


def train_files(names: Sequence[str]) -> list[Path]:
    """Return the files that policies of these names are tuned on, in order."""
    pairs = [name.partition(":") for name in names]
    return [Path(file) for kind, _, file in pairs if kind in TUNED and file]


def entrants(
    names: Sequence[str],
    workers: Sequence[str],
    usd_weights: Sequence[float],
    qualities: Sequence[int] = (),
    conductors: Mapping[str, ConductorDirectory] = MappingProxyType({}),
    endpoints: Mapping[str, Endpoint] = MappingProxyType({}),
) -> list[Entrant]:
    """The policies asked for, and every fixed worker and the oracle. `conductors`: directories that are read already,
    by name. `endpoints`: those among `names`. Raises ConfigError on an unknown name or a policy named twice,
    VersionRefused for a bad directory."""
    all_entrants: list[Entrant] = []
    paths = {name: path for name in names if (path := _path(name))}
    read = read_conductors(paths.values(), places_of_bases())
    policies = {name: _conductor(name, read[path]) for name, path in paths.items()}
    policies |= {name: Entrant(name, "endpoint", each.identity, endpoint=each) for name, each in endpoints.items()}
    for name in names:
        for entrant in _entrants_of(name, workers, usd_weights, qualities, policies):
            if twin := next((one for one in all_entrants if one.identity == entrant.identity), None):
                same = f", as `{twin.name}`" if twin.name != entrant.name else ""
                raise ConfigError(f"--policy {name}: named twice{same}; drop one")
            all_entrants.append(entrant)
    all_entrants += [_conductor(name, directory) for name, directory in conductors.items()]
    always = [*(fixed_worker(worker) for worker in workers), Entrant(ORACLE, "oracle", ORACLE)]
    identities = {entrant.identity for entrant in all_entrants}
    return [*(entrant for entrant in always if entrant.identity not in identities), *all_entrants]


def fixed_worker(worker: str) -> Entrant:
    """Return the entrant that always calls this worker."""
    return Entrant(f"{FIXED}{worker}", "fixed", f"{FIXED}{worker}")


def _entrants_of(
    name: str,
    workers: Sequence[str],
    usd_weights: Sequence[float],
    qualities: Sequence[int],
    policies: Mapping[str, Entrant],
) -> list[Entrant]:
    if name in policies:
        return _by_quality(policies[name], qualities)
    kind, _, file = name.partition(":")
    if kind in TUNED:
        return [_tuned_entrant(name, kind, file, weight, many=len(usd_weights) > 1) for weight in usd_weights]
    if name == f"{FIXED}*":
        return [fixed_worker(worker) for worker in workers]
    if name.startswith(FIXED):
        worker = name.removeprefix(FIXED)
        if worker not in workers:
            raise ConfigError(f"--policy {name}: no such worker; there are {', '.join(workers)}")
        return [fixed_worker(worker)]
    if name == ORACLE:
        return [Entrant(name, "oracle", ORACLE)]
    full_name = ALIASES.get(name, name)
    if name.startswith(CHECKED):
        return [_checked(name, workers)]
    if full_name in ROUTERS or full_name == ORACLE_PLAN:
        return [Entrant(name, "router", full_name)]
    fixed = [
        f"{CHECKED}A>B@CHECKER",
        f"{FIXED}WORKER",
        f"{FIXED}*",
        *TUNED,
        *ALIASES,
        *ROUTERS,
        ORACLE_PLAN,
        ORACLE,
        CONDUCTOR_SHIPPED,
    ]
    names = [*fixed, "http(s)://HOST/v1#MODEL", f"{WORKER}NAME"]
    raise ConfigError(f"--policy {name}: neither a policy directory nor one of {', '.join(names)}")


def router(identity: str, seed: int) -> Planner:
    """The router of an entrant."""
    chain = CheckedRouter.read(identity.removeprefix(CHECKED)) if identity.startswith(CHECKED) else None
    return chain or ROUTERS[identity](seed)


def _checked(name: str, workers: Sequence[str]) -> Entrant:
    """A chain of workers and a checker, such as the recorded one, `check`. Raises ConfigError."""
    chain = CheckedRouter.read(name.removeprefix(CHECKED))
    missing = [worker for worker in chain.workers if worker not in workers] if chain else []
    if chain is None or missing:
        raise ConfigError(f"--policy {name}: give {CHECKED}A>B@CHECKER with workers among {', '.join(workers)}")
    return Entrant(name, "router", name)


def _path(name: str) -> Path | None:
    """The policy directory that a name stands for; None where it stands for something else."""
    if name == CONDUCTOR_SHIPPED:
        return SHIPPED
    reserved = name.startswith(CHECKED) or name in ROUTERS or name in ALIASES or name in (ORACLE, ORACLE_PLAN)
    if reserved or is_endpoint(name) or name.partition(":")[0] in TUNED:
        return None
    return Path(name) if Path(name).is_dir() else None


def _tuned_entrant(name: str, kind: str, file: str, weight: float, *, many: bool) -> Entrant:
    source = Path(file) if file else None
    identity = f"{kind}:{source.resolve() if source else ''}~{weight:g}"
    return Entrant(f"{name}~{weight:g}" if many else name, "tuned", identity, source, weight)


def _conductor(name: str, directory: ConductorDirectory) -> Entrant:
    return Entrant(name, "conductor", f"conductor:{digest_of(directory.sha256)}", directory=directory)


def _by_quality(entrant: Entrant, qualities: Sequence[int]) -> list[Entrant]:
    """Return an entrant for each place of the dial, where the policy reads the dial."""
    if not (entrant.reads_dial and qualities):
        return [entrant]
    many = len(qualities) > 1
    return [
        replace(
            entrant,
            name=f"{entrant.name}~q{at}" if many else entrant.name,
            identity=f"{entrant.identity}~q{at}",
            quality=at,
        )
        for at in qualities
    ]
