"""A restore walked through: requests, a backup, everything lost, the restore, and the ledger to the nano-dollar."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from gateway.adapters.postgres import admin_tables
from gateway.adapters.postgres.database import sync_engine
from gateway.core.log.events import uuid7
from gateway.core.money.amounts import usd_to_nano
from tests.acceptance.test_serve import ROOT, Gateway, serving
from tests.records import T0_US
from tests.tiny_model import write_tiny_model
from tests.waiting import wait_until

pytestmark = pytest.mark.long
JOB = uuid7(T0_US // 1000)
REQUESTS = 5
CHARGED = "SELECT coalesce(sum(amount_nano), 0) FROM ledger WHERE kind IN ('posted', 'uncertain')"


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="baton-backup-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def baton(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "gateway", *words, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    reply: dict[str, Any] = json.loads(done.stdout)
    return reply


def spend_nano(gateway: Gateway) -> int:
    """The nano-dollars of one request, as its reply says."""
    reply = gateway.ask()
    assert reply.status_code == 200
    return usd_to_nano(reply.headers["x-baton-cost-usd"])


def charged_nano(gateway: Gateway) -> int:
    engine = sync_engine(gateway.facts["database_url"])
    with engine.begin() as connection:
        total = int(connection.execute(text(CHARGED)).scalar_one())
    engine.dispose()
    return total


def admin(gateway: Gateway, path: str) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {gateway.facts['admin_key']}"}
    reply: dict[str, Any] = httpx.get(f"{gateway.facts['admin_url']}{path}", headers=headers, timeout=60).json()
    return reply


def add_job(gateway: Gateway) -> None:
    """A job with a checkpoint on disk."""
    at = datetime(2026, 1, 1, tzinfo=UTC)
    job: dict[str, Any] = {
        "id": JOB,
        "policy": "conductor",
        "spec": {"arguments": [], "gate": [], "auto": False},
        "by": "key:ops",
    }
    job |= {"state": "failed", "stage": "train", "progress": {}, "attempts": 1, "cancel": False}
    engine = sync_engine(gateway.facts["database_url"])
    with engine.begin() as connection:
        connection.execute(admin_tables.policy_jobs.insert().values(**job, created_at=at, changed_at=at))
    engine.dispose()
    (gateway.directory / "jobs" / JOB).mkdir(parents=True)
    (gateway.directory / "jobs" / JOB / "checkpoint").write_bytes(b"weights")


def test_after_everything_is_lost_a_restore_has_the_money_the_versions_and_the_jobs(place: Path) -> None:
    directory, model, kept = place / "data", write_tiny_model(place / "model"), place / "kept.tar"
    with serving(directory, model) as first:
        add_job(first)
        spent = sum(spend_nano(first) for _ in range(REQUESTS))
        live = baton("backup", str(place / "live.tar"), "--data-dir", str(directory))
        assert live["ledger"]["charged_nano"] <= spent, "the rest is in its journal"
        spent += spend_nano(first)
        key, versions = first.facts["data_key"], admin(first, "/admin/policies")["data"]
        first.end(signal.SIGKILL)  # what the shipper had not stored is in the journal alone
    saved = baton("backup", str(kept), "--data-dir", str(directory))
    assert saved["ledger"]["charged_nano"] <= spent
    assert kept.stat().st_mode & 0o077 == 0, "it holds the pepper"
    shutil.rmtree(directory)

    restored = place / "restored"
    assert baton("restore", str(kept), "--data-dir", str(restored)) == saved["ledger"]
    assert (restored / "jobs" / JOB / "checkpoint").read_bytes() == b"weights"
    with serving(restored, model) as second:
        wait_until(lambda: charged_nano(second) == spent, 60.0)
        assert charged_nano(second) == spent, "the ledger is that of the replies, to the nano-dollar"
        balance = next(row for row in admin(second, "/admin/keys")["data"] if row["class"] == "data")
        assert usd_to_nano(balance["spent_usd"]) == spent, "Redis was rebuilt from it"
        assert [one["version"] for one in admin(second, "/admin/policies")["data"]] == [
            one["version"] for one in versions
        ]
        assert [one["id"] for one in admin(second, "/admin/jobs")["data"]] == [JOB]
        assert second.ask(key=key).status_code == 200, "the old key works: its pepper was restored"
        assert second.end() == 0


def test_a_backup_of_the_moment_is_whole_while_a_gateway_serves(place: Path) -> None:
    directory, model, kept = place / "data", write_tiny_model(place / "model"), place / "kept.tar"
    with serving(directory, model) as gateway:
        spent = sum(spend_nano(gateway) for _ in range(REQUESTS))
        baton("backup", str(kept), "--data-dir", str(directory))
        assert gateway.ask().status_code == 200, "it serves on"
        gateway.end(signal.SIGKILL)
    baton("restore", str(kept), "--data-dir", str(place / "restored"))
    with serving(place / "restored", model) as gateway:
        wait_until(lambda: charged_nano(gateway) == spent, 60.0)
        assert charged_nano(gateway) == spent, "what was asked before the backup, in its dump or in its journal"
