"""The name of the embedder with each vector: null for vectors of before, which a gateway computes again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("task_embedder", sa.Text))
    op.add_column("experience", sa.Column("embedder", sa.Text))


def downgrade() -> None:
    """Forgets the names, and the vectors that the older version would take for vectors of hashing."""
    op.execute("UPDATE experience SET embedding = NULL WHERE embedder <> 'hashing'")
    op.drop_column("experience", "embedder")
    op.drop_column("rollouts", "task_embedder")
