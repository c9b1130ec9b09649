"""Alembic's entry: runs on the connection handed over by `gateway.adapters.postgres.migrate`, never opens its own."""

from __future__ import annotations

from alembic import context

from gateway.adapters.postgres.migrate import is_described
from gateway.adapters.postgres.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    compare_type=True,
    compare_server_default=True,
    include_object=is_described,
)
with context.begin_transaction():
    context.run_migrations()
