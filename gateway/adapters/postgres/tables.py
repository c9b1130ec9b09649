"""The tables of the log and of what outlives one request, as SQLAlchemy Core describes them.

`migrations/` creates them and those of `admin_tables.py`, `files.py` and `batches.py`; a test holds the two together.

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

from gateway.core.loop.experience.likeness import EMBEDDING_DIM

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
MONTHS_SCHEMA = "months"  # of these parts


_SETTLED = text("kind IN ('posted', 'voided', 'uncertain')")


def timestamp(name: str, **more: Any) -> Column[Any]:
    """A time with its zone. `more`: arguments of Column."""
    return Column(name, DateTime(timezone=True), **more)


def uuid_column(name: str, **more: Any) -> Column[Any]:
    """A UUID, as text in Python. `more`: arguments of Column."""
    return Column(name, Uuid(as_uuid=False), **more)


def required(name: str, kind: Any) -> Column[Any]:
    """A column that is never NULL."""
    return Column(name, kind, nullable=False)


rollouts = Table(
    "rollouts",
    metadata,
    uuid_column("id", primary_key=True),
    required("key_id", Text),
    required("org", Text),
    timestamp("created_at", nullable=False),
    required("policy_requested", Text),
    required("pool_name", Text),
    required("pool_hash", Text),
    Column("pool_revision", Text),
    required("pool", JSONB),
    required("caps", JSONB),
    required("request", JSONB),
    required("completion_id", Text),
    uuid_column("parent_id"),
    required("depth", SmallInteger),
    Column("end_user", Text),
    Column("task_type", Text),
    required("policy_used", Text),
    Column("policy_version", Text),
    Column("policy_assigned", Text),
    Column("fallback", Text),
    Column("capped", Text),
    required("status", Text),
    Column("error", JSONB),
    Column("reply", JSONB),
    required("hold_nano", BigInteger),
    required("cost_nano", BigInteger),
    required("prompt_tokens", BigInteger),
    required("completion_tokens", BigInteger),
    required("overhead_ms", Double),
    timestamp("finished_at"),
    required("stream", Boolean),
    required("log_mode", Text),
    required("train", Boolean),
    required("tags", JSONB),
    Column("task_embedding", ARRAY(REAL)),
    Column("task_embedder", Text),
    Column("request_id", Text),
    Column("turn", JSONB),
    Column("memory", JSONB),
    Index(None, "key_id", "created_at"),
    Index(None, "completion_id"),
    Index(None, "created_at"),
    Index(None, "end_user", "created_at", postgresql_where=text("end_user IS NOT NULL")),
    Index("rollouts_parent_id_idx", "parent_id", postgresql_where=text("parent_id IS NOT NULL")),
    Index(None, "policy_assigned", "created_at", postgresql_where=text("policy_assigned IS NOT NULL")),
    postgresql_partition_by="RANGE (id)",
)

rounds = Table(
    "rounds",
    metadata,
    uuid_column("rollout_id", primary_key=True),
    Column("round", SmallInteger, primary_key=True, autoincrement=False),
    required("planner", Text),
    Column("policy_version", Text),
    Column("prompt_version", Text),
    Column("prompt_hash", Text),
    required("messages", JSONB),
    required("prompt_token_ids", ARRAY(Integer)),
    required("plan_token_ids", ARRAY(Integer)),
    required("plan_logprobs", ARRAY(Double)),
    required("decision_mask", ARRAY(Boolean)),
    Column("plan_text", Text),
    Column("plan", JSONB),
    required("sampling", JSONB),
    Column("schema_hash", Text),
    Column("allowed", JSONB),
    Column("quality", SmallInteger),
    Column("shown", JSONB),
    Column("flags", ARRAY(Text)),
    Column("decision", JSONB),
    Column("refusal", Text),
    required("prompt_tokens", BigInteger),
    required("completion_tokens", BigInteger),
    required("cost_nano", BigInteger),
    timestamp("started_at"),
    timestamp("finished_at"),
    postgresql_partition_by="RANGE (rollout_id)",
)

steps = Table(
    "steps",
    metadata,
    uuid_column("rollout_id", primary_key=True),
    Column("round", SmallInteger, primary_key=True, autoincrement=False),
    Column("step", SmallInteger, primary_key=True, autoincrement=False),
    required("worker", Text),
    required("handle", Text),
    required("kind", Text),
    required("worker_version", Text),
    Column("task", Text),
    required("see", ARRAY(Integer)),
    required("messages", JSONB),
    Column("reply", Text),
    Column("tool_calls", JSONB),
    Column("finish_reason", Text),
    required("status", Text),
    Column("error", Text),
    required("prompt_tokens", BigInteger),
    required("completion_tokens", BigInteger),
    required("usage_estimated", Boolean),
    Column("lowered", JSONB),
    Column("usage_details", JSONB),
    required("cost_nano", BigInteger),
    timestamp("started_at"),
    timestamp("first_byte_at"),
    timestamp("finished_at"),
    required("attempts", JSONB),
    uuid_column("child_rollout_id"),
    postgresql_partition_by="RANGE (rollout_id)",
)

outcomes = Table(
    "outcomes",
    metadata,
    uuid_column("id", primary_key=True),
    uuid_column("rollout_id", nullable=False, index=True),
    required("key_id", Text),
    required("kind", Text),
    Column("value", Double),
    Column("label", Text),
    Column("comment", Text),
    Column("demonstration", JSONB),
    required("source", Text),
    Column("grader_version", Text),
    Column("metadata", JSONB),
    Column("idempotency_key", Text),
    timestamp("created_at", nullable=False),
    Column("step", SmallInteger),
    Column("credited", SmallInteger, nullable=False, server_default=text("0")),
    ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], ondelete="CASCADE"),
    UniqueConstraint("key_id", "idempotency_key"),
    CheckConstraint("kind IN ('number', 'boolean', 'label', 'comment', 'demonstration')", name="kind"),
    CheckConstraint("value BETWEEN 0 AND 1", name="value_range"),
    CheckConstraint("(value IS NOT NULL) = (kind IN ('number', 'boolean'))", name="value_kind"),
)

ledger = Table(
    "ledger",
    metadata,
    uuid_column("event_id", primary_key=True),
    required("hold_id", Text),
    uuid_column("rollout_id", index=True),
    required("kind", Text),
    required("amount_nano", BigInteger),
    required("scopes", JSONB),
    required("detail", JSONB),
    timestamp("at", nullable=False),
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
    uuid_column("rollout_id", primary_key=True),
    Column("round", SmallInteger, primary_key=True, autoincrement=False),
    Column("step", SmallInteger, primary_key=True, autoincrement=False),
    required("worker", Text),
    required("worker_version", Text),
    required("pool_name", Text),
    Column("task_type", Text),
    Column("embedding", Vector(EMBEDDING_DIM)),
    required("success", REAL),
    required("cost_nano", BigInteger),
    required("latency_ms", Integer),
    timestamp("at", nullable=False),
    Column("embedder", Text),
    Column("org", Text, nullable=False, server_default=text("''")),
    Column("key_id", Text, nullable=False, server_default=text("''")),
    Column("source", Text, nullable=False, server_default=text("'client'")),
    Column("weight", REAL, nullable=False, server_default=text("1")),
    timestamp("changed_at", nullable=False, server_default=text("clock_timestamp()")),
    ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], ondelete="CASCADE"),
    Index(None, "worker", "at"),
    Index(None, "pool_name", "worker", "at"),
    Index(None, "org", "worker", "at"),
    Index(None, "changed_at"),
)

sources = Table(
    "sources",
    metadata,
    Column("org", Text, primary_key=True),
    Column("source", Text, primary_key=True),
    required("right_accepted", Double),
    required("right_rejected", Double),
    required("wrong_accepted", Double),
    required("wrong_rejected", Double),
    required("weight_right", REAL),
    required("weight_wrong", REAL),
    timestamp("measured_at", nullable=False),
)

dead_letters = Table(
    "dead_letters",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("kind", Text),
    required("record", LargeBinary),
    required("error", Text),
    timestamp("at", nullable=False, server_default=text("now()")),
)

policy_shadows = Table(
    "policy_shadows",
    metadata,
    uuid_column("id", primary_key=True),
    uuid_column("rollout_id", nullable=False),
    required("version", Text),
    Column("live_version", Text),
    Column("refusal", Text),
    Column("agrees", Boolean),
    required("latency_ms", Double),
    required("live_latency_ms", Double),
    required("prompt_tokens", BigInteger),
    required("completion_tokens", BigInteger),
    required("cost_nano", BigInteger),
    timestamp("at", nullable=False),
    Index(None, "version", "at"),
    Index(None, "rollout_id"),
)

gradings = Table(
    "gradings",
    metadata,
    uuid_column("rollout_id", primary_key=True),
    required("grader", Text),
    required("reference", Text),
    required("state", Text),
    required("attempts", SmallInteger),
    Column("detail", Text),
    uuid_column("outcome_id"),
    timestamp("created_at", nullable=False),
    timestamp("due_at", nullable=False),
    ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], ondelete="CASCADE"),
    CheckConstraint("state IN ('waiting', 'graded', 'ungraded')", name="state"),
    Index("gradings_waiting_idx", "due_at", postgresql_where=text("state = 'waiting'")),
)

continuations = Table(
    "continuations",
    metadata,
    Column("key_id", Text, primary_key=True),
    Column("mark", Text, primary_key=True),
    required("worker", Text),
    uuid_column("rollout_id", nullable=False),
    timestamp("until", nullable=False),
    Column("facts", JSONB),
    Index(None, "until"),
    Index(None, "rollout_id"),  # they are deleted with their rollout
    ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], ondelete="CASCADE"),
)

idempotent_replies = Table(
    "idempotent_replies",
    metadata,
    Column("key_id", Text, primary_key=True),
    Column("digest", LargeBinary, primary_key=True),
    required("fingerprint", LargeBinary),
    uuid_column("claim", nullable=False),
    Column("status", SmallInteger),
    Column("headers", JSONB),
    Column("body", LargeBinary),
    timestamp("created_at", nullable=False),
    timestamp("lease_until", nullable=False),
    Index(None, "created_at"),
    CheckConstraint("(status IS NULL) = (headers IS NULL)", name="whole"),
)
