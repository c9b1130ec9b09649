"""The tables of administration: keys, organisations, their audit, pool files, policy versions, jobs, alerts, drift.

The queue of jobs is its library's, in the schema `queue` (docs/adr/0013).
"""

from __future__ import annotations

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Date,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    LargeBinary,
    SmallInteger,
    Table,
    Text,
    text,
)

from gateway.adapters.postgres.tables import JSONB, metadata, required, timestamp, uuid_column

BUDGETS = (
    *("budget_nano", "budget_month_nano", "budget_day_nano"),
    *("user_budget_nano", "user_budget_month_nano", "user_budget_day_nano"),
)

keys = Table(
    "keys",
    metadata,
    Column("public_id", Text, primary_key=True),
    required("key_class", Text),
    required("name", Text),
    required("digest", LargeBinary),
    required("pepper_version", Integer),
    required("org", Text),
    required("pools", ARRAY(Text)),
    required("workers", ARRAY(Text)),
    Column("budget_nano", BigInteger),
    Column("rpm", Integer),
    Column("tpm", Integer),
    Column("concurrency", Integer),
    required("caps", JSONB),
    required("log_mode", Text),
    required("train", Boolean),
    timestamp("created_at", nullable=False),
    timestamp("revoked_at"),
    Column("budget_month_nano", BigInteger),
    Column("budget_day_nano", BigInteger),
    Column("user_budget_nano", BigInteger),
    Column("user_budget_month_nano", BigInteger),
    Column("user_budget_day_nano", BigInteger),
    Column("retention_days", Integer),
    Column("previous_digest", LargeBinary),
    Column("previous_pepper_version", Integer),
    timestamp("previous_until"),
    Column("role", Text),
    Column("judges", Boolean, nullable=False, server_default=text("true")),
    Column("signals", Boolean, nullable=False, server_default=text("true")),
    Column("worth", JSONB),
    CheckConstraint("retention_days > 0", name="retention"),
    CheckConstraint("key_class IN ('data', 'admin')", name="class"),
    CheckConstraint("log_mode IN ('full', 'redacted', 'metadata')", name="log_mode"),
    CheckConstraint(
        "role IS NULL OR (key_class = 'admin' AND role IN ('admin', 'operator', 'auditor'))",
        name="role",
    ),
)

orgs = Table(
    "orgs",
    metadata,
    Column("name", Text, primary_key=True),
    timestamp("created_at", nullable=False),
    *(Column(name, BigInteger) for name in BUDGETS),
    Column("rpm", Integer),
    Column("tpm", Integer),
    Column("concurrency", Integer),
    Column("retention_days", Integer),
    timestamp("closed_at"),
    CheckConstraint("retention_days > 0", name="retention"),
)

audit = Table(
    "audit",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    timestamp("at", nullable=False),
    required("actor", Text),
    required("act", Text),
    required("target", Text),
    Column("before", JSONB),
    Column("after", JSONB),
    required("why", Text),
    required("prev", LargeBinary),
    required("hash", LargeBinary),
    Index(None, "target", "seq"),
    CheckConstraint("seq > 0", name="seq"),
)

pool_revisions = Table(
    "pool_revisions",
    metadata,
    Column("hash", Text, primary_key=True),
    required("file", Text),
    timestamp("at", nullable=False),
    required("actor", Text),
    required("why", Text),
    Index(None, "at"),
    CheckConstraint("hash = encode(sha256(convert_to(file, 'UTF8')), 'hex')", name="hash"),
)

