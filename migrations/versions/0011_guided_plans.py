"""What a guided prompt showed beside workers and request, and what was odd about a planner's text: null before."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rounds", sa.Column("shown", postgresql.JSONB))
    op.add_column("rounds", sa.Column("flags", postgresql.ARRAY(sa.Text)))


def downgrade() -> None:
    """Forgets both."""
    op.drop_column("rounds", "flags")
    op.drop_column("rounds", "shown")
