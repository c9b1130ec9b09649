"""Responses in the background, which any gateway goes on with (docs/adr/0032); what batches used of caches."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column
from sqlalchemy.dialects.postgresql import JSONB

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)
OPEN = "status IN ('queued', 'in_progress', 'cancelling')"
STATUS = "status IN ('queued', 'in_progress', 'cancelling', 'done', 'cancelled', 'failed')"


def upgrade() -> None:
    for name in ("cached_tokens", "reasoning_tokens"):
        op.add_column("batches", Column(name, sa.BigInteger, nullable=False, server_default="0"))
    op.create_table(
        "background_requests",
        Column("id", sa.Text, nullable=False),
        Column("key_id", sa.Text, nullable=False),
        Column("body", sa.LargeBinary, nullable=False),
        Column("options", JSONB, nullable=False),
        Column("status", sa.Text, nullable=False),
        Column("error", JSONB),
        Column("state", sa.LargeBinary),
        Column("created_at", TIME, nullable=False),
        Column("expires_at", TIME, nullable=False),
        Column("ended_at", TIME),
        Column("claim", sa.Uuid(as_uuid=False)),
        Column("lease_until", TIME),
        sa.PrimaryKeyConstraint("id", name="background_requests_pkey"),
        sa.CheckConstraint(STATUS, name="status"),
    )
    open_ones = sa.text(OPEN)
    op.create_index("background_requests_open_idx", "background_requests", ["created_at"], postgresql_where=open_ones)
    op.create_index(
        "background_requests_ended_at_idx",
        "background_requests",
        ["ended_at"],
        postgresql_where=sa.text("ended_at IS NOT NULL"),
    )
    op.create_table(
        "background_records",
        Column("request_id", sa.Text, nullable=False),
        Column("place", sa.Text, nullable=False),
        Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("request_id", "place", name="background_records_pkey"),
        sa.ForeignKeyConstraint(
            ["request_id"],
            ["background_requests.id"],
            name="background_records_request_id_fkey",
            ondelete="CASCADE",
        ),
    )


def downgrade() -> None:
    """Forgets responses in the background; the rollouts of those that ended stay."""
    for table in ("background_records", "background_requests"):
        op.drop_table(table)
    for name in ("reasoning_tokens", "cached_tokens"):
        op.drop_column("batches", name)
