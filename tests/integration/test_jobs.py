"""Jobs on a real PostgreSQL: a real queue, worker and registry, programs of a few lines in place of training."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.audit import PostgresAudit
from gateway.adapters.postgres.inserts import insert_outcome, insert_rows
from gateway.adapters.postgres.policies.jobs import JobStore, queue_app
from gateway.adapters.postgres.policies.registry import Registry
from gateway.core.policies.jobs import Job, JobSpec
from gateway.errors import ConfigError, Conflict, NotFound
from policy.jobs.worker import Worker, WorkerSettings
from tests.jobs_kit import REFUSING, fake_python, in_state, runs
from tests.postgres_server import PostgresServer
from tests.records import a_rollout, an_outcome, rollout_event
from tests.tiny_model import write_tiny_model
from tests.waiting import BOUND_S, until

ROOT = Path(__file__).resolve().parents[2]


class Scene:
    """A store, a registry and what a worker is told."""

    def __init__(self, engine: AsyncEngine, database_url: str, directory: Path) -> None:
        self.store = JobStore(engine, queue_app(database_url))
        self.registry = Registry(engine, directory / "policies")
        self.directory = directory
        self.settings = WorkerSettings(
            database_url=database_url,
            data_dir=directory,
            policies=directory / "policies",
            shipped=write_tiny_model(directory / "shipped"),
            python=fake_python(directory),
            stale_s=3.0,
            stop_s=10.0,
        )

    async def submit(self, train: Mapping[str, Any] | None = None, policy: str = "conductor", **more: Any) -> Job:
        return await self.store.submit(policy, JobSpec({"env": "arena", **(train or {})}, **more), "tests")

    async def ended(self, job: Job, *states: str) -> Job:
        return await in_state(lambda: self.store.get(job.id), *(states or ("done", "refused", "failed", "cancelled")))

    def place(self, job: Job) -> Path:
        return self.directory / "jobs" / job.id

    async def log(self, job: Job) -> list[str]:
        return [line["line"] for line in await self.store.log(job.id)]

    def hold(self) -> tuple[Path, dict[str, Any]]:
        """A file that is not there, and a spec that makes the trainer wait for it after its third step."""
        path = self.directory / "hold"
        return path, {"settings": {"steps": 8}, "name": f"hold={path}"}

    async def step(self, job: Job, at_least: int) -> None:
        async def reached() -> bool:
            return int((await self.store.get(job.id)).progress.get("step", 0)) >= at_least

        await until(reached)


@pytest.fixture
def scene(pg_engine: AsyncEngine, database_url: str, tmp_path: Path) -> Scene:
    return Scene(pg_engine, database_url, tmp_path)


@asynccontextmanager
async def working(settings: WorkerSettings) -> AsyncIterator[asyncio.Task[None]]:
    """A worker in this process."""
    task = asyncio.create_task(Worker(settings).run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def spawned(scene: Scene) -> subprocess.Popen[bytes]:
    """A worker as a process of its own."""
    path = scene.directory / "worker.json"
    path.write_text(scene.settings.model_dump_json())
    command = [sys.executable, "-m", "policy", "jobs", "work", "--settings", str(path)]
    with (scene.directory / "worker.log").open("ab") as log:
        return subprocess.Popen(command, cwd=ROOT, stderr=log)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def read(path: str | None) -> Any:
    return json.loads(Path(str(path)).read_text())


async def test_a_policy_that_no_database_can_hold_has_no_jobs(scene: Scene) -> None:
    assert await scene.store.list("a\x00b") == []


async def test_a_job_ends_as_a_shadow_version_with_its_log_and_lineage(scene: Scene) -> None:
    async with working(scene.settings):
        job = await scene.ended(await scene.submit())
    assert (job.state, job.stage, job.version, job.attempts) == ("done", "shadow", "conductor@1", 1)
    assert (job.progress["step"], job.progress["steps"]) == (3, 3)
    version = await scene.registry.get("conductor@1")
    assert (version.state, version.parent) == ("shadow", "conductor@0")
    assert version.gate is not None
    assert version.gate["live"] == str(scene.settings.shipped)
    (event,) = [one for one in await scene.registry.events("conductor@1") if one["what"] == "published"]
    assert (event["who"], event["why"]) == (f"job {job.id}", "trained and passed the gate, asked for by tests")
    log = await scene.log(job)
    assert log[0] == "from step 0"
    assert log[-1] == "conductor@1 is shadow"
    (run,) = runs(scene.place(job))
    assert run["nice"] == max(10, os.nice(0))
    assert run["spec"] == {"init": str(scene.settings.shipped), "env": "arena"}
    assert version.gate["spec"] == {"env": "arena"}
    assert "--resume" in run["words"]


async def test_auto_makes_it_a_canary_of_one_percent(scene: Scene) -> None:
    async with working(scene.settings):
        job = await scene.ended(await scene.submit(auto=True))
    version = await scene.registry.get(str(job.version))
    assert (version.state, version.percent) == ("canary", 1)


async def test_a_refused_gate_leaves_everything_as_it_was(scene: Scene) -> None:
    async with working(scene.settings):
        job = await scene.ended(await scene.submit(gate={"seed": REFUSING}))
    assert (job.state, job.version) == ("refused", None)
    assert job.error == "the gate refused it: worse: 0.40 is below the live version's 0.60"
    assert job.report == str(scene.place(job) / "gate.json")
    assert read(job.report)["passed"] is False
    assert await scene.registry.list() == []
    assert not scene.registry.policies.exists()
    with pytest.raises(Conflict, match="only a failed or cancelled one is resumed"):
        await scene.store.resume(job.id)


async def test_a_worker_that_is_killed_mid_train_is_replaced_and_training_goes_on(scene: Scene) -> None:
    hold, train = scene.hold()
    job = await scene.submit(train)
    first = spawned(scene)
    try:
        await scene.step(job, 3)
    finally:
        first.kill()
        first.wait()
    hold.touch()
    second = spawned(scene)
    try:
        job = await scene.ended(job)
    finally:
        second.send_signal(signal.SIGTERM)
        assert second.wait(BOUND_S) == 0
    assert (job.state, job.attempts, job.version) == ("done", 2, "conductor@1"), job
    one, other = runs(scene.place(job))
    assert one["pid"] != other["pid"]
    resumed = int(next(line for line in reversed(await scene.log(job)) if line.startswith("from step")).split()[-1])
    assert resumed >= 3
    steps = [json.loads(line)["step"] for line in (scene.place(job) / "progress.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 9))  # none twice, none left out


async def test_a_stopped_worker_gives_its_job_back_at_the_checkpoint(scene: Scene) -> None:
    hold, train = scene.hold()
    job = await scene.submit(train)
    async with working(scene.settings):
        await scene.step(job, 2)
    hold.touch()
    assert (await scene.store.get(job.id)).state == "queued"
    async with working(scene.settings):
        job = await scene.ended(job)
    assert (job.state, job.attempts) == ("done", 2)
    assert len(runs(scene.place(job))) == 2


async def test_one_job_a_policy_at_a_time(scene: Scene) -> None:
    job = await scene.submit()
    with pytest.raises(Conflict, match=rf"job {job.id} of conductor is queued; one at a time"):
        await scene.submit()
    other = await scene.submit(policy="other")
    async with working(scene.settings):
        assert (await scene.ended(job)).state == "done"
        assert (await scene.ended(other)).state == "done"
    many = await asyncio.gather(*(scene.submit() for _ in range(6)), return_exceptions=True)
    assert [type(one) for one in many].count(Job) == 1
    assert {type(one) for one in many} == {Job, Conflict}


async def test_cancel_stops_at_the_checkpoint_and_resume_goes_on(scene: Scene) -> None:
    hold, train = scene.hold()
    job = await scene.submit(train)
    async with working(scene.settings):
        await scene.step(job, 2)
        assert (await scene.store.cancel(job.id)).cancel
        job = await scene.ended(job)
        assert (job.state, job.error) == ("cancelled", None)
        assert await scene.registry.list() == []
        with pytest.raises(Conflict, match="is cancelled already"):
            await scene.store.cancel(job.id)
        hold.touch()
        assert (await scene.store.resume(job.id)).state == "queued"
        job = await scene.ended(job, "done", "failed")
    assert (job.state, job.attempts) == ("done", 2)
    steps = [json.loads(line)["step"] for line in (scene.place(job) / "progress.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 9))


async def test_a_queued_job_is_cancelled_at_once_and_never_run(scene: Scene) -> None:
    job = await scene.submit()
    assert (await scene.store.cancel(job.id, "key:op")).state == "cancelled"
    done = await PostgresAudit(scene.store._engine).latest(1)
    assert [(one.entry.actor, one.entry.act, one.entry.target) for one in done] == [
        ("key:op", "job.cancelled", f"job:{job.id}")
    ]
    other = await scene.submit(policy="other")
    async with working(scene.settings):
        await scene.ended(other)
    assert (await scene.store.get(job.id)).attempts == 0
    assert not scene.place(job).exists()


async def test_a_job_goes_on_with_a_larger_cap_of_its_gate(scene: Scene) -> None:
    job = await scene.store.cancel((await scene.submit(gate={"usd_max": "1", "n": 5})).id)
    job = await scene.store.resume(job.id, "key:op", "2.50")
    assert job.spec["gate"] == {"usd_max": "2.50", "n": 5}
    assert (await scene.store.cancel(job.id)).spec["gate"]["usd_max"] == "2.50"
    done = await PostgresAudit(scene.store._engine).latest(2)
    assert {"gate_usd_max": "2.50"} in [one.entry.after for one in done]


async def test_a_trainer_that_fails_is_one_line_and_can_be_resumed(scene: Scene) -> None:
    async with working(scene.settings):
        job = await scene.ended(await scene.submit({"name": "fail=no GPU of that name; use --device cpu"}))
    assert job.state == "failed"
    log = scene.place(job) / "log"
    assert job.error == f"policy train ended with status 2: no GPU of that name; use --device cpu (log: {log})"
    assert await scene.registry.list() == []
    assert (await scene.store.resume(job.id)).error is None


async def test_postgres_gone_mid_job_does_not_stop_it(scene: Scene, pg_server: PostgresServer) -> None:
    hold, train = scene.hold()
    job = await scene.submit(train)
    async with working(scene.settings):
        await scene.step(job, 1)
        await asyncio.to_thread(pg_server.shut, scene.settings.database_url)
        await asyncio.sleep(1.0)
        hold.touch()
        await asyncio.sleep(1.0)
        await asyncio.to_thread(pg_server.reopen, scene.settings.database_url)
        job = await scene.ended(job)
    assert (job.state, job.version) == ("done", "conductor@1")
    steps = [json.loads(line)["step"] for line in (scene.place(job) / "progress.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 9))


async def test_a_job_taken_over_stops_its_first_worker(scene: Scene) -> None:
    _, train = scene.hold()
    job = await scene.submit(train)
    async with working(scene.settings):
        await scene.step(job, 1)
        taken = await scene.store.claim(job.id, stale_s=-1.0)  # as a worker does that has not heard of the first
        assert taken is not None
        (run,) = runs(scene.place(job))
        await until(lambda: not alive(run["pid"]))
        assert not await scene.store.beat(taken)  # it is the second one's still, and unharmed
        await scene.store.end(taken, "failed", "end of the test")


async def test_empty_selection_is_one_line_that_says_what_to_do(scene: Scene) -> None:
    async with working(scene.settings):
        job = await scene.ended(await scene.submit({"env": "logged"}))
    assert job.state == "failed"
    assert job.stage == "select"
    assert "the log is empty: send requests through the gateway first" in str(job.error)


async def test_a_file_that_changed_under_a_job_is_refused(scene: Scene) -> None:
    data = scene.directory / "recorded.jsonl"
    data.write_text("{}\n")
    _, train = scene.hold()
    job = await scene.submit({**train, "data": str(data)})
    async with working(scene.settings):
        await scene.step(job, 1)
        await scene.store.cancel(job.id)
        await scene.ended(job)
        data.write_text("{}{}\n")
        await scene.store.resume(job.id)
        job = await scene.ended(job, "done", "failed")
    assert job.state == "failed"
    assert f"{data} has changed since this job began" in str(job.error)


async def test_a_log_is_read_from_where_one_was(scene: Scene) -> None:
    async with working(scene.settings):
        job = await scene.ended(await scene.submit())
    whole = await scene.store.log(job.id)
    rest = await scene.store.log(job.id, after=whole[0]["n"])
    assert [line["n"] for line in rest] == [line["n"] for line in whole[1:]]
    with pytest.raises(NotFound, match="no job"):
        await scene.store.log("00000000-0000")


async def test_a_job_without_an_entry_in_the_queue_is_queued_again(scene: Scene) -> None:
    job = await scene.submit()
    async with working(scene.settings):
        await scene.ended(job)
    again = await scene.submit()
    dead = await scene.store.claim(again.id, stale_s=3.0)  # by a worker that then vanishes
    assert dead is not None
    async with working(scene.settings):
        again = await scene.ended(again)
    assert (again.state, again.attempts) == ("done", 2)
    with pytest.raises(Conflict, match="no longer this worker's"):
        await scene.store.end(dead, "failed", "the dead one's last word")


async def test_a_job_of_an_older_release_ends_with_the_command_that_submits_it_again(scene: Scene) -> None:
    old = {"arguments": ["--env", "arena", "--set", "steps=3"], "gate": [], "auto": False}

    class Arguments(JobSpec):
        def as_json(self) -> dict[str, Any]:
            return old

    job = await scene.store.submit("conductor", Arguments({}), "tests")
    async with working(scene.settings):
        job = await scene.ended(job)
    assert (job.state, job.stage, job.spec) == ("failed", None, old)
    assert str(job.error).endswith("`baton train submit --env arena --set steps=3`")
    assert not scene.place(job).exists()


async def test_a_worker_with_a_schedule_that_no_job_could_have_says_so_at_once(scene: Scene) -> None:
    asked = {"retrain_outcomes_min": 1, "retrain_arguments": ["--env", "mars"]}
    with pytest.raises(ConfigError, match="BATON_RETRAIN_ARGUMENTS: argument --env: invalid choice"):
        Worker(scene.settings.model_copy(update=asked))


async def test_the_worker_looks_at_the_schedule_by_itself(scene: Scene, pg_engine: AsyncEngine) -> None:
    record = a_rollout()
    async with pg_engine.begin() as connection:
        await connection.run_sync(insert_rows, rows.event_rows(rollout_event(record)))
        await connection.run_sync(insert_outcome, an_outcome(record.id))
    asked = {"retrain_outcomes_min": 1, "retrain_arguments": ["--env", "arena"]}
    async with working(scene.settings.model_copy(update=asked)):
        jobs = await until(scene.store.list)
        job = await scene.ended(jobs[0])
    assert (job.by, job.state, job.version) == ("schedule", "done", "conductor@1")
    assert len(await scene.store.list()) == 1
