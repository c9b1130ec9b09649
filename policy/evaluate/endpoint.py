"""A prompted planner, or a conductor on any OpenAI-compatible server, as a policy: `http(s)://HOST/v1#MODEL`.

Only an answer of the model counts: a plan, or a text that is none. A server that keeps failing ends the evaluation.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from pydantic import ValidationError

from gateway.adapters.host.poolfile import resolve_secret
from gateway.adapters.upstream.conductor.client import HttpConductor, Structured
from gateway.config.settings import environment
from gateway.core.loop.prompt import Profile
from gateway.core.policies.manifest import check_prompt, manifest_of
from gateway.core.pool.workers import PoolFile, Price, WorkerSpec
from gateway.errors import ConductorError, ConfigError
from gateway.service.loop.conducting import (
    PROMPTED_TOKENS_MAX,
    TRAINED_TOKENS_MAX,
    ConductorPlanner,
    ConductorSettings,
)
from policy.engines.endpoint import PatientConductor, client_of
from policy.environments.executor import UNHURRIED_S
from policy.evaluate.options import EvaluationOptions

WORKER = "worker:"
POOL_BYTES_MAX = 1 << 20
UNPRICED = "no --planner-price: planning counts as free"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model behind a URL, as its server describes it. `price`: None where nobody gave one."""

    url: str  # …/v1, without a key
    model: str
    price: Price | None
    timeout_s: float  # of one call
    calls_max: int  # in flight
    key: str | None = field(default=None, repr=False)
    profile: Profile = "guided"
    structured: Structured = "auto"
    version: str = ""  # NAME@VERSION of the manifest that the server shows
    owned_by: str = ""
    quality: int | None = None  # the dial's place in that manifest; None: it reads no dial
    tokens_max: int = TRAINED_TOKENS_MAX
    trained: bool = False  # on prompts of `profile`
    params: Mapping[str, Any] = field(default_factory=dict)  # sent with every call, as the pool file has them
    cannot: tuple[str, ...] = ()

    @property
    def identity(self) -> str:
        """What decides its plans and their cost, without the key."""
        price = self.price or Price()
        dollars = f"{price.input_nano_per_mtok},{price.output_nano_per_mtok}"
        params = f"~{json.dumps(self.params, sort_keys=True)}" if self.params else ""
        return f"endpoint:{self.url}#{self.model}~{self.version}~{self.profile}~{self.tokens_max}~{dollars}{params}"

    def facts(self) -> dict[str, Any]:
        """For the report."""
        price = self.price or Price()
        return {
            "url": self.url,
            "model": self.model,
            "version": self.version or None,
            "owned_by": self.owned_by or None,
            "prompt": self.profile,
            "temperature": 0.0,
            "input_usd_per_mtok": float(price.input_usd_per_mtok),
            "output_usd_per_mtok": float(price.output_usd_per_mtok),
            "price": UNPRICED if self.price is None else "given",
        }

    @asynccontextmanager
    async def open(self, quality: int | None = None) -> AsyncIterator[ConductorPlanner]:
        """A planner at temperature 0. It raises EngineLost. `quality`: the dial; None: the manifest's."""
        quality = self.quality if quality is None else quality
        name, slow = f"{self.url}#{self.model}", f" in {self.timeout_s:g} s; raise --planner-timeout"
        patient = PatientConductor(_client(self), name, self.calls_max, slow)
        settings = ConductorSettings(
            self.profile,
            self.price or Price(),
            UNHURRIED_S,
            tokens_max=self.tokens_max,
            quality=quality,
            trained=self.trained,
        )
        try:
            yield ConductorPlanner(patient, settings)
        finally:
            await patient.close()


def _client(endpoint: Endpoint) -> HttpConductor:
    return client_of(
        endpoint.url,
        endpoint.model,
        endpoint.key,
        structured=endpoint.structured,
        timeout_s=endpoint.timeout_s,
        logprobs=False,
        params=endpoint.params,
        cannot=endpoint.cannot,
    )


# ---------------------------------------------------------------- from its name to what the server says


def is_endpoint(name: str) -> bool:
    """Whether a policy's name stands for a model behind a URL."""
    return name.startswith((WORKER, "http://", "https://"))


async def read_endpoints(options: EvaluationOptions) -> dict[str, Endpoint]:
    """The endpoints among the policies, by name, each as its server describes it. Raises ConfigError, VersionRefused
    for a conductor of another prompt, ConductorError for a server that does not answer."""
    endpoints = {name: _endpoint(name, options) for name in options.policies if is_endpoint(name)}
    return {name: await _describe(name, endpoint) for name, endpoint in endpoints.items()}


