"""Jobs in PostgreSQL: the gateway submits and steers them, a worker runs them; and their queue.

A worker owns a job by the number of its attempt. Every write of a worker names that number; a worker that another one
has overtaken gets Conflict(job_overtaken), and nothing is written.

The queue is procrastinate's, with its tables in a schema of its own. An entry only says that a job may be run;
`policy_jobs` says what the job is and who runs it. So a superfluous entry does nothing, and the worker that looks after
jobs enters a lost one again.

Gradings are rows of their own: a worker gets those that wait for a limited time; if it dies, the next worker gets them.
One transaction writes the outcome and ends the grading, so that a crash leaves neither two outcomes nor none.
"""

from __future__ import annotations

import builtins
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from procrastinate import App, PsycopgConnector
from procrastinate.exceptions import AlreadyEnqueued
from sqlalchemy import ColumnElement, Interval, Update, cast, func, insert, literal, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres import audit as store_audit
from gateway.adapters.postgres import rows
from gateway.adapters.postgres.admin_tables import policy_job_lines as lines
from gateway.adapters.postgres.admin_tables import policy_jobs as jobs
from gateway.adapters.postgres.database import driver_url, transaction
from gateway.adapters.postgres.inserts import insert_outcome
from gateway.adapters.postgres.rows import clean
from gateway.adapters.postgres.sources import is_heard
from gateway.adapters.postgres.tables import gradings, outcomes, rollouts
from gateway.core.access.audit import Act
from gateway.core.log.events import uuid7
from gateway.core.log.outcome import Judgement, Outcome
from gateway.core.loop.evidence.sources import JUDGE
from gateway.core.policies.grading import SOURCE
from gateway.core.policies.jobs import ACTIVE, RESUMABLE, Job, JobSpec, JobState, Stage, with_gate_cap
from gateway.errors import BadRequest, Conflict, NotFound

DETAIL_CHARS_MAX = 500
JOBS_MAX = 200  # of one list
LINES_MAX = 1_000  # of one page of a log
LINE_CHARS_MAX = 2_000
ERROR_CHARS_MAX = 2_000
OUTCOMES_COUNTED_MAX = 1_000_000
OVERTAKEN = "job_overtaken"
QUEUE_SCHEMA = "queue"
TRAINING, UPKEEP = "training", "upkeep"  # names of queues
RUN_JOB = "run_job"  # the task
QUEUE_CONNECTIONS_MAX = 4
QUEUE_CONNECT_S = 5


