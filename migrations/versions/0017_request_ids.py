"""The `x-request-id` of the reply in its rollout: null before."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("request_id", sa.Text))


def downgrade() -> None:
    """Forgets them."""
    op.drop_column("rollouts", "request_id")
