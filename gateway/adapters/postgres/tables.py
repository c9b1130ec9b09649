"""The tables of the log, as SQLAlchemy Core describes them. `migrations/` creates them; a test holds the two together.

Columns are named after the fields of `core/log/rollout.py`. Two conversions, everywhere: `*_us` (microseconds since the
epoch) becomes `*_at` (timestamptz, which keeps the microseconds), and a nested record becomes jsonb.
"""

from __future__ import annotations

from typing import Any

from pgvector.sqlalchemy import Vector
from sqlalchemy import (
    ARRAY,
    REAL,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects import postgresql

from gateway.core.loop.experience import EMBEDDING_DIM

metadata = MetaData(
    naming_convention={
        "pk": "%(table_name)s_pkey",
        "fk": "%(table_name)s_%(column_0_name)s_fkey",
        "uq": "%(table_name)s_%(column_0_N_name)s_key",
        "ix": "%(table_name)s_%(column_0_N_name)s_idx",
        "ck": "%(table_name)s_%(constraint_name)s_check",
    }
)
JSONB = postgresql.JSONB(none_as_null=True)  # a missing value is SQL NULL, never the JSON text `null`
SETTLED = ("posted", "voided", "uncertain")
MODEL_KINDS = ("openai", "litellm")
# Tables with a part for each month, by the column that says which; `months.*_rest` have what is of none of those. Parts
# of the latter two refer to the same month's of the first, with ON DELETE CASCADE (docs/adr/0018).
MONTHLY = {"rollouts": "id", "rounds": "rollout_id", "steps": "rollout_id"}


_SETTLED = text("kind IN ('posted', 'voided', 'uncertain')")


def _at(name: str, **more: Any) -> Column[Any]:
    return Column(name, DateTime(timezone=True), **more)


def _id(name: str, **more: Any) -> Column[Any]:
    return Column(name, Uuid(as_uuid=False), **more)


def _need(name: str, kind: Any) -> Column[Any]:
    return Column(name, kind, nullable=False)


keys = Table(
    "keys",
    metadata,
    Column("public_id", Text, primary_key=True),
    _need("key_class", Text),
    _need("name", Text),
    _need("digest", LargeBinary),
    _need("pepper_version", Integer),
    _need("org", Text),
    _need("pools", ARRAY(Text)),
    _need("workers", ARRAY(Text)),
    Column("budget_nano", BigInteger),
    Column("rpm", Integer),
    Column("tpm", Integer),
    Column("concurrency", Integer),
    _need("caps", JSONB),
    _need("log_mode", Text),
    _need("train", Boolean),
    _at("created_at", nullable=False),
    _at("revoked_at"),
    Column("budget_month_nano", BigInteger),
    Column("budget_day_nano", BigInteger),
    Column("user_budget_nano", BigInteger),
    Column("user_budget_month_nano", BigInteger),
    Column("user_budget_day_nano", BigInteger),
    Column("retention_days", Integer),
    Column("previous_digest", LargeBinary),
    Column("previous_pepper_version", Integer),
    _at("previous_until"),
    CheckConstraint("retention_days > 0", name="retention"),
    CheckConstraint("key_class IN ('data', 'admin')", name="class"),
    CheckConstraint("log_mode IN ('full', 'redacted', 'metadata')", name="log_mode"),
)

rollouts = Table(
    "rollouts",
    metadata,
    _id("id", primary_key=True),
    _need("key_id", Text),
    _need("org", Text),
    _at("created_at", nullable=False),
    _need("policy_requested", Text),
    _need("pool_name", Text),
    _need("pool_hash", Text),
    Column("pool_revision", Text),
    _need("pool", JSONB),
    _need("caps", JSONB),
    _need("request", JSONB),
    _need("completion_id", Text),
    _id("parent_id"),
    _need("depth", SmallInteger),
    Column("end_user", Text),
    Column("task_type", Text),
    _need("policy_used", Text),
    Column("policy_version", Text),
    Column("policy_assigned", Text),
    Column("fallback", Text),
    Column("capped", Text),
    _need("status", Text),
    Column("error", JSONB),
    Column("reply", JSONB),
    _need("hold_nano", BigInteger),
    _need("cost_nano", BigInteger),
    _need("prompt_tokens", BigInteger),
    _need("completion_tokens", BigInteger),
    _need("overhead_ms", Double),
    _at("finished_at"),
    _need("stream", Boolean),
    _need("log_mode", Text),
    _need("train", Boolean),
    _need("tags", JSONB),
    Column("task_embedding", ARRAY(REAL)),
    Index(None, "key_id", "created_at"),
    Index(None, "completion_id"),
    Index(None, "created_at"),
    Index("rollouts_parent_id_idx", "parent_id", postgresql_where=text("parent_id IS NOT NULL")),
    Index(None, "policy_assigned", "created_at", postgresql_where=text("policy_assigned IS NOT NULL")),
    postgresql_partition_by="RANGE (id)",
)

rounds = Table(
    "rounds",
    metadata,
    _id("rollout_id", primary_key=True),
    Column("round", SmallInteger, primary_key=True, autoincrement=False),
    _need("planner", Text),
    Column("policy_version", Text),
    Column("prompt_version", Text),
    Column("prompt_hash", Text),
    _need("messages", JSONB),
    _need("prompt_token_ids", ARRAY(Integer)),
    _need("plan_token_ids", ARRAY(Integer)),
    _need("plan_logprobs", ARRAY(Double)),
    _need("decision_mask", ARRAY(Boolean)),
    Column("plan_text", Text),
    Column("plan", JSONB),
    _need("sampling", JSONB),
    Column("schema_hash", Text),
    Column("allowed", JSONB),
    Column("quality", SmallInteger),
    Column("refusal", Text),
    _need("prompt_tokens", BigInteger),
    _need("completion_tokens", BigInteger),
    _need("cost_nano", BigInteger),
    _at("started_at"),
    _at("finished_at"),
    postgresql_partition_by="RANGE (rollout_id)",
)

steps = Table(
    "steps",
    metadata,
    _id("rollout_id", primary_key=True),
    Column("round", SmallInteger, primary_key=True, autoincrement=False),
    Column("step", SmallInteger, primary_key=True, autoincrement=False),
    _need("worker", Text),
    _need("handle", Text),
    _need("kind", Text),
    _need("worker_version", Text),
    Column("task", Text),
    _need("see", ARRAY(Integer)),
    _need("messages", JSONB),
    Column("reply", Text),
    Column("tool_calls", JSONB),
    Column("finish_reason", Text),
    _need("status", Text),
    Column("error", Text),
    _need("prompt_tokens", BigInteger),
    _need("completion_tokens", BigInteger),
    _need("usage_estimated", Boolean),
    _need("cost_nano", BigInteger),
    _at("started_at"),
    _at("first_byte_at"),
    _at("finished_at"),
    _need("attempts", JSONB),
    _id("child_rollout_id"),
    postgresql_partition_by="RANGE (rollout_id)",
)

outcomes = Table(
    "outcomes",
    metadata,
    _id("id", primary_key=True),
    _id("rollout_id", nullable=False, index=True),
    _need("key_id", Text),
    _need("kind", Text),
    Column("value", Double),
    Column("label", Text),
    Column("comment", Text),
    Column("demonstration", JSONB),
    _need("source", Text),
    Column("grader_version", Text),
    Column("metadata", JSONB),
    Column("idempotency_key", Text),
    _at("created_at", nullable=False),
    ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], ondelete="CASCADE"),
    UniqueConstraint("key_id", "idempotency_key"),
    CheckConstraint("kind IN ('number', 'boolean', 'label', 'comment', 'demonstration')", name="kind"),
    CheckConstraint("value BETWEEN 0 AND 1", name="value_range"),
    CheckConstraint("(value IS NOT NULL) = (kind IN ('number', 'boolean'))", name="value_kind"),
)

