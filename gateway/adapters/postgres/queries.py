"""The named statements of `queries.sql`, read once. Identifiers and numbers are composed by psycopg, never by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files

from psycopg import sql
from sqlalchemy import TextClause, text

_NAME = re.compile(r"^-- name: (\w+)$", re.M)
_COMMENT = re.compile(r"^--.*\n", re.M)


@cache
def _statements() -> Mapping[str, sql.SQL]:
    source = files("gateway.adapters.postgres").joinpath("queries.sql").read_text(encoding="utf-8")
    _, *parts = _NAME.split(source)
    statements = [sql.SQL(_COMMENT.sub("", part).strip()) for part in parts[1::2]]
    return dict(zip(parts[::2], statements, strict=True))


def query(name: str, **parts: sql.Composable) -> TextClause:
    """The statement of that name, with `parts` for its {words}. Raises KeyError where a name or a part is missing."""
    return text(_statements()[name].format(**parts).as_string())


def fragment(name: str) -> sql.Composable:
    """An expression of that name, a part of other statements. Raises KeyError."""
    return _statements()[name]


def identifiers(names: Iterable[str]) -> sql.Composable:
    """A list of columns or tables."""
    return sql.SQL(", ").join(sql.Identifier(name) for name in names)
