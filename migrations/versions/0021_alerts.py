"""The outbox of alerts that go out by webhook."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0021"
down_revision = "0019"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "alerts",
        sa.Column("id", sa.Uuid(as_uuid=False), nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("data", JSONB, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("due_at", TIME, nullable=False),
        sa.Column("said", sa.Text),
        sa.Column("ended_at", TIME),
        sa.Column("forget_at", TIME),
        sa.PrimaryKeyConstraint("id", name="alerts_pkey"),
        sa.UniqueConstraint("subject", name="alerts_subject_key"),
        sa.CheckConstraint("state IN ('waiting', 'sent', 'given_up')", name=op.f("alerts_state_check")),
    )
    op.create_index("alerts_waiting", "alerts", ["at", "id"], postgresql_where=sa.text("state = 'waiting'"))
    op.create_index("alerts_forget_at_idx", "alerts", ["forget_at"])


def downgrade() -> None:
    """Forgets which alerts were sent: after another upgrade, those of the last two days are sent again."""
    op.drop_table("alerts")
