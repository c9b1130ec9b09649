"""The servers under a gateway: find or start PostgreSQL (and migrate it), Redis, the workers and the conductor."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urldefrag

from gateway.adapters.engines.sealed import read_document
from gateway.adapters.host import poolfile
from gateway.adapters.host.servers import EmbeddedPostgres, EmbeddedProgram, EmbeddedRedis
from gateway.adapters.host.supervisor import PROGRAMS_ROOT, Server
from gateway.adapters.postgres.database import connected
from gateway.adapters.postgres.migrate import upgrade
from gateway.adapters.postgres.policies.registry import Registry
from gateway.cli.process.datadir import FACTS, DataDir
from gateway.config import settings as config
from gateway.config.settings import Services, Settings
from gateway.core.policies.manifest import MANIFEST_FILE, Manifest, manifest_of
from gateway.core.policies.versions import Version
from gateway.core.pool.workers import LOCAL, PoolFile
from gateway.errors import ConfigError, NotFound, Unavailable, VersionRefused
from gateway.files import write_atomic

ARENA_SEED = 7
ARENA_POOL = "arena-pool.yaml"
POOL_TEXT_S = 30.0
SHIPPED_CONDUCTOR = "shipped/arena-3"  # inside the policy package
SMOL, SMOL_CONDUCTOR, SMOL_BASE = "smol", "shipped/smol-1", "smollm2"  # the adapter's name, its place, and its base
BASE_S = 300.0  # to import a base
CHOICES = (
    "smol, which plans on any pool; worker:NAME, a model of the pool that plans by prompt; http://host:port/v1#model; "
    "the directory of a policy that was trained for this pool; or none, and the rule router plans"
)
T = TypeVar("T")
Say = Callable[[str], None]


def shipped_directory(place: str = SHIPPED_CONDUCTOR) -> Path | None:
    """The directory of shipped weights; None where the policy package is not installed."""
    spec = find_spec("policy")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / place


def conductor_offered(settings: Settings) -> tuple[Path, Manifest]:
    """The directory of the conductor's weights, and its manifest. Raises ConfigError where no manifest can be read."""
    directory: Path | None = Path(settings.conductor)
    if settings.conductor_kind == "embedded":
        directory = shipped_directory()
    elif settings.conductor == SMOL:
        directory = shipped_directory(SMOL_CONDUCTOR)
        if directory is not None and not directory.is_dir():
            raise ConfigError(f"BATON_CONDUCTOR=smol: this release ships no {directory.name}; choose {CHOICES}")
    if directory is None:
        raise ConfigError("no embedded conductor in this installation; set BATON_CONDUCTOR=http://host:port/v1#model")
    try:
        return directory.resolve(), manifest_of(read_document(directory))
    except VersionRefused as refusal:
        fix = "BATON_CONDUCTOR must be embedded, a policy directory, worker:NAME or http://host:port/v1#model"
        place = directory / MANIFEST_FILE
        what = refusal.message.removeprefix(f"{place}: ").split(";")[0]
        raise ConfigError(f"{place}:1: {what}; {fix}") from None


def is_shipped(manifest: Manifest) -> bool:
    """Whether the weights are the shipped ones, which were trained on the simulator."""
    directory = shipped_directory()
    if directory is None or not manifest.weights_sha256:
        return False
    return manifest.weights_sha256 == manifest_of(read_document(directory)).weights_sha256


def starts_conductor(settings: Settings, pool: PoolFile | None) -> bool:
    """Whether the conductor that is configured plans on this pool (None: the arena). Under `auto`, weights of the
    simulator do not. Raises ConfigError where they are set by name, and for a worker that is not in the pool."""
    if settings.conductor_worker is not None:
        if pool is None:
            what = "the workers are simulated, and none of them plans"
            raise ConfigError(
                f"BATON_CONDUCTOR={settings.conductor}: {what}; name a pool file too (BATON_POOL, POOL=…)"
            )
        poolfile.with_planner(pool, settings.conductor_worker)
    if settings.conductor_kind not in ("embedded", "directory"):
        return settings.conductor_kind != "none"
    directory, manifest = conductor_offered(settings)
    name = (settings.default_pool_name or pool.default) if pool else None
    if pool is None or not is_shipped(manifest) or name in manifest.pools:
        return True
    if settings.conductor == "auto":
        return False
    raise ConfigError(
        f"BATON_CONDUCTOR={settings.conductor}: {directory.name} was trained on the simulator ({manifest.data}; pools "
        f"{', '.join(manifest.pools)}) and does not know the workers of pool `{name}`; choose {CHOICES}"
    )


def policy_version(manifest: Manifest) -> str:
    """The name, such as `conductor@7`, under which weights without a registry are served and logged."""
    return f"conductor@{manifest.version}" if manifest.version else "conductor"


