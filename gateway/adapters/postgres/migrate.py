"""Migrate a database to the schema of this version: Alembic, driven from inside the installed package."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from pgvector.sqlalchemy import Vector
from psycopg.errors import InsufficientPrivilege
from sqlalchemy import Connection, ForeignKeyConstraint, func, inspect, select
from sqlalchemy.exc import OperationalError, ProgrammingError

import gateway.adapters.postgres.admin_tables
import gateway.adapters.postgres.background
import gateway.adapters.postgres.batches  # noqa: F401 - the same, with files.py
import migrations
from gateway.adapters.postgres.database import query, sync_engine
from gateway.adapters.postgres.tables import MONTHS_SCHEMA
from gateway.errors import ConfigError, Unavailable

log = logging.getLogger("gateway.migrate")
LOCK_KEY = 0x6261746F6E  # "baton": one migrator at a time, across hosts
GRANTS = "let its owner run: GRANT CREATE ON DATABASE name TO role; GRANT CREATE, USAGE ON SCHEMA public TO role"
VECTOR_MISSING = (
    "PostgreSQL has no pgvector here: a worker's experience is averaged over its latest tasks of the same type, "
    "not over the most similar ones. Install pgvector before the first migration to have both."
)


def config_for(connection: Connection) -> Config:
    """Alembic's configuration for the shipped `migrations/`, bound to an open connection."""
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.attributes["connection"] = connection
    return config


def upgrade(database_url: str, revision: str = "head", *, lock_timeout_s: float = 60.0) -> bool:
    """Migrate up, in one transaction, under a lock. Return whether pgvector is in use (see docs/schema.md). Raises
    Unavailable when the server is away or the lock is not free in time, ConfigError for a role that may not make the
    tables."""
    try:
        with _locked(database_url, lock_timeout_s) as connection:
            command.upgrade(config_for(connection), revision)
            has_vector = vector_in_use(connection)
    except CommandError:
        now = examine(database_url, lock_timeout_s)
        problem = f"DATABASE_URL: its schema is {now.revision}, of a newer version of Baton than this ({now.head})"
        raise ConfigError(f"{problem}; install that version, or restore the backup from before its migration") from None
    except OperationalError as error:
        raise Unavailable(str(error.orig).strip().splitlines()[0], code="store_unavailable") from error
    except ProgrammingError as error:
        if not isinstance(error.orig, InsufficientPrivilege):
            raise
        raise ConfigError(f"DATABASE_URL: {str(error.orig).splitlines()[0]}; {GRANTS}") from None
    if not has_vector:
        log.warning(VECTOR_MISSING)
    return has_vector


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """What a database is. `revision`: of its schema, None before the first migration; `head`: of this version.
    `may_create`: whether the role may make schemas and tables. `has_vector`: whether pgvector is installed or could be.
    `skew_s`: the server's clock less this host's."""

    version: str
    role: str
    revision: str | None
    head: str
    may_create: bool
    has_vector: bool
    skew_s: float


def examine(database_url: str, timeout_s: float) -> DatabaseFacts:
    """The facts of a database; nothing is changed. Raises Unavailable, and ConfigError for a URL that is no
    PostgreSQL's."""
    engine = sync_engine(database_url, connect_timeout_s=timeout_s, statement_timeout_s=timeout_s)
    try:
        with engine.connect() as connection:
            row = connection.execute(query("database_facts")).mappings().one()
            skew_s = float(row["now_s"]) - time.time()
            revision = MigrationContext.configure(connection).get_current_revision()
            head = ScriptDirectory.from_config(config_for(connection)).get_current_head() or ""
            facts = {name: row[name] for name in ("version", "role", "may_create", "has_vector")}
            return DatabaseFacts(revision=revision, head=head, skew_s=skew_s, **facts)
    except OperationalError as error:
        raise Unavailable(str(error.orig).strip().splitlines()[0], code="store_unavailable") from None
    finally:
        engine.dispose()


def downgrade(database_url: str, revision: str, *, lock_timeout_s: float = 60.0) -> None:
    """Migrate down to `revision`; `base` leaves only the version table."""
    with _locked(database_url, lock_timeout_s) as connection:
        command.downgrade(config_for(connection), revision)


def is_described(item: object, name: str | None, kind: str, reflected: bool, compare_to: object) -> bool:
    """Whether Alembic compares this object with `tables.py`. It leaves out references of a month's part: PostgreSQL
    copies each reference to the log for every part."""
    to = item.elements[0].target_fullname if isinstance(item, ForeignKeyConstraint) else ""
    return not (reflected and to.startswith(f"{MONTHS_SCHEMA}."))


def vector_in_use(connection: Connection) -> bool:
    """Whether `experience.embedding` is a pgvector column."""
    columns = inspect(connection).get_columns("experience")
    return any(isinstance(column["type"], Vector) for column in columns if column["name"] == "embedding")


@contextmanager
def _locked(database_url: str, lock_timeout_s: float) -> Iterator[Connection]:
    """A connection in a transaction that holds the migration lock. At its end it commits and disposes of the engine."""
    engine = sync_engine(database_url, statement_timeout_s=600.0)
    try:
        with engine.begin() as connection:
            connection.execute(select(func.set_config("lock_timeout", f"{round(lock_timeout_s * 1000)}ms", True)))
            connection.execute(select(func.pg_advisory_xact_lock(LOCK_KEY)))
            yield connection
    finally:
        engine.dispose()
