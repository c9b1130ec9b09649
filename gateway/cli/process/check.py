"""`baton check`: check settings, pool file and conductor without starting anything. Only a conductor by URL is called.

It prints a line for each thing that is right. A mistake is `file:line: field: what is wrong; the fix` and status 2.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from pathlib import Path

from gateway.adapters.engines.http import EngineApi
from gateway.adapters.engines.propensity import trust_in
from gateway.adapters.host import poolfile
from gateway.adapters.postgres.database import driver_url
from gateway.cli.process.services import CHOICES, conductor_offered, starts_conductor
from gateway.config import settings as config
from gateway.core.pool.workers import MODEL_KINDS, PoolFile
from gateway.errors import ConfigError, EngineDown

SERVER_TIMEOUT_S = 10.0


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments."""
    parser.add_argument("--pool", type=Path, help="pool file (BATON_POOL)")
    parser.add_argument("--conductor", help="auto, none, embedded, DIRECTORY, worker:NAME or http://host:port/v1#model")


def run(options: argparse.Namespace) -> int:
    """0 where `baton serve` would accept the same settings."""
    settings = config.load(pool=options.pool, conductor=options.conductor)
    environ = config.environment()
    print(f"ok settings   data in {settings.data_dir}, port {settings.port}, admin port {settings.admin_port}")
    for name, url in (("postgres", settings.database_url), ("redis", settings.redis_url)):
        print(f"ok {name:<10} {'set, not tried' if url else 'embedded'}")
    if settings.database_url:
        driver_url(settings.database_url)
    for name, ref in (("pepper", settings.pepper), ("conductor_api_key", settings.conductor_api_key)):
        if ref:
            poolfile.resolve_secret(ref, environ)
            print(f"ok {name} {ref}")
    pool = poolfile.load(settings.pool, environ) if settings.pool else None
    print(f"ok pool       {_pool_line(settings, pool)}")
    plans = starts_conductor(settings, pool)
    print(f"ok conductor  {_conductor_line(settings, pool, environ) if plans else f'none; it may be {CHOICES}'}")
    print(f"ok planner    {_planner_line(settings, pool, plans)}")
    return 0


def _pool_line(settings: config.Settings, pool: PoolFile | None) -> str:
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


def _conductor_line(settings: config.Settings, pool: PoolFile | None, environ: Mapping[str, str]) -> str:
    match settings.conductor_kind:
        case "worker":
            name = settings.conductor.removeprefix("worker:")
            known = [worker.name for worker in pool.workers] if pool else []
            if name not in known:
                raise ConfigError(f"BATON_CONDUCTOR={settings.conductor}: no such worker; known: {', '.join(known)}")
            return f"worker {name} of the pool, by prompt; not trained"
        case "url":
            trained = asyncio.run(_server_line(settings, environ))
            return f"{settings.conductor}, by prompt unless it serves a policy; {trained}"
        case _:
            directory, manifest = conductor_offered(settings)
            pools = f", for pool {', '.join(manifest.pools)}" if manifest.pools else ""
            return f"{directory}: {manifest.id}, trained on {manifest.data}{pools}, prompt {manifest.prompt_version}"


def _planner_line(settings: config.Settings, pool: PoolFile | None, plans: bool) -> str:
    """Which planner the model name `baton` stands for."""
    if not plans:
        return "`baton` is the rule router, or a live version that was published here"
    if settings.default_policy == "rule":
        return "`baton` is the rule router"
    own = conductor_offered(settings)[1].pools if settings.conductor_kind in ("embedded", "directory") else ()
    known = pool is None or (settings.default_pool_name or pool.default) in own
    if settings.default_policy == "conductor" or not settings.conductor_outcomes_min or known:
        return "`baton` is the conductor"
    return (
        "`baton` is the rule router; a task type goes to the conductor once both have "
        f"{settings.conductor_outcomes_min} judged requests of it and the conductor's mean reward is surely higher "
        "(BATON_DEFAULT_POLICY=conductor: at once)"
    )