class JobStore:
    """`app`: the queue, opened or not. Every call raises Unavailable when PostgreSQL is away."""

    def __init__(self, engine: AsyncEngine, app: App) -> None:
        self._engine = engine
        self._app = app

    # ---------------------------------------------------------------- for operators

    async def submit(self, policy: str, spec: JobSpec, by: str) -> Job:
        """Queue a job. Raises Conflict, which names it, if the policy has a job that is queued or running."""
        values = {"id": uuid7(time.time_ns() // 1_000_000), "policy": policy, "spec": clean(spec.as_json()), "by": by}
        new = insert(jobs).values(
            **values, state="queued", progress={}, attempts=0, cancel=False, created_at=_now(), changed_at=_now()
        )
        try:
            async with self._begin() as connection:
                job = _job((await connection.execute(new.returning(jobs))).mappings().one())
                await _nudge(self._app, connection, job.id)
                await store_audit.write(connection, Act(by), "job.submitted", f"job:{job.id}", None, spec.as_json())
                return job
        except IntegrityError:
            raise await self._taken(policy) from None

    async def get(self, job_id: str) -> Job:
        """Find a job by its id or the first eight or more characters of it. Raises NotFound, and Conflict if several
        match."""
        async with self._begin() as connection:
            return await _require(connection, job_id)

    async def list(self, policy: str | None = None, limit: int = 50) -> Sequence[Job]:
        """Jobs, newest first."""
        query = select(jobs).order_by(jobs.c.created_at.desc(), jobs.c.id.desc()).limit(min(limit, JOBS_MAX))
        if policy is not None:
            query = query.where(jobs.c.policy == clean(policy))  # the stored form
        async with self._begin() as connection:
            return [_job(row) for row in (await connection.execute(query)).mappings()]

    async def cancel(self, job_id: str, by: str = "baton") -> Job:
        """End a queued job; ask a running one to stop after its checkpoint. Raises Conflict for one that has ended."""
        async with self._begin() as connection:
            job = await _require(connection, job_id, lock=True)
            if job.state not in ACTIVE:
                raise Conflict(f"job {job.id} is {job.state} already; there is nothing to cancel", code="job_ended")
            change = update(jobs).where(jobs.c.id == job.id)
            if job.state == "queued":
                change = change.values(state="cancelled", ended_at=_now(), changed_at=_now())
            else:
                change = change.values(cancel=True, changed_at=_now())
            became = await _changed(connection, change)
            await store_audit.write(connection, Act(by), "job.cancelled", f"job:{job.id}", {"state": job.state})
            return became

    async def resume(self, job_id: str, by: str = "baton", gate_usd_max: str = "") -> Job:
        """Queue a failed or cancelled job again, to go on from its checkpoint. `gate_usd_max`: another cap of its gate,
        in dollars. Raises Conflict for any other job, and if its policy has another active job; BadRequest as
        `with_gate_cap`."""
        try:
            async with self._begin() as connection:
                job = await _require(connection, job_id, lock=True)
                if job.state not in RESUMABLE:
                    raise Conflict(f"job {job.id} is {job.state}; only a failed or cancelled one is resumed")
                change = update(jobs).where(jobs.c.id == job.id)
                change = change.values(state="queued", cancel=False, error=None, ended_at=None, changed_at=_now())
                if gate_usd_max:
                    change = change.values(spec=with_gate_cap(job.spec, gate_usd_max))
                queued = await _changed(connection, change)
                await _nudge(self._app, connection, job.id)
                capped = {"gate_usd_max": gate_usd_max} if gate_usd_max else None
                was, target = {"state": job.state}, f"job:{job.id}"
                await store_audit.write(connection, Act(by), "job.resumed", target, was, capped)
                return queued
        except IntegrityError:
            raise await self._taken((await self.get(job_id)).policy) from None

    async def log(self, job_id: str, after: int = 0, limit: int = LINES_MAX) -> builtins.list[Mapping[str, Any]]:
        """Lines {n, at, line} of a job's log with numbers above `after`, oldest first."""
        async with self._begin() as connection:
            job = await _require(connection, job_id)
            query = select(lines.c.n, lines.c.at, lines.c.line).where(lines.c.job_id == job.id, lines.c.n > after)
            rows = await connection.execute(query.order_by(lines.c.n).limit(min(limit, LINES_MAX)))
            return [{"n": n, "at": at.isoformat(), "line": line} for n, at, line in rows]

    # ---------------------------------------------------------------- for workers

    async def claim(self, job_id: str, stale_s: float) -> Job | None:
        """Start an attempt at a job that is queued, or whose worker has been silent for `stale_s`. None if it is
        neither."""
        free = or_(jobs.c.state == "queued", (jobs.c.state == "running") & _silent(stale_s))
        change = update(jobs).where(jobs.c.id == job_id, free)
        change = change.values(
            state="running", attempts=jobs.c.attempts + 1, heartbeat_at=_now(), changed_at=_now(), error=None
        )
        async with self._begin() as connection:
            row = (await connection.execute(change.returning(jobs))).mappings().first()
        return _job(row) if row else None

    async def beat(
        self, job: Job, *, stage: Stage | None = None, progress: Mapping[str, Any] | None = None, **facts: str
    ) -> bool:
        """Record that the job is alive, and its progress. Return whether somebody asked it to stop. `facts`: version,
        report."""
        values: dict[str, Any] = {"heartbeat_at": _now(), **facts}
        if stage is not None:
            values |= {"stage": stage, "changed_at": _now()}
        if progress is not None:
            values |= {"progress": clean(progress)}
        async with self._begin() as connection:
            return (await self._own(connection, job, values)).cancel

    async def write(self, job: Job, texts: Sequence[str]) -> None:
        """Add lines to the job's log."""
        at = func.clock_timestamp()
        values = [{"job_id": job.id, "line": clean(line)[:LINE_CHARS_MAX]} for line in texts]
        if values:
            async with self._begin() as connection:
                await connection.execute(insert(lines).values(at=at), values)

    async def end(self, job: Job, state: JobState, error: str | None = None) -> Job:
        """Record how the job ended: done, refused, failed or cancelled."""
        message = clean(error)[:ERROR_CHARS_MAX] if error else None
        async with self._begin() as connection:
            return await self._own(connection, job, {"state": state, "error": message, **_times("changed", "ended")})

    async def give_back(self, job: Job) -> None:
        """Queue the job again, because this worker stops; the next one goes on from the checkpoint."""
        async with self._begin() as connection:
            await self._own(connection, job, {"state": "queued", **_times("changed")})
            await _nudge(self._app, connection, job.id)

    async def renudge(self, stale_s: float) -> Sequence[str]:
        """Enter jobs in the queue again that wait, or whose worker has been silent for `stale_s`. Return their ids."""
        waiting = (jobs.c.state == "queued") & (jobs.c.changed_at < _ago(stale_s))
        left = (jobs.c.state == "running") & _silent(stale_s)
        query = select(jobs.c.id).where(or_(waiting, left)).order_by(jobs.c.created_at).limit(JOBS_MAX)
        async with self._begin() as connection:
            ids = [str(job_id) for job_id in await connection.scalars(query)]
            for job_id in ids:
                await _nudge(self._app, connection, job_id)
        return ids

    async def news(self, policy: str) -> tuple[datetime | None, int]:
        """Return when the policy's last job was made (None if it never had one), and how many judged outcomes came
        since."""
        latest = select(func.max(jobs.c.created_at)).where(jobs.c.policy == policy)
        async with self._begin() as connection:
            since = await connection.scalar(latest)
            judged = select(literal(1)).where(outcomes.c.value.is_not(None), outcomes.c.step.is_(None))
            judged = judged.where(is_heard(outcomes.c.source))
            if since is not None:
                judged = judged.where(outcomes.c.created_at > since)
            some = judged.limit(OUTCOMES_COUNTED_MAX).subquery()
            return since, int(await connection.scalar(select(func.count()).select_from(some)) or 0)

    # ---------------------------------------------------------------- parts

    def _begin(self) -> AbstractAsyncContextManager[AsyncConnection]:
        return transaction(self._engine)

    async def _own(self, connection: AsyncConnection, job: Job, values: Mapping[str, Any]) -> Job:
        mine = (jobs.c.id == job.id) & (jobs.c.attempts == job.attempts) & (jobs.c.state == "running")
        row = (await connection.execute(update(jobs).where(mine).values(**values).returning(jobs))).mappings().first()
        if row is None:
            raise Conflict(f"job {job.id} is no longer this worker's", code=OVERTAKEN)
        return _job(row)

    async def _taken(self, policy: str) -> Conflict:
        other = next((job for job in await self.list(policy) if job.state in ACTIVE), None)
        what = f"job {other.id} of {policy} is {other.state}" if other else f"{policy} had a job a moment ago"
        return Conflict(f"{what}; one at a time: wait for it, or cancel it", code="job_active")


def _job(row: Mapping[Any, Any]) -> Job:
    return Job(**row)


async def _require(connection: AsyncConnection, job_id: str, *, lock: bool = False) -> Job:
    prefix = job_id.lower()
    if len(prefix) < 8 or len(prefix) > 36 or not set(prefix) <= set("0123456789abcdef-"):
        raise BadRequest(f"`{job_id[:64]}` is not a job id; `baton train status` lists them", param="job_id")
    text = cast(jobs.c.id, lines.c.line.type)
    query = select(jobs).where(text.startswith(prefix)).limit(2)
    rows = (await connection.execute(query.with_for_update() if lock else query)).mappings().all()
    if not rows:
        raise NotFound(f"no job `{job_id}`; `baton train status` lists them", param="job_id", code="job_not_found")
    if len(rows) > 1:
        raise Conflict(f"several jobs begin with `{job_id}`; give more of the id", code="job_ambiguous")
    return _job(rows[0])


async def _changed(connection: AsyncConnection, change: Update) -> Job:
    return _job((await connection.execute(change.returning(jobs))).mappings().one())


def _now() -> ColumnElement[datetime]:
    return func.clock_timestamp()


def _times(*names: str) -> dict[str, Any]:
    return {f"{name}_at": _now() for name in names}


def _ago(seconds: float) -> ColumnElement[Any]:
    return func.clock_timestamp() - cast(f"{seconds} seconds", Interval)


def _silent(stale_s: float) -> ColumnElement[bool]:
    return jobs.c.heartbeat_at < _ago(stale_s)


# ---------------------------------------------------------------- the queue


def queue_app(database_url: str, *, statement_timeout_s: float = 10.0) -> App:
    """An unopened App: a JobStore uses it as it is, a worker opens it."""
    options = f"-c search_path={QUEUE_SCHEMA} -c timezone=UTC -c statement_timeout={round(statement_timeout_s * 1000)}"
    connector = PsycopgConnector(
        conninfo=driver_url(database_url).set(drivername="postgresql").render_as_string(hide_password=False),
        kwargs={"options": options, "connect_timeout": QUEUE_CONNECT_S, "application_name": "baton worker"},
        min_size=1,
        max_size=QUEUE_CONNECTIONS_MAX,
        timeout=float(QUEUE_CONNECT_S),
    )
    return App(connector=connector)


async def _nudge(app: App, connection: AsyncConnection, job_id: str) -> None:
    """Enter a job in the queue, in the open transaction, unless it waits there already."""
    path = func.concat(f"{QUEUE_SCHEMA}, ", func.current_setting("search_path"))
    try:
        async with connection.begin_nested():
            await connection.execute(select(func.set_config("search_path", path, True)))
            raw = (await connection.get_raw_connection()).driver_connection
            entry = app.configure_task(RUN_JOB, queue=TRAINING, queueing_lock=job_id, connection=raw)
            await entry.defer_async(job_id=job_id)
    except AlreadyEnqueued:
        return


# ---------------------------------------------------------------- gradings


@dataclass(frozen=True, slots=True)
class Waiting:
    """A rollout to grade. `request` and `reply` are the bodies as logged; None if there is no reply. `grader`: a name
    of core/policies/grading.py, or the source of a sampled judge, whose `reference` is the type of the task."""

    rollout_id: str
    key_id: str
    grader: str
    reference: str
    attempts: int
    status: str
    request: Mapping[str, Any]
    reply: Mapping[str, Any] | None

    @property
    def is_sampled(self) -> bool:
        """Whether a judge drew it; else its request named the grader."""
        return self.grader.startswith(JUDGE)

    @property
    def source(self) -> str:
        """The source of the outcome that comes of it."""
        return self.grader if self.is_sampled else SOURCE


class GradingStore:
    """Every call raises Unavailable when PostgreSQL is away."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def lend(self, limit: int, lease_s: float) -> Sequence[Waiting]:
        """Return up to `limit` gradings that are due, the longest waiting first. No other worker gets them for
        `lease_s`."""
        due = select(gradings.c.rollout_id).where(gradings.c.state == "waiting", gradings.c.due_at <= func.now())
        due = due.order_by(gradings.c.due_at).limit(limit).with_for_update(skip_locked=True)
        until = func.now() + timedelta(seconds=lease_s)
        change = update(gradings).where(gradings.c.rollout_id.in_(due.scalar_subquery()))
        change = change.values(attempts=gradings.c.attempts + 1, due_at=until)
        names = ("rollout_id", "grader", "reference", "attempts")
        async with transaction(self._engine) as connection:
            lent = (await connection.execute(change.returning(*(gradings.c[n] for n in names)))).mappings().all()
            ids = [row["rollout_id"] for row in lent]
            r = rollouts.c
            query = select(r.id, r.key_id, r.status, r.request, r.reply)
            rollout_of = {row.id: row for row in await connection.execute(query.where(r.id.in_(ids)))}
        of = [(row, rollout_of[row["rollout_id"]]) for row in lent]
        return [Waiting(**row, key_id=r.key_id, status=r.status, request=r.request, reply=r.reply) for row, r in of]

    async def graded(self, waiting: Waiting, value: float, version: str, detail: str) -> bool:
        """Store the grade as an outcome. Return False if the rollout has one already."""
        outcome = Outcome(
            id=uuid7(time.time_ns() // 1_000_000),
            rollout_id=waiting.rollout_id,
            key_id=waiting.key_id,
            created_at=datetime.now(UTC),
            judgement=Judgement(kind="number", value=value, source=waiting.source, grader_version=version),
            idempotency_key=f"{waiting.source}:{waiting.rollout_id}",
        )
        done = {"state": "graded", "detail": _short(detail), "outcome_id": outcome.id}
        mine = (gradings.c.rollout_id == waiting.rollout_id) & (gradings.c.state == "waiting")
        async with transaction(self._engine) as connection:
            if not (await connection.execute(update(gradings).where(mine).values(**done))).rowcount:
                return False
            return await connection.run_sync(insert_outcome, outcome)

    async def ungraded(self, waiting: Waiting, reason: str) -> None:
        """End the grading without a grade; the rollout shows the reason."""
        await self._note(waiting, state="ungraded", detail=_short(reason))

    async def later(self, waiting: Waiting, reason: str, pause_s: float) -> None:
        """Try again after a pause."""
        await self._note(waiting, detail=_short(reason), due_at=func.now() + timedelta(seconds=pause_s))

    async def _note(self, waiting: Waiting, **values: Any) -> None:
        mine = (gradings.c.rollout_id == waiting.rollout_id) & (gradings.c.state == "waiting")
        async with transaction(self._engine) as connection:
            await connection.execute(update(gradings).where(mine).values(**values))


def _short(text: str) -> str:
    return str(rows.clean(text))[:DETAIL_CHARS_MAX]
