"""Policy versions: the registry and its audit, shadow plans, and the version that each rollout was given to."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column
from sqlalchemy.dialects.postgresql import JSONB, UUID

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

at = sa.DateTime(timezone=True)
APPEND_ONLY = """
CREATE FUNCTION policy_events_are_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'policy_events is append-only: what was done stays written' USING ERRCODE = 'restrict_violation';
END $$
"""
GUARDS = (
    "CREATE TRIGGER policy_events_keep BEFORE UPDATE OR DELETE ON policy_events "
    "FOR EACH ROW EXECUTE FUNCTION policy_events_are_append_only()",
    "CREATE TRIGGER policy_events_keep_all BEFORE TRUNCATE ON policy_events "
    "FOR EACH STATEMENT EXECUTE FUNCTION policy_events_are_append_only()",
)


def upgrade() -> None:
    _versions()
    _events()
    _shadows()
    op.add_column("rollouts", Column("policy_assigned", sa.Text))
    op.create_index(
        "rollouts_policy_assigned_created_at_idx",
        "rollouts",
        ["policy_assigned", "created_at"],
        postgresql_where=sa.text("policy_assigned IS NOT NULL"),
    )


def downgrade() -> None:
    """Forgets every version; their directories stay under the data directory."""
    op.drop_index("rollouts_policy_assigned_created_at_idx", "rollouts")
    op.drop_column("rollouts", "policy_assigned")
    for table in ("policy_shadows", "policy_events", "policy_versions"):
        op.drop_table(table)
    op.execute("DROP FUNCTION policy_events_are_append_only()")


def _versions() -> None:
    op.create_table(
        "policy_versions",
        Column("name", sa.Text, nullable=False),
        Column("number", sa.Integer, autoincrement=False, nullable=False),
        Column("state", sa.Text, nullable=False),
        Column("parent", sa.Text),
        Column("previous", sa.Integer),
        Column("percent", sa.SmallInteger),
        Column("directory", sa.Text, nullable=False),
        Column("manifest", JSONB, nullable=False),
        Column("gate", JSONB),
        Column("created_at", at, nullable=False),
        Column("changed_at", at, nullable=False),
        sa.CheckConstraint("number >= 0", name="number"),
        sa.CheckConstraint("state IN ('candidate', 'shadow', 'canary', 'live', 'retired')", name="state"),
        sa.CheckConstraint("percent IN (1, 5, 25, 100)", name="percent"),
        sa.CheckConstraint("(percent IS NOT NULL) = (state = 'canary')", name="percent_state"),
        sa.PrimaryKeyConstraint("name", "number", name="policy_versions_pkey"),
    )
    for state in ("shadow", "canary", "live"):
        op.create_index(
            f"policy_versions_one_{state}",
            "policy_versions",
            ["name"],
            unique=True,
            postgresql_where=sa.text(f"state = '{state}'"),
        )


def _events() -> None:
    op.create_table(
        "policy_events",
        Column("id", sa.BigInteger, sa.Identity(always=True), nullable=False),
        Column("name", sa.Text, nullable=False),
        Column("number", sa.Integer, nullable=False),
        Column("what", sa.Text, nullable=False),
        Column("was", sa.Text),
        Column("state", sa.Text, nullable=False),
        Column("percent", sa.SmallInteger),
        Column("who", sa.Text, nullable=False),
        Column("why", sa.Text, nullable=False),
        Column("forced", sa.Boolean, nullable=False),
        Column("detail", JSONB, nullable=False),
        Column("at", at, nullable=False),
        sa.ForeignKeyConstraint(
            ["name", "number"], ["policy_versions.name", "policy_versions.number"], name="policy_events_name_fkey"
        ),
        sa.PrimaryKeyConstraint("id", name="policy_events_pkey"),
    )
    op.create_index("policy_events_name_id_idx", "policy_events", ["name", "id"])
    op.execute(APPEND_ONLY)
    for guard in GUARDS:
        op.execute(guard)


def _shadows() -> None:
    op.create_table(
        "policy_shadows",
        Column("id", UUID, nullable=False),
        Column("rollout_id", UUID, nullable=False),
        Column("version", sa.Text, nullable=False),
        Column("live_version", sa.Text),
        Column("refusal", sa.Text),
        Column("agrees", sa.Boolean),
        Column("latency_ms", sa.Double, nullable=False),
        Column("live_latency_ms", sa.Double, nullable=False),
        Column("prompt_tokens", sa.BigInteger, nullable=False),
        Column("completion_tokens", sa.BigInteger, nullable=False),
        Column("cost_nano", sa.BigInteger, nullable=False),
        Column("at", at, nullable=False),
        sa.PrimaryKeyConstraint("id", name="policy_shadows_pkey"),
    )
    op.create_index("policy_shadows_version_at_idx", "policy_shadows", ["version", "at"])
