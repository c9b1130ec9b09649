"""The embedded servers: the real programs, started, crashed, killed and left alone."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import psycopg
import pytest
from redis.asyncio import Redis

from gateway.adapters.host import servers, supervisor
from gateway.adapters.host.servers import EmbeddedPostgres, EmbeddedProgram, EmbeddedRedis
from gateway.errors import ConfigError, Unavailable
from tests.waiting import BOUND_S, until

TINY = "tests.integration.tiny_program"
ROOT = Path(__file__).resolve().parents[2]


def _plain(url: str) -> str:
    return url.replace("postgresql+psycopg", "postgresql")


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In place of pytest's own, whose root every other run of pytest closes again for PostgreSQL's user."""
    with tempfile.TemporaryDirectory(prefix="baton-test-") as path:
        yield Path(path)


@pytest.fixture
async def tiny(tmp_path: Path) -> AsyncIterator[EmbeddedProgram]:
    program = EmbeddedProgram("tiny", tmp_path, TINY, [], ready_s=20)
    await program.start()
    yield program
    await program.stop()


async def test_postgres_keeps_its_data_between_starts_and_leaves_no_process(tmp_path: Path) -> None:
    first = EmbeddedPostgres(tmp_path)
    await first.start()
    with psycopg.connect(_plain(first.url), autocommit=True) as connection:
        connection.execute("create extension vector")
        connection.execute("create table kept as select 7 as n")
    pid = first.pid
    await first.stop()
    assert pid is not None
    assert not _alive(pid)

    second = EmbeddedPostgres(tmp_path)
    await second.start()
    with psycopg.connect(_plain(second.url)) as connection:
        assert connection.execute("select n from kept").fetchone() == (7,)
    await second.stop()
    assert second.pid is None


async def test_only_this_user_reaches_the_data_and_the_sockets(tmp_path: Path) -> None:
    postgres, redis = EmbeddedPostgres(tmp_path), EmbeddedRedis(tmp_path)
    await asyncio.gather(postgres.start(), redis.start())
    try:
        for directory in (postgres.directory, postgres.sockets, redis.socket.parent):
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    finally:
        await asyncio.gather(postgres.stop(), redis.stop())


async def test_redis_answers_and_runs_lua(tmp_path: Path) -> None:
    redis = EmbeddedRedis(tmp_path)
    await redis.start()
    async with Redis.from_url(redis.url) as client:
        script = client.register_script("return redis.call('incrby', KEYS[1], ARGV[1])")
        assert await script(keys=["x"], args=[5]) == 5
    await redis.stop()
    await redis.stop()
    assert redis.pid is None


