"""The worker: carries out jobs from the queue, grades what asks for it, and looks after what was left behind.

Five loops that fail and come back on their own: a training queue (one job at a time), an upkeep queue (the schedule, by
procrastinate's periodic tasks), the look-out for jobs whose worker fell silent, the graders, and the signals. None
imports anything heavy: training is a program of its own (`policy/jobs/pipeline.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from procrastinate import App
from procrastinate.exceptions import ConnectorException
from procrastinate.jobs import Status
from pydantic import BaseModel, ConfigDict, ValidationError
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres.database import async_engine
from gateway.adapters.postgres.evidence.sampling import JudgeSample, SampledJudge
from gateway.adapters.postgres.evidence.signals import PostgresSignals
from gateway.adapters.postgres.policies.jobs import RUN_JOB, TRAINING, UPKEEP, GradingStore, JobStore, queue_app
from gateway.adapters.postgres.policies.registry import Registry
from gateway.errors import BatonError, ConfigError
from policy.jobs.grading import BATCH, Grading
from policy.jobs.judging import JudgeSettings, Judging
from policy.jobs.known import known
from policy.jobs.pipeline import Releases, Workshop, carry_out
from policy.jobs.schedule import Schedule, check

log = logging.getLogger("policy.jobs")
STALE_S = 20.0  # a running job not heard of for so long has lost its worker; it is heard of every second
LOOK_S = 5.0
GRADE_S = 0.5  # between two looks at what waits for a grade
SIGNALS_S, SIGNALS_MAX = 5.0, 50  # between two looks at what clients did next, and the requests of one look
SCHEDULE_CRON = "* * * * *"
PAUSE_FIRST_S, PAUSE_MAX_S = 0.5, 30.0
POLL_S = 2.0  # beside PostgreSQL's notifications
CONNECTIONS_MAX = 6


class WorkerSettings(BaseModel):
    """What `python -m policy jobs work --settings FILE` reads. It may hold a password, so it is a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    database_url: str
    data_dir: Path
    policies: Path
    shipped: Path | None = None
    python: str = sys.executable
    retrain_policy: str = "conductor"
    retrain_outcomes_min: int = 0
    retrain_every_s: float = 0.0
    retrain_arguments: list[str] = ["--env", "logged"]
    retrain_auto: bool = False
    gate_usd_max: str = ""
    facts: Path | None = None
    judge: JudgeSettings | None = None
    stale_s: float = STALE_S
    stop_s: float = 60.0
    jobs_url: str = ""
    policies_url: str = ""
    policies_stored_bytes_max: int = 2**30


def read_settings(path: Path) -> WorkerSettings:
    """Raises ConfigError naming the field."""
    try:
        return WorkerSettings.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; `baton worker` writes it") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: no JSON ({error}); `baton worker` writes it") from None


