"""What outlives a gateway that is killed: who answered a conversation, and replies kept for their Idempotency-Key."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance.test_serve import CHAT, Gateway, gone, serving
from tests.tiny_model import write_tiny_model
from tests.waiting import wait_until

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="baton-turns-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def rollout(gateway: Gateway, rollout_id: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {gateway.facts['data_key']}"}
    return httpx.get(f"{gateway.facts['base_url']}/rollouts/{rollout_id}", headers=headers, timeout=120)


def send(gateway: Gateway, key: str | None = None, **request: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {gateway.facts['data_key']}"}
    headers |= {} if key is None else {"idempotency-key": key}
    url = f"{gateway.facts['base_url']}/chat/completions"
    return httpx.post(url, json=CHAT | request, headers=headers, timeout=120)


def test_a_restart_without_redis_still_knows_who_asked(place: Path) -> None:
    model, directory = write_tiny_model(place / "model"), place / "data"
    with serving(directory, model) as gateway:
        first = send(gateway, "once")
        streamed = send(gateway, "stream", stream=True)
        assert (first.status_code, streamed.status_code) == (200, 200)
        children = gateway.children()
        gateway.process.kill()
        gateway.process.wait()
        assert gone(children)
    for stale in (directory / "serve.json", *directory.glob("redis/*.rdb"), *directory.glob("redis/*.aof")):
        stale.unlink(missing_ok=True)
    with serving(directory, model) as gateway:
        again = send(gateway, "once")
        assert again.content == first.content
        assert again.headers["x-baton-idempotent-replay"] == "true"
        assert send(gateway, "stream", stream=True).content == streamed.content
        assert send(gateway, "once", temperature=0.5).status_code == 422
        said = first.json()["choices"][0]["message"]
        turn = [*CHAT["messages"], said, {"role": "user", "content": "And in pounds?"}]

        def stored() -> bool:
            """Whether the journal of the gateway that died is shipped. Asking with the turn itself would plan it."""
            ids = (reply.headers["x-baton-rollout-id"] for reply in (first, streamed))
            return all(rollout(gateway, rollout_id).status_code == 200 for rollout_id in ids)

        wait_until(stored)
        second = send(gateway, messages=turn)
        assert second.headers["x-baton-policy"] == "sticky"
        workers = [reply.headers["x-baton-workers"].rpartition(",")[2] for reply in (first, streamed)]
        assert second.headers["x-baton-workers"] in workers  # both may have given this reply
