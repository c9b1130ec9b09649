"""Jobs of the learning loop, gradings asked for by requests, and the queue's own schema (docs/adr/0013)."""

from __future__ import annotations

from importlib.metadata import version

import sqlalchemy as sa
from alembic import op
from procrastinate.schema import SchemaManager
from sqlalchemy import Column
from sqlalchemy.dialects.postgresql import JSONB, UUID

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

at = sa.DateTime(timezone=True)


def upgrade() -> None:
    _jobs()
    _gradings()
    _queue()


def downgrade() -> None:
    op.execute("DROP SCHEMA queue CASCADE")
    for table in ("gradings", "policy_job_lines", "policy_jobs"):
        op.drop_table(table)


def _jobs() -> None:
    op.create_table(
        "policy_jobs",
        Column("id", UUID, nullable=False),
        Column("policy", sa.Text, nullable=False),
        Column("spec", JSONB, nullable=False),
        Column("by", sa.Text, nullable=False),
        Column("state", sa.Text, nullable=False),
        Column("stage", sa.Text),
        Column("progress", JSONB, nullable=False),
        Column("version", sa.Text),
        Column("report", sa.Text),
        Column("error", sa.Text),
        Column("attempts", sa.Integer, nullable=False),
        Column("cancel", sa.Boolean, nullable=False),
        Column("created_at", at, nullable=False),
        Column("changed_at", at, nullable=False),
        Column("heartbeat_at", at),
        Column("ended_at", at),
        sa.CheckConstraint("state IN ('queued', 'running', 'done', 'refused', 'failed', 'cancelled')", name="state"),
        sa.PrimaryKeyConstraint("id", name="policy_jobs_pkey"),
    )
    op.create_index(
        "policy_jobs_active_once",
        "policy_jobs",
        ["policy"],
        unique=True,
        postgresql_where=sa.text("state IN ('queued', 'running')"),
    )
    op.create_index("policy_jobs_policy_created_at_idx", "policy_jobs", ["policy", "created_at"])
    op.create_table(
        "policy_job_lines",
        Column("n", sa.BigInteger, sa.Identity(always=True), nullable=False),
        Column("job_id", UUID, nullable=False),
        Column("at", at, nullable=False),
        Column("line", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["policy_jobs.id"], name="policy_job_lines_job_id_fkey", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("n", name="policy_job_lines_pkey"),
    )
    op.create_index("policy_job_lines_job_id_n_idx", "policy_job_lines", ["job_id", "n"])


def _gradings() -> None:
    op.create_table(
        "gradings",
        Column("rollout_id", UUID, nullable=False),
        Column("grader", sa.Text, nullable=False),
        Column("reference", sa.Text, nullable=False),
        Column("state", sa.Text, nullable=False),
        Column("attempts", sa.SmallInteger, nullable=False),
        Column("detail", sa.Text),
        Column("outcome_id", UUID),
        Column("created_at", at, nullable=False),
        Column("due_at", at, nullable=False),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name="gradings_rollout_id_fkey", ondelete="CASCADE"),
        sa.CheckConstraint("state IN ('waiting', 'graded', 'ungraded')", name="state"),
        sa.PrimaryKeyConstraint("rollout_id", name="gradings_pkey"),
    )
    op.create_index("gradings_waiting_idx", "gradings", ["due_at"], postgresql_where=sa.text("state = 'waiting'"))


def _queue() -> None:
    """The library's tables as the installed release describes them, in a schema of their own; its comment says which
    release that was, for the migration that a later one will need."""
    connection = op.get_bind()
    before = connection.scalar(sa.text("SELECT current_setting('search_path')"))
    op.execute("CREATE SCHEMA queue")
    op.execute(f"COMMENT ON SCHEMA queue IS 'procrastinate {version('procrastinate')}'")
    connection.execute(sa.text("SELECT set_config('search_path', 'queue', true)"))
    connection.exec_driver_sql(SchemaManager.get_schema(), execution_options={"no_parameters": True})
    connection.execute(sa.text("SELECT set_config('search_path', :path, true)"), {"path": before})
