"""Logins at an identity provider: those that have begun, and sessions of the console."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "console_logins",
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("data", JSONB, nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("digest", name="console_logins_pkey"),
        sa.CheckConstraint("kind IN ('pending', 'session')", name=op.f("console_logins_kind_check")),
    )
    op.create_index("console_logins_expires_at_idx", "console_logins", ["expires_at"])


def downgrade() -> None:
    """Ends every session of the console that began by a login."""
    op.drop_table("console_logins")
