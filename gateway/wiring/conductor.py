"""The composition root's part for who plans: the conductor, the engines under it, and the versions they hold."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from gateway.adapters.engines.embedded import EmbeddedEngine
from gateway.adapters.engines.http import EngineApi
from gateway.adapters.engines.reload import ReloadConductor, VllmReload
from gateway.adapters.engines.replicas import Replicas
from gateway.adapters.engines.vllm import VllmLora
from gateway.adapters.host import poolfile
from gateway.adapters.host.metrics import PrometheusMetrics
from gateway.adapters.postgres.database import Connections
from gateway.adapters.postgres.registry import Registry
from gateway.adapters.upstream.conductor import HttpConductor
from gateway.adapters.upstream.conductor_worker import Structured, WorkerConductor
from gateway.adapters.upstream.pooled import PooledWorkers
from gateway.config.settings import Services, Settings, environment
from gateway.core.loop.prompt import Profile
from gateway.core.money.amounts import usd_to_nano
from gateway.core.policies.manifest import check_prompt, manifest_of
from gateway.core.policies.watch import Margins
from gateway.core.pool.workers import PoolFile, Price
from gateway.errors import ConductorError, ConfigError
from gateway.service.loop.conducting import ConductorPlanner, ConductorSettings
from gateway.service.policies.admin import PolicyAdmin
from gateway.service.policies.shadow import ShadowedPlanner, ShadowLimits, Shadows
from gateway.service.policies.versions import VersionLimits, Versions
from gateway.service.policies.watcher import Watcher, WatchLimits
from gateway.service.ports.money import Budgets
from gateway.service.ports.policies import PolicyEngine
from gateway.service.ports.request import Clock, Conductor, Journal

log = logging.getLogger("gateway")
FREE = Price(input_usd_per_mtok=Decimal(0), output_usd_per_mtok=Decimal(0))
UNLOAD_SLACK_S = 60.0


async def conductor_of(
    settings: Settings, services: Services, pools: PoolFile, workers: PooledWorkers, opened: AsyncExitStack
) -> tuple[HttpConductor | WorkerConductor, ConductorSettings]:
    """The conductor and how to ask it. One served with a manifest is refused when its prompt is not ours."""
    structured, price = settings.conductor_structured, _conductor_price(settings)
    url, model, ref = services.conductor_url, services.conductor_model, settings.conductor_api_key
    if settings.conductor_kind == "worker":
        spec = pools.worker(settings.conductor.removeprefix("worker:"))
        url, model, ref, price = spec.url, spec.model, spec.api_key, spec.price or FREE
        if spec.kind == "litellm":
            hint: Structured = structured if structured in ("json_schema", "json_object") else "none"
            return WorkerConductor(workers, spec, hint), planning_of(settings, "full", price)
    if url is None or model is None:
        raise ConfigError("BATON_CONDUCTOR: no conductor was started; set it to embedded, worker:NAME or a URL#model")
    key = poolfile.resolve_secret(ref, environment()) if ref else None
    ours = settings.conductor_kind in ("embedded", "directory")
    if structured == "auto":
        structured = "vllm" if ours else await _dialect(HttpConductor(url, model, key))
    conductor = HttpConductor(url, model, key, structured=structured, text_bytes_max=settings.plan_bytes_max)
    opened.push_async_callback(conductor.close)
    manifest = await conductor.describe() if ours else None
    profile = _profile(settings, manifest)
    return conductor, planning_of(settings, profile, price, (manifest or {}).get("quality"))


async def _dialect(probe: HttpConductor) -> Literal["vllm", "json_schema"]:
    """How a server by URL is asked for a schema: vLLM names itself as the owner of its models, and only it gives the
    token ids and log-probs that learning needs."""
    try:
        return "vllm" if (await probe.describe()).get("owned_by") == "vllm" else "json_schema"
    except ConductorError:
        log.warning("the conductor does not answer yet; BATON_CONDUCTOR_STRUCTURED=vllm says that it is a vLLM")
        return "json_schema"
    finally:
        await probe.close()


def _profile(settings: Settings, manifest: Mapping[str, Any] | None) -> Profile:
    """The prompt profile. Raises VersionRefused for weights that were trained on another prompt."""
    if manifest is None:
        return "full" if settings.plan_prompt == "auto" else settings.plan_prompt
    return check_prompt(manifest_of(manifest), "BATON_CONDUCTOR")


def _conductor_price(settings: Settings) -> Price:
    prompt, plan = settings.conductor_input_usd_per_mtok, settings.conductor_output_usd_per_mtok
    return Price(input_usd_per_mtok=prompt or Decimal(0), output_usd_per_mtok=plan or Decimal(0))


def planning_of(settings: Settings, profile: Profile, price: Price, quality: int | None = None) -> ConductorSettings:
    return ConductorSettings(
        profile, price, settings.conductor_timeout_s, settings.plan_tokens_max, settings.conductor_temperature, quality
    )


# ---------------------------------------------------------------- versions


@dataclass(frozen=True, slots=True)
class PolicyParts:
    """What follows the registry, beside the request path."""

    versions: Versions
    watcher: Watcher
    shadows: Shadows
    admin: PolicyAdmin
    planner: ShadowedPlanner

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What runs for as long as the gateway does, by name."""
        return {"versions": self.versions.run(), "watcher": self.watcher.run()}