async def own_version(database_url: str, policies: Path) -> Version | None:
    """The live version, unless it is the shipped conductor. Raises Unavailable."""
    async with connected(database_url, pool_size=1) as engine:
        live = await Registry(engine, policies).live()
    return None if live is None or is_shipped(manifest_of(live.manifest)) else live


async def live_version(database_url: str, settings: Settings, directory: Path, *, insist: bool) -> tuple[str, Path]:
    """The id and the directory of the live version. The first start makes `directory` live; with `insist`, any start
    does where that directory is new. Raises VersionRefused, Unavailable."""
    policies = settings.policies_path or settings.data_dir / "policies"
    async with connected(database_url, pool_size=1) as engine:
        registry = Registry(engine, policies, settings.policies_url, settings.policies_stored_bytes_max)
        version = await registry.seed(directory, insist=insist)
        with suppress(NotFound, Unavailable, VersionRefused):  # without it, this host plans with its own weights
            await registry.place(version)
        return version.id, registry.directory(version)


def pepper_of(settings: Settings, data: DataDir) -> bytes:
    """The secret under key digests: that of BATON_PEPPER, else the data directory's own."""
    ref = settings.pepper
    return poolfile.resolve_secret(ref, config.environment()).encode() if ref else data.pepper()


def database_of(settings: Settings, data: DataDir) -> str:
    """The database of an installation: DATABASE_URL, else that of the gateway on the data directory. Raises
    ConfigError."""
    url = settings.database_url or (data.read(FACTS) or {}).get("database_url")
    if not url:
        raise ConfigError(f"no gateway serves from {data.path}: start it (`baton serve`), or set DATABASE_URL")
    return str(url)


def pool_file(settings: Settings, data: DataDir) -> Path:
    """The pool file of an installation, whether a gateway runs or not."""
    served = (data.read(FACTS) or {}).get("pool_file")
    return settings.pool or Path(served or data.path / ARENA_POOL)


def require_policy(what: str) -> None:
    """Raises ConfigError where the policy package is missing; `what` it is needed for goes into the message."""
    if find_spec("policy") is None:
        raise ConfigError(f"this installation has no policy package; {what} where it is installed")


