"""The tables of jobs and of grading. The queue itself is its library's, in the schema `queue` (docs/adr/0013)."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    SmallInteger,
    Table,
    Text,
    text,
)

from gateway.adapters.postgres.tables import JSONB, _at, _id, _need, metadata

QUEUE_SCHEMA = "queue"

policy_jobs = Table(
    "policy_jobs",
    metadata,
    _id("id", primary_key=True),
    _need("policy", Text),
    _need("spec", JSONB),
    _need("by", Text),
    _need("state", Text),
    Column("stage", Text),
    _need("progress", JSONB),
    Column("version", Text),
    Column("report", Text),
    Column("error", Text),
    _need("attempts", Integer),
    _need("cancel", Boolean),
    _at("created_at", nullable=False),
    _at("changed_at", nullable=False),
    _at("heartbeat_at"),
    _at("ended_at"),
    CheckConstraint("state IN ('queued', 'running', 'done', 'refused', 'failed', 'cancelled')", name="state"),
    Index("policy_jobs_active_once", "policy", unique=True, postgresql_where=text("state IN ('queued', 'running')")),
    Index(None, "policy", "created_at"),
)

policy_job_lines = Table(
    "policy_job_lines",
    metadata,
    Column("n", BigInteger, Identity(always=True), primary_key=True),
    _id("job_id", nullable=False),
    _at("at", nullable=False),
    _need("line", Text),
    ForeignKeyConstraint(["job_id"], ["policy_jobs.id"], ondelete="CASCADE"),
    Index(None, "job_id", "n"),
)

gradings = Table(
    "gradings",
    metadata,
    _id("rollout_id", primary_key=True),
    _need("grader", Text),
    _need("reference", Text),
    _need("state", Text),
    _need("attempts", SmallInteger),
    Column("detail", Text),
    _id("outcome_id"),
    _at("created_at", nullable=False),
    _at("due_at", nullable=False),
    ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], ondelete="CASCADE"),
    CheckConstraint("state IN ('waiting', 'graded', 'ungraded')", name="state"),
    Index("gradings_waiting_idx", "due_at", postgresql_where=text("state = 'waiting'")),
)