ledger = Table(
    "ledger",
    metadata,
    _id("event_id", primary_key=True),
    _need("hold_id", Text),
    _id("rollout_id", index=True),
    _need("kind", Text),
    _need("amount_nano", BigInteger),
    _need("scopes", JSONB),
    _need("detail", JSONB),
    _at("at", nullable=False),
    Index(None, "hold_id"),
    Index(
        "ledger_settled_once",
        "hold_id",
        unique=True,
        postgresql_where=_SETTLED,
    ),
    CheckConstraint("kind IN ('hold', 'dispatched', 'posted', 'voided', 'uncertain', 'credit')", name="kind"),
    CheckConstraint("amount_nano BETWEEN 0 AND 9007199254740991", name="amount"),
)

experience = Table(
    "experience",
    metadata,
    _id("rollout_id", primary_key=True),
    Column("round", SmallInteger, primary_key=True, autoincrement=False),
    Column("step", SmallInteger, primary_key=True, autoincrement=False),
    _need("worker", Text),
    _need("worker_version", Text),
    _need("pool_name", Text),
    Column("task_type", Text),
    Column("embedding", Vector(EMBEDDING_DIM)),
    _need("success", REAL),
    _need("cost_nano", BigInteger),
    _need("latency_ms", Integer),
    _at("at", nullable=False),
    ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], ondelete="CASCADE"),
    Index(None, "worker", "at"),
    Index(None, "pool_name"),
)

