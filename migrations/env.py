"""Alembic's entry: runs on the connection handed over by `gateway.adapters.migrate`, never opens its own."""

from __future__ import annotations

from alembic import context

from gateway.adapters.migrate import is_described
from gateway.adapters.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    compare_type=True,
    compare_server_default=True,
    include_object=is_described,
)
with context.begin_transaction():
    context.run_migrations()
