"""Organisations, budgets by window, rotation and retention of keys, credits in the ledger, and the audit chain."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column
from sqlalchemy.dialects.postgresql import JSONB

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

at = sa.DateTime(timezone=True)
WINDOWED = (
    *("budget_month_nano", "budget_day_nano"),
    *("user_budget_nano", "user_budget_month_nano", "user_budget_day_nano"),
)
KINDS = ("hold", "dispatched", "posted", "voided", "uncertain")
APPEND_ONLY = """
CREATE FUNCTION audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'audit is append-only: what was done stays written' USING ERRCODE = 'restrict_violation';
END $$
"""
GUARDS = (
    "CREATE TRIGGER audit_keep BEFORE UPDATE OR DELETE ON audit FOR EACH ROW EXECUTE FUNCTION audit_is_append_only()",
    "CREATE TRIGGER audit_keep_all BEFORE TRUNCATE ON audit FOR EACH STATEMENT EXECUTE FUNCTION audit_is_append_only()",
)
EVERY_ORG = "INSERT INTO orgs (name, created_at) SELECT org, min(created_at) FROM keys GROUP BY org"
DEFAULT_ORG = "INSERT INTO orgs (name, created_at) VALUES ('default', now()) ON CONFLICT DO NOTHING"


def upgrade() -> None:
    _orgs()
    _keys()
    _audit()
    _ledger_kinds((*KINDS, "credit"))
    op.create_index("policy_shadows_rollout_id_idx", "policy_shadows", ["rollout_id"])


def downgrade() -> None:
    """Forgets organisations and the audit. Credits become nothing: what they gave back counts as spent again."""
    op.drop_index("policy_shadows_rollout_id_idx", "policy_shadows")
    op.execute("DELETE FROM ledger WHERE kind = 'credit'")
    _ledger_kinds(KINDS)
    op.drop_table("audit")
    op.execute("DROP FUNCTION audit_is_append_only()")
    for name in ("previous_until", "previous_pepper_version", "previous_digest", "retention_days", *reversed(WINDOWED)):
        op.drop_column("keys", name)
    op.drop_table("orgs")


def _orgs() -> None:
    op.create_table(
        "orgs",
        Column("name", sa.Text, nullable=False),
        Column("created_at", at, nullable=False),
        Column("budget_nano", sa.BigInteger),
        *(Column(name, sa.BigInteger) for name in WINDOWED),
        Column("rpm", sa.Integer),
        Column("tpm", sa.Integer),
        Column("concurrency", sa.Integer),
        Column("retention_days", sa.Integer),
        Column("closed_at", at),
        sa.CheckConstraint("retention_days > 0", name="retention"),
        sa.PrimaryKeyConstraint("name", name="orgs_pkey"),
    )
    op.execute(EVERY_ORG)
    op.execute(DEFAULT_ORG)


def _keys() -> None:
    for name in WINDOWED:
        op.add_column("keys", Column(name, sa.BigInteger))
    op.add_column("keys", Column("retention_days", sa.Integer))
    op.add_column("keys", Column("previous_digest", sa.LargeBinary()))
    op.add_column("keys", Column("previous_pepper_version", sa.Integer))
    op.add_column("keys", Column("previous_until", at))
    op.create_check_constraint("retention", "keys", "retention_days > 0")


def _audit() -> None:
    op.create_table(
        "audit",
        Column("seq", sa.BigInteger, autoincrement=False, nullable=False),
        Column("at", at, nullable=False),
        Column("actor", sa.Text, nullable=False),
        Column("act", sa.Text, nullable=False),
        Column("target", sa.Text, nullable=False),
        Column("before", JSONB),
        Column("after", JSONB),
        Column("why", sa.Text, nullable=False),
        Column("prev", sa.LargeBinary(), nullable=False),
        Column("hash", sa.LargeBinary(), nullable=False),
        sa.CheckConstraint("seq > 0", name="seq"),
        sa.PrimaryKeyConstraint("seq", name="audit_pkey"),
    )
    op.create_index("audit_target_seq_idx", "audit", ["target", "seq"])
    op.execute(APPEND_ONLY)
    for guard in GUARDS:
        op.execute(guard)


def _ledger_kinds(kinds: tuple[str, ...]) -> None:
    op.drop_constraint("kind", "ledger", type_="check")
    named = ", ".join(f"'{kind}'" for kind in kinds)
    op.create_check_constraint("kind", "ledger", f"kind IN ({named})")