dead_letters = Table(
    "dead_letters",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("kind", Text),
    _need("record", LargeBinary),
    _need("error", Text),
    _at("at", nullable=False, server_default=text("now()")),
)

policy_versions = Table(
    "policy_versions",
    metadata,
    Column("name", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    _need("state", Text),
    Column("parent", Text),
    Column("previous", Integer),
    Column("percent", SmallInteger),
    _need("directory", Text),
    _need("manifest", JSONB),
    Column("gate", JSONB),
    _at("created_at", nullable=False),
    _at("changed_at", nullable=False),
    CheckConstraint("number >= 0", name="number"),
    CheckConstraint("state IN ('candidate', 'shadow', 'canary', 'live', 'retired')", name="state"),
    CheckConstraint("percent IN (1, 5, 25, 100)", name="percent"),
    CheckConstraint("(percent IS NOT NULL) = (state = 'canary')", name="percent_state"),
    Index("policy_versions_one_shadow", "name", unique=True, postgresql_where=text("state = 'shadow'")),
    Index("policy_versions_one_canary", "name", unique=True, postgresql_where=text("state = 'canary'")),
    Index("policy_versions_one_live", "name", unique=True, postgresql_where=text("state = 'live'")),
)

policy_events = Table(
    "policy_events",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    _need("name", Text),
    _need("number", Integer),
    _need("what", Text),
    Column("was", Text),
    _need("state", Text),
    Column("percent", SmallInteger),
    _need("who", Text),
    _need("why", Text),
    _need("forced", Boolean),
    _need("detail", JSONB),
    _at("at", nullable=False),
    ForeignKeyConstraint(["name", "number"], ["policy_versions.name", "policy_versions.number"]),
    Index(None, "name", "id"),
)

policy_shadows = Table(
    "policy_shadows",
    metadata,
    _id("id", primary_key=True),
    _id("rollout_id", nullable=False),
    _need("version", Text),
    Column("live_version", Text),
    Column("refusal", Text),
    Column("agrees", Boolean),
    _need("latency_ms", Double),
    _need("live_latency_ms", Double),
    _need("prompt_tokens", BigInteger),
    _need("completion_tokens", BigInteger),
    _need("cost_nano", BigInteger),
    _at("at", nullable=False),
    Index(None, "version", "at"),
    Index(None, "rollout_id"),
)
