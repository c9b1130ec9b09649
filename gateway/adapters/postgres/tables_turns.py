"""The tables of what outlives one request (service/ports/turns.py). Rows are swept when their time is over."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, ForeignKeyConstraint, Index, LargeBinary, SmallInteger, Table, Text

from gateway.adapters.postgres.tables import JSONB, _at, _id, _need, metadata

idempotent_replies = Table(
    "idempotent_replies",
    metadata,
    Column("key_id", Text, primary_key=True),
    Column("digest", LargeBinary, primary_key=True),
    _need("fingerprint", LargeBinary),
    _id("claim", nullable=False),
    Column("status", SmallInteger),
    Column("headers", JSONB),
    Column("body", LargeBinary),
    _at("created_at", nullable=False),
    _at("lease_until", nullable=False),
    Index(None, "created_at"),
    CheckConstraint("(status IS NULL) = (headers IS NULL)", name="whole"),
)

continuations = Table(
    "continuations",
    metadata,
    Column("key_id", Text, primary_key=True),
    Column("mark", Text, primary_key=True),
    _need("worker", Text),
    _id("rollout_id", nullable=False),
    _at("until", nullable=False),
    Index(None, "until"),
    Index(None, "rollout_id"),  # a rollout that goes takes them along
    ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], ondelete="CASCADE"),
)
