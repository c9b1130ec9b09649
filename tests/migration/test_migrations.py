"""The migrations make exactly what `adapters/postgres/tables.py` describes, and can be taken back."""

from __future__ import annotations

import logging
import threading

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect, text

from gateway.adapters.postgres.database import sync_engine
from gateway.adapters.postgres.migrate import (
    VECTOR_MISSING,
    config_for,
    downgrade,
    is_described,
    upgrade,
    vector_in_use,
)
from gateway.adapters.postgres.tables import metadata
from gateway.errors import ConfigError, Unavailable
from tests.waiting import BOUND_S


def _tables(url: str) -> set[str]:
    engine = sync_engine(url)
    try:
        return set(inspect(engine).get_table_names())
    finally:
        engine.dispose()


def _differences(connection: Connection) -> list[object]:
    options = {"compare_type": True, "compare_server_default": True, "include_object": is_described}
    return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))


def test_up_down_and_up_again(empty_database_url: str) -> None:
    assert upgrade(empty_database_url) is True
    assert _tables(empty_database_url) == {*metadata.tables, "alembic_version"}
    downgrade(empty_database_url, "base")
    assert _tables(empty_database_url) == {"alembic_version"}
    assert upgrade(empty_database_url) is True
    assert upgrade(empty_database_url) is True  # nothing left to do
    assert _tables(empty_database_url) == {*metadata.tables, "alembic_version"}


def test_the_schema_equals_the_description(database_url: str) -> None:
    engine = sync_engine(database_url)
    with engine.connect() as connection:
        assert _differences(connection) == []
        connection.execute(text("ALTER TABLE steps DROP COLUMN reply"))
        assert len(_differences(connection)) == 1  # the comparison can fail
    engine.dispose()


def test_check_constraints_carry_their_names(database_url: str) -> None:
    engine = sync_engine(database_url)
    for table in metadata.sorted_tables:
        described = {c.name for c in table.constraints if type(c).__name__ == "CheckConstraint"}
        assert {c["name"] for c in inspect(engine).get_check_constraints(table.name)} == described
    engine.dispose()


def test_without_pgvector_the_column_is_an_array_and_a_warning_says_so(
    empty_database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = sync_engine(empty_database_url)
    with engine.begin() as connection:
        # A view of the same name earlier in the search path hides the extension from the migration.
        connection.execute(text("CREATE SCHEMA bare"))
        connection.execute(text("CREATE VIEW bare.pg_available_extensions AS SELECT NULL::text AS name WHERE false"))
        database = connection.engine.url.database
        connection.execute(text(f'ALTER DATABASE "{database}" SET search_path = bare, pg_catalog, public'))
    engine.dispose()
    with caplog.at_level(logging.WARNING, logger="gateway.migrate"):
        assert upgrade(empty_database_url) is False
    assert VECTOR_MISSING in caplog.text
    engine = sync_engine(empty_database_url)
    with engine.connect() as connection:
        assert vector_in_use(connection) is False
        kind = connection.scalar(
            text(
                "SELECT data_type FROM information_schema.columns "
                "WHERE table_name = 'experience' AND column_name = 'embedding'"
            )
        )
    engine.dispose()
    assert kind == "ARRAY"


def test_two_migrators_at_once_take_turns(empty_database_url: str) -> None:
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(upgrade(empty_database_url))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert results == [True, True, True]


def test_a_held_lock_ends_in_an_error_not_in_waiting(empty_database_url: str) -> None:
    engine = sync_engine(empty_database_url)
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(:k)"), {"k": 0x6261746F6E})
        with pytest.raises(Unavailable):
            upgrade(empty_database_url, lock_timeout_s=0.2)
    engine.dispose()


def test_a_schema_of_a_newer_version_is_named_in_one_line(database_url: str) -> None:
    engine = sync_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(ConfigError, match="schema is 9999, of a newer version") as refused:
        upgrade(database_url)
    assert "\n" not in refused.value.message
    assert "restore the backup" in refused.value.message


def test_the_package_finds_its_own_scripts(database_url: str) -> None:
    engine = sync_engine(database_url)
    with engine.connect() as connection:
        location = config_for(connection).get_main_option("script_location")
    engine.dispose()
    assert location is not None
    assert location.endswith("migrations")


@pytest.mark.parametrize("url", ["mysql://localhost/x", "nonsense", "sqlite://"])
def test_other_databases_are_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match="DATABASE_URL"):
        upgrade(url)