class Worker:
    """`run` until cancelled: then the running job's program is asked to stop, and the job is queued again."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._schedule = Schedule(
            settings.retrain_policy,
            settings.retrain_outcomes_min,
            settings.retrain_every_s,
            tuple(settings.retrain_arguments),
            settings.retrain_auto,
        )
        if self._schedule.on:
            self._schedule.spec()  # raises at start, not when a job is due
        self._jobs: set[asyncio.Future[None]] = set()
        self._engine = engine = async_engine(settings.database_url, pool_size=CONNECTIONS_MAX, statement_timeout_s=10.0)
        self._store = JobStore(engine, queue_app(settings.database_url))
        self._grading = Grading(GradingStore(engine), _judging(engine, settings.judge))
        self._looking = PostgresSignals(engine)
        self._releases: Releases = Registry(
            engine, settings.policies, settings.policies_url, settings.policies_stored_bytes_max
        )
        self._shop = Workshop(
            settings.database_url,
            settings.data_dir / "jobs",
            settings.python,
            settings.shipped,
            stop_s=settings.stop_s,
            url=settings.jobs_url,
            known=partial(known, settings.facts, settings.gate_usd_max),
        )

    async def run(self) -> None:
        """All loops; returns only by cancellation."""
        loops: dict[str, Callable[[], Awaitable[None]]] = {
            "training": lambda: self._queue(TRAINING),
            "look-out": self._look_out,
            "graders": self._grade,
            "signals": self._signals,
        }
        if self._schedule.on:
            loops["upkeep"] = lambda: self._queue(UPKEEP)
        try:
            async with asyncio.TaskGroup() as group:
                for name, loop in loops.items():
                    group.create_task(_for_ever(name, loop), name=name)
        finally:
            await self._engine.dispose()

    async def _queue(self, queue: str) -> None:
        """One worker of the library on one queue. Without PostgreSQL it takes nothing new up and ends when the job it
        has is done; only when this is cancelled is that job stopped too."""
        app = queue_app(self._settings.database_url)
        self._tasks(app)
        async with app.open_async():
            for left in await app.job_manager.get_stalled_jobs(queue=queue):
                await app.job_manager.finish_job(left, Status.FAILED, delete_job=True)
            taking = app.run_worker_async(
                queues=[queue],
                name=queue,
                concurrency=1,
                install_signal_handlers=False,
                fetch_job_polling_interval=POLL_S,
                delete_jobs="always",
            )
            working = asyncio.ensure_future(taking)
            try:
                await asyncio.shield(working)
            except asyncio.CancelledError:
                for job in self._jobs:
                    job.cancel()
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)
                raise

    def _tasks(self, app: App) -> None:
        """The two tasks of the queue."""

        async def run_job(job_id: str) -> None:
            job = await self._store.claim(job_id, self._settings.stale_s)
            if job is None:
                return
            log.info("job %s of %s: attempt %d", job.id, job.policy, job.attempts)
            doing = asyncio.ensure_future(carry_out(job, self._store, self._releases, self._shop))
            self._jobs.add(doing)
            try:
                await asyncio.shield(doing)
            finally:
                self._jobs.discard(doing)

        async def check_schedule(timestamp: int) -> None:
            await check(self._schedule, self._store)

        app.task(name=RUN_JOB, queue=TRAINING)(run_job)
        if self._schedule.on:
            app.periodic(cron=SCHEDULE_CRON)(
                app.task(name="check_schedule", queue=UPKEEP, queueing_lock="check_schedule")(check_schedule)
            )

    async def _look_out(self) -> None:
        while True:
            await self._store.renudge(self._settings.stale_s)
            await asyncio.sleep(LOOK_S)

    async def _grade(self) -> None:
        while True:
            if await self._grading.round() < BATCH:
                await asyncio.sleep(GRADE_S)

    async def _signals(self) -> None:
        while True:
            await self._looking.look(SIGNALS_MAX)
            await asyncio.sleep(SIGNALS_S)


def _judging(engine: AsyncEngine, judge: JudgeSettings | None) -> Judging | None:
    if judge is None:
        return None
    return Judging(judge, JudgeSample(engine, SampledJudge(judge.worker, judge.share)))


async def _for_ever(name: str, loop: Callable[[], Awaitable[None]]) -> None:
    """Again after every failure, with pauses that double while it goes on failing."""
    clock = asyncio.get_running_loop()
    pause_s = PAUSE_FIRST_S
    while True:
        began_s = clock.time()
        try:
            await loop()
            reason = "it ended"
        except (BatonError, DBAPIError, ConnectorException, OSError) as error:
            reason = error.message if isinstance(error, BatonError) else type(error).__name__
        except Exception:  # boundary: one loop's bug must not end the others
            log.exception("the %s loop failed", name)
            reason = "a bug, see above"
        if clock.time() - began_s > PAUSE_MAX_S:
            pause_s = PAUSE_FIRST_S
        log.warning("%s: %s; again in %g s", name, reason, pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


async def work(settings: WorkerSettings) -> None:
    """Run a worker until SIGINT or SIGTERM. Raises ConfigError for a schedule that no job could have."""
    worker = Worker(settings)
    running = asyncio.ensure_future(worker.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, running.cancel)
    log.info("worker of %s is looking for jobs", settings.data_dir)
    with suppress(asyncio.CancelledError):
        await running
