"""What follows drift: identities of workers, facts about them, and quarantines."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "worker_identities",
        *(sa.Column(name, sa.Text, nullable=False) for name in ("worker", "version", "model", "fingerprint")),
        sa.Column("first_at", TIME, nullable=False),
        sa.Column("last_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("worker", "version", "model", "fingerprint", name="worker_identities_pkey"),
    )
    op.create_table(
        "worker_facts",
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), nullable=False),
        sa.Column("at", TIME, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("worker", "version", "what")),
        sa.Column("data", JSONB, nullable=False),
        sa.Column("subject", sa.Text),
        sa.PrimaryKeyConstraint("id", name="worker_facts_pkey"),
        sa.UniqueConstraint("subject", name="worker_facts_subject_key"),
        sa.CheckConstraint(
            "what IN ('flagged', 'identity', 'quarantined', 'released')", name=op.f("worker_facts_what_check")
        ),
    )
    op.create_index("worker_facts_at_idx", "worker_facts", ["at"])
    op.create_table(
        "worker_quarantines",
        sa.Column("id", sa.Uuid(as_uuid=False), nullable=False),
        sa.Column("worker", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("by", sa.Text, nullable=False),
        sa.Column("why", sa.Text, nullable=False),
        sa.Column("tests", JSONB, nullable=False),
        sa.Column("probes", sa.Integer, nullable=False),
        sa.Column("nano", sa.BigInteger, nullable=False),
        sa.Column("due_at", TIME, nullable=False),
        sa.Column("ended_at", TIME),
        sa.Column("ended_by", sa.Text),
        sa.Column("ended_why", sa.Text),
        sa.Column("anew", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("id", name="worker_quarantines_pkey"),
    )
    live = sa.text("ended_at IS NULL")
    op.create_index(
        "worker_quarantines_one", "worker_quarantines", ["worker", "version"], unique=True, postgresql_where=live
    )
    op.create_index("worker_quarantines_ended_at_idx", "worker_quarantines", ["ended_at"])


def downgrade() -> None:
    """Forgets which workers are in quarantine: an older gateway plans with them again."""
    for table in ("worker_quarantines", "worker_facts", "worker_identities"):
        op.drop_table(table)