policy_versions = Table(
    "policy_versions",
    metadata,
    Column("name", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    required("state", Text),
    Column("parent", Text),
    Column("previous", Integer),
    Column("percent", SmallInteger),
    required("directory", Text),
    required("manifest", JSONB),
    Column("gate", JSONB),
    timestamp("created_at", nullable=False),
    timestamp("changed_at", nullable=False),
    CheckConstraint("number >= 0", name="number"),
    CheckConstraint("state IN ('candidate', 'shadow', 'canary', 'live', 'retired')", name="state"),
    CheckConstraint("percent IN (1, 5, 25, 100)", name="percent"),
    CheckConstraint("(percent IS NOT NULL) = (state = 'canary')", name="percent_state"),
    Index("policy_versions_one_shadow", "name", unique=True, postgresql_where=text("state = 'shadow'")),
    Index("policy_versions_one_canary", "name", unique=True, postgresql_where=text("state = 'canary'")),
    Index("policy_versions_one_live", "name", unique=True, postgresql_where=text("state = 'live'")),
)

policy_events = Table(
    "policy_events",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    required("name", Text),
    required("number", Integer),
    required("what", Text),
    Column("was", Text),
    required("state", Text),
    Column("percent", SmallInteger),
    required("who", Text),
    required("why", Text),
    required("forced", Boolean),
    required("detail", JSONB),
    timestamp("at", nullable=False),
    ForeignKeyConstraint(["name", "number"], ["policy_versions.name", "policy_versions.number"]),
    Index(None, "name", "id"),
)

policy_blobs = Table(
    "policy_blobs",
    metadata,
    Column("sha256", Text, primary_key=True),
    required("size_bytes", BigInteger),
    timestamp("created_at", nullable=False),
)

policy_pieces = Table(
    "policy_pieces",
    metadata,
    Column("sha256", Text, primary_key=True),
    Column("n", Integer, primary_key=True, autoincrement=False),
    required("data", LargeBinary),
)

policy_gateways = Table(
    "policy_gateways",
    metadata,
    Column("id", Text, primary_key=True),
    required("host", Text),
    required("held", JSONB),
    timestamp("seen_at", nullable=False),
    Index(None, "seen_at"),
)

policy_jobs = Table(
    "policy_jobs",
    metadata,
    uuid_column("id", primary_key=True),
    required("policy", Text),
    required("spec", JSONB),
    required("by", Text),
    required("state", Text),
    Column("stage", Text),
    required("progress", JSONB),
    Column("version", Text),
    Column("report", Text),
    Column("error", Text),
    required("attempts", Integer),
    required("cancel", Boolean),
    timestamp("created_at", nullable=False),
    timestamp("changed_at", nullable=False),
    timestamp("heartbeat_at"),
    timestamp("ended_at"),
    CheckConstraint("state IN ('queued', 'running', 'done', 'refused', 'failed', 'cancelled')", name="state"),
    Index("policy_jobs_active_once", "policy", unique=True, postgresql_where=text("state IN ('queued', 'running')")),
    Index(None, "policy", "created_at"),
)

policy_job_lines = Table(
    "policy_job_lines",
    metadata,
    Column("n", BigInteger, Identity(always=True), primary_key=True),
    uuid_column("job_id", nullable=False),
    timestamp("at", nullable=False),
    required("line", Text),
    ForeignKeyConstraint(["job_id"], ["policy_jobs.id"], ondelete="CASCADE"),
    Index(None, "job_id", "n"),
)

sessions = Table(
    "sessions",
    metadata,
    Column("key_id", Text, primary_key=True),
    Column("id", Text, primary_key=True),
    timestamp("started_at", nullable=False),
    required("state", Text),
    Column("nano", BigInteger),
    Column("calls", Integer),
    Column("minutes", Integer),
    required("first", JSONB),
    CheckConstraint("state IN ('open', 'frozen', 'killed')", name="state"),
    Index(None, "key_id", "started_at"),
    Index(None, "started_at"),
)

alerts = Table(
    "alerts",
    metadata,
    uuid_column("id", primary_key=True),
    required("kind", Text),
    Column("subject", Text, nullable=False, unique=True),
    timestamp("at", nullable=False),
    required("data", JSONB),
    required("state", Text),
    required("attempts", Integer),
    timestamp("due_at", nullable=False),
    Column("said", Text),
    timestamp("ended_at"),
    timestamp("forget_at"),
    CheckConstraint("state IN ('waiting', 'sent', 'given_up')", name="state"),
    Index("alerts_waiting", "at", "id", postgresql_where=text("state = 'waiting'")),
    Index(None, "forget_at"),
)

worker_identities = Table(
    "worker_identities",
    metadata,
    Column("worker", Text, primary_key=True),
    Column("version", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("fingerprint", Text, primary_key=True),
    timestamp("first_at", nullable=False),
    timestamp("last_at", nullable=False),
)

worker_facts = Table(
    "worker_facts",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    timestamp("at", nullable=False),
    required("worker", Text),
    required("version", Text),
    required("what", Text),
    required("data", JSONB),
    Column("subject", Text, unique=True),
    CheckConstraint("what IN ('flagged', 'identity', 'quarantined', 'released')", name="what"),
    Index(None, "at"),
)

worker_quarantines = Table(
    "worker_quarantines",
    metadata,
    uuid_column("id", primary_key=True),
    required("worker", Text),
    required("version", Text),
    timestamp("at", nullable=False),
    required("by", Text),
    required("why", Text),
    required("tests", JSONB),
    required("probes", Integer),
    required("nano", BigInteger),
    timestamp("due_at", nullable=False),
    timestamp("ended_at"),
    Column("ended_by", Text),
    Column("ended_why", Text),
    required("anew", Boolean),
    Index("worker_quarantines_one", "worker", "version", unique=True, postgresql_where=text("ended_at IS NULL")),
    Index(None, "ended_at"),
)

console_logins = Table(
    "console_logins",
    metadata,
    Column("digest", LargeBinary, primary_key=True),
    required("kind", Text),
    required("data", JSONB),
    timestamp("expires_at", nullable=False),
    CheckConstraint("kind IN ('pending', 'session')", name="kind"),
    Index(None, "expires_at"),
)

spend_days = Table(
    "spend_days",
    metadata,
    Column("day", Date, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    required("count", BigInteger),
    required("cost_nano", BigInteger),
    timestamp("summed_at", nullable=False),
    CheckConstraint("kind IN ('day', 'key', 'worker')", name="kind"),
)
