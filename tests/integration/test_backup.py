"""`baton backup` and `baton restore` over DATABASE_URL: what is in the file, and what they refuse."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway import cli
from gateway.adapters.host import servers
from gateway.adapters.postgres import rows
from gateway.adapters.postgres.database import sync_engine
from gateway.adapters.postgres.inserts import insert_rows
from gateway.errors import ConfigError
from tests.postgres_server import PostgresServer
from tests.records import a_rollout, hold_event, rollout_event, settle_event

Run = Callable[..., Any]
RUNNING = ("run/x", "worker.json", "processes/1/process.json", "serve.json")  # some name the database's password


@pytest.fixture
async def installed(database_url: str, pg_engine: AsyncEngine, tmp_path: Path) -> Path:
    """A data directory, and a database with one rollout and its charge."""
    rollout = a_rollout()
    events = [rollout_event(rollout), hold_event("h1", rollout.id, 900), settle_event("h1", rollout.id, "posted", 805)]
    for event in events:
        async with pg_engine.begin() as connection:
            await connection.run_sync(insert_rows, rows.event_rows(event))
    data = tmp_path / "data"
    kept = {"pepper": "p", "spool/0001": "records", "policies/c@1/weights": "w"}
    for name, content in (kept | dict.fromkeys(RUNNING, "postgresql://u:password@h")).items():
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_text(content)
    return data


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def command(url: str, *words: str | Path, status: int = 0) -> Any:
        if url:
            monkeypatch.setenv("DATABASE_URL", url)
        else:
            monkeypatch.delenv("DATABASE_URL", raising=False)  # the embedded server
        assert cli.main([*map(str, words), "--json"]) == status
        printed = capsys.readouterr()
        return json.loads(printed.out) if status == 0 else printed.err

    return command


def test_a_backup_has_all_that_is_no_running_state_and_comes_back(
    run: Run, installed: Path, database_url: str, pg_server: PostgresServer, tmp_path: Path
) -> None:
    file, again = tmp_path / "kept.tar", tmp_path / "again"
    facts = run(database_url, "backup", file, "--data-dir", installed)
    assert facts["ledger"] == {"rows": 2, "charged_nano": 805}
    with tarfile.open(file) as tar:
        names = {name.removeprefix("./") for name in tar.getnames()}
    assert {"postgres.dump", "journal/0001", "policies/c@1/weights", "data/pepper"} <= names
    assert not names & {f"data/{name}" for name in RUNNING}
    assert b"password" not in file.read_bytes()
    assert "exists" in run(database_url, "backup", file, "--data-dir", installed, status=1)

    empty = pg_server.create()
    assert run(empty, "restore", file, "--data-dir", again) == facts["ledger"]
    assert [(again / name).read_text() for name in ("pepper", "spool/0001", "policies/c@1/weights")] == [
        *("p", "records", "w")
    ]
    engine = sync_engine(empty)
    with engine.begin() as connection:
        assert connection.execute(text("SELECT status FROM rollouts")).scalar_one() == "done"
    engine.dispose()


def test_nothing_is_overwritten(
    run: Run, installed: Path, database_url: str, pg_server: PostgresServer, tmp_path: Path
) -> None:
    file = tmp_path / "kept.tar"
    run(database_url, "backup", file, "--data-dir", installed)
    assert "is not empty" in run(pg_server.create(), "restore", file, "--data-dir", installed, status=1)
    assert "name an empty one" in run(database_url, "restore", file, "--data-dir", tmp_path / "new", status=1)


def test_a_damaged_backup_is_refused_before_anything_is_written(
    run: Run, installed: Path, database_url: str, pg_server: PostgresServer, tmp_path: Path
) -> None:
    file, new = tmp_path / "kept.tar", tmp_path / "new"
    run(database_url, "backup", file, "--data-dir", installed)
    damaged = file.read_bytes().replace(b"records", b"rec0rds")
    (tmp_path / "damaged.tar").write_bytes(damaged)
    assert "damaged: journal/0001" in run(
        pg_server.create(), "restore", tmp_path / "damaged.tar", "--data-dir", new, status=2
    )
    assert not new.exists()
    (tmp_path / "none.tar").write_text("no tar")
    assert "no backup" in run(pg_server.create(), "restore", tmp_path / "none.tar", "--data-dir", new, status=2)


@pytest.mark.parametrize("name", ["../out", "/out", "data/../../out", "link", "pipe"])
def test_a_file_that_leads_out_or_is_no_plain_file_is_refused(run: Run, tmp_path: Path, name: str) -> None:
    member = tarfile.TarInfo(name.replace("/out", f"{tmp_path}/out") if name.startswith("/") else name)
    if name in ("link", "pipe"):
        member.type, member.linkname = tarfile.SYMTYPE if name == "link" else tarfile.FIFOTYPE, "/etc/hostname"
    member.size = 0 if name in ("link", "pipe") else 3
    with tarfile.open(tmp_path / "other.tar", "w") as tar:
        tar.addfile(member, io.BytesIO(b"out"))
    told = run("", "restore", tmp_path / "other.tar", "--data-dir", tmp_path / "new", status=2)
    assert "which no backup writes" in told
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "new").exists()


def test_a_restore_that_failed_leaves_nothing_and_can_be_tried_again(
    run: Run, installed: Path, database_url: str, tmp_path: Path
) -> None:
    file, other, new = tmp_path / "kept.tar", tmp_path / "other.tar", tmp_path / "new"
    facts = run(database_url, "backup", file, "--data-dir", installed)
    with tarfile.open(file) as tar:
        for member in filter(tarfile.TarInfo.isfile, tar):
            (tmp_path / "unpacked" / member.name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "unpacked" / member.name).write_bytes(tar.extractfile(member).read())  # type: ignore[union-attr]
    manifest = tmp_path / "unpacked" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"charged_nano": 805', '"charged_nano": 806'))
    with tarfile.open(other, "w") as tar:
        tar.add(tmp_path / "unpacked", arcname=".")
    assert "the backup's was" in run("", "restore", other, "--data-dir", new, status=1)
    assert list(new.iterdir()) == []
    assert run("", "restore", file, "--data-dir", new) == facts["ledger"]
    assert {"postgres", "pepper"} <= {path.name for path in new.iterdir()}


def test_a_program_is_of_the_servers_version_or_newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "pg_dump"
    program.write_text("#!/bin/sh\necho 'pg_dump (PostgreSQL) 17.3 (Debian)'\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert servers.postgres_programs("pg_dump", 16) == program
    assert servers.postgres_programs("pg_dump", 18) != program
    with pytest.raises(ConfigError, match="postgresql-client-99"):
        servers.postgres_programs("pg_dump", 99)
