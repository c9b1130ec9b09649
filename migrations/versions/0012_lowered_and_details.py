"""What lowered a reply's bound, and the parts of prompt and reply that have prices of their own: null before."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("steps", sa.Column("lowered", postgresql.JSONB))
    op.add_column("steps", sa.Column("usage_details", postgresql.JSONB))


def downgrade() -> None:
    """Forgets both."""
    op.drop_column("steps", "usage_details")
    op.drop_column("steps", "lowered")
