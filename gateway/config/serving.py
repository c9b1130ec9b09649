"""Settings of serving: addresses and servers, requests and conversations, workers, caps, money and log.

The types of settings are here too: their bounds are part of every description in docs/configuration.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, AliasChoices, BaseModel, Field, field_validator, model_validator

from gateway.core.log.alerts import KINDS
from gateway.core.loop.turns.replanning import DISTANCE_MAX, TRIGGERS
from gateway.core.money.amounts import usd_to_nano
from gateway.core.pool.workers import SecretRef


def _check_usd(text: str) -> str:
    usd_to_nano(text)
    return text


Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Bytes = Annotated[int, Field(ge=1024, le=2**40)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Share = Annotated[float, Field(ge=0, le=1)]
Usd = Annotated[str, AfterValidator(_check_usd)]

_HOST = re.compile(r"(?!-)[a-z0-9-]+(\.[a-z0-9-]+)*\.[a-z][a-z0-9-]*[a-z0-9](:\d{1,5})?")
_ORIGIN = re.compile(r"https?://[a-z0-9.-]+(:\d{1,5})?|\*")


class PlacesSettings(BaseModel):
    """Places: where state lives, where Baton listens, and the servers it uses"""

    data_dir: Path = Field(Path(".baton"), description="Directory that holds all state of this installation")
    host: str = Field("127.0.0.1", description="Address that the public API listens on")
    port: Port = Field(8080, description="Port of the public API; 0 takes any free one")
    admin_host: str = Field("127.0.0.1", description="Address that the admin API, health and metrics listen on")
    admin_port: Port = Field(8081, description="Port of the admin API; 0 takes any free one")
    processes: int = Field(
        1, ge=1, le=64, description="Processes that serve the public port; with several, one more watches them"
    )
    port_strict: bool = Field(False, description="Stop where a port is taken; off: take the next free one")
    database_url: str | None = Field(
        None,
        validation_alias=AliasChoices("BATON_DATABASE_URL", "DATABASE_URL"),
        description="PostgreSQL, `postgresql://user:password@host/database`; unset: Baton starts one",
    )
    redis_url: str | None = Field(
        None,
        validation_alias=AliasChoices("BATON_REDIS_URL", "REDIS_URL"),
        description="Redis, `redis://host:6379/0` or `unix:///path`; unset: Baton starts one",
    )
    pepper: SecretRef | None = Field(
        None, description="Secret under key digests, `env:NAME` or `file:PATH`; unset: made once in the data directory"
    )
    first_keys: Literal["auto", "always", "first", "never"] = Field(
        "auto",
        description="When a data directory gets a data and an admin key of its own: always, first (only in a database "
        "without keys), or never; auto: first where `DATABASE_URL` is set, else always",
    )
    show_keys: bool = Field(True, description="Print the first keys when they are made; the image does not")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Level of the program's log")
    log_format: Literal["text", "json"] = Field("text", description="Form of the log's lines: text, or JSON objects")
    otel_url: str = Field(
        "", description="Where traces go by OTLP/HTTP, such as http://collector:4318/v1/traces; empty: nowhere"
    )
    otel_headers: SecretRef | None = Field(
        None, description="Headers of that request, `env:NAME` or `file:PATH` of `name=value,…`; see otel.md"
    )
    otel_service: str = Field("baton", min_length=1, max_length=64, description="`service.name` of the traces")
    otel_content: bool = Field(
        False, description="Traces have prompts and replies, of requests that are logged in full"
    )
    access_log: Literal["off", "errors", "all"] = Field(
        "errors", description="Requests that get a line in the log: none, those with an error, or all"
    )

    @field_validator("redis_url")
    @classmethod
    def _is_redis(cls, url: str | None) -> str | None:
        if url is not None and urlsplit(url).scheme not in ("redis", "rediss", "unix"):
            raise ValueError("write redis://host:6379/0, rediss://… or unix:///path/to/socket")
        return url


class RequestsSettings(BaseModel):
    """Requests: what the public API accepts, and how it behaves"""

    body_bytes_max: Bytes = Field(50 * 2**20, description="Bytes of a request body; a larger one is 413")
    bodies_bytes_max: Bytes = Field(
        128 * 2**20,
        description="Bytes of all bodies over 1 MiB that a process serves at the same time; one too many is 503. They "
        "take about ten times as much memory",
    )
    body_s_max: Seconds = Field(120.0, description="Time for a whole request body; a slower one is 408")
    body_bytes_per_s_min: Count = Field(
        1024, description="Bytes of a body in each second on the average, after 5 s; a slower one is 408"
    )
    header_bytes_max: Bytes = Field(65_536, description="Bytes of all request headers; more are 431")
    messages_max: Count = Field(2000, description="Messages of one request")
    in_flight_max: Count = Field(512, description="Requests served at the same time; a further one is 503")
    outcomes_per_minute: Count = Field(6_000, description="Outcomes that one key may post a minute; more are 429")
    keepalive_s: float = Field(
        10.0, ge=0, le=3600, description="Interval of keep-alive comments on an idle stream; 0: none"
    )
    progress: Literal["off", "on", "reasoning"] = Field(
        "off",
        description="What a stream says of plans and steps where its request does not say: nothing, comments, or "
        "reasoning before the reply",
    )
    strict_fields: bool = Field(False, description="Refuse unknown request fields with 400; off: drop them")
    drain_s: float = Field(30.0, ge=0, le=3600, description="Time for open requests to finish after SIGTERM")
    lame_duck_s: float = Field(
        5.0,
        ge=0,
        le=600,
        description="Time after SIGTERM in which Baton says it is not ready and still serves; 0: none",
    )
    key_cache_s: float = Field(1.0, ge=0, le=60, description="Time for which a revoked key may still work")
    key_stale_s: Seconds = Field(3600.0, description="Time for which a known key works while PostgreSQL is away")
    key_cache_max: Count = Field(10_000, description="Keys held in memory")


class TurnsSettings(BaseModel):
    """Turns: repeated requests, and conversations that continue"""

    idempotency_keep_s: float = Field(
        86_400.0, gt=0, le=7 * 86_400, description="Time for which a reply is kept for its Idempotency-Key"
    )
    idempotency_reply_bytes_max: int = Field(
        16 * 2**20, ge=1024, le=2**30, description="Bytes of a reply that is kept; a larger one is sent once"
    )
    sticky_window_s: float = Field(
        600.0,
        ge=0,
        le=86_400,
        description="Time for which a conversation returns to its last worker; 0: every turn is planned",
    )
    sticky_tools_s: float = Field(
        86_400.0,
        ge=0,
        le=7 * 86_400,
        description="Time for which tool results return to the worker that asked; 0: they are planned",
    )
    sticky_timeout_s: float = Field(
        0.25, gt=0, le=60, description="If the look-up of that worker takes longer, plan the turn"
    )
    replan: str = Field(
        ",".join(TRIGGERS),
        description="What plans such a turn anew, by commas: failure (of the last turn), tool_error (a declared one), "
        "cap (in sight), intent (another one, by meaning), better (a worker, by more than the lost prompt cache); "
        "empty: nothing. See conversations.md",
    )
    replan_distance: float | None = Field(
        None,
        gt=0,
        le=2,
        description="1 − cosine of two user messages above which the later one wants something else; unset: "
        f"{DISTANCE_MAX}, measured, with the embedder `minilm`, and none with others",
    )
    replan_turns_left: int = Field(
        2, ge=1, le=100, description="A cap is in sight where fewer turns like the last one are left"
    )
    replan_gain: float = Field(
        0.1, ge=0, le=1, description="How much of a right answer another worker must gain beyond the lost prompt cache"
    )
    vendor_state_keep_s: float = Field(
        86_400.0,
        ge=0,
        le=7 * 86_400,
        description="Time for which signatures and encrypted reasoning of tool calls are kept for clients that do not "
        "return them; 0: never",
    )

    @field_validator("replan")
    @classmethod
    def _are_triggers(cls, text: str) -> str:
        for name in listed(text):
            if name not in TRIGGERS:
                raise ValueError(f"`{name}` is not one of {', '.join(TRIGGERS)}")
        return text


class BatchesSettings(BaseModel):
    """Batches: files, and requests that are served when live ones leave room; responses in the background"""

    file_bytes_max: Bytes = Field(200 * 2**20, description="Bytes of an uploaded file; a larger one is 413")
    files_bytes_per_key_max: Bytes = Field(2 * 2**30, description="Bytes of all files of one key; more are 413")
    files_keep_s: int = Field(
        30 * 86_400, ge=3600, le=365 * 86_400, description="Time for which a file is kept whose client sets none"
    )
    batch_lines_max: int = Field(
        8,
        ge=0,
        le=1000,
        description="Lines of batches served at the same time, less one for each live request; 0: none",
    )
    batch_cost_usd_max: Usd = Field("10.00", description="Dollars that all lines of one batch may cost")
    batch_lease_s: Seconds = Field(
        30.0, description="Time until another gateway goes on with a dead one's batches and background responses"
    )
    background_max: int = Field(
        64, ge=0, le=10_000, description="Background responses that this gateway makes at the same time; 0: none"
    )
    background_s: Seconds = Field(
        3600.0, description="Time after its request in which a background response must be made, crashes included"
    )

    @property
    def batch_cost_nano_max(self) -> int:
        """`batch_cost_usd_max` in nano-dollars."""
        return usd_to_nano(self.batch_cost_usd_max)


class OutsideSettings(BaseModel):
    """Outside: hosts that images, audio and files may be fetched from, and web pages that may call"""

    media_hosts: str = Field(
        "", description="Hosts (`host` or `host:port`) of `https:` parts, comma-separated; empty: only `data:` parts"
    )
    media_bytes_max: Annotated[int, Field(ge=1024, le=2**30)] = Field(
        36 * 2**20, description="Bytes of one image, audio or file, decoded"
    )
    media_timeout_s: Annotated[float, Field(gt=0, le=600)] = Field(10.0, description="Time to fetch one of them")
    media_fetches_max: Annotated[int, Field(ge=1, le=1000)] = Field(16, description="Fetches of one request")
    cors_origins: str = Field(
        "", description="Origins of web pages that may call the public API, comma-separated; `*`: any; empty: none"
    )

    @field_validator("media_hosts")
    @classmethod
    def _are_hosts(cls, text: str) -> str:
        for host in listed(text):
            if not _HOST.fullmatch(host):
                raise ValueError(f"`{host}` is not a host name such as images.example.com; addresses are not taken")
        return text

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, text: str) -> str:
        for origin in listed(text):
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"`{origin}` is not an origin such as https://app.example.com (no path), or *")
        return text


class AlertsSettings(BaseModel):
    """Alerts: a webhook that is told of budgets, drift, roll-backs, uncertain charges and jobs"""

    alerts_url: str = Field("", description="Webhook that gets alerts, http(s)://…; empty: none. See webhooks.md")
    alerts_secret: SecretRef | None = Field(
        None, description="Secret of their signature, `env:NAME` or `file:PATH` of `whsec_` and base64"
    )
    alerts_kinds: str = Field(
        ",".join(KINDS), description="Kinds of alerts that are sent, comma-separated, of those of the default"
    )

    @field_validator("alerts_url")
    @classmethod
    def _is_webhook(cls, text: str) -> str:
        parts = urlsplit(text)
        if text and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError("write a URL that begins with http:// or https://")
        return text

    @field_validator("alerts_kinds")
    @classmethod
    def _are_kinds(cls, text: str) -> str:
        for kind in listed(text):
            if kind not in KINDS:
                raise ValueError(f"`{kind}` is no kind of alert; there are {', '.join(KINDS)}")
        return text

    @model_validator(mode="after")
    def _is_signed(self) -> AlertsSettings:
        if self.alerts_url and self.alerts_secret is None:
            raise ValueError("BATON_ALERTS_URL needs BATON_ALERTS_SECRET, or nobody could check what it gets")
        return self


class UpstreamSettings(BaseModel):
    """Workers: how they are called"""

    worker_idle_s: Seconds = Field(
        60.0, description="Longest silence inside a worker's stream, where the pool file sets no `chunk_gap_s`"
    )
    worker_first_token_s: Seconds | None = Field(
        None,
        description="Time to the first token of a worker's stream, where the pool file sets no "
        "`first_token_timeout_s`; unset: the worker's `timeout_s`",
    )
    worker_failures_max: int = Field(
        3, ge=0, le=100, description="Failures in a row after which a worker rests; 0: none ever rests"
    )
    worker_rest_s: Seconds = Field(
        10.0, description="The first rest of a worker; each further one is twice as long, until a call succeeds"
    )
    worker_rest_s_max: Seconds = Field(
        600.0, description="The longest rest after 429, 401 and 402; others grow to six times the first one"
    )
    worker_reply_bytes_max: Bytes = Field(16 * 2**20, description="Bytes of one worker's reply")
    worker_connections_max: Count = Field(512, description="Open connections to all workers")
    retry_attempts_max: int = Field(3, ge=1, le=10, description="Attempts at one step, the first included")
    retry_backoff_s: Seconds = Field(0.25, description="First pause between attempts; it doubles, with jitter")
    retry_budget_share: float = Field(
        0.2, gt=0.001, le=1, description="Retries as a share of calls; above it there are none"
    )


def listed(text: str) -> tuple[str, ...]:
    """The items between commas, in lower case, without spaces around them."""
    return tuple(item.strip().lower() for item in text.split(",") if item.strip())


class CapsSettings(BaseModel):
    """Caps: the most one request may do; a key or a request can only lower them"""

    caps_depth_max: int = Field(2, ge=0, le=8, description="Child loops inside child loops")
    caps_rounds_max: int = Field(3, ge=1, le=16, description="Plans of one request")
    caps_steps_max: int = Field(5, ge=1, le=16, description="Steps of one plan")
    caps_parallel_max: int = Field(4, ge=1, le=16, description="Steps that run at the same time")
    caps_calls_max: int = Field(16, ge=1, le=1000, description="Worker calls in all, retries included")
    caps_tokens_max: Count = Field(200_000, description="Tokens in all, planning included")
    caps_cost_usd_max: Usd = Field("0.50", description="Dollars in all")
    caps_wall_s_max: Seconds = Field(300.0, description="Wall-clock time of the whole request")

    @property
    def caps_cost_nano_max(self) -> int:
        """`caps_cost_usd_max` in nano-dollars."""
        return usd_to_nano(self.caps_cost_usd_max)


class MoneySettings(BaseModel):
    """Money and limits: holds, leases, and what happens when Redis is away"""

    money_lease_s: Seconds = Field(
        60.0, description="A gateway silent for 1.5× this lease loses its holds; equal for all on one Redis"
    )
    budget_wait_s: float = Field(
        10.0, ge=0, le=600, description="How long a request waits for money that others hold, before 429 `budget_held`"
    )
    money_sweep_s: Seconds = Field(15.0, description="Interval of the search for abandoned holds")
    rate_limits_fail_open: bool = Field(
        True, description="Serve without rate limits while Redis is away; never without money"
    )
    redis_timeout_s: Seconds = Field(0.2, description="Limit of a Redis command of money; a fifth of it for rates")
    redis_connections_max: Count = Field(
        64, description="Connections to Redis for one script: one takes commands, the others await late replies"
    )


class LogSettings(BaseModel):
    """Log: the journal on disk and its way to PostgreSQL"""

    spool_dir: Path | None = Field(None, description="Directory of the journal; unset: `spool` in the data directory")
    spool_bytes_max: Bytes = Field(
        2**30, description="Bytes not yet in PostgreSQL; beyond, requests are 503 `spool_full`"
    )
    disk_free_bytes_min: int = Field(
        64 * 2**20, ge=0, le=2**40, description="Free bytes of the journal's disk below which `/readyz` is 503"
    )
    spool_segment_bytes: Bytes = Field(16 * 2**20, description="Bytes of one journal file")
    ship_batch_max: Count = Field(2_000, description="Events of one transaction")
    ship_process: bool = Field(True, description="Ship the log in a process of its own; false: in a thread")
    ship_wait_s: Seconds = Field(5.0, description="Time that a read waits for its own writes to reach PostgreSQL")
    retention_days: int = Field(
        0,
        ge=0,
        le=36_500,
        description="Days until rollouts are deleted, where key and organisation set none; 0: never",
    )
    retention_every_s: Seconds = Field(3600.0, description="Interval of the search for rollouts over their time")
    db_connections_max: Count = Field(10, description="Connections to PostgreSQL on the path of requests")
    db_background_connections_max: Count = Field(
        6, description="Connections for reports, administration, versions, jobs and retention"
    )
    db_connect_s: Seconds = Field(5.0, description="Time to connect to PostgreSQL")
    db_statement_s: Seconds = Field(10.0, description="Time for one statement")
