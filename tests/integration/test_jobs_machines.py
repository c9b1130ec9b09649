"""Jobs on machines without a common disk: directories, inputs and versions go by URL; PostgreSQL is all they share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.engines.sealed import read_policy
from gateway.adapters.host import urls
from gateway.adapters.host.urls import below, exists, read_text
from gateway.adapters.postgres.policies.registry import Registry
from gateway.errors import NotFound
from policy.jobs.worker import WorkerSettings
from tests.integration.test_jobs import Scene, spawned, working
from tests.jobs_kit import runs
from tests.tiny_model import write_tiny_model
from tests.waiting import until


class Machine(Scene):
    """A disk of its own, with the same weights under another path."""

    def __init__(self, engine: AsyncEngine, database_url: str, directory: Path, shelf: str) -> None:
        directory.mkdir()
        super().__init__(engine, database_url, directory)
        where = {"jobs_url": f"{shelf}/jobs", "policies_url": f"{shelf}/policies"}
        self.settings = WorkerSettings.model_validate(self.settings.model_dump() | where)
        self.registry = Registry(engine, directory / "policies", f"{shelf}/policies")


@pytest.fixture
def shelf(tmp_path: Path) -> str:
    return f"file://{tmp_path}/shelf"


@pytest.fixture
def machines(pg_engine: AsyncEngine, database_url: str, tmp_path: Path, shelf: str) -> tuple[Machine, Machine]:
    one, two = (Machine(pg_engine, database_url, tmp_path / name, shelf) for name in ("one", "two"))
    return one, two


async def test_a_machine_that_is_lost_is_replaced_by_another_from_the_checkpoint(
    machines: tuple[Machine, Machine], shelf: str, pg_engine: AsyncEngine, tmp_path: Path
) -> None:
    one, two = machines
    hold, train = one.hold()
    job = await one.submit(train)
    first = spawned(one)
    try:
        await one.step(job, 3)
        state = below(f"{shelf}/jobs/{job.id}", "state.json")

        async def kept() -> bool:
            files = json.loads(read_text(state))["files"] if exists(state) else {}
            digest = files.get("train/checkpoint")
            return digest is not None and read_text(below(f"{shelf}/jobs/{job.id}/files", digest)) == "3"

        await until(kept)
    finally:
        first.kill()
        first.wait()
    shutil.rmtree(one.place(job), ignore_errors=True)  # the disk is gone with it
    hold.touch()
    async with working(two.settings):
        job = await two.ended(job)
    assert (job.state, job.version, job.attempts) == ("done", "conductor@1", 2), job
    (run,) = runs(two.place(job))
    assert run["spec"]["init"] == str(two.settings.shipped)
    assert "from step 3" in await two.log(job)
    version = await two.registry.get("conductor@1")
    third = Registry(pg_engine, tmp_path / "third", f"{shelf}/policies")  # a gateway that has no disk with them either
    assert read_policy(await third.place(version)).manifest.parent == "conductor@0"
    await two.registry.canary("conductor@1", 100, by="tests")
    await two.registry.move("conductor@1", "live", by="tests")
    async with working(one.settings):
        again = await one.ended(await one.submit())
    assert again.state == "done", again
    (run,) = runs(one.place(again))
    assert run["spec"]["init"] == str(one.directory / "policies" / "conductor@1")


def _text(path: str) -> str:
    return Path(path).read_text()


async def test_inputs_by_url_are_fetched_and_named_where_they_are_not_there(
    machines: tuple[Machine, Machine], shelf: str, tmp_path: Path
) -> None:
    one, _ = machines
    weights = write_tiny_model(tmp_path / "weights", seed=3)
    urls.send_policy(weights, f"{shelf}/inputs/weights")
    (tmp_path / "answers.jsonl").write_text("{}\n")
    train = {"env": "replay", "init": f"{shelf}/inputs/weights", "data": f"{shelf}/inputs/answers.jsonl"}
    async with working(one.settings):
        lost = await one.ended(await one.submit(train))
        urls.send(tmp_path / "answers.jsonl", train["data"])
        await one.store.resume(lost.id)
        job = await one.ended(lost, "done")
    assert lost.state == "failed"
    assert "answers.jsonl: there is no such file; check the name" in str(lost.error)
    (run,) = runs(one.place(job))
    assert json.loads(_text(run["spec"]["data"])) == {}
    assert read_policy(Path(run["spec"]["init"])).manifest == read_policy(weights).manifest
    version = await one.registry.get(str(job.version))
    assert version.gate is not None
    assert version.gate["spec"]["data"] == run["spec"]["data"]


async def test_a_shelf_that_is_full_costs_no_training(
    machines: tuple[Machine, Machine], shelf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The uploads fail while the program runs: a line in the log. At the end the job fails by name, and resumes."""
    one, _ = machines
    real, tried = urls.send, []

    def full(path: Path, url: str) -> Any:
        tried.append(path.name)
        raise OSError(28, "No space left on device", url)

    monkeypatch.setattr("policy.jobs.mirror.send", full)
    async with working(one.settings):
        job = await one.ended(await one.submit({"settings": {"steps": 30}}))
        monkeypatch.setattr("policy.jobs.mirror.send", real)
        failed = job
        await one.store.resume(job.id)
        job = await one.ended(job, "done")
    assert failed.state == "failed"
    assert str(failed.error).startswith(f"{shelf}/jobs/{job.id}/files/")
    assert "No space left on device" in str(failed.error)
    assert any("is kept here alone for now" in line for line in await one.log(job))
    assert (job.state, len(runs(one.place(job)))) == ("done", 1)
    assert len(tried) > 1


async def test_a_version_that_is_nowhere_is_one_line(
    machines: tuple[Machine, Machine], pg_engine: AsyncEngine, tmp_path: Path, shelf: str
) -> None:
    one, _ = machines
    version = await Registry(pg_engine, tmp_path / "alone").seed(write_tiny_model(tmp_path / "model"))
    with pytest.raises(NotFound, match=r"policies/conductor@.*manifest\.json: there is no such file"):
        await one.registry.place(version)
