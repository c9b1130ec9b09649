"""Outcomes of single steps, and the rules of credit that each outcome was counted under (0: the first)."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("outcomes", sa.Column("step", sa.SmallInteger))
    op.add_column("outcomes", sa.Column("credited", sa.SmallInteger, nullable=False, server_default=sa.text("0")))


def downgrade() -> None:
    """Deletes outcomes of single steps: without the column they would judge the whole request."""
    op.execute("DELETE FROM outcomes WHERE step IS NOT NULL")
    op.drop_column("outcomes", "credited")
    op.drop_column("outcomes", "step")
