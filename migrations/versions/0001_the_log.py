"""The log: keys, rollouts with their rounds and steps, outcomes, the money ledger, experience, dead letters."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from pgvector.sqlalchemy import Vector
from sqlalchemy import Column
from sqlalchemy.dialects.postgresql import JSONB, UUID

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

at = sa.DateTime(timezone=True)


def upgrade() -> None:
    _keys()
    _rollouts()
    _rounds()
    _steps()
    _outcomes()
    _ledger()
    _experience()
    _dead_letters()


def downgrade() -> None:
    """Drops every table. The extension stays: other schemas of the database may use it."""
    for table in ("dead_letters", "experience", "ledger", "outcomes", "steps", "rounds", "rollouts", "keys"):
        op.drop_table(table)


def _embedding_type() -> Any:
    """pgvector where the server has it; else a plain array, which stores the same but is not searched."""
    found = "SELECT count(*) FROM pg_available_extensions WHERE name = 'vector'"
    if not op.get_bind().scalar(sa.text(found)):
        return sa.ARRAY(sa.REAL)
    try:
        with op.get_bind().begin_nested():
            op.execute("CREATE EXTENSION IF NOT EXISTS vector")
    except sa.exc.ProgrammingError:  # there, but this role may not create it
        return sa.ARRAY(sa.REAL)
    return Vector(256)


def _keys() -> None:
    op.create_table(
        "keys",
        Column("public_id", sa.Text, nullable=False),
        Column("key_class", sa.Text, nullable=False),
        Column("name", sa.Text, nullable=False),
        Column("digest", sa.LargeBinary(), nullable=False),
        Column("pepper_version", sa.Integer, nullable=False),
        Column("org", sa.Text, nullable=False),
        Column("pools", sa.ARRAY(sa.Text), nullable=False),
        Column("workers", sa.ARRAY(sa.Text), nullable=False),
        Column("budget_nano", sa.BigInteger),
        Column("rpm", sa.Integer),
        Column("tpm", sa.Integer),
        Column("concurrency", sa.Integer),
        Column("caps", JSONB, nullable=False),
        Column("log_mode", sa.Text, nullable=False),
        Column("train", sa.Boolean, nullable=False),
        Column("created_at", at, nullable=False),
        Column("revoked_at", at),
        sa.CheckConstraint("key_class IN ('data', 'admin')", name="class"),
        sa.CheckConstraint("log_mode IN ('full', 'redacted', 'metadata')", name="log_mode"),
        sa.PrimaryKeyConstraint("public_id", name="keys_pkey"),
    )


def _rollouts() -> None:
    op.create_table(
        "rollouts",
        Column("id", UUID, nullable=False),
        Column("key_id", sa.Text, nullable=False),
        Column("org", sa.Text, nullable=False),
        Column("created_at", at, nullable=False),
        Column("policy_requested", sa.Text, nullable=False),
        Column("pool_name", sa.Text, nullable=False),
        Column("pool_hash", sa.Text, nullable=False),
        Column("pool", JSONB, nullable=False),
        Column("caps", JSONB, nullable=False),
        Column("request", JSONB, nullable=False),
        Column("completion_id", sa.Text, nullable=False),
        Column("parent_id", UUID),
        Column("depth", sa.SmallInteger, nullable=False),
        Column("end_user", sa.Text),
        Column("task_type", sa.Text),
        Column("policy_used", sa.Text, nullable=False),
        Column("policy_version", sa.Text),
        Column("fallback", sa.Text),
        Column("capped", sa.Text),
        Column("status", sa.Text, nullable=False),
        Column("error", JSONB),
        Column("reply", JSONB),
        Column("hold_nano", sa.BigInteger, nullable=False),
        Column("cost_nano", sa.BigInteger, nullable=False),
        Column("prompt_tokens", sa.BigInteger, nullable=False),
        Column("completion_tokens", sa.BigInteger, nullable=False),
        Column("overhead_ms", sa.Double, nullable=False),
        Column("finished_at", at),
        Column("stream", sa.Boolean, nullable=False),
        Column("log_mode", sa.Text, nullable=False),
        Column("train", sa.Boolean, nullable=False),
        Column("tags", JSONB, nullable=False),
        Column("task_embedding", sa.ARRAY(sa.REAL())),
        sa.PrimaryKeyConstraint("id", name="rollouts_pkey"),
    )
    op.create_index("rollouts_completion_id_idx", "rollouts", ["completion_id"])
    op.create_index("rollouts_created_at_idx", "rollouts", ["created_at"])
    op.create_index("rollouts_key_id_created_at_idx", "rollouts", ["key_id", "created_at"])
    op.create_index(
        "rollouts_parent_id_idx", "rollouts", ["parent_id"], postgresql_where=sa.text("parent_id IS NOT NULL")
    )


def _rounds() -> None:
    op.create_table(
        "rounds",
        Column("rollout_id", UUID, nullable=False),
        Column("round", sa.SmallInteger, autoincrement=False, nullable=False),
        Column("planner", sa.Text, nullable=False),
        Column("policy_version", sa.Text),
        Column("prompt_version", sa.Text),
        Column("prompt_hash", sa.Text),
        Column("messages", JSONB, nullable=False),
        Column("prompt_token_ids", sa.ARRAY(sa.Integer), nullable=False),
        Column("plan_token_ids", sa.ARRAY(sa.Integer), nullable=False),
        Column("plan_logprobs", sa.ARRAY(sa.Double), nullable=False),
        Column("decision_mask", sa.ARRAY(sa.Boolean), nullable=False),
        Column("plan_text", sa.Text),
        Column("plan", JSONB),
        Column("sampling", JSONB, nullable=False),
        Column("schema_hash", sa.Text),
        Column("refusal", sa.Text),
        Column("prompt_tokens", sa.BigInteger, nullable=False),
        Column("completion_tokens", sa.BigInteger, nullable=False),
        Column("cost_nano", sa.BigInteger, nullable=False),
        Column("started_at", at),
        Column("finished_at", at),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name="rounds_rollout_id_fkey", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("rollout_id", "round", name="rounds_pkey"),
    )


def _steps() -> None:
    op.create_table(
        "steps",
        Column("rollout_id", UUID, nullable=False),
        Column("round", sa.SmallInteger, autoincrement=False, nullable=False),
        Column("step", sa.SmallInteger, autoincrement=False, nullable=False),
        Column("worker", sa.Text, nullable=False),
        Column("handle", sa.Text, nullable=False),
        Column("kind", sa.Text, nullable=False),
        Column("worker_version", sa.Text, nullable=False),
        Column("task", sa.Text),
        Column("see", sa.ARRAY(sa.Integer), nullable=False),
        Column("messages", JSONB, nullable=False),
        Column("reply", sa.Text),
        Column("tool_calls", JSONB),
        Column("finish_reason", sa.Text),
        Column("status", sa.Text, nullable=False),
        Column("error", sa.Text),
        Column("prompt_tokens", sa.BigInteger, nullable=False),
        Column("completion_tokens", sa.BigInteger, nullable=False),
        Column("usage_estimated", sa.Boolean, nullable=False),
        Column("cost_nano", sa.BigInteger, nullable=False),
        Column("started_at", at),
        Column("first_byte_at", at),
        Column("finished_at", at),
        Column("attempts", JSONB, nullable=False),
        Column("child_rollout_id", UUID),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name="steps_rollout_id_fkey", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("rollout_id", "round", "step", name="steps_pkey"),
    )


def _outcomes() -> None:
    op.create_table(
        "outcomes",
        Column("id", UUID, nullable=False),
        Column("rollout_id", UUID, nullable=False),
        Column("key_id", sa.Text, nullable=False),
        Column("kind", sa.Text, nullable=False),
        Column("value", sa.Double),
        Column("label", sa.Text),
        Column("comment", sa.Text),
        Column("demonstration", JSONB),
        Column("source", sa.Text, nullable=False),
        Column("grader_version", sa.Text),
        Column("idempotency_key", sa.Text),
        Column("created_at", at, nullable=False),
        sa.CheckConstraint("(value IS NOT NULL) = (kind IN ('number', 'boolean'))", name="value_kind"),
        sa.CheckConstraint("kind IN ('number', 'boolean', 'label', 'comment', 'demonstration')", name="kind"),
        sa.CheckConstraint("value BETWEEN 0 AND 1", name="value_range"),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name="outcomes_rollout_id_fkey", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="outcomes_pkey"),
        sa.UniqueConstraint("key_id", "idempotency_key", name="outcomes_key_id_idempotency_key_key"),
    )
    op.create_index("outcomes_rollout_id_idx", "outcomes", ["rollout_id"])


def _ledger() -> None:
    op.create_table(
        "ledger",
        Column("event_id", UUID, nullable=False),
        Column("hold_id", sa.Text, nullable=False),
        Column("rollout_id", UUID),
        Column("kind", sa.Text, nullable=False),
        Column("amount_nano", sa.BigInteger, nullable=False),
        Column("scopes", JSONB, nullable=False),
        Column("detail", JSONB, nullable=False),
        Column("at", at, nullable=False),
        sa.CheckConstraint("kind IN ('hold', 'dispatched', 'posted', 'voided', 'uncertain')", name="kind"),
        sa.CheckConstraint("amount_nano BETWEEN 0 AND 9007199254740991", name="amount"),
        sa.PrimaryKeyConstraint("event_id", name="ledger_pkey"),
    )
    op.create_index("ledger_hold_id_idx", "ledger", ["hold_id"])
    op.create_index("ledger_rollout_id_idx", "ledger", ["rollout_id"])
    op.create_index(
        "ledger_settled_once",
        "ledger",
        ["hold_id"],
        unique=True,
        postgresql_where=sa.text("kind IN ('posted', 'voided', 'uncertain')"),
    )


def _experience() -> None:
    op.create_table(
        "experience",
        Column("rollout_id", UUID, nullable=False),
        Column("round", sa.SmallInteger, autoincrement=False, nullable=False),
        Column("step", sa.SmallInteger, autoincrement=False, nullable=False),
        Column("worker", sa.Text, nullable=False),
        Column("worker_version", sa.Text, nullable=False),
        Column("pool_name", sa.Text, nullable=False),
        Column("task_type", sa.Text),
        Column("embedding", _embedding_type()),
        Column("success", sa.REAL(), nullable=False),
        Column("cost_nano", sa.BigInteger, nullable=False),
        Column("latency_ms", sa.Integer, nullable=False),
        Column("at", at, nullable=False),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name="experience_rollout_id_fkey", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("rollout_id", "round", "step", name="experience_pkey"),
    )
    op.create_index("experience_pool_name_idx", "experience", ["pool_name"])
    op.create_index("experience_worker_at_idx", "experience", ["worker", "at"])


def _dead_letters() -> None:
    op.create_table(
        "dead_letters",
        Column("digest", sa.Text, nullable=False),
        Column("kind", sa.Text),
        Column("record", sa.LargeBinary(), nullable=False),
        Column("error", sa.Text, nullable=False),
        Column("at", at, server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="dead_letters_pkey"),
    )
