"""Every pool file that ever served, by its hash, and the one that each rollout ran on (docs/adr/0019)."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

APPEND_ONLY = """
CREATE FUNCTION pool_revisions_are_kept() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'pool_revisions is append-only: what served stays written' USING ERRCODE = 'restrict_violation';
END $$
"""
KEEP = "BEFORE UPDATE OR DELETE ON pool_revisions FOR EACH ROW EXECUTE FUNCTION pool_revisions_are_kept()"
KEEP_ALL = "BEFORE TRUNCATE ON pool_revisions FOR EACH STATEMENT EXECUTE FUNCTION pool_revisions_are_kept()"


def upgrade() -> None:
    op.create_table(
        "pool_revisions",
        Column("hash", sa.Text, nullable=False),
        Column("file", sa.Text, nullable=False),
        Column("at", sa.DateTime(timezone=True), nullable=False),
        Column("actor", sa.Text, nullable=False),
        Column("why", sa.Text, nullable=False),
        sa.CheckConstraint("hash = encode(sha256(convert_to(file, 'UTF8')), 'hex')", name="hash"),
        sa.PrimaryKeyConstraint("hash", name="pool_revisions_pkey"),
    )
    op.create_index("pool_revisions_at_idx", "pool_revisions", ["at"])
    op.execute(APPEND_ONLY)
    op.execute(f"CREATE TRIGGER pool_revisions_keep {KEEP}")
    op.execute(f"CREATE TRIGGER pool_revisions_keep_all {KEEP_ALL}")
    op.add_column("rollouts", Column("pool_revision", sa.Text))


def downgrade() -> None:
    """Forgets the pools; rollouts keep `pool_hash` and the workers that they were shown."""
    op.drop_column("rollouts", "pool_revision")
    op.drop_table("pool_revisions")
    op.execute("DROP FUNCTION pool_revisions_are_kept()")
