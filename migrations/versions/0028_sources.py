"""How far each source of outcomes is believed, by organisation."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    counts = ("right_accepted", "right_rejected", "wrong_accepted", "wrong_rejected")
    op.create_table(
        "sources",
        sa.Column("org", sa.Text, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        *(sa.Column(name, sa.Double, nullable=False) for name in counts),
        sa.Column("weight_right", sa.REAL, nullable=False),
        sa.Column("weight_wrong", sa.REAL, nullable=False),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("org", "source", name="sources_pkey"),
    )


def downgrade() -> None:
    """Forgets how far each source is believed; what was credited keeps its weight."""
    op.drop_table("sources")
