"""Every setting and every limit, and the only place that reads the environment.

`load()` gives the frozen `Settings`. A setting `drain_s` is the variable `BATON_DRAIN_S`; a `BATON_*` variable that
is no setting is an error that names the nearest one. `docs/configuration.md` is written from the fields below.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AliasChoices, BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from gateway.config.outside import Outside
from gateway.config.turns import Turns
from gateway.core.loop.experience import HALF_LIFE
from gateway.core.money.amounts import usd_to_nano
from gateway.core.pool.workers import SecretRef
from gateway.errors import ConfigError

PREFIX = "BATON_"
HASHING = "hashing"
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Bytes = Annotated[int, Field(ge=1024, le=2**40)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Share = Annotated[float, Field(ge=0, le=1)]


class Places(BaseModel):
    """Places: where state lives, where Baton listens, and the servers it uses"""

    data_dir: Path = Field(Path(".baton"), description="all state of this installation")
    host: str = Field("127.0.0.1", description="address of the public API")
    port: Port = Field(8080, description="port of the public API; 0: any free one")
    admin_host: str = Field("127.0.0.1", description="address of the admin API, health and metrics")
    admin_port: Port = Field(8081, description="port of the admin API; 0: any free one")
    port_strict: bool = Field(False, description="a taken port is an error; off: the next free one is used")
    database_url: str | None = Field(
        None,
        validation_alias=AliasChoices("BATON_DATABASE_URL", "DATABASE_URL"),
        description="PostgreSQL, `postgresql://user:password@host/database`; unset: an embedded server",
    )
    redis_url: str | None = Field(
        None,
        validation_alias=AliasChoices("BATON_REDIS_URL", "REDIS_URL"),
        description="Redis, `redis://host:6379/0` or `unix:///path`; unset: an embedded server",
    )
    pepper: SecretRef | None = Field(
        None, description="`env:NAME` or `file:PATH` of the secret under key digests; unset: made once in the data dir"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="of the program's own log")


class Planning(BaseModel):
    """Planning: the pool, the conductor, and who plans when"""

    pool: Path | None = Field(None, description="the pool file; unset: the arena's simulated workers")
    default_pool_name: str | None = Field(None, description="pool of keys that name none; unset: the file's `default`")
    conductor: str = Field(
        "embedded",
        description="`embedded` (the one shipped), a policy directory, `worker:NAME` (of the pool), "
        "or `http://host:port/v1#model`",
    )
    conductor_api_key: SecretRef | None = Field(None, description="`env:NAME` or `file:PATH`, for a conductor by URL")
    conductor_input_usd_per_mtok: Decimal | None = Field(
        None, ge=0, le=100_000, description="price of a prompt token; 0 when embedded, required for a URL"
    )
    conductor_output_usd_per_mtok: Decimal | None = Field(
        None, ge=0, le=100_000, description="price of a plan token; 0 when embedded, required for a URL"
    )
    conductor_structured: Literal["auto", "vllm", "json_schema", "json_object", "none"] = Field(
        "auto", description="how the plan's schema is asked for; auto: vllm when embedded, else json_schema"
    )
    conductor_timeout_s: Seconds = Field(10.0, description="a planning call that takes longer goes to the fallback")
    conductor_rounds: int = Field(
        1,
        ge=1,
        le=16,
        description="plans a request may take unless it, or the conductor's manifest, asks for more; with 1 every "
        "reply streams",
    )
    conductor_temperature: float = Field(0.0, ge=0, le=2, description="of planning, outside the exploring share")
    explore_share: Share = Field(
        0.1,
        description="share of requests planned at temperature 1, so that logs can teach; never one that says train: "
        "false",
    )
    plan_prompt: Literal["auto", "compact", "full"] = Field(
        "auto", description="prompt profile; auto: what the conductor's manifest says, full without one"
    )
    plan_tokens_max: Count = Field(512, description="tokens of one plan")
    plan_bytes_max: Bytes = Field(262_144, description="bytes of one plan; longer is refused unread")
    default_policy: Literal["auto", "conductor", "rule"] = Field(
        "auto", description="what `baton` means; auto: the conductor once `conductor_outcomes_min` outcomes exist"
    )
    conductor_outcomes_min: int = Field(
        0, ge=0, le=1_000_000, description="outcomes a pool needs before `auto` trusts the conductor with it"
    )
    rule_w_success: float = Field(1.0, ge=0, le=1000, description="rule: weight of the observed success rate")
    rule_w_latency: float = Field(0.05, ge=0, le=1000, description="rule: weight of 1 / seconds")
    rule_w_cost: float = Field(20.0, ge=0, le=100_000, description="rule: weight of the dollars of one call")
    experience_timeout_s: Seconds = Field(0.1, description="a slower look-up of experience is done without")
    experience_neighbours: Count = Field(200, description="past steps per worker that experience is computed from")
    experience_half_life: float = Field(
        HALF_LIFE,
        gt=0,
        le=1_000_000,
        description="newer steps like it after which a past step counts half; see experience.md",
    )
    embedder: str = Field(
        HASHING,
        description="what says which tasks are alike: `hashing` (in the process), or `http://host:port/v1#model`, an "
        "OpenAI-compatible embeddings endpoint, whose calls are not priced",
    )
    embedder_api_key: SecretRef | None = Field(None, description="`env:NAME` or `file:PATH`, for an embedder by URL")


class Versions(BaseModel):
    """Policy versions: where they lie, which engines hold them, shadow plans and automatic rollback"""

    policies_dir: Path | None = Field(
        None,
        description="directories of the versions; unset: `policies` in the data directory. Gateways that share a "
        "database share this directory",
    )
    policy_engine: Literal["auto", "none", "vllm-lora", "vllm-reload"] = Field(
        "auto",
        description="who holds versions; auto: the embedded conductor's server, for a conductor by URL nobody; "
        "none: one version, no registry",
    )
    policy_engine_urls: str | None = Field(
        None, description="every replica of the conductor's server, comma between; unset: the conductor's URL"
    )
    policy_engine_base: Path | None = Field(
        None, description="the weights a vLLM was started with, as a directory here"
    )
    policy_versions_max: int = Field(16, ge=2, le=1000, description="versions a vLLM holds: its `--max-cpu-loras`")
    policy_rank_max: int = Field(16, ge=1, le=512, description="rank of an adapter: its `--max-lora-rank`")
    policy_poll_s: float = Field(0.5, gt=0, le=10, description="how late a change of versions is seen")
    policy_engine_check_s: Seconds = Field(1.0, description="how late the restart of an engine is seen")
    shadow_share: Share = Field(0.1, description="share of requests that the shadow version plans too")
    shadow_parallel_max: int = Field(1, ge=1, le=64, description="shadow plans at once; more are dropped")
    shadow_usd_max: str = Field("0", description="dollars all shadow plans may cost, where planning has a price")
    watch_look_s: Seconds = Field(5.0, description="how often a canary, or a fresh live version, is compared")
    watch_window_s: Seconds = Field(3600.0, description="how far back it is compared")
    watch_requests_max: Count = Field(2000, description="requests of each version that are compared, the latest")
    watch_requests_min: Count = Field(30, description="requests of each before anything is compared")
    watch_outcomes_min: Count = Field(30, description="outcomes of each before outcomes are compared")
    watch_validity_margin: Share = Field(0.02, description="how much less often its plans may be used")
    watch_errors_margin: Share = Field(0.02, description="how much more often requests may fail")
    watch_outcome_margin: Share = Field(0.03, description="how much lower its outcomes may average")
    watch_cost_margin: float = Field(0.5, ge=0, le=100, description="how much dearer a request may be; 0.5: by half")
    watch_z: float = Field(3.3, ge=1, le=10, description="standard errors by which that must be sure")
    watch_probation_s: Seconds = Field(3600.0, description="how long a new live version is compared with the last one")


class Learning(BaseModel):
    """Learning: the worker that carries out jobs and grades replies, and when a policy is trained again by itself"""

    jobs_worker: bool = Field(True, description="`baton serve` starts a worker; off: `baton worker` runs elsewhere")
    train_python: Path | None = Field(
        None, description="the Python that has what training needs (the train extra); unset: the gateway's own"
    )
    retrain_outcomes_min: int = Field(
        0, ge=0, le=1_000_000, description="new outcomes after which the conductor is trained again; 0: not by that"
    )
    retrain_every_s: float = Field(
        0, ge=0, le=366 * 86_400, description="so long after its last job it is trained again, if outcomes came; 0: not"
    )
    retrain_arguments: str = Field("--env logged", description="of `baton train`, for jobs that the schedule submits")
    retrain_auto: bool = Field(False, description="their version becomes a canary of 1 % when the gate passes it")
    judge_model: str | None = Field(
        None, description="the worker that grades where a request names the grader `judge`; unset: there is no judge"
    )
    judge_budget_usd: str = Field("1.00", description="dollars the judge's key may spend in all")


class Caps(BaseModel):
    """Caps: the most one request may do; a key or a request can only lower them"""

    caps_depth_max: int = Field(2, ge=0, le=8, description="child loops inside child loops")
    caps_rounds_max: int = Field(3, ge=1, le=16, description="plans per request")
    caps_steps_max: int = Field(5, ge=1, le=16, description="steps per plan")
    caps_parallel_max: int = Field(4, ge=1, le=16, description="steps running at the same time")
    caps_calls_max: int = Field(16, ge=1, le=1000, description="worker calls in all, retries included")
    caps_tokens_max: Count = Field(200_000, description="tokens in all, planning included")
    caps_cost_usd_max: str = Field("0.50", description="dollars in all")
    caps_wall_s_max: Seconds = Field(120.0, description="wall-clock of the whole request")


class Requests(BaseModel):
    """Requests: what the public API accepts, and how it behaves"""

    body_bytes_max: Bytes = Field(10 * 2**20, description="bytes of a request body; more is 413")
    header_bytes_max: Bytes = Field(65_536, description="bytes of all request headers; more is 431")
    messages_max: Count = Field(2000, description="messages of one request")
    in_flight_max: Count = Field(512, description="requests being served")
    keepalive_s: float = Field(10.0, ge=0, le=3600, description="an SSE comment this often while nothing else; 0: off")
    strict_fields: bool = Field(False, description="unknown request fields are 400 instead of dropped")
    drain_s: float = Field(30.0, ge=0, le=3600, description="after SIGTERM, time for open requests to finish")
    key_cache_s: float = Field(1.0, ge=0, le=60, description="how long a revoked key may still work")
    key_stale_s: Seconds = Field(3600.0, description="how long a key goes on working while PostgreSQL is away")
    key_cache_max: Count = Field(10_000, description="keys remembered")


class Upstream(BaseModel):
    """Workers: how they are called"""

    worker_idle_s: Seconds = Field(60.0, description="longest silence inside a worker's stream")
    worker_reply_bytes_max: Bytes = Field(16 * 2**20, description="bytes of one worker's reply")
    worker_connections_max: Count = Field(512, description="open connections to all workers")
    retry_attempts_max: int = Field(3, ge=1, le=10, description="attempts at one step, the first included")
    retry_backoff_s: Seconds = Field(0.25, description="first pause between attempts; doubles, with jitter")
    retry_budget_share: float = Field(
        0.2, gt=0.001, le=1, description="retries as a share of calls; above it there are none"
    )


class Money(BaseModel):
    """Money and limits: holds, leases, and what happens when Redis is away"""

    money_lease_s: Seconds = Field(
        60.0,
        description="a gateway not heard of for so long, and half of it more, no longer holds money; the same for all "
        "on one Redis",
    )
    money_sweep_s: Seconds = Field(15.0, description="how often abandoned holds are looked for")
    rate_limits_fail_open: bool = Field(True, description="serve without rate limits while Redis is away; never money")
    redis_timeout_s: Seconds = Field(0.2, description="time for a Redis command of money; a fifth of it for rates")
    redis_connections_max: Count = Field(64, description="connections to Redis")


class Log(BaseModel):
    """Log: the journal on disk and its way to PostgreSQL"""

    spool_dir: Path | None = Field(None, description="journal; unset: `spool` in the data directory")
    spool_bytes_max: Bytes = Field(2**30, description="bytes of journal not yet in PostgreSQL; then 503 `spool_full`")
    spool_segment_bytes: Bytes = Field(16 * 2**20, description="bytes of one journal file")
    ship_batch_max: Count = Field(500, description="events per transaction")
    ship_wait_s: Seconds = Field(5.0, description="how long a read waits for its own writes to be shipped")
    retention_days: int = Field(
        0,
        ge=0,
        le=36_500,
        description="days after which rollouts are deleted, where key and organisation say nothing; "
        "0: never. Money and audit stay",
    )
    retention_every_s: Seconds = Field(3600.0, description="how often rollouts whose time is over are looked for")
    db_connections_max: Count = Field(10, description="connections to PostgreSQL on the path of requests")
    db_background_connections_max: Count = Field(
        6, description="connections to PostgreSQL for reports, administration, policy versions, jobs and retention"
    )
    db_connect_s: Seconds = Field(5.0, description="time to connect to PostgreSQL")
    db_statement_s: Seconds = Field(10.0, description="time for one statement")


MAY_HOLD_SECRETS = frozenset(
    {"database_url", "redis_url", "pepper", "conductor_api_key", "embedder_api_key"}
)  # never echoed
SECTIONS = (Places, Planning, Versions, Learning, Caps, Requests, Turns, Outside, Upstream, Money, Log)


class Settings(
    Log, Money, Upstream, Outside, Turns, Requests, Caps, Learning, Versions, Planning, Places, BaseSettings
):
    """All of the above as one frozen, flat object."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", populate_by_name=True, validate_default=True
    )

    @field_validator("judge_budget_usd", "caps_cost_usd_max", "shadow_usd_max")
    @classmethod
    def _is_money(cls, text: str) -> str:
        usd_to_nano(text)
        return text

    @field_validator("redis_url")
    @classmethod
    def _is_redis(cls, url: str | None) -> str | None:
        if url is not None and urlsplit(url).scheme not in ("redis", "rediss", "unix"):
            raise ValueError("write redis://host:6379/0, rediss://… or unix:///path/to/socket")
        return url

    @field_validator("embedder")
    @classmethod
    def _is_embedder(cls, text: str) -> str:
        parts = urlsplit(text)
        if text != HASHING and not (parts.scheme in ("http", "https") and parts.hostname and parts.fragment):
            raise ValueError(f"write {HASHING}, or http://host:port/v1#model")
        return text

    @model_validator(mode="after")
    def _conductor_is_whole(self) -> Settings:
        if self.conductor_kind == "url":
            parts = urlsplit(self.conductor)
            if not parts.hostname or not parts.fragment:
                raise ValueError(f"conductor `{self.conductor}` names no model; write http://host:port/v1#model")
            if self.conductor_input_usd_per_mtok is None or self.conductor_output_usd_per_mtok is None:
                raise ValueError(
                    "a conductor by URL needs its price, or it would be free: set "
                    "BATON_CONDUCTOR_INPUT_USD_PER_MTOK and BATON_CONDUCTOR_OUTPUT_USD_PER_MTOK (0 is allowed)"
                )
        return self

    @property
    def conductor_kind(self) -> Literal["embedded", "worker", "url", "directory"]:
        """Which of its four forms `conductor` has."""
        if self.conductor == "embedded":
            return "embedded"
        if self.conductor.startswith("worker:"):
            return "worker"
        return "url" if self.conductor.startswith(("http://", "https://")) else "directory"

    @property
    def policies_path(self) -> Path | None:
        """Where policy versions lie; None where no engine holds any."""
        ours = self.conductor_kind in ("embedded", "directory")
        held = self.policy_engine in ("auto",) if ours else self.policy_engine.startswith("vllm")
        return (self.policies_dir or self.data_dir / "policies") if held else None

    @property
    def caps_cost_nano_max(self) -> int:
        """`caps_cost_usd_max` in nano-dollars."""
        return usd_to_nano(self.caps_cost_usd_max)

    @property
    def spool_path(self) -> Path:
        """The journal's directory."""
        return self.spool_dir or self.data_dir / "spool"


