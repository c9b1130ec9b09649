"""Replies kept for their Idempotency-Key, and the workers that conversations go back to (docs/adr/0015, 0016)."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column
from sqlalchemy.dialects.postgresql import JSONB, UUID

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

at = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "idempotent_replies",
        Column("key_id", sa.Text, nullable=False),
        Column("digest", sa.LargeBinary, nullable=False),
        Column("fingerprint", sa.LargeBinary, nullable=False),
        Column("claim", UUID, nullable=False),
        Column("status", sa.SmallInteger),
        Column("headers", JSONB),
        Column("body", sa.LargeBinary),
        Column("created_at", at, nullable=False),
        Column("lease_until", at, nullable=False),
        sa.CheckConstraint("(status IS NULL) = (headers IS NULL)", name="whole"),
        sa.PrimaryKeyConstraint("key_id", "digest", name="idempotent_replies_pkey"),
    )
    op.create_index("idempotent_replies_created_at_idx", "idempotent_replies", ["created_at"])
    op.create_table(
        "continuations",
        Column("key_id", sa.Text, nullable=False),
        Column("mark", sa.Text, nullable=False),
        Column("worker", sa.Text, nullable=False),
        Column("rollout_id", UUID, nullable=False),
        Column("until", at, nullable=False),
        sa.ForeignKeyConstraint(
            ["rollout_id"], ["rollouts.id"], name="continuations_rollout_id_fkey", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("key_id", "mark", name="continuations_pkey"),
    )
    op.create_index("continuations_until_idx", "continuations", ["until"])
    op.create_index("continuations_rollout_id_idx", "continuations", ["rollout_id"])


def downgrade() -> None:
    for table in ("continuations", "idempotent_replies"):
        op.drop_table(table)
