"""`baton check`: check settings, pool file and conductor without starting anything. Servers that are named are asked;
those of MCP that are programs are started for it, and ended. With `--ask` each worker is asked one short question.

It prints a line for each thing that is right. A mistake is `file:line: field: what is wrong; the fix` and status 2.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.adapters.engines.http import EngineApi
from gateway.adapters.engines.propensity import trust_in
from gateway.adapters.host import poolfile
from gateway.adapters.host.poolfile import with_planner
from gateway.adapters.postgres import migrate
from gateway.adapters.redis import server as redis_server
from gateway.adapters.upstream.http1.ways import Ways
from gateway.adapters.upstream.mcp import tool_servers
from gateway.cli.process.services import CHOICES, conductor_offered, starts_conductor
from gateway.config import settings as config
from gateway.core.pool.tools import Tool
from gateway.core.pool.workers import MODEL_KINDS, PoolFile
from gateway.errors import ConfigError, EngineDown, Unavailable
from gateway.service.policies.standing import standing_of
from gateway.service.ports.pools import LoadedPool
from gateway.wiring import reach
from gateway.wiring.conductor import charge_of

SERVER_TIMEOUT_S = 10.0
NO_POOL = PoolFile.model_construct(workers=(), pools={})  # of the simulated workers, which are not started


def run(options: argparse.Namespace) -> int:
    """0 where `baton serve` would accept the same settings; 1 where a server that they name does not answer."""
    settings = config.load(pool=options.pool, conductor=options.conductor)
    environ = config.environment()
    print(f"ok settings   data in {settings.data_dir}, port {settings.port}, admin port {settings.admin_port}")
    away = [_try("postgres", _postgres_line, settings.database_url), _try("redis", _redis_line, settings.redis_url)]
    for name, ref in (("pepper", settings.pepper), ("conductor_api_key", settings.conductor_api_key)):
        if ref:
            poolfile.resolve_secret(ref, environ)
            print(f"ok {name} {ref}")
    pool = poolfile.load(settings.pool, environ) if settings.pool else None
    print(f"ok pool       {pool_line(settings, pool)}")
    for offer in tool_offers(pool, environ):
        print(f"{'--' if offer.problems else 'ok'} mcp        {offer.line}")
        away.append(not offer.tools)
    for sight in reach.asked(pool, environ) if pool and options.ask else ():
        print(f"{'ok' if sight.state == 'ok' else '--'} worker     {sight.line}")
        away.append(sight.state == "bad")
    plans = starts_conductor(settings, pool)
    print(f"ok conductor  {conductor_line(settings, environ) if plans else f'none; it may be {CHOICES}'}")
    print(f"ok planner    {planner_line(settings, pool, plans)}")
    return int(any(away))


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """What the MCP server of a worker offers, and why it does not offer all that the pool file lists."""

    worker: str
    tools: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def line(self) -> str:
        """The offer in one line."""
        return "; ".join((f"{self.worker}: {', '.join(self.tools) or 'no tools'}", *self.problems))


def tool_offers(pool: PoolFile | None, environ: Mapping[str, str]) -> list[ToolOffer]:
    """What each MCP server of the pool offers now. Raises ConfigError where the library is not installed."""
    workers = [worker for worker in pool.workers if worker.kind == "mcp"] if pool else []
    return asyncio.run(_ask_servers(pool, environ)) if pool and workers else []


async def _ask_servers(pool: PoolFile, environ: Mapping[str, str]) -> list[ToolOffer]:
    servers = tool_servers(LoadedPool(pool, poolfile.secrets(pool, environ)), Ways(environ))
    await servers.start()
    try:
        return [
            ToolOffer(one.name, tuple(_described(tool) for tool in servers.tools(one.name)), servers.problems(one.name))
            for one in pool.workers
            if one.kind == "mcp"
        ]
    finally:
        await servers.close()


def _described(tool: Tool) -> str:
    effects = "repeatable" if tool.idempotent else "has side effects"
    return f"{tool.name} ({effects if tool.side_effects else 'reads'})"


def run_migrate(_: argparse.Namespace) -> int:
    """Migrate DATABASE_URL to the schema of this version, and end. Raises ConfigError, Unavailable."""
    url = config.load().database_url
    if url is None:
        raise ConfigError("set DATABASE_URL; the embedded database is migrated by `baton serve`")
    migrate.upgrade(url)
    print(f"ok postgres   schema {migrate.examine(url, SERVER_TIMEOUT_S).revision}")
    return 0


def _try(name: str, line: Callable[[str | None], str], url: str | None) -> bool:
    """Print the line about a server; return whether it is away. Raises ConfigError."""
    try:
        print(f"ok {name:<10} {line(url)}")
    except Unavailable as error:
        print(f"-- {name:<10} {error.message}")
        return True
    return False


def _postgres_line(url: str | None) -> str:
    """What DATABASE_URL is. Raises Unavailable where it does not answer, ConfigError where its role cannot migrate."""
    if url is None:
        return "embedded"
    try:
        facts = migrate.examine(url, SERVER_TIMEOUT_S)
    except Unavailable as error:
        raise Unavailable(f"DATABASE_URL does not answer: {error.message}") from None
    if facts.revision != facts.head and not facts.may_create:
        raise ConfigError(f"DATABASE_URL: role {facts.role} may not make tables; {migrate.GRANTS}")
    schema = facts.head if facts.revision == facts.head else f"{facts.revision or 'empty'}, the next start migrates it"
    return f"PostgreSQL {facts.version}, schema {schema}"


def _redis_line(url: str | None) -> str:
    """What REDIS_URL is. Raises Unavailable."""
    if url is None:
        return "embedded"
    try:
        facts = asyncio.run(redis_server.examine(url, SERVER_TIMEOUT_S))
    except Unavailable as error:
        raise Unavailable(f"REDIS_URL does not answer: {error.message}") from None
    return f"Redis {facts.version}, {facts.eviction or 'unknown eviction'}"


def pool_line(settings: config.Settings, pool: PoolFile | None) -> str:
    """The workers and pools of the file. Raises ConfigError for a default pool that it does not have."""
    if pool is None:
        return "the arena's simulated workers"
    name = settings.default_pool_name or pool.default
    if name not in pool.pools:
        raise ConfigError(f"BATON_DEFAULT_POOL_NAME={name}: not in {settings.pool}; it has {', '.join(pool.pools)}")
    bare = [worker.name for worker in pool.workers if worker.kind in MODEL_KINDS and not worker.description.strip()]
    note = f"; without a description, which a planner goes by: {', '.join(bare)}" if bare else ""
    return f"{settings.pool}: {len(pool.workers)} workers, pools {', '.join(pool.pools)}, default {name}{note}"


async def _server_line(settings: config.Settings, environ: Mapping[str, str]) -> str:
    """Whether plans of a conductor by URL can be trained on."""
    url, _, model = settings.conductor.partition("#")
    key = poolfile.resolve_secret(settings.conductor_api_key, environ) if settings.conductor_api_key else None
    api = EngineApi(url.rstrip("/").removesuffix("/v1"), key=key, timeout_s=SERVER_TIMEOUT_S)
    try:
        trust = await trust_in(api, model)
    except EngineDown:
        return "it does not answer now"
    finally:
        await api.close()
    return f"its plans are {'' if trust.trainable else 'not '}trained on: {trust.reason}"


def conductor_line(settings: config.Settings, environ: Mapping[str, str]) -> str:
    """What the conductor is. Raises ConfigError."""
    match settings.conductor_kind:
        case "worker":
            return f"worker {settings.conductor_worker} of the pool, by prompt; not trained"
        case "url":
            trained = asyncio.run(_server_line(settings, environ))
            return f"{settings.conductor}, by prompt unless it serves a policy; {trained}"
        case _:
            directory, manifest = conductor_offered(settings)
            pools = f", for pool {', '.join(manifest.pools)}" if manifest.pools else ""
            return f"{directory}: {manifest.id}, trained on {manifest.data}{pools}, prompt {manifest.prompt_version}"


def planner_line(settings: config.Settings, pool: PoolFile | None, plans: bool) -> str:
    """Whom the model name `baton` stands for, and the next rung. Outcomes are not counted here: `baton status` does."""
    manifests = plans and settings.conductor_kind in ("embedded", "directory")
    charge = charge_of(settings, plans=plans, trained=conductor_offered(settings)[1].pools if manifests else ())
    if pool is None:
        return standing_of(NO_POOL, NO_POOL.default, charge, None).line
    name = settings.default_pool_name or pool.default
    return standing_of(with_planner(pool, settings.conductor_worker), name, charge, None).line
