"""Two gateways with data directories of their own over one PostgreSQL: a version published at one plans at both."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.acceptance.test_policy_versions import done, numbered, publish
from tests.acceptance.test_serve import CHAT, Gateway, serving
from tests.redis_server import start_redis
from tests.tiny_model import write_tiny_model
from tests.waiting import wait_until

pytestmark = pytest.mark.long


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="baton-two-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def planned_by(gateway: Gateway, first: Gateway) -> str | None:
    """The version that plans a request at `gateway`; None where a router plans. `first` has the keys."""
    headers = {"authorization": f"Bearer {first.facts['data_key']}"}
    url = gateway.facts["base_url"]
    reply = httpx.post(
        f"{url}/chat/completions", json=CHAT | {"model": "baton/conductor"}, headers=headers, timeout=120
    )
    rollout = reply.headers["x-baton-rollout-id"]
    version = httpx.get(f"{url}/rollouts/{rollout}", headers=headers, timeout=120).json()["policy_assigned"]
    return None if version is None else str(version)


def test_a_version_published_at_one_plans_at_both(place: Path, database_url: str) -> None:
    redis = start_redis(place)
    (place / "pepper").write_text("p" * 40)
    shared = {"DATABASE_URL": database_url, "REDIS_URL": redis.url, "BATON_PEPPER": f"file:{place / 'pepper'}"}
    shared |= {"BATON_JOBS_WORKER": "false"}
    model = write_tiny_model(place / "model")
    try:
        with serving(place / "one", model, **shared) as one, serving(place / "two", model, **shared) as two:
            version = publish(one, numbered(place, 2, seed=5))
            done(one, "shadow", version)
            done(one, "canary", version, percent=100)  # returns once the other gateway holds it, too
            assert (two.directory / "policies" / version / "manifest.json").is_file()
            done(one, "promote", version)
            assert [row["held"][version] for row in done(one, "list")["gateways"]] == ["", ""]
            wait_until(lambda: planned_by(two, one) == version)
            assert planned_by(one, one) == version
            two.process.kill()
            two.process.wait()
        with serving(place / "three", model, **shared) as three:  # joins later, with an empty directory
            assert (three.directory / "policies" / version / "manifest.json").is_file()
            assert f"as {version}" in three.printed
    finally:
        redis.stop()
