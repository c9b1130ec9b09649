"""`baton doctor` and `baton check` on broken set-ups: what is wrong and what to do, a line each, and no traceback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import make_url

from gateway import cli
from gateway.adapters.postgres.migrate import upgrade
from gateway.errors import ConfigError
from tests.postgres_server import PostgresServer
from tests.redis_server import RedisServer
from tests.upstreams.server import Reply, Request, Server, json_reply

ROLE = "reader"
OWN_POOL = """
workers:
  - {name: far, kind: openai, model: m, url: "http://127.0.0.1:1/v1", description: far away,
     price: {input_usd_per_mtok: 1, output_usd_per_mtok: 2}}
pools: {default: [far]}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("BATON_CONDUCTOR", "none")
    return tmp_path


@pytest.fixture
def poor_url(pg_server: PostgresServer, empty_database_url: str) -> Iterator[str]:
    """The URL of an empty database, as a role that may make no table in it."""
    pg_server.admin(f"CREATE ROLE {ROLE} LOGIN")
    yield make_url(empty_database_url).set(username=ROLE).render_as_string(hide_password=False)
    pg_server.admin(f"DROP ROLE {ROLE}")


def findings(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    status = cli.main(["doctor", "--json", *words])
    return status, {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}


def test_all_well(
    place: Path,
    database_url: str,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("REDIS_URL", redis_server.url)
    status, found = findings(capsys)
    assert status == 0, found
    assert {found[name]["state"] for name in ("settings", "postgres", "redis", "pool", "planner")} == {"ok"}
    assert not (place / "data").exists(), "it makes nothing"
    assert cli.main(["check"]) == 0
    assert "ok postgres   PostgreSQL " in capsys.readouterr().out


def test_a_role_that_may_make_no_table_is_told_what_to_grant(
    place: Path, poor_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATABASE_URL", poor_url)
    status, found = findings(capsys)
    assert status == 1
    assert found["postgres"]["state"] == "bad"
    assert "GRANT CREATE ON DATABASE" in found["postgres"]["fix"]
    assert cli.main(["check"]) == 2
    assert "GRANT CREATE ON DATABASE" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"permission denied.*GRANT CREATE ON DATABASE"):
        upgrade(poor_url)


def test_a_redis_that_may_drop_balances_is_bad(
    place: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REDIS_URL", redis_server.url)
    with redis.Redis.from_url(redis_server.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        status, found = findings(capsys)
        client.config_set("maxmemory-policy", "noeviction")
    assert (status, found["redis"]["state"]) == (1, "bad")
    assert "noeviction" in found["redis"]["fix"]


@pytest.mark.parametrize(
    ("name", "value", "bad"),
    [
        ("DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none", "postgres"),
        ("REDIS_URL", "redis://127.0.0.1:1/0", "redis"),
        ("BATON_POOL", "/nowhere/pool.yaml", "pool"),
        ("BATON_DATA_DIR", "/etc/passwd/baton", "data"),
        ("BATON_DISK_FREE_BYTES_MIN", str(2**40), "disk"),
        ("BATON_NO_SUCH", "1", "settings"),
    ],
)
def test_each_fault_is_found_by_its_name(
    place: Path, name: str, value: str, bad: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    status, found = findings(capsys)
    assert (status, found[bad]["state"]) == (1, "bad"), found


def test_a_gateway_that_was_killed_is_found(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "data").mkdir()
    facts = {"admin_url": "http://127.0.0.1:1", "base_url": "http://127.0.0.1:1/v1", "pid": 1}
    (place / "data" / "serve.json").write_text(json.dumps(facts))
    status, found = findings(capsys)
    assert (status, found["gateway"]["state"]) == (1, "bad")
    assert cli.main(["doctor"]) == 1
    assert "\nBAD gateway" in capsys.readouterr().out


@pytest.mark.parametrize(("mode", "state"), [(0o700, "ok"), (0o711, "ok"), (0o750, "warn"), (0o702, "warn")])
def test_a_data_directory_that_others_can_read_is_named(
    place: Path, capsys: pytest.CaptureFixture[str], mode: int, state: str
) -> None:
    (place / "data").mkdir()
    (place / "data").chmod(mode)
    _, named = findings(capsys)
    assert named.get("data", {"state": "ok"})["state"] == state


async def test_beside_a_gateway_that_serves_the_answers_are_about_that_one(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = place / "own.yaml"
    pool.write_text(OWN_POOL)
    totals = {"requests": 4, "errors": 4}
    reports: dict[str, dict[str, Any]] = {
        "/readyz": {"status": "ready", "parts": {"money": "ok"}},
        "/admin/overview": {"totals": totals, "by_worker": [{"worker": "far", "calls": 4, "errors": 4}]},
        "/admin/workers": {"errors": [{"worker": "far", "error": "upstream_error", "n": 4}]},
    }
    keys: list[str | None] = []

    def answer(request: Request) -> Reply:
        keys.append(request.headers.get("authorization"))
        return json_reply(reports[request.path])

    async with Server(answer) as server:
        facts = {"base_url": "http://127.0.0.1:1/v1", "admin_url": server.url, "admin_key": "bt_admin_x", "pid": 1}
        facts |= {"pool_file": str(pool), "simulated": False, "conductor": "worker:far"}
        (place / "data").mkdir(mode=0o700)
        (place / "data" / "serve.json").write_text(json.dumps(facts))
        status, found = await asyncio.to_thread(findings, capsys)
        assert status == 1
        assert found["settings"]["what"] == "those of the gateway that serves http://127.0.0.1:1/v1"
        assert found["pool"]["what"].startswith(str(pool))
        assert found["conductor"]["what"] == "worker far of the pool, by prompt; not trained"
        assert (found["requests"]["state"], found["requests"]["what"]) == ("bad", "4 in the last hour, 4 failed")
        assert found["worker"]["what"] == "far: 4 of 4 calls failed (upstream_error)"
        assert set(keys) == {None, "Bearer bt_admin_x"}
        totals |= {"errors": 0}
        reports["/admin/overview"]["by_worker"] = []
        assert (await asyncio.to_thread(findings, capsys))[1]["requests"]["state"] == "ok"
        asked_for = await asyncio.to_thread(
            findings, capsys, "--conductor", "none"
        )  # of another start, not of this one
        assert "simulated workers" in asked_for[1]["pool"]["what"]
