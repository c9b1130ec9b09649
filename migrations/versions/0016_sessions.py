"""Sessions: budgets of a run of one key, in dollars, worker calls and minutes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column
from sqlalchemy.dialects.postgresql import JSONB

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sessions",
        Column("key_id", sa.Text, nullable=False),
        Column("id", sa.Text, nullable=False),
        Column("started_at", sa.DateTime(timezone=True), nullable=False),
        Column("state", sa.Text, nullable=False),
        Column("nano", sa.BigInteger),
        Column("calls", sa.Integer),
        Column("minutes", sa.Integer),
        Column("first", JSONB, nullable=False),
        sa.CheckConstraint("state IN ('open', 'frozen', 'killed')", name="state"),
        sa.PrimaryKeyConstraint("key_id", "id", name="sessions_pkey"),
    )
    op.create_index("sessions_key_id_started_at_idx", "sessions", ["key_id", "started_at"])
    op.create_index("sessions_started_at_idx", "sessions", ["started_at"])


def downgrade() -> None:
    op.drop_table("sessions")
