"""The log by month: rollouts, rounds and steps in parts by ranges of their ids (docs/adr/0018).

Every row is copied, inside the migration's one transaction: all of it or nothing. Nothing else reads or writes these
tables meanwhile; requests are served, as the journal takes what they log.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

KEYS = {"rollouts": "id", "rounds": "rollout_id", "steps": "rollout_id"}
PRIMARY = {"rollouts": "id", "rounds": "rollout_id, round", "steps": "rollout_id, round, step"}
BOUND = ("gradings", "continuations", "outcomes", "experience")
LIKE = "INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE INCLUDING COMPRESSION"
INDEXES = (
    ("rollouts_key_id_created_at_idx", "(key_id, created_at)"),
    ("rollouts_completion_id_idx", "(completion_id)"),
    ("rollouts_created_at_idx", "(created_at)"),
    ("rollouts_parent_id_idx", "(parent_id) WHERE parent_id IS NOT NULL"),
    ("rollouts_policy_assigned_created_at_idx", "(policy_assigned, created_at) WHERE policy_assigned IS NOT NULL"),
)
# The months that ids speak of, as far as they can be true; this one and the next; each with the ids that it begins and
# ends with. 48 bits of an id are milliseconds.
MONTHS = """
WITH stored AS (
  SELECT DISTINCT date_trunc('month', to_timestamp(
    ('x' || left(replace(CAST(id AS text), '-', ''), 12))::bit(48)::bigint / 1000.0) AT TIME ZONE 'UTC') AS month
  FROM was.rollouts
), wanted AS (
  SELECT month FROM stored WHERE month >= '2020-01-01' AND month <= now() AT TIME ZONE 'UTC' + interval '1 month'
  UNION SELECT date_trunc('month', now() AT TIME ZONE 'UTC') + m * interval '1 month' FROM generate_series(0, 1) AS m
), edges AS (
  SELECT month, extract(epoch FROM month)::bigint * 1000 AS begins,
    extract(epoch FROM month + interval '1 month')::bigint * 1000 AS ends
  FROM wanted
)
SELECT to_char(month, 'YYYY_MM'), CAST(rpad(lpad(to_hex(begins), 12, '0'), 32, '0') AS uuid),
  CAST(rpad(lpad(to_hex(ends), 12, '0'), 32, '0') AS uuid)
FROM edges ORDER BY month
"""


def upgrade() -> None:
    _aside()
    op.execute("CREATE SCHEMA months")
    for name, key in KEYS.items():
        op.execute(f"CREATE TABLE {name} (LIKE was.{name} {LIKE}) PARTITION BY RANGE ({key})")
        op.execute(f"ALTER TABLE {name} ADD CONSTRAINT {name}_pkey PRIMARY KEY ({PRIMARY[name]})")
    for index, what in INDEXES:
        op.execute(f"CREATE INDEX {index} ON rollouts {what}")
    months = op.get_bind().execute(sa.text(MONTHS)).all()
    ranges = [f"({{key}} >= '{begins}' AND {{key}} < '{ends}')" for _, begins, ends in months]
    for (month, begins, ends), within in zip(months, ranges, strict=True):
        _part(month, within, f"FOR VALUES FROM ('{begins}') TO ('{ends}')")
    _part("rest", f"NOT ({' OR '.join(ranges)})", "DEFAULT")
    _bind()
    _forget()


def downgrade() -> None:
    """One table each again, with every row."""
    _aside()
    for name in KEYS:
        op.execute(f"CREATE TABLE {name} (LIKE was.{name} {LIKE})")
        op.execute(f"INSERT INTO {name} SELECT * FROM was.{name} ORDER BY {PRIMARY[name]}")  # noqa: S608 - our names
        op.execute(f"ALTER TABLE {name} ADD CONSTRAINT {name}_pkey PRIMARY KEY ({PRIMARY[name]})")
    for index, what in INDEXES:
        op.execute(f"CREATE INDEX {index} ON rollouts {what}")
    for name in ("rounds", "steps"):
        op.execute(f"ALTER TABLE {name} ADD {_reference(name, 'rollouts')}")
    _bind()
    _forget()
    op.execute("DROP SCHEMA months")


def _aside() -> None:
    """The tables as they are, under another schema, so that their names and those of their indexes are free."""
    op.execute("SET LOCAL statement_timeout = 0")  # as long as it takes: it is all or nothing
    for name in BOUND:
        op.execute(f"ALTER TABLE {name} DROP CONSTRAINT {name}_rollout_id_fkey")
    op.execute("CREATE SCHEMA was")
    for name in KEYS:
        op.execute(f"ALTER TABLE {name} SET SCHEMA was")


def _forget() -> None:
    """Fails where somebody's view or reference hangs on the old tables, and then nothing was done: it is theirs."""
    op.execute("DROP TABLE was.steps, was.rounds, was.rollouts")
    op.execute("DROP SCHEMA was")


def _part(part: str, within: str, bounds: str) -> None:
    """Filled before it has an index, and attached when it is whole."""
    for name, key in KEYS.items():
        here = f"months.{name}_{part}"
        op.execute(f"CREATE TABLE {here} (LIKE {name} {LIKE})")
        mine = f"SELECT * FROM was.{name} WHERE {within.format(key=key)} ORDER BY {PRIMARY[name]}"  # noqa: S608 - ours
        op.execute(f"INSERT INTO {here} {mine}")
        if name != "rollouts":
            op.execute(f"ALTER TABLE {here} ADD {_reference(f'{name}_{part}', f'months.rollouts_{part}')}")
        op.execute(f"ALTER TABLE {name} ATTACH PARTITION {here} {bounds}")


def _reference(name: str, to: str) -> str:
    return f"CONSTRAINT {name}_rollout_id_fkey FOREIGN KEY (rollout_id) REFERENCES {to} (id) ON DELETE CASCADE"


def _bind() -> None:
    for name in BOUND:
        op.execute(f"ALTER TABLE {name} ADD {_reference(name, 'rollouts')}")
