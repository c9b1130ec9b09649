"""Why a turn went back or was planned, and what the next one is judged by: null in what was logged before."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("turn", postgresql.JSONB))
    op.add_column("continuations", sa.Column("facts", postgresql.JSONB))


def downgrade() -> None:
    """Forgets both: a turn after it is judged as one of which nothing is known."""
    op.drop_column("continuations", "facts")
    op.drop_column("rollouts", "turn")
