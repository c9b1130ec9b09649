"""Migrate a database to the schema of this version: Alembic, driven from inside the installed package."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from pgvector.sqlalchemy import Vector
from sqlalchemy import Connection, ForeignKeyConstraint, func, inspect, select
from sqlalchemy.exc import OperationalError

import gateway.adapters.postgres.admin_tables  # noqa: F401 - described in the metadata of tables.py
import migrations
from gateway.adapters.postgres.database import sync_engine
from gateway.adapters.postgres.months import SCHEMA
from gateway.errors import Unavailable

log = logging.getLogger("gateway.migrate")
LOCK_KEY = 0x6261746F6E  # "baton": one migrator at a time, across hosts
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
    Unavailable when the server is away or the lock is not free in time."""
    try:
        with _locked(database_url, lock_timeout_s) as connection:
            command.upgrade(config_for(connection), revision)
            has_vector = vector_in_use(connection)
    except OperationalError as error:
        raise Unavailable(str(error.orig).strip().splitlines()[0], code="store_unavailable") from error
    if not has_vector:
        log.warning(VECTOR_MISSING)
    return has_vector


def downgrade(database_url: str, revision: str, *, lock_timeout_s: float = 60.0) -> None:
    """Migrate down to `revision`; `base` leaves only the version table."""
    with _locked(database_url, lock_timeout_s) as connection:
        command.downgrade(config_for(connection), revision)


def is_described(item: object, name: str | None, kind: str, reflected: bool, compare_to: object) -> bool:
    """Whether Alembic compares this object with `tables.py`. It leaves out references of a month's part: PostgreSQL
    copies each reference to the log for every part."""
    to = item.elements[0].target_fullname if isinstance(item, ForeignKeyConstraint) else ""
    return not (reflected and to.startswith(f"{SCHEMA}."))


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
