"""What a client says of its outcome: `metadata`, pairs of strings."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("outcomes", sa.Column("metadata", postgresql.JSONB))


def downgrade() -> None:
    """Forgets the metadata of outcomes."""
    op.drop_column("outcomes", "metadata")
