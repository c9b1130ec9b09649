"""The table of pools: every pool file that ever served, by its hash, so that a rollout's can be looked up for good."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, Index, Table, Text

from gateway.adapters.postgres.tables import _at, _need, metadata

pool_revisions = Table(
    "pool_revisions",
    metadata,
    Column("hash", Text, primary_key=True),
    _need("file", Text),
    _at("at", nullable=False),
    _need("actor", Text),
    _need("why", Text),
    Index(None, "at"),
    CheckConstraint("hash = encode(sha256(convert_to(file, 'UTF8')), 'hex')", name="hash"),
)
