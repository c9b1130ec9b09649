"""The queue of jobs: procrastinate on the PostgreSQL that is there anyway, its tables in the schema `queue`.

An entry is a nudge that says which job may be run; what a job is and who runs it stands in `policy_jobs`. So an entry
too many does nothing, and one that was lost is put in again by the worker that looks after jobs.
"""

from __future__ import annotations

from procrastinate import App, PsycopgConnector
from procrastinate.exceptions import AlreadyEnqueued
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.adapters.postgres.database import driver_url
from gateway.adapters.postgres.tables_jobs import QUEUE_SCHEMA

TRAINING, UPKEEP = "training", "upkeep"  # queues
RUN_JOB = "run_job"  # the task
CONNECTIONS_MAX = 4
CONNECT_S = 5


def queue_app(database_url: str, *, statement_timeout_s: float = 10.0) -> App:
    """An App that is not opened: `nudge` needs it no further, a worker opens it."""
    options = f"-c search_path={QUEUE_SCHEMA} -c timezone=UTC -c statement_timeout={round(statement_timeout_s * 1000)}"
    connector = PsycopgConnector(
        conninfo=driver_url(database_url).set(drivername="postgresql").render_as_string(hide_password=False),
        kwargs={"options": options, "connect_timeout": CONNECT_S, "application_name": "baton worker"},
        min_size=1,
        max_size=CONNECTIONS_MAX,
        timeout=float(CONNECT_S),
    )
    return App(connector=connector)


async def nudge(app: App, connection: AsyncConnection, job_id: str) -> None:
    """Enter a job in the queue as part of the open transaction; one that waits there already is left as it is."""
    path = func.concat(f"{QUEUE_SCHEMA}, ", func.current_setting("search_path"))
    try:
        async with connection.begin_nested():
            await connection.execute(select(func.set_config("search_path", path, True)))
            raw = (await connection.get_raw_connection()).driver_connection
            entry = app.configure_task(RUN_JOB, queue=TRAINING, queueing_lock=job_id, connection=raw)
            await entry.defer_async(job_id=job_id)
    except AlreadyEnqueued:
        return
