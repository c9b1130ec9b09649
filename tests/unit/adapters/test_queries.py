"""The named statements of `adapters/postgres/queries.sql`: each is used, each composes, and names are quoted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from psycopg import sql

from gateway.adapters.postgres.database import fragment, identifiers, query

ROOM = Path(__file__).resolve().parents[3] / "gateway" / "adapters" / "postgres"
NAMES = re.findall(r"^-- name: (\w+)$", (ROOM / "queries.sql").read_text(), re.M)


def test_every_statement_is_named_once_and_used() -> None:
    code = "".join(path.read_text() for path in ROOM.rglob("*.py"))
    assert sorted(set(NAMES)) == sorted(NAMES)
    assert [name for name in NAMES if not re.search(rf'(query|fragment)\(\s*"{name}"', code)] == []


def test_comments_are_left_out_and_what_is_missing_is_named() -> None:
    assert str(query("posted_totals")).startswith("SELECT scope ->> 0")
    assert "sub-select" not in str(query("plans_near", cosine=fragment("cosine")))
    with pytest.raises(KeyError, match="nothing"):
        query("nothing")
    with pytest.raises(KeyError, match="table"):
        query("reference_drop", constraint=sql.Identifier("c"))


def test_an_identifier_cannot_end_its_quotes() -> None:
    hostile = 'x"; DROP TABLE keys; --'
    assert str(query("part_drop", part=sql.Identifier(hostile))) == 'DROP TABLE "x""; DROP TABLE keys; --"'
    assert identifiers(["a", hostile]).as_string() == '"a", "x""; DROP TABLE keys; --"'
