"""The tables of administration: organisations, and the audit of everything that was ever changed by somebody."""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, Column, Index, Integer, LargeBinary, Table, Text

from gateway.adapters.postgres.tables import JSONB, _at, _need, metadata

BUDGETS = (
    *("budget_nano", "budget_month_nano", "budget_day_nano"),
    *("user_budget_nano", "user_budget_month_nano", "user_budget_day_nano"),
)

orgs = Table(
    "orgs",
    metadata,
    Column("name", Text, primary_key=True),
    _at("created_at", nullable=False),
    *(Column(name, BigInteger) for name in BUDGETS),
    Column("rpm", Integer),
    Column("tpm", Integer),
    Column("concurrency", Integer),
    Column("retention_days", Integer),
    _at("closed_at"),
    CheckConstraint("retention_days > 0", name="retention"),
)

audit = Table(
    "audit",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    _at("at", nullable=False),
    _need("actor", Text),
    _need("act", Text),
    _need("target", Text),
    Column("before", JSONB),
    Column("after", JSONB),
    _need("why", Text),
    _need("prev", LargeBinary),
    _need("hash", LargeBinary),
    Index(None, "target", "seq"),
    CheckConstraint("seq > 0", name="seq"),
)
