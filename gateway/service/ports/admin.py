"""The ports of administration: organisations, keys, credits, their audit, retention, and what an operator reads.

Every change writes its audit entry in the same transaction: both are stored, or neither. Every call raises Unavailable
when the store is away.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from gateway.core.access.audit import Act, Anchor, Link

if TYPE_CHECKING:
    from gateway.core.log.counterfactual import JudgedPlan  # it loads numpy, which the CLI's help does not need

# ---------------------------------------------------------------- keys, organisations, credits


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
    retention_days: int | None = None  # of texts; None: that of the settings
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
    retention_days: int | None = None  # None: the organisation's
    previous_digest: bytes | None = None  # the digest before a rotation, valid until `previous_until`
    previous_pepper_version: int | None = None
    previous_until: datetime | None = None
    role: str | None = None  # of an admin key: "admin" | "operator" | "auditor"; None: "admin"
    judges: bool = True  # whether its outcomes are taken
    signals: bool = True  # whether its requests are judged by what its clients do next
    worth: Mapping[str, Any] | None = None  # of a right answer: usd, seconds; None: as pool and settings say
    organisation: OrgRow | None = None  # None: it was never created, and has no limits


@dataclass(frozen=True, slots=True)
class Credit:
    """Money given back: `amount_nano` in each of `scopes`. `hold_id`: the charge it gives back, None for a top-up."""

    id: str
    hold_id: str | None
    amount_nano: int
    scopes: tuple[str, ...]
    at: datetime
    by: str
    why: str


@dataclass(frozen=True, slots=True)
class UncertainCharge:
    """A charge that no reply confirmed: what was dispatched before a crash, at its worst case. `credited_nano`: what an
    operator has given back of it."""

    hold_id: str
    rollout_id: str | None
    amount_nano: int
    credited_nano: int
    scopes: tuple[str, ...]
    at: datetime


@dataclass(frozen=True, slots=True)
class CreditRequest:
    """A credit before it is given. With `charge`: the hold or rollout whose charge to give back, with `amount_nano`
    None for all that is left of it. Otherwise with `scope`, for a top-up. The same `id` again is the same credit."""

    id: str
    amount_nano: int | None
    charge: str | None = None
    scope: str | None = None


class AdminStore(Protocol):
    """Keys and organisations, for operators."""

    async def key_insert(self, key: KeyRow, act: Act) -> None:
        """Store a key. Raises Conflict when its id exists, BadRequest(org) for an unknown or closed organisation."""
        ...

    async def key_list(self, limit: int, before: str | None = None, text: str | None = None) -> Sequence[KeyRow]:
        """Return up to `limit` keys, revoked ones too, newest first; after the key whose id is `before`, and with
        `text` in their id, name or organisation, in capitals or not. None after a key that does not exist."""
        ...

    async def key_budgets(self, limit: int, after: str = "", among: Collection[str] | None = None) -> Sequence[KeyRow]:
        """Return up to `limit` keys that are not revoked and have a budget, by id: those that follow the id `after`, or
        of the ids `among` alone."""
        ...

    async def key_exists(self) -> bool:
        """Return whether there is a key that is not revoked."""
        ...

    async def key_find(self, public_id: str) -> KeyRow | None: ...

    async def key_change(self, public_id: str, changes: Mapping[str, Any], act: Act, what: str) -> KeyRow | None:
        """Change those columns and return the key, None if there is no such key. An update without changes is not
        audited. Raises Conflict for a revoked key."""
        ...

    async def key_revoke(self, public_id: str, at: datetime, act: Act) -> KeyRow | None:
        """Revoke a key and return it, None if there is no such key. A second call keeps the first time of
        revocation."""
        ...

    async def org_insert(self, org: OrgRow, act: Act) -> None:
        """Store an organisation. Raises Conflict when the name is taken."""
        ...

    async def org_list(self) -> Sequence[OrgRow]:
        """Return every organisation by name, closed ones too."""
        ...

    async def org_get(self, name: str) -> OrgRow | None: ...

    async def org_change(self, name: str, changes: Mapping[str, Any], act: Act, what: str) -> OrgRow | None:
        """As `key_change`; raises Conflict for a closed organisation."""
        ...

    async def credit(self, request: CreditRequest, at: datetime, act: Act) -> tuple[Credit, bool]:
        """Give a credit; return it, and whether it is new. Raises NotFound for an unknown charge, Conflict for a charge
        that is not settled or has less left, and for an id of another credit."""
        ...

    async def credits(self, limit: int) -> Sequence[Credit]:
        """Credits, newest first."""
        ...

    async def uncertain(self, limit: int, hold_id: str | None = None) -> Sequence[UncertainCharge]:
        """Uncertain charges, newest first, credited ones too; of one hold, where it is named."""
        ...


# ---------------------------------------------------------------- the audit


class AuditLog(Protocol):
    """The audit, for its readers."""

    async def head(self) -> Anchor:
        """Return the end of the chain; number 0 for an empty one."""
        ...

    async def walk(self, after: int, limit: int) -> Sequence[Link]:
        """Return entries after number `after`, oldest first."""
        ...

    async def latest(
        self,
        limit: int,
        before: int | None = None,
        target: str | None = None,
        actor: str | None = None,
        act: str | None = None,
    ) -> Sequence[Link]:
        """Return entries, newest first: before number `before`, and of one target, actor and act, or all."""
        ...


class Anchors(Protocol):
    """A record of the heads of the audit, outside the database."""

    async def add(self, anchor: Anchor, at: datetime) -> None:
        """Record a head; it is durable when this returns."""
        ...

    async def all(self) -> Sequence[Anchor]: ...


# ---------------------------------------------------------------- retention


@dataclass(frozen=True, slots=True)
class DroppedMonth:
    """A month of the log whose tables were dropped, or would be: rollouts by key, and the rows deleted with them."""

    month: str
    rollouts: Mapping[str, int]
    rounds: int
    steps: int


@dataclass(frozen=True, slots=True)
class SweepReport:
    """The rows that a sweep of the retention deleted, or would delete: whole `months`, then rollouts by key and other
    rows, one by one. `held`: months whose time is over that are in use; the next sweep tries them again."""

    rollouts: Mapping[str, int] = field(default_factory=dict)
    shadows: int = 0
    dead_letters: int = 0
    months: Sequence[DroppedMonth] = ()
    held: Sequence[str] = ()

    @property
    def by_row(self) -> int:
        """Rows that were deleted one by one."""
        return sum(self.rollouts.values()) + self.shadows + self.dead_letters

    @property
    def total(self) -> int:
        """The number of rollouts, and of the other rows."""
        return self.by_row + sum(sum(month.rollouts.values()) for month in self.months)


class RetentionStore(Protocol):
    """The log, for the retention."""

    async def sweep(self, now: datetime, days: int | None, act: Act, *, dry: bool = False) -> SweepReport:
        """Delete rollouts, with all that refers to them, that are older than their key's `retention_days`, else their
        organisation's, else `days` (None: never). Months with nothing to keep are dropped, other rows are deleted one
        by one; ledger and audit stay. Also make the tables of this month and the next. `dry`: only count. Does nothing
        while another gateway sweeps."""
        ...


# ---------------------------------------------------------------- reports


STATUSES = ("done", "failed", "aborted", "fallback", "capped")  # the last two: done, with a restriction


@dataclass(frozen=True, slots=True)
class RolloutsQuery:
    """A page of rollouts. None: any.

    `before`: the `next` of the page before it. `policy`: asked for, in use, or the version. `status`: one of STATUSES.
    `fault`: the cause of a fallback, a cap, or the code of an error. `judged`: whether it has an outcome as a whole.
    `tag`: a name of the request's `metadata`, and its value or None for any. `text`: in its messages or its reply.
    """

    limit: int
    before: str | None = None
    key: str | None = None
    policy: str | None = None
    status: str | None = None
    worker: str | None = None
    fault: str | None = None
    user: str | None = None
    text: str | None = None
    tag: tuple[str, str | None] | None = None
    since: datetime | None = None
    until: datetime | None = None
    judged: bool | None = None
    outcome_min: float | None = None
    outcome_max: float | None = None
    cost_min_nano: int | None = None
    cost_max_nano: int | None = None


class Reports(Protocol):
    """Figures and rollouts of every key, for the operator. All of it is JSON-able. Raises Unavailable when the log is
    away."""

    async def overview(self, until: datetime, window_s: int) -> Mapping[str, Any]:
        """{since, until, truncated, totals, series, by_key, by_policy, by_worker} of the `window_s` seconds to `until`:
        requests, errors, fallbacks, nano-dollars, quantiles of latency and overhead in milliseconds."""
        ...

    async def spend(self, until: datetime, days: int) -> Mapping[str, Any]:
        """{since, until, truncated, by_key, by_worker} of the `days` that end with today: nano-dollars by UTC day."""
        ...

    async def open_holds(self, now: datetime) -> Sequence[Mapping[str, Any]]:
        """Return holds that nothing settled, newest first."""
        ...

    async def workers(self, until: datetime, window_s: int, names: Sequence[str]) -> Mapping[str, Any]:
        """{calls, errors, success, sources}: by worker, of the `window_s` seconds to `until`; success by kind of task,
        from 0 to 1, of the named workers' latest judged steps; how far each source of outcomes is believed."""
        ...

    async def rollouts_page(self, query: RolloutsQuery) -> Mapping[str, Any]:
        """{data, next, scanned_to}: lines of top-level rollouts, newest first, without any text. Where the search of
        one page ended early, `scanned_to` is the time back to which it looked. Raises BadRequest(before)."""
        ...

    async def rollout_any(self, rollout_id: str) -> Mapping[str, Any] | None:
        """`Store.rollout_get` for the operator: any key's rollout, by rollout or completion id."""
        ...

    async def judged_plans(self, rollout_id: str, key: str | None) -> tuple[str, Sequence[JudgedPlan]]:
        """(what they have in common, the plans) of judged requests like a rollout, of its organisation. `key`: of this
        key alone."""
        ...
