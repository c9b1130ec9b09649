"""Versions on a running gateway with its own conductor: swapped under traffic, refused by name, kept over a restart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from tests.acceptance.test_serve import CHAT, ROOT, Gateway, serving
from tests.tiny_model import write_tiny_model
from tests.waiting import wait_until

pytestmark = pytest.mark.long

SWAP_FAILURES = {"conductor_refused", "conductor_down", "conductor_slow"}  # others: what a tiny model plans


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="baton-policy-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture(scope="module")
def gateway(place: Path) -> Iterator[Gateway]:
    with serving(place / "data", write_tiny_model(place / "one")) as running:
        yield running


def numbered(place: Path, number: int, seed: int = 0) -> Path:
    """A policy directory of its own, with that version in its manifest."""
    directory = write_tiny_model(place / f"source-{number}", seed=seed)
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(manifest | {"version": str(number)}))
    return directory


def baton(gateway: Gateway, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway", "policy", *arguments],
        cwd=ROOT,
        env={**os.environ, "BATON_DATA_DIR": str(gateway.directory)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def done(gateway: Gateway, action: str, version: str = "", **body: Any) -> Any:
    """One action over the admin API: `publish`, `list`, or a move of a version."""
    facts = gateway.facts
    path = {"publish": "", "list": ""}.get(action, f"/{version}/{action}")
    reply = httpx.request(
        "GET" if action == "list" else "POST",
        f"{facts['admin_url']}/admin/policies{path}",
        json=None if action == "list" else body,
        headers={"authorization": f"Bearer {facts['admin_key']}"},
        timeout=120,
    )
    assert reply.is_success, reply.text
    return reply.json()


def publish(gateway: Gateway, source: Path) -> str:
    return str(done(gateway, "publish", directory=str(source), force=True, why="a test")["version"])


def live_canary(gateway: Gateway, source: Path) -> str:
    """Published, shadowed, and the canary of all requests."""
    version = publish(gateway, source)
    done(gateway, "shadow", version)
    done(gateway, "canary", version, percent=100)
    return version


class Traffic(threading.Thread):
    """Requests one after the other until told to stop; `seen` is (status, policy header, fallback)."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(daemon=True)
        self.gateway = gateway
        self.seen: list[tuple[int, str, str | None]] = []
        self.ended = threading.Event()

    def run(self) -> None:
        facts = self.gateway.facts
        headers = {"authorization": f"Bearer {facts['data_key']}"}
        with httpx.Client(headers=headers, timeout=120) as client:
            while not self.ended.wait(0.02):
                reply = client.post(f"{facts['base_url']}/chat/completions", json=CHAT | {"model": "baton/conductor"})
                found = reply.headers
                self.seen.append((reply.status_code, found["x-baton-policy"], found.get("x-baton-fallback")))

    def some_more(self, n: int = 5) -> None:
        """Wait for `n` requests more."""
        wanted = len(self.seen) + n
        wait_until(lambda: len(self.seen) >= wanted)


def test_published_canaried_promoted_and_rolled_back_under_traffic(gateway: Gateway, place: Path) -> None:
    source = numbered(place, 2, seed=5)
    ungated = baton(gateway, "publish", str(source))
    assert (ungated.returncode, "no gate report" in ungated.stderr) == (4, True)
    assert publish(gateway, source) == "conductor@2"
    traffic = Traffic(gateway)
    traffic.start()
    try:
        traffic.some_more()
        done(gateway, "shadow", "conductor@2")
        traffic.some_more()
        for action, body in (("canary", {"percent": 100}), ("promote", {}), ("rollback", {"why": "enough"})):
            done(gateway, action, "conductor@2", **body)
            traffic.some_more()
    finally:
        traffic.ended.set()
        traffic.join(60)
    assert len(traffic.seen) >= 25
    assert {status for status, _, _ in traffic.seen} == {200}
    assert {why for _, _, why in traffic.seen}.isdisjoint(SWAP_FAILURES)
    listed = done(gateway, "list")
    states = {one["version"]: one["state"] for one in listed["data"]}
    assert (states["conductor@2"], states["conductor@0"]) == ("retired", "live")
    told = [event for event in listed["events"] if event["version"] in ("conductor@2", "conductor@0")]
    what = ["restored", "rolled back", "promoted", "replaced", "canary", "shadowed", "published"]
    assert [event["what"] for event in told[:7]] == what
    forced = told[6]
    assert (forced["forced"], forced["why"], forced["who"].startswith("key:")) == (True, "a test", True)
    each_was_on_one_version(gateway)


