"""The planners, wired: the conductor, the engines under it with their versions, and the routers."""

from __future__ import annotations

import logging
import platform
from collections.abc import Container, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from gateway.adapters.engines.embedded import EmbeddedEngine
from gateway.adapters.engines.http import EngineApi
from gateway.adapters.engines.propensity import ProvenConductor
from gateway.adapters.engines.reload import ReloadConductor, VllmReload
from gateway.adapters.engines.vllm import Replicas, VllmLora
from gateway.adapters.postgres.policies.policy_files import Holders
from gateway.adapters.postgres.policies.registry import Registry
from gateway.adapters.postgres.reports.overview import PostgresReports
from gateway.adapters.postgres.reports.readiness import PostgresReadiness
from gateway.adapters.upstream.client import Breaker
from gateway.adapters.upstream.conductor.client import HttpConductor
from gateway.adapters.upstream.conductor.worker import Structured, WorkerConductor
from gateway.config.settings import Settings
from gateway.core.loop.prompt import Profile, prompt_hash
from gateway.core.money.amounts import usd_to_nano
from gateway.core.policies.earning import Bar
from gateway.core.policies.manifest import check_prompt, manifest_of
from gateway.core.policies.watch import Margins
from gateway.core.pool.workers import PoolFile, Price, WorkerSpec
from gateway.errors import ConfigError
from gateway.service.admin.housekeeping import Sweep
from gateway.service.loop.conducting import (
    PROMPTED_TOKENS_MAX,
    TRAINED_TOKENS_MAX,
    ConductorPlanner,
    ConductorSettings,
    Patience,
)
from gateway.service.loop.routers import AutoPlanner, CascadeRouter, Earnings, RulePlanner, VoteRouter, listed_worth
from gateway.service.loop.state import Planner
from gateway.service.policies.admin import PolicyAdmin
from gateway.service.policies.attendance import Attendance
from gateway.service.policies.readiness import Shortage, TrainingCheck, TrainingFacts
from gateway.service.policies.shadow import ShadowedPlanner, ShadowLimits, Shadows
from gateway.service.policies.standing import Charge
from gateway.service.policies.standings import Standings
from gateway.service.policies.versions import PolicyVersions, VersionLimits
from gateway.service.policies.watcher import Watcher, WatchLimits
from gateway.service.ports.money import Budgets
from gateway.service.ports.policies import PolicyEngine
from gateway.service.ports.request import Conductor, Journal
from gateway.service.request.catalog import Catalog
from gateway.wiring.base import Base
from gateway.wiring.requests import PoolParts

log = logging.getLogger("gateway")
FREE = Price(input_usd_per_mtok=Decimal(0), output_usd_per_mtok=Decimal(0))
UNLOAD_SLACK_S = 60.0
PROMPTED: tuple[Profile, ...] = ("full", "guided")
PROMPTED_TIMEOUT_S, TRAINED_TIMEOUT_S = 60.0, 10.0


@dataclass(frozen=True, slots=True)
class ConductorParts:
    """The conductor and how to prompt it. `pools`: those that its weights were trained for."""

    conductor: HttpConductor | WorkerConductor
    planning: ConductorSettings
    pools: frozenset[str] = frozenset()
    breaker: Breaker = field(default_factory=Breaker)