def engine_of(
    settings: Settings, services: Services, conductor: Conductor, opened: AsyncExitStack
) -> tuple[PolicyEngine, Conductor]:
    """The engines that hold the versions, and the conductor that plans are asked of."""
    url = str(services.conductor_url).removesuffix("/v1")
    urls = settings.policy_engine_urls.split(",") if settings.policy_engine_urls else [url]
    apis = [EngineApi(one.strip().rstrip("/").removesuffix("/v1"), key=services.engine_key) for one in urls]
    for api in apis:
        opened.push_async_callback(api.close)
    if settings.policy_engine == "vllm-reload":
        if settings.policy_engine_base is None or len(apis) != 1:
            raise ConfigError("BATON_POLICY_ENGINE=vllm-reload needs BATON_POLICY_ENGINE_BASE and one engine")
        engine = VllmReload(apis[0], str(services.conductor_model), settings.policy_engine_base)
        return engine, ReloadConductor(conductor, engine)
    if settings.policy_engine == "vllm-lora":
        limits = {"versions_max": settings.policy_versions_max, "rank_max": settings.policy_rank_max}
        return Replicas([VllmLora(api, base=settings.policy_engine_base, **limits) for api in apis]), conductor
    return EmbeddedEngine(apis[0]), conductor


def policy_parts(
    settings: Settings,
    services: Services,
    engine: PolicyEngine,
    planner: ConductorPlanner,
    planning: ConductorSettings,
    connections: Connections,
    budgets: Budgets,
    journal: Journal,
    clock: Clock,
    metrics: PrometheusMetrics,
    opened: AsyncExitStack,
) -> PolicyParts:
    """The registry, what follows it, and what an operator does with it. `services.policies` is there."""
    if services.policies is None:
        raise ValueError("this gateway was given no policies directory")
    registry = Registry(connections.background, services.policies)
    versions = Versions(registry, engine, clock, metrics, limits=_version_limits(settings))
    opened.push_async_callback(versions.close)
    watcher = Watcher(versions, registry, clock, metrics, _watch_limits(settings))
    shadow_limits = ShadowLimits(
        settings.shadow_share, settings.shadow_parallel_max, usd_to_nano(settings.shadow_usd_max)
    )
    shadows = Shadows(versions, planner, planning, budgets, journal, clock, metrics, shadow_limits)
    opened.push_async_callback(shadows.drain)
    admin = PolicyAdmin(registry, versions, watcher)
    return PolicyParts(versions, watcher, shadows, admin, ShadowedPlanner(planner, shadows))


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