def shipped(admin: httpx.Client) -> list[dict[str, Any]]:
    """The conductor's rollouts, once the last of them had time to reach the database."""

    def enough() -> list[dict[str, Any]] | None:
        lines: list[dict[str, Any]] = admin.get("/admin/rollouts?limit=200&policy=baton/conductor").json()["data"]
        return lines if len(lines) >= 25 else None

    return cast(list[dict[str, Any]], wait_until(enough))


def each_was_on_one_version(gateway: Gateway) -> None:
    """What the log says of that traffic."""
    headers = {"authorization": f"Bearer {gateway.facts['admin_key']}"}
    versions = set()
    with httpx.Client(base_url=gateway.facts["admin_url"], headers=headers, timeout=120) as admin:
        lines = shipped(admin)
        for line in lines:
            tree = admin.get(f"/admin/rollouts/{line['id']}").json()
            if tree["fallback"] is not None:
                continue  # of a test that killed the engine
            planned = {planned["policy_version"] for planned in tree["rounds"] if planned["planner"] == "conductor"}
            assert planned == {tree["policy_assigned"]}
            versions |= planned
    assert versions >= {"conductor@0", "conductor@2"}


def test_a_flip_counts_from_the_next_request_on(gateway: Gateway, place: Path) -> None:
    version = live_canary(gateway, numbered(place, 3, seed=6))
    assert gateway.ask(model=f"baton/{version}").status_code == 200
    assert planned_by(gateway) == version
    done(gateway, "rollback", "conductor", why="a test")
    assert planned_by(gateway) == "conductor@0"
    assert gateway.ask(model=f"baton/{version}").status_code == 404


def planned_by(gateway: Gateway) -> str:
    """The version that a request now is given to, as its rollout says."""
    reply = gateway.ask(model="baton/conductor")
    headers = {"authorization": f"Bearer {gateway.facts['data_key']}"}
    url = f"{gateway.facts['base_url']}/rollouts/{reply.headers['x-baton-rollout-id']}"
    return str(httpx.get(url, headers=headers, timeout=120).json()["policy_assigned"])


def test_a_version_that_cannot_be_served_is_refused_in_one_line(gateway: Gateway, place: Path) -> None:
    broken = numbered(place, 8)
    (broken / "model.safetensors").write_bytes(b"not weights")
    refused = baton(gateway, "publish", str(broken), "--force", "--why", "a test")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert f"{broken}/model.safetensors: does not match its sha256" in refused.stderr
    assert "conductor@8" not in {one["version"] for one in done(gateway, "list")["data"]}
    assert gateway.ask().status_code == 200


def test_an_engine_that_was_killed_gets_its_versions_back(gateway: Gateway, place: Path) -> None:
    version = live_canary(gateway, numbered(place, 9, seed=7))
    before = [pid for pid in gateway.children() if b"policy.serve" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(before[0], signal.SIGKILL)
    assert gateway.ask().status_code == 200

    def serves_it() -> bool:
        served = planned_by(gateway) == version
        return served and gateway.ask().headers.get("x-baton-fallback") not in SWAP_FAILURES

    wait_until(serves_it)
    parts = httpx.get(f"{gateway.facts['admin_url']}/readyz").json()["parts"]
    assert (parts["versions"], parts["conductor"]) == ("ok", "ok")
    done(gateway, "rollback", "conductor", why="a test")


def test_a_restart_serves_what_was_live(place: Path) -> None:
    directory, first = place / "again", write_tiny_model(place / "first")
    with serving(directory, first) as running:
        version = live_canary(running, numbered(place, 4, seed=8))
        done(running, "promote", version)
        assert running.end(signal.SIGTERM) == 0
    with serving(directory, first) as running:
        assert [(one["version"], one["state"], one["held"]) for one in done(running, "list")["data"]] == [
            ("conductor@4", "live", True),
            ("conductor@0", "retired", True),
        ]
        assert planned_by(running) == "conductor@4"
        done(running, "rollback", "conductor", why="still one step away")
        assert planned_by(running) == "conductor@0"
        assert running.end(signal.SIGTERM) == 0
    nobody = baton(running, "list")
    assert (nobody.returncode, "no gateway serves from" in nobody.stderr) == (2, True)