async def conductor_of(base: Base, pool: PoolParts) -> ConductorParts | None:
    """The conductor; None where routers alone plan. Raises VersionRefused for weights that were trained on another
    prompt."""
    settings, services = base.settings, base.services
    if services.conductor_url is None and settings.conductor_kind in ("embedded", "none"):
        return None
    structured, price = settings.conductor_structured, _conductor_price(settings)
    own: dict[str, Any] = {}
    spec: WorkerSpec | None = None
    url, model, ref = services.conductor_url, services.conductor_model, settings.conductor_api_key
    if settings.conductor_worker is not None:
        spec = pool.first.pools.worker(settings.conductor_worker)
        url, model, ref, price = spec.url, spec.model, spec.api_key, spec.price or FREE
        url = services.places.get(str(url), url)
        own = {"params": spec.params, "cannot": spec.cannot}
        if spec.kind == "litellm":
            hint: Structured = structured if structured in ("json_schema", "json_object") else "none"
            planning = planning_of(settings, _profile(settings, None), price, spec=spec)
            breaker = Breaker()
            return ConductorParts(WorkerConductor(pool.workers, spec, hint, breaker), planning, breaker=breaker)
    if url is None or model is None:
        raise ConfigError("BATON_CONDUCTOR: no conductor was started; set it to embedded, worker:NAME or a URL#model")
    key = base.referred(ref)
    ours = settings.conductor_kind in ("embedded", "directory")
    if structured == "auto" and ours:
        structured = "vllm"
    text_bytes_max = settings.plan_bytes_max
    breaker = Breaker()
    limits: dict[str, Any] = {
        "text_bytes_max": text_bytes_max,
        "timeout_s": settings.caps_wall_s_max,
        "breaker": breaker,
    }
    limits |= {"client": base.client(), "way": base.ways.of_worker(spec, pool.first.secrets) if spec else None}
    conductor = base.closing(HttpConductor(url, model, key, structured=structured, **limits, **own))
    manifest = await conductor.describe() if ours else None
    profile = _profile(settings, manifest)
    about = manifest_of(manifest or {})
    planning = planning_of(settings, profile, price, (manifest or {}).get("quality"), spec)
    planning = replace(planning, trained=manifest is not None and about.kind != "base")
    return ConductorParts(conductor, planning, frozenset(about.pools), breaker)


def _profile(settings: Settings, manifest: Mapping[str, Any] | None) -> Profile:
    """The prompt profile. Raises VersionRefused for weights that were trained on another prompt."""
    if manifest is None:
        return "guided" if settings.plan_prompt == "auto" else settings.plan_prompt
    return check_prompt(manifest_of(manifest), "BATON_CONDUCTOR")


def _conductor_price(settings: Settings) -> Price:
    prompt, plan = settings.conductor_input_usd_per_mtok, settings.conductor_output_usd_per_mtok
    return Price(input_usd_per_mtok=prompt or Decimal(0), output_usd_per_mtok=plan or Decimal(0))


def planning_of(
    settings: Settings, profile: Profile, price: Price, quality: int | None = None, spec: WorkerSpec | None = None
) -> ConductorSettings:
    """How the conductor is called. `spec`: the worker that plans. A model that plans by prompt may think first."""
    prompted = profile in PROMPTED
    timeout_s = settings.conductor_timeout_s or (PROMPTED_TIMEOUT_S if prompted else TRAINED_TIMEOUT_S)
    tokens_max = settings.plan_tokens_max or (PROMPTED_TOKENS_MAX if prompted else TRAINED_TOKENS_MAX)
    if spec is not None:
        timeout_s, tokens_max = min(timeout_s, spec.timeout_s), min(tokens_max, spec.output_tokens_max)
    patience = Patience(timeout_s, min(timeout_s, settings.conductor_patience_s_min))
    return ConductorSettings(profile, price, timeout_s, tokens_max, settings.conductor_temperature, quality, patience)


# ---------------------------------------------------------------- versions


@dataclass(frozen=True, slots=True)
class PolicyParts:
    """The parts that follow the registry, beside the request path."""

    versions: PolicyVersions
    watcher: Watcher
    shadows: Shadows
    admin: PolicyAdmin
    planner: ShadowedPlanner
    attendance: Attendance
    sweep: Sweep

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """The tasks that run as long as the gateway does, by name."""
        return {
            "versions": self.versions.run(),
            "watcher": self.watcher.run(),
            "attendance": self.attendance.run(),
        }


