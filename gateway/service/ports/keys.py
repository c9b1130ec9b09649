"""Keys and organisations as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class OrgRow:
    """One organisation as stored. Nano-dollars by window as in `core.access.keys.Allowance`. None: not limited."""

    name: str
    created_at: datetime
    budget_nano: int | None = None
    budget_month_nano: int | None = None
    budget_day_nano: int | None = None
    user_budget_nano: int | None = None
    user_budget_month_nano: int | None = None
    user_budget_day_nano: int | None = None
    rpm: int | None = None
    tpm: int | None = None
    concurrency: int | None = None
    retention_days: int | None = None  # of texts; None: as the settings say
    closed_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One API key as stored: never the secret, only its HMAC digest."""

    public_id: str
    key_class: str  # "data" | "admin"
    name: str
    digest: bytes
    pepper_version: int
    org: str
    pools: tuple[str, ...]
    workers: tuple[str, ...]  # empty: every worker of its pools
    budget_nano: int | None
    rpm: int | None
    tpm: int | None
    concurrency: int | None
    caps: Mapping[str, Any]
    log_mode: str  # "full" | "redacted" | "metadata"
    train: bool
    created_at: datetime
    revoked_at: datetime | None = None
    budget_month_nano: int | None = None
    budget_day_nano: int | None = None
    user_budget_nano: int | None = None  # of each end user
    user_budget_month_nano: int | None = None
    user_budget_day_nano: int | None = None
    retention_days: int | None = None  # None: as its organisation says
    previous_digest: bytes | None = None  # of the secret before a rotation, which counts until `previous_until`
    previous_pepper_version: int | None = None
    previous_until: datetime | None = None
    organisation: OrgRow | None = None  # read beside it; None: an organisation nobody made, without limits
