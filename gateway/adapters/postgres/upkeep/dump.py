"""Dumps of the database, by PostgreSQL's own programs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from sqlalchemy import make_url

from gateway.adapters.postgres.database import driver_url
from gateway.errors import Unavailable

CONNECT_S = 10
LEDGER = "SELECT count(*), coalesce(sum(amount_nano) FILTER (WHERE kind IN ('posted', 'uncertain')), 0) FROM ledger"
Programs = Callable[[str, int], Path]  # a client program by its name, for a server of that major version


def _words(url: str) -> dict[str, Any]:
    plain = make_url(driver_url(url)).set(drivername="postgresql").render_as_string(hide_password=False)
    return conninfo_to_dict(plain)


@contextmanager
def _connected(url: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection. Raises Unavailable."""
    try:
        with psycopg.connect(make_conninfo(**_words(url) | {"connect_timeout": CONNECT_S})) as connection:
            yield connection
    except psycopg.OperationalError as error:
        raise Unavailable(f"PostgreSQL: {str(error).strip().splitlines()[0]}", code="store_unavailable") from None


def is_used(url: str) -> bool:
    """Whether the database has tables of Baton. Raises Unavailable."""
    with _connected(url) as connection:
        row = connection.execute("SELECT to_regclass('rollouts') IS NOT NULL").fetchone()
    return bool(row and row[0])


def ledger_sums(url: str) -> dict[str, int]:
    """Rows of the ledger, and the nano-dollars that it charged. Raises Unavailable."""
    with _connected(url) as connection:
        return _sums(connection)


def _sums(connection: psycopg.Connection[Any]) -> dict[str, int]:
    rows, charged = connection.execute(LEDGER).fetchone() or (0, 0)
    return {"rows": int(rows), "charged_nano": int(charged)}


def dump(url: str, target: Path, programs: Programs) -> dict[str, int]:
    """Dump the database; return the sums of its ledger as of the same moment. Raises Unavailable."""
    with _connected(url) as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        snapshot = (connection.execute("SELECT pg_export_snapshot()").fetchone() or [""])[0]
        sums = _sums(connection)
        major = connection.info.server_version // 10_000
        _run(programs("pg_dump", major), url, ["--format=custom", f"--snapshot={snapshot}", f"--file={target}"])
    return sums


def load(url: str, source: Path, programs: Programs) -> None:
    """Lay a dump into an empty database, whole or not at all. Raises Unavailable."""
    with _connected(url) as connection:
        major = connection.info.server_version // 10_000
    options = ["--no-owner", "--no-privileges", "--no-comments", "--exit-on-error", "--single-transaction"]
    _run(programs("pg_restore", major), url, [*options, str(source)])


def _run(program: Path, url: str, arguments: list[str]) -> None:
    """Run a program of PostgreSQL. The password is no argument: other users of the machine see those. Raises
    Unavailable with its last words."""
    words = _words(url)
    environ = {"PATH": os.defpath, "LC_ALL": "C", "PGPASSWORD": words.pop("password", None) or ""}
    command = [str(program), "--no-password", f"--dbname={make_conninfo(**words)}", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)  # noqa: S603 - our own
    if done.returncode != 0:
        raise Unavailable(f"{program.name}: {' | '.join(done.stderr.strip().splitlines()[-2:])}")