def engine_of(base: Base, conductor: Conductor) -> tuple[PolicyEngine, Conductor]:
    """The engines that hold the versions, and the conductor that is asked for plans. Raises ConfigError."""
    settings, services = base.settings, base.services
    url = str(services.conductor_url).removesuffix("/v1")
    urls = settings.policy_engine_urls.split(",") if settings.policy_engine_urls else [url]
    places = [url.strip().rstrip("/").removesuffix("/v1") for url in urls]
    apis = [base.closing(EngineApi(place, key=services.engine_key, client=base.client())) for place in places]
    if settings.policy_engine == "vllm-reload":
        if settings.policy_engine_base is None or len(apis) != 1:
            raise ConfigError("BATON_POLICY_ENGINE=vllm-reload needs BATON_POLICY_ENGINE_BASE and one engine")
        engine = VllmReload(apis[0], str(services.conductor_model), settings.policy_engine_base)
        return engine, ReloadConductor(conductor, engine)
    if settings.policy_engine == "vllm-lora":
        limits = {"versions_max": settings.policy_versions_max, "rank_max": settings.policy_rank_max}
        return Replicas([VllmLora(api, base=settings.policy_engine_base, **limits) for api in apis]), conductor
    return EmbeddedEngine(apis[0]), conductor


def policies_of(
    base: Base, parts: ConductorParts | None, budgets: Budgets, journal: Journal
) -> tuple[PolicyParts | None, Planner | None]:
    """The parts that follow the registry (None if no engine holds versions), and the planner `conductor` (None if there
    is no conductor)."""
    if parts is None:
        return None, None
    conductor, planning = parts.conductor, parts.planning
    if base.services.policies is None:
        return None, ConductorPlanner(_proven(base, conductor), planning)
    engine, asked = engine_of(base, conductor)
    planner = ConductorPlanner(asked, planning)
    settings, clock, metrics = base.settings, base.clock, base.metrics
    registry = registry_of(base, base.services.policies)
    versions = base.closing(PolicyVersions(registry, engine, clock, metrics, limits=_version_limits(settings)))
    watcher = Watcher(versions, registry, clock, metrics, _watch_limits(settings))
    limits = ShadowLimits(settings.shadow_share, settings.shadow_parallel_max, usd_to_nano(settings.shadow_usd_max))
    shadows = Shadows(versions, planner, planning, budgets, journal, clock, metrics, limits)
    base.opened.push_async_callback(shadows.drain)
    attendance = base.closing(_attendance(base, registry, versions))
    admin = PolicyAdmin(registry, versions, watcher, attendance)
    front = ShadowedPlanner(planner, shadows)
    policies = PolicyParts(versions, watcher, shadows, admin, front, attendance, registry.sweep)
    return policies, policies.planner


def registry_of(base: Base, policies: Path) -> Registry:
    """The registry over this host's directory of versions."""
    settings = base.settings
    return Registry(base.connections.background, policies, settings.policies_url, settings.policies_stored_bytes_max)


def _attendance(base: Base, registry: Registry, versions: PolicyVersions) -> Attendance:
    settings, gateways = base.settings, Holders(base.connections.background)
    host = f"{platform.node()}:{settings.data_dir.resolve()}"
    wait_s = settings.policy_wait_s
    return Attendance(gateways, registry, versions, base.clock, gateway=uuid4().hex, host=host, wait_s=wait_s)


def _proven(base: Base, conductor: Conductor) -> Conductor:
    """The conductor; by URL, one whose log-probs are logged once they are proven."""
    settings, services = base.settings, base.services
    if settings.conductor_kind != "url" or services.conductor_url is None or services.conductor_model is None:
        return conductor
    url, key = services.conductor_url.rstrip("/").removesuffix("/v1"), base.referred(settings.conductor_api_key)
    api = EngineApi(url, key=key, client=base.client())
    return base.closing(ProvenConductor(conductor, api, services.conductor_model))


def _version_limits(settings: Settings) -> VersionLimits:
    return VersionLimits(
        poll_s=settings.policy_poll_s,
        check_s=settings.policy_engine_check_s,
        unload_s=settings.caps_wall_s_max + UNLOAD_SLACK_S,
        exclusive=settings.policy_engine == "vllm-reload",
    )


def _watch_limits(settings: Settings) -> WatchLimits:
    margins = Margins(
        requests_min=settings.watch_requests_min,
        outcomes_min=settings.watch_outcomes_min,
        validity=settings.watch_validity_margin,
        errors=settings.watch_errors_margin,
        outcome=settings.watch_outcome_margin,
        cost_share=settings.watch_cost_margin,
        z=settings.watch_z,
    )
    return WatchLimits(
        look_s=settings.watch_look_s,
        window_s=settings.watch_window_s,
        latest=settings.watch_requests_max,
        probation_s=settings.watch_probation_s,
        margins=margins,
    )