async def test_a_path_too_long_for_a_socket_gets_a_private_one_that_goes_again(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    redis = EmbeddedRedis(deep)
    await redis.start()
    outside = redis.socket.parent
    assert not outside.is_relative_to(tmp_path)
    assert stat.S_IMODE(outside.stat().st_mode) == 0o700
    await redis.stop()
    assert not outside.exists()


async def test_a_killed_parent_leaves_nothing_and_the_next_start_works(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.integration.killed_parent", str(tmp_path)]
    parent = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pids = [int(word) for word in (await parent.stdout.readline()).split()]
    assert len(pids) == 2
    assert all(_alive(pid) for pid in pids)
    parent.kill()
    await parent.wait()
    postgres = EmbeddedPostgres(tmp_path)
    await postgres.start()  # at once: the old server may still be closing
    await until(lambda: not any(_alive(pid) for pid in pids))
    await postgres.stop()


async def test_a_former_server_still_running_is_waited_out(tmp_path: Path) -> None:
    former = EmbeddedPostgres(tmp_path)
    await former.start()
    pid = former.pid
    assert former._watch is not None
    former._watch.cancel()  # as if its Baton were gone
    second = EmbeddedPostgres(tmp_path)
    await second.start()
    assert second.pid not in (None, pid)
    await second.stop()
    await former.stop()


async def test_a_crashed_program_comes_back_where_it_was(tiny: EmbeddedProgram) -> None:
    before = tiny.pid
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.HTTPError):
            await client.get(f"{tiny.url}/die")
        await until(lambda: tiny.restarts == 1 and tiny.pid not in (None, before))
        transport = httpx.AsyncHTTPTransport(retries=10)
        async with httpx.AsyncClient(transport=transport) as patient:
            assert (await patient.get(f"{tiny.url}/health")).status_code == 200


async def test_a_program_that_keeps_failing_is_tried_with_growing_pauses(
    tiny: EmbeddedProgram, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST_S", 0.01)
    tiny.arguments.append("--refuse")
    assert tiny.pid is not None
    os.kill(tiny.pid, signal.SIGKILL)
    await until(lambda: tiny.restarts >= 2)
    assert "I would rather not" in caplog.text
    assert "restarting in 0.5 s" in caplog.text


async def test_after_a_steady_run_the_pause_is_short_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(supervisor, "STEADY_S", 0.0)  # every run is one
    program = EmbeddedProgram("tiny", tmp_path, TINY, [], ready_s=20)
    launched, launch = asyncio.Event(), program._launch

    async def noted() -> asyncio.subprocess.Process:
        process = await launch()
        launched.set()
        return process

    monkeypatch.setattr(program, "_launch", noted)
    await program.start()
    try:
        for _ in range(3):
            launched.clear()
            assert program.pid is not None
            os.kill(program.pid, signal.SIGKILL)
            await asyncio.wait_for(launched.wait(), BOUND_S)
    finally:
        await program.stop()
    assert re.findall(r"restarting in (\S+) s", caplog.text) == ["0.01"] * 3


async def test_a_program_that_will_not_start_says_why_in_one_line(tmp_path: Path) -> None:
    program = EmbeddedProgram("tiny", tmp_path, TINY, ["--refuse"])
    with pytest.raises(Unavailable) as caught:
        await program.start()
    message = caught.value.message
    assert "\n" not in message
    assert "tiny did not start: ended with status 1, its last words: tiny: I would rather not" in message
    assert f"-m {TINY} --refuse --port 0` shows it alone" in message
    assert program.pid is None


async def test_a_program_that_never_answers_is_ended(tmp_path: Path) -> None:
    program = EmbeddedProgram("mute", tmp_path, TINY, ["--mute"], ready_s=1.5)
    with pytest.raises(Unavailable, match=r"no answer within 1\.5 s"):
        await program.start()
    assert program.pid is None


async def test_a_server_that_ignores_its_signal_is_killed(tiny: EmbeddedProgram) -> None:
    pid = tiny.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    tiny.stop_s = 0.2
    await asyncio.wait_for(tiny.stop(), BOUND_S)
    assert not _alive(pid)


async def test_other_data_of_another_postgres_are_refused(tmp_path: Path) -> None:
    postgres = EmbeddedPostgres(tmp_path)
    postgres.directory.mkdir()
    (postgres.directory / "PG_VERSION").write_text("17\n")
    with pytest.raises(Unavailable, match="made by PostgreSQL 17, this is 18"):
        await postgres.start()


async def test_a_failed_initdb_leaves_no_half_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    postgres = EmbeddedPostgres(tmp_path)
    monkeypatch.setattr(
        EmbeddedPostgres, "env", {"PATH": os.defpath, "TZ": "x", "LD_PRELOAD": "/nowhere.so", "PGPORT": "x"}
    )
    monkeypatch.setattr(servers, "_postgres_binaries", lambda: _false_binaries(tmp_path))
    with pytest.raises(Unavailable, match="initdb failed"):
        await postgres.start()
    assert not postgres.directory.exists()


def _false_binaries(where: Path) -> Path:
    binaries = where / "bin"
    binaries.mkdir(exist_ok=True)
    (binaries / "initdb").write_text("#!/bin/sh\nexit 1\n")
    (binaries / "initdb").chmod(0o755)
    return binaries


async def test_servers_start_from_the_main_thread_only(tmp_path: Path) -> None:
    caught: list[BaseException] = []

    def start() -> None:
        try:
            asyncio.run(EmbeddedRedis(tmp_path).start())
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    await asyncio.to_thread(thread.join, 10)
    assert "main thread" in str(caught[0])


def test_missing_programs_name_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for find, fix in ((servers._postgres_binaries, "DATABASE_URL"), (servers._redis_binary, "REDIS_URL")):
        with pytest.raises(ConfigError, match=fix):
            find()


def test_a_redis_on_the_path_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert servers._redis_binary() == Path("/usr/bin/redis-server")


def test_directories_are_opened_for_passing_and_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    (closed / "inner").mkdir()
    servers._let_through(closed / "inner", quiet=closed)
    assert stat.S_IMODE(closed.stat().st_mode) == 0o701
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o701
    assert [f"{tmp_path} now lets" in line for line in caplog.messages] == [True]


async def test_a_long_log_is_turned_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LOG_BYTES_MAX", 10)
    redis = EmbeddedRedis(tmp_path)
    redis.log_path.parent.mkdir()
    redis.log_path.write_text("x" * 100)
    await redis.start()
    await redis.stop()
    assert redis.log_path.with_suffix(".log.1").read_text() == "x" * 100
