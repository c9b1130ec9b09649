"""Evidence belongs to an organisation and has a source and a weight; what the rule decided; what a key may judge."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rounds", sa.Column("decision", postgresql.JSONB))
    op.add_column("rollouts", sa.Column("memory", postgresql.JSONB))
    for name in ("judges", "signals"):
        op.add_column("keys", sa.Column(name, sa.Boolean, nullable=False, server_default=sa.text("true")))
    op.add_column("keys", sa.Column("worth", postgresql.JSONB))
    op.add_column("experience", sa.Column("org", sa.Text, nullable=False, server_default=sa.text("''")))
    op.add_column("experience", sa.Column("key_id", sa.Text, nullable=False, server_default=sa.text("''")))
    op.add_column("experience", sa.Column("source", sa.Text, nullable=False, server_default=sa.text("'client'")))
    op.add_column("experience", sa.Column("weight", sa.REAL, nullable=False, server_default=sa.text("1")))
    changed = sa.Column(
        "changed_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("clock_timestamp()")
    )
    op.add_column("experience", changed)
    op.execute(
        "UPDATE experience AS e SET org = r.org, key_id = r.key_id, changed_at = e.at"
        " FROM rollouts AS r WHERE r.id = e.rollout_id"
    )
    op.create_index("experience_changed_at_idx", "experience", ["changed_at"])
    op.create_index("experience_org_worker_at_idx", "experience", ["org", "worker", "at"])
    op.drop_index("experience_pool_name_idx", "experience")
    op.create_index("experience_pool_name_worker_at_idx", "experience", ["pool_name", "worker", "at"])


def downgrade() -> None:
    """Forgets whose evidence a step's success is, and what the rule decided."""
    op.drop_index("experience_pool_name_worker_at_idx", "experience")
    op.create_index("experience_pool_name_idx", "experience", ["pool_name"])
    for name in ("experience_org_worker_at_idx", "experience_changed_at_idx"):
        op.drop_index(name, "experience")
    for name in ("changed_at", "weight", "source", "key_id", "org"):
        op.drop_column("experience", name)
    for name in ("worth", "signals", "judges"):
        op.drop_column("keys", name)
    op.drop_column("rollouts", "memory")
    op.drop_column("rounds", "decision")