# ---------------------------------------------------------------- planners


def charge_of(settings: Settings, *, plans: bool, trained: Iterable[str] = ()) -> Charge:
    """Whom `baton` stands for. `plans`: whether there is a conductor. `trained`: the pools that it was trained for."""
    bar, name = Bar(settings.conductor_outcomes_min), settings.conductor_worker or settings.conductor
    if not plans or settings.default_policy == "rule":
        return Charge("rule" if settings.pool else "simulated", "the rule", bar)
    name = "the shipped conductor" if name in ("auto", "embedded") else name
    if settings.pool is None:
        return Charge("simulated", name, bar)
    earns = settings.default_policy == "auto" and settings.conductor_outcomes_min > 0
    return Charge("trial" if earns else "conductor", name, bar, settings.conductor_trial_share, frozenset(trained))


def check_of(base: Base, conductor: ConductorParts | None, pool: str) -> TrainingCheck:
    """What tells how far the log is from a retraining. `pool`: the default one."""
    settings, engine = base.settings, base.connections.background
    profile = None if conductor is None else conductor.planning.profile
    charge = charge_of(settings, plans=conductor is not None)
    earns = charge.mode == "trial" and not (conductor and pool in conductor.pools)
    in_charge = conductor is not None and settings.default_policy != "rule" and not earns
    facts = TrainingFacts(
        simulated=settings.pool is None,
        ships=settings.conductor_kind in ("embedded", "directory"),
        prompt_hash=None if profile is None else prompt_hash(profile),
        share=max(settings.explore_share, settings.explore_share_max) if in_charge else 1.0,
    )
    registry = Registry(engine, base.services.policies or settings.data_dir / "policies")
    return TrainingCheck(PostgresReadiness(engine).judged, registry.live, base.clock, facts)


def shortage_of(base: Base) -> Shortage:
    """Whether the log has too few requests to train on."""
    return base.watching("shortage", Shortage(PostgresReadiness(base.connections.background).trainable))


def earnings_of(
    base: Base, learned: Planner | None, trained: Iterable[str], pools: PoolFile
) -> tuple[Earnings, Standings]:
    """What `auto` knows of rule and conductor, and who plans. Their rewards are compared by what a right answer is
    worth in the pools that the gateway starts with."""
    settings = base.settings
    worth = {name: settings.right_usd or listed_worth(pools.pool(name)).usd for name in pools.pools}
    rewards = partial(PostgresReports(base.connections.background).planner_rewards, worth)
    charge = charge_of(settings, plans=learned is not None, trained=trained)
    standings = Standings(rewards, charge, pools)
    standings.earned = earnings = Earnings(standings.rewards, charge.bar)
    return earnings, standings


def planners_of(
    base: Base, learned: Planner | None, trained: Container[str], earnings: Earnings
) -> Mapping[str, tuple[Planner | AutoPlanner, Planner]]:
    """Map each model name to its planner and the planner that replaces it when it fails. `learned`: None where there is
    no conductor. `trained`: the pools that it was trained for."""
    settings = base.settings
    rule = RulePlanner()
    default: Planner | AutoPlanner = rule
    if learned is not None and settings.default_policy != "rule":
        earns = charge_of(settings, plans=True).mode == "trial"
        default = AutoPlanner(rule, learned, earnings, trained) if earns else learned
    planners: list[Planner] = [*([learned] if learned else []), rule, VoteRouter(), CascadeRouter()]
    return {"baton": (default, rule), **{f"baton/{planner.name}": (planner, rule) for planner in planners}}


def catalog_of(
    base: Base,
    pools: PoolFile,
    conductor: ConductorParts | None,
    learned: Planner | None,
    policies: PolicyParts | None,
) -> tuple[Catalog, Standings]:
    """Who plans under each model name, and how far each pool's next rung is."""
    trained = conductor.pools if conductor else ()
    earnings, standings = earnings_of(base, learned, trained, pools)
    planners = planners_of(base, learned, trained, base.watching("earnings", earnings))
    catalog = Catalog(pools, planners, policies.versions if policies else None, standings.short)
    return catalog, standings
