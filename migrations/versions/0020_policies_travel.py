"""Weights of policy versions in pieces, by their sha256, and which gateway holds which version."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0020"
down_revision = "0017"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "policy_blobs",
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("sha256", name="policy_blobs_pkey"),
    )
    op.create_table(
        "policy_pieces",
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("n", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("sha256", "n", name="policy_pieces_pkey"),
    )
    op.execute("ALTER TABLE policy_pieces ALTER COLUMN data SET STORAGE EXTERNAL")  # weights do not compress
    op.create_table(
        "policy_gateways",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("held", JSONB, nullable=False),
        sa.Column("seen_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="policy_gateways_pkey"),
    )
    op.create_index("policy_gateways_seen_at_idx", "policy_gateways", ["seen_at"])


def downgrade() -> None:
    """Forgets the stored weights: each host keeps the versions on its disk."""
    for table in ("policy_gateways", "policy_pieces", "policy_blobs"):
        op.drop_table(table)