class Stack:
    """Starts the servers and describes them as `Services`; stops those it started, the last one first."""

    def __init__(self, settings: Settings, data: DataDir, say: Say) -> None:
        self.settings = settings
        self.data = data
        self.say = say
        self.started: list[Server] = []
        self._importing = asyncio.Lock()

    async def start(self) -> Services:
        """Start all servers at the same time. After an error, stop those that started and raise the first error."""
        pepper = pepper_of(self.settings, self.data)
        pools = poolfile.load(self.settings.pool, config.environment()) if self.settings.pool else None
        plans = starts_conductor(self.settings, pools)
        try:
            async with asyncio.TaskGroup() as group:
                database = group.create_task(self._timed("postgres", self._database()))
                redis = group.create_task(self._timed("redis", self._redis()))
                pool = group.create_task(self._timed("workers", self._pool()))
                places = group.create_task(self._places(pools))
                conductor = group.create_task(self._timed("conductor", self._conductor(database, plans)))
        except BaseExceptionGroup as errors:  # boundary: stop what started, raise the first error again
            await self.stop()
            raise errors.exceptions[0] from None
        except asyncio.CancelledError:
            await self.stop()
            raise
        url, model, key = conductor.result()[0]
        return Services(
            database_url=database.result()[0],
            redis_url=redis.result()[0],
            pool_file=pool.result()[0],
            pepper=pepper,
            conductor_url=url,
            conductor_model=model,
            policies=self.settings.policies_path.resolve() if self.settings.policies_path and (url or plans) else None,
            engine_key=key,
            places=places.result(),
        )

    async def stop(self) -> None:
        """Stop the servers, the last one started first."""
        while self.started:
            await self.started.pop().stop()

    async def _timed(self, name: str, work: Coroutine[Any, Any, tuple[T, str]]) -> tuple[T, str]:
        began_s = time.monotonic()
        result = await work
        self.say(f"  {name:<10} {time.monotonic() - began_s:5.1f} s  {result[1]}")
        return result

    async def run(self, server: Server) -> None:
        """Start one more server, to be stopped with the others."""
        self.started.append(server)
        await server.start()

    async def _database(self) -> tuple[str, str]:
        url, where = self.settings.database_url, "yours"
        if url is None:
            server = EmbeddedPostgres(self.data.path)
            await self.run(server)
            url, where = server.url, "embedded"
        try:
            vectors = await asyncio.to_thread(upgrade, url)
        except Unavailable as error:
            what = f"PostgreSQL ({where}) is not usable: {error.message}"
            raise Unavailable(f"{what}; check DATABASE_URL and the server") from None
        return url, f"{where}, migrated{'' if vectors else ', without pgvector'}"

    async def _redis(self) -> tuple[str, str]:
        if self.settings.redis_url:
            return self.settings.redis_url, "yours"
        server = EmbeddedRedis(self.data.path)
        await self.run(server)
        return server.url, "embedded"

    async def _pool(self) -> tuple[Path, str]:
        if self.settings.pool:
            return self.settings.pool.resolve(), str(self.settings.pool)
        arena = EmbeddedProgram(
            "arena", self.data.path, "policy.simulators.arena", ["serve", "--seed", str(ARENA_SEED)]
        )
        arena.health = "/healthz"
        await self.run(arena)
        path = self.data.path / ARENA_POOL
        write_atomic(path, await output_of("policy.simulators.arena", "pool", "--base-url", arena.url))
        return path, f"simulated (the arena), {arena.url}"

    async def _places(self, pools: PoolFile | None) -> dict[str, str]:
        """Start a server for each local model of the pool; the base URLs by the `local:` URLs."""
        models = sorted({worker.local_model for worker in pools.workers if worker.local_model} if pools else ())
        served = [(await self._timed(model, self._local(model)))[0] for model in models]
        return {f"{LOCAL}{model}": url for model, url in zip(models, served, strict=True)}

    async def _local(self, model: str) -> tuple[str, str]:
        """Start the server of a local model under the model's name. Raises ConfigError, Unavailable."""
        arguments = ["--model", str(await self.base(model)), "--served-model-name", model, "--versions", "1"]
        server = EmbeddedProgram(model, self.data.path, "policy.serve", arguments, ready_s=BASE_S)
        await self.run(server)
        return f"{server.url}/v1", f"a local model, {server.url}"

    async def base(self, model: str) -> Path:
        """The directory of a packaged model in the data directory, imported at its first use. Raises ConfigError where
        its package is missing."""
        directory = self.data.path.resolve() / "bases" / model
        async with self._importing:
            if not directory.is_dir():
                require_policy(f"{LOCAL}{model} is served")
                self.say(f"  {model:<10} the weights are unpacked into {directory}, once")
                try:
                    await output_of("policy", "import", model, "--out", str(directory), limit_s=BASE_S)
                except Unavailable as error:
                    raise ConfigError(error.message.split(": ", 1)[-1]) from None
        return directory

    async def _conductor(
        self, database: asyncio.Task[tuple[str, str]], plans: bool
    ) -> tuple[tuple[str | None, str | None, str | None], str]:
        """(base URL, model, key of the routes that load versions), and a line about them. `plans`: whether the
        conductor that is configured knows the pool; if not, a live version of the operator's own plans, if any."""
        settings = self.settings
        if not plans:
            place, url = settings.policies_path, (await database)[0]
            if place is None or await own_version(url, place) is None:
                return (None, None, None), f"none: the rule router plans. BATON_CONDUCTOR may be {CHOICES}"
        if settings.conductor_kind == "worker":
            return (None, None, None), f"{settings.conductor} of the pool"
        if settings.conductor_kind == "url":
            url, model = urldefrag(settings.conductor)
            return (url.rstrip("/"), model, None), settings.conductor
        configured, manifest = conductor_offered(settings)
        name, directory = policy_version(manifest), configured
        if settings.policies_path is not None:
            insist = settings.conductor_kind == "directory"
            name, directory = await live_version((await database)[0], settings, configured, insist=insist)
        if not directory.is_dir():  # another host published it; this one plans with its own weights
            self.say(f"  conductor  {name} is not in {settings.policies_path}; {configured.name} plans here instead")
            name, directory = "conductor", configured
        try:
            return await self._serve_policy(name, directory)
        except Unavailable as error:
            if directory == configured:
                raise
            self.say(f"  conductor  {error.message}; {configured.name} plans until {name} is rolled back")
            return await self._serve_policy("conductor", configured)

    async def _serve_policy(self, name: str, directory: Path) -> tuple[tuple[str, str, str], str]:
        """Start the embedded conductor's server on that directory. Raises Unavailable."""
        key_file = self.data.engine_key()
        arguments = ["--model", str(directory), "--served-model-name", name, "--admin-key-file", str(key_file)]
        if self.settings.conductor == SMOL:
            arguments += ["--base", str(await self.base(SMOL_BASE))]
        server = EmbeddedProgram("conductor", self.data.path, "policy.serve", arguments)
        await self.run(server)
        return (f"{server.url}/v1", name, key_file.read_text()), f"{directory.name} as {name}, {server.url}"


async def output_of(module: str, *arguments: str, limit_s: float | None = None) -> bytes:
    """The output of `python -m MODULE …`. Raises Unavailable with the last lines of its errors."""
    limit_s = limit_s or POOL_TEXT_S
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", module, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=PROGRAMS_ROOT,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), limit_s)
    except TimeoutError:
        raise Unavailable(f"{module} {arguments[0]} did not answer within {limit_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        words = " | ".join(errors.decode(errors="replace").strip().splitlines()[-3:])
        raise Unavailable(f"{module} {arguments[0]} ended with status {process.returncode}: {words}")
    return output
