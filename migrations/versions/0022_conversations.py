"""Conversations that outlive a request, with the claim of their turn (docs/adr/0034)."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy import Column
from sqlalchemy.dialects.postgresql import JSONB

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "conversations",
        Column("id", sa.Text, nullable=False),
        Column("key_id", sa.Text, nullable=False),
        Column("created_at", TIME, nullable=False),
        Column("used_at", TIME, nullable=False),
        Column("metadata", JSONB, nullable=False),
        Column("item_count", sa.Integer, nullable=False),
        Column("size_bytes", sa.BigInteger, nullable=False),
        Column("next", sa.Integer, nullable=False),
        Column("turn", sa.Text),
        Column("turn_until", TIME),
        sa.PrimaryKeyConstraint("id", name="conversations_pkey"),
    )
    op.create_index("conversations_key_id_idx", "conversations", ["key_id"])
    claimed = sa.text("turn IS NOT NULL")
    op.create_index("conversations_turn_idx", "conversations", ["turn"], postgresql_where=claimed)
    op.create_index("conversations_used_at_idx", "conversations", ["used_at"])
    op.create_table(
        "conversation_items",
        Column("conversation_id", sa.Text, nullable=False),
        Column("n", sa.Integer, nullable=False, autoincrement=False),
        Column("id", sa.Text, nullable=False),
        Column("item", JSONB),
        Column("at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("conversation_id", "n", name="conversation_items_pkey"),
        sa.ForeignKeyConstraint(
            ["conversation_id"],
            ["conversations.id"],
            name="conversation_items_conversation_id_fkey",
            ondelete="CASCADE",
        ),
    )
    op.create_index("conversation_items_id_key", "conversation_items", ["conversation_id", "id"], unique=True)
    op.create_index("conversation_items_at_idx", "conversation_items", ["at"])


def downgrade() -> None:
    """Forgets conversations; the rollouts of their turns stay."""
    for table in ("conversation_items", "conversations"):
        op.drop_table(table)
