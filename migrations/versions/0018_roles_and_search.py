"""Roles of admin keys (null: admin), and an index for the requests of an end user."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("keys", sa.Column("role", sa.Text))
    roles = "role IS NULL OR (key_class = 'admin' AND role IN ('admin', 'operator', 'auditor'))"
    op.create_check_constraint("role", "keys", roles)
    where = sa.text("end_user IS NOT NULL")
    op.create_index("rollouts_end_user_created_at_idx", "rollouts", ["end_user", "created_at"], postgresql_where=where)


def downgrade() -> None:
    """Every admin key may do everything again."""
    op.drop_index("rollouts_end_user_created_at_idx", "rollouts")
    op.drop_column("keys", "role")