@dataclass(frozen=True, slots=True)
class Services:
    """The running servers a gateway is wired to; `cli` starts or finds them, `app.build` uses them.

    `conductor_url` (base URL ending in /v1) and `conductor_model` are None when the conductor is a worker of the pool.
    """

    database_url: str = field(repr=False)
    redis_url: str = field(repr=False)
    pool_file: Path
    pepper: bytes = field(repr=False)
    conductor_url: str | None = None
    conductor_model: str | None = None
    policies: Path | None = None  # None: this conductor has one version and no registry
    engine_key: str | None = field(default=None, repr=False)  # of the routes that load versions


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def load(**given: Any) -> Settings:
    """Settings from the environment; `given` (the command line) wins, its Nones do not count.

    Raises ConfigError with one line per mistake: the variable, what is wrong with it, and the fix.
    """
    _refuse_unknown(os.environ)
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise ConfigError("\n".join(_line(dict(detail)) for detail in error.errors())) from None


def environment() -> dict[str, str]:
    """A copy of the environment, for what looks up secret references (`env:NAME`) and for child processes."""
    return dict(os.environ)


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    known = [variable(name) for name in Settings.model_fields]
    lines = []
    for name in sorted(name for name in environ if name.startswith(PREFIX) and name not in known):
        near = difflib.get_close_matches(name, known, n=1)
        fix = f"did you mean {near[0]}?" if near else "unset it; docs/configuration.md lists every setting"
        lines.append(f"{name}: no such setting; {fix}")
    if lines:
        raise ConfigError("\n".join(lines))


def _line(detail: Mapping[str, Any]) -> str:
    message = str(detail["msg"]).removeprefix("Value error, ")
    if not detail["loc"]:
        return message
    name = str(detail["loc"][0]).lower().removeprefix(PREFIX.lower())
    field = Settings.model_fields.get(name)
    if field is None:
        return f"{name}: no such setting; docs/configuration.md lists every setting"
    shown = "" if name in MAY_HOLD_SECRETS else f"={detail['input']}"
    return f"{variable(name)}{shown}: {message} ({field.description}; default {field.default})"
