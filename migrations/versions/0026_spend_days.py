"""Sums of past days: dollars and counts by key and by worker, so that no page sums a month of requests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "spend_days",
        sa.Column("day", sa.Date, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("count", sa.BigInteger, nullable=False),
        sa.Column("cost_nano", sa.BigInteger, nullable=False),
        sa.Column("summed_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("day", "kind", "name", name="spend_days_pkey"),
        sa.CheckConstraint("kind IN ('day', 'key', 'worker')", name=op.f("spend_days_kind_check")),
    )


def downgrade() -> None:
    """Forgets the sums of days whose requests retention has deleted; all others can be summed again."""
    op.drop_table("spend_days")
