"""What a plan was allowed, and the dial that its prompt showed: null in rounds that were logged before."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rounds", sa.Column("allowed", postgresql.JSONB))
    op.add_column("rounds", sa.Column("quality", sa.SmallInteger))


def downgrade() -> None:
    """Forgets both."""
    op.drop_column("rounds", "quality")
    op.drop_column("rounds", "allowed")