def _endpoint(name: str, options: EvaluationOptions) -> Endpoint:
    own: dict[str, Any] = {"tokens_max": PROMPTED_TOKENS_MAX}
    if name.startswith(WORKER):
        spec = _worker(name, options)
        key, price = spec.api_key, spec.price or _price(options.planner_price)
        url, model = spec.url or "", spec.model or ""
        own = {"params": spec.params, "cannot": spec.cannot}
        own["tokens_max"] = min(PROMPTED_TOKENS_MAX, spec.output_tokens_max)
    else:
        url, _, model = name.partition("#")
        key, price = options.planner_key, _price(options.planner_price)
        _check_url(url, model)
    secret = resolve_secret(key, environment()) if key else None
    limits = (options.planner_timeout_s, options.planner_calls)
    return Endpoint(url.rstrip("/"), model, price, *limits, secret, options.planner_prompt, **own)


def _check_url(url: str, model: str) -> None:
    try:
        parts = urlsplit(url)
        bare = not (parts.username or parts.password or parts.query)
    except ValueError:
        raise ConfigError("--policy http…: not a URL; write http(s)://HOST:PORT/v1#MODEL") from None
    if not bare:  # it may hold a key: it is not repeated
        raise ConfigError(
            f"--policy {parts.scheme}://{parts.hostname}…: a URL holds no key; give --planner-key env:NAME"
        )
    if not (parts.hostname and model):
        raise ConfigError(f"--policy {url}: names no host or no model; write http(s)://HOST:PORT/v1#MODEL")


def _worker(name: str, options: EvaluationOptions) -> WorkerSpec:
    path = options.pool_file
    if path is None:
        raise ConfigError(f"--policy {name}: needs --pool-file FILE, the pool file that has this worker")
    pool = _pool_file(path)
    try:
        spec = pool.worker(name.removeprefix(WORKER))
    except KeyError:
        names = ", ".join(spec.name for spec in pool.workers if spec.kind == "openai" and spec.task == "chat")
        raise ConfigError(
            f"--policy {name}: no such worker in {path}; it has {names or 'none that can plan'}"
        ) from None
    if spec.kind != "openai" or spec.task != "chat":
        raise ConfigError(f"--policy {name}: cannot plan: {path} gives it no chat model with a `url` (kind openai)")
    return spec


def _pool_file(path: Path) -> PoolFile:
    try:
        with path.open("rb") as file:
            return PoolFile.model_validate(yaml.safe_load(file.read(POOL_BYTES_MAX)))
    except OSError as error:
        raise ConfigError(f"--pool-file {path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"--pool-file {path}: no pool file ({str(error).splitlines()[0]})") from None


def _price(text: str | None) -> Price | None:
    """The price in `INPUT,OUTPUT`. Raises ConfigError."""
    if text is None:
        return None
    try:
        prompt, plan = (Decimal(part.strip()) for part in text.split(","))
        return Price(input_usd_per_mtok=prompt, output_usd_per_mtok=plan)
    except (ValueError, InvalidOperation):
        raise ConfigError(
            f"--planner-price {text}: write INPUT,OUTPUT in dollars per million tokens, such as 0.15,0.6"
        ) from None


async def _describe(name: str, endpoint: Endpoint) -> Endpoint:
    """The endpoint with the prompt profile, dialect and version that its server names. A server that lists no models,
    or not this one, is asked all the same: its first reply decides."""
    client = _client(endpoint)
    try:
        facts: Mapping[str, Any] = await client.describe()
    except ConductorError as error:
        if error.upstream_status in (401, 403):
            raise ConfigError(f"--policy {name}: {error.message}; give --planner-key env:NAME or file:PATH") from None
        if error.reason in ("down", "slow"):
            raise ConductorError(error.reason, f"--policy {name}: {error.message}") from None
        facts = {}
    finally:
        await client.close()
    return _with_facts(name, endpoint, facts)


def _with_facts(name: str, endpoint: Endpoint, facts: Mapping[str, Any]) -> Endpoint:
    ours = "prompt_version" in facts
    manifest = manifest_of(facts)
    return replace(
        endpoint,
        profile=check_prompt(manifest, f"--policy {name}") if ours else endpoint.profile,
        tokens_max=TRAINED_TOKENS_MAX if ours else endpoint.tokens_max,
        structured="vllm" if ours else "auto",
        version=manifest.id if ours else "",
        owned_by=str(facts.get("owned_by", "")),
        quality=manifest.quality if ours else None,
        trained=ours and manifest.kind != "base",
    )


def planner_lines(planners: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    """A line of the report for each endpoint."""
    return [
        f"Planner `{name}`: model `{each['model']}` at {each['url']}, prompt {each['prompt']}, temperature 0, "
        f"${each['input_usd_per_mtok']:g} and ${each['output_usd_per_mtok']:g} per million tokens"
        + (f" ({UNPRICED})." if each["price"] == UNPRICED else ".")
        for name, each in planners.items()
    ]
