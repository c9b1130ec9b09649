"""Settings of money and log: caps, holds, and what is stored where and for how long."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, Field

from gateway.config.serving import Bytes, Count, Seconds, Usd
from gateway.core.money.amounts import usd_to_nano


class CapsSettings(BaseModel):
    """Caps: the most one request may do; a key or a request can only lower them"""

    caps_depth_max: int = Field(2, ge=0, le=8, description="Child loops inside child loops")
    caps_rounds_max: int = Field(3, ge=1, le=16, description="Plans of one request")
    caps_steps_max: int = Field(5, ge=1, le=16, description="Steps of one plan")
    caps_parallel_max: int = Field(4, ge=1, le=16, description="Steps that run at the same time")
    caps_calls_max: int = Field(16, ge=1, le=1000, description="Worker calls in all, retries included")
    caps_tokens_max: Count = Field(200_000, description="Tokens in all, planning included")
    caps_cost_usd_max: Usd = Field("0.50", description="Dollars in all")
    caps_wall_s_max: Seconds = Field(120.0, description="Wall-clock time of the whole request")

    @property
    def caps_cost_nano_max(self) -> int:
        """`caps_cost_usd_max` in nano-dollars."""
        return usd_to_nano(self.caps_cost_usd_max)


class MoneySettings(BaseModel):
    """Money and limits: holds, leases, and what happens when Redis is away"""

    money_lease_s: Seconds = Field(
        60.0, description="A gateway silent for 1.5× this lease loses its holds; equal for all on one Redis"
    )
    money_sweep_s: Seconds = Field(15.0, description="Interval of the search for abandoned holds")
    rate_limits_fail_open: bool = Field(
        True, description="Serve without rate limits while Redis is away; never without money"
    )
    redis_timeout_s: Seconds = Field(0.2, description="Limit of a Redis command of money; a fifth of it for rates")
    redis_connections_max: Count = Field(64, description="Connections to Redis")


class LogSettings(BaseModel):
    """Log: the journal on disk and its way to PostgreSQL"""

    spool_dir: Path | None = Field(None, description="Directory of the journal; unset: `spool` in the data directory")
    spool_bytes_max: Bytes = Field(
        2**30, description="Bytes not yet in PostgreSQL; beyond, requests are 503 `spool_full`"
    )
    spool_segment_bytes: Bytes = Field(16 * 2**20, description="Bytes of one journal file")
    ship_batch_max: Count = Field(500, description="Events of one transaction")
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
