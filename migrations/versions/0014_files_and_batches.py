"""Files, and batches whose lines any gateway continues (docs/adr/0025)."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column
from sqlalchemy.dialects.postgresql import JSONB

revision = "0014"
down_revision = "0012"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)
OPEN = "status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"
STATUS = (
    "status IN ('validating', 'failed', 'in_progress', 'finalizing', 'completed', 'expired', 'cancelling', 'cancelled')"
)


def upgrade() -> None:
    op.create_table(
        "files",
        Column("id", sa.Text, nullable=False),
        Column("key_id", sa.Text, nullable=False),
        Column("name", sa.Text, nullable=False),
        Column("purpose", sa.Text, nullable=False),
        Column("size_bytes", sa.BigInteger, nullable=False),
        Column("created_at", TIME, nullable=False),
        Column("expires_at", TIME),
        sa.PrimaryKeyConstraint("id", name="files_pkey"),
    )
    op.create_index("files_key_id_created_at_idx", "files", ["key_id", "created_at"])
    op.create_index("files_expires_at_idx", "files", ["expires_at"], postgresql_where=sa.text("expires_at IS NOT NULL"))
    op.create_table(
        "file_pieces",
        Column("file_id", sa.Text, nullable=False),
        Column("n", sa.Integer, nullable=False, autoincrement=False),
        Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("file_id", "n", name="file_pieces_pkey"),
        sa.ForeignKeyConstraint(["file_id"], ["files.id"], name="file_pieces_file_id_fkey", ondelete="CASCADE"),
    )
    _create_batches()
    op.create_table(
        "batch_lines",
        Column("batch_id", sa.Text, nullable=False),
        Column("n", sa.Integer, nullable=False, autoincrement=False),
        Column("request", sa.LargeBinary, nullable=False),
        Column("result", sa.LargeBinary),
        Column("failed", sa.Boolean),
        Column("attempts", sa.SmallInteger, nullable=False),
        Column("due_at", TIME, nullable=False),
        Column("claim", sa.Uuid(as_uuid=False)),
        Column("lease_until", TIME),
        sa.PrimaryKeyConstraint("batch_id", "n", name="batch_lines_pkey"),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name="batch_lines_batch_id_fkey", ondelete="CASCADE"),
        sa.CheckConstraint("(result IS NULL) = (failed IS NULL)", name="result"),
    )
    op.create_index(
        "batch_lines_open_idx", "batch_lines", ["n", "batch_id"], postgresql_where=sa.text("result IS NULL")
    )
    claimed = sa.text("result IS NULL AND claim IS NOT NULL")
    op.create_index("batch_lines_claim_idx", "batch_lines", ["claim"], postgresql_where=claimed)


def _create_batches() -> None:
    op.create_table(
        "batches",
        Column("id", sa.Text, nullable=False),
        Column("key_id", sa.Text, nullable=False),
        Column("asked", JSONB, nullable=False),
        Column("budget_nano", sa.BigInteger, nullable=False),
        Column("status", sa.Text, nullable=False),
        Column("created_at", TIME, nullable=False),
        Column("expires_at", TIME, nullable=False),
        Column("times", JSONB, nullable=False),
        Column("errors", JSONB, nullable=False),
        Column("total", sa.Integer, nullable=False),
        Column("completed", sa.Integer, nullable=False),
        Column("failed", sa.Integer, nullable=False),
        Column("input_tokens", sa.BigInteger, nullable=False),
        Column("output_tokens", sa.BigInteger, nullable=False),
        Column("output_file_id", sa.Text),
        Column("error_file_id", sa.Text),
        Column("claim", sa.Uuid(as_uuid=False)),
        Column("lease_until", TIME),
        sa.PrimaryKeyConstraint("id", name="batches_pkey"),
        sa.CheckConstraint(STATUS, name="status"),
    )
    op.create_index("batches_key_id_created_at_idx", "batches", ["key_id", "created_at"])
    op.create_index("batches_open_idx", "batches", ["created_at"], postgresql_where=sa.text(OPEN))


def downgrade() -> None:
    """Forgets files and batches; the rollouts of their lines stay."""
    for table in ("batch_lines", "batches", "file_pieces", "files"):
        op.drop_table(table)
