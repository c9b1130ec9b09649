"""Which workers are there: looks that cost nothing, a question that is paid for, and who is told."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gateway import cli
from gateway.adapters.upstream.http1.ways import Ways
from gateway.adapters.upstream.looks import HttpLooks
from gateway.adapters.upstream.pooled import pooled_workers
from gateway.core.pool.workers import WorkerSpec
from gateway.service.policies import reach
from gateway.service.policies.reach import Reach, ask, look_at
from gateway.service.ports.pools import LoadedPool, Sight, WorkerLooks
from tests.integration.test_ways import answers
from tests.integration.test_workers_swap import pool, worker
from tests.upstreams.server import Reply, Request, Server, json_reply
from tests.waiting import until

LISTED = json_reply({"data": [{"id": "m"}, {"id": "mm-large"}]})
REFUSED = json_reply({"error": {"message": "bad key"}}, 401)


async def sight_of(reply: Reply, **more: Any) -> tuple[Sight, Request]:
    """What a look at a worker with that server shows, and what the server was asked."""
    async with Server(lambda request: reply) as server:
        spec = worker(**{"url": f"{server.url}/v1", **more})
        looks = HttpLooks(Ways())
        try:
            sights = await look_at(looks, LoadedPool(pool(spec), {"w": "its-key"}), [spec])
        finally:
            await looks.close()
        sight = sights["w"]
        return Sight("w", sight.state, sight.what.replace(str(server.port), "PORT"), sight.fix), server.requests[0]


@pytest.mark.parametrize(
    ("reply", "more", "state", "what", "fix"),
    [
        (LISTED, {}, "ok", "127.0.0.1:PORT has m", ""),
        (LISTED, {"model": "mm-larg"}, "warn", "127.0.0.1:PORT does not list mm-larg", "such as `mm-large`"),
        (REFUSED, {"api_key": "env:THE_KEY"}, "bad", "refuses the key of `env:THE_KEY` (401)", "into `env:THE_KEY`"),
        (REFUSED, {}, "bad", "refuses calls without a key (401)", "`api_key: env:NAME`"),
        (json_reply({}, 404), {}, "ok", "lists no models", ""),
        (json_reply([], 200), {}, "ok", "lists no models", ""),
        (json_reply({}, 503), {}, "warn", "answers 503", "status page"),
        (json_reply({}, 402), {}, "warn", "answers 402", "bill"),
        (json_reply({}, 407), {}, "bad", "its proxy asks", "env:NAME"),
    ],
)
async def test_a_look_says_what_is_wrong_and_what_to_do(
    reply: Reply, more: Mapping[str, Any], state: str, what: str, fix: str
) -> None:
    sight, request = await sight_of(reply, **more)
    assert (sight.state, what in sight.what, fix in sight.fix) == (state, True, True), sight
    assert (request.method, request.path) == ("GET", "/v1/models")
    assert request.headers["authorization"] == "Bearer its-key"


async def test_a_tool_is_looked_at_without_a_call_and_others_are_asked_as_their_vendor_wants() -> None:
    tool = {"kind": "tool", "model": None, "price": {"call_usd": "0"}}
    sight, request = await sight_of(Reply(status=405), **tool)
    assert (sight.state, request.method, request.content) == ("ok", "HEAD", b"")
    sight, request = await sight_of(
        json_reply({"data": [{"id": "claude-x"}]}), kind="litellm", model="anthropic/claude-x"
    )
    assert (sight.state, request.headers["x-api-key"]) == ("ok", "its-key")
    assert request.path == "/v1/models"


async def test_what_cannot_be_reached_names_its_address_and_its_cause() -> None:
    looks = HttpLooks(Ways({"HTTP_PROXY": "socks5://127.0.0.1:1"}))
    specs = [
        worker("a", url="http://127.0.0.1:1/v1"),
        worker("b", url="http://far.test/v1"),
        worker("c", url="local:smollm2"),
    ]
    sights = await look_at(looks, LoadedPool(pool(*specs), {}), specs)
    await looks.close()
    assert sights["a"].state == sights["b"].state == "bad"
    assert sights["a"].what.startswith("127.0.0.1:1 cannot be reached (")
    assert "HTTP proxies" in sights["b"].what
    assert "c" not in sights


# ---------------------------------------------------------------- one question


@pytest.mark.parametrize(
    ("reply", "state", "words"),
    [
        (None, "ok", "answers as m, with tools: 3 + 1 tokens"),
        (REFUSED, "bad", "refused Baton's key (401)"),
        (json_reply({"error": {"message": "no such model"}}, 404), "bad", "no such model"),
        (json_reply({"error": {"message": "pay first"}}, 402), "bad", "pay first"),
    ],
)
async def test_a_question_tells_key_and_model(reply: Reply | None, state: str, words: str) -> None:
    async with Server(lambda request: reply or answers(request)) as server:
        spec = worker(url=f"{server.url}/v1")
        workers = pooled_workers(pool(spec), {}, b"")
        sight = await ask(workers, spec)
        await workers.close()
    assert sight is not None
    assert (sight.state, words in sight.what) == (state, True), sight
    assert len(server.requests) == 1
    assert server.requests[0].body["tools"][0]["function"]["name"] == "note"


async def test_a_worker_that_takes_no_tools_is_told_how_to_say_so() -> None:
    def serve(request: Request) -> Reply:
        if "tools" in request.body:
            return json_reply({"error": {"message": "m does not support tools"}}, 400)
        return answers(request)

    async with Server(serve) as server:
        spec = worker(url=f"{server.url}/v1")
        workers = pooled_workers(pool(spec), {}, b"")
        sight = await ask(workers, spec)
        await workers.close()
    assert sight is not None
    assert (sight.state, "takes no tools" in sight.what, "cannot: [tools" in sight.fix) == ("warn", True, True)


# ---------------------------------------------------------------- beside the traffic


class Scripted(WorkerLooks):
    """Shows these sights one after another, the last for ever."""

    def __init__(self, *sights: Sight) -> None:
        self.sights = list(sights)
        self.looks = 0

    async def look(self, worker: WorkerSpec, secrets: Mapping[str, str]) -> Sight | None:
        self.looks += 1
        return self.sights.pop(0) if len(self.sights) > 1 else self.sights[0]


async def test_looks_are_told_once_and_repeated_until_all_is_well(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="baton.workers")
    monkeypatch.setattr(reach, "TURN_S", 0.001)
    monkeypatch.setattr(reach, "AGAIN_S", 0.001)
    bad = Sight("w", "bad", "is away", "start it")
    looks = Scripted(bad, bad, Sight("w", "ok", "is there"))
    reached = Reach(looks, lambda: LoadedPool(pool(worker()), {}))
    task = asyncio.create_task(reached.run())
    await until(lambda: reached.sights.get("w") == Sight("w", "ok", "is there"))
    looks_by_then = looks.looks
    await asyncio.sleep(0.05)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert looks.looks == looks_by_then == 3  # one that is well is left alone
    assert caplog.messages == ["worker w: is away; start it", "worker w: is there"]


# ---------------------------------------------------------------- commands

FILE = """
workers:
  - {{name: far, kind: openai, model: m, url: "{url}/v1", api_key: env:FAR_KEY, description: far away,
     price: {{input_usd_per_mtok: 1, output_usd_per_mtok: 2}}}}
pools: {{default: [far]}}
"""


async def test_check_asks_where_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("FAR_KEY", "its-key")
    async with Server(answers) as server:
        (tmp_path / "pool.yaml").write_text(FILE.format(url=server.url))
        words = ["check", "--pool", str(tmp_path / "pool.yaml"), "--conductor", "none"]
        assert await asyncio.to_thread(cli.main, words) == 0
        assert not server.requests
        assert await asyncio.to_thread(cli.main, [*words, "--ask"]) == 0
        assert "ok worker     far: answers as m, with tools: 3 + 1 tokens" in capsys.readouterr().out
        server.handler = lambda request: REFUSED
        assert await asyncio.to_thread(cli.main, [*words, "--ask"]) == 1
        assert "key `env:FAR_KEY`); put a key that works into `env:FAR_KEY`" in capsys.readouterr().out


async def test_doctor_sees_workers_with_the_keys_of_the_gateway_that_serves(tmp_path: Path) -> None:
    """Its own shell has no FAR_KEY; the gateway's environment has."""
    (tmp_path / "data").mkdir(mode=0o700)
    pool_path = tmp_path / "pool.yaml"
    environ = {**os.environ, "BATON_DATA_DIR": str(tmp_path / "data"), "BATON_CONDUCTOR": "none"}
    program = [sys.executable, "-c", "import time; time.sleep(60)", "serve"]
    with subprocess.Popen(  # noqa: ASYNC220 - it only sleeps
        program, env=environ | {"FAR_KEY": "its-key", "BATON_POOL": str(pool_path)}
    ) as gateway:
        try:
            async with Server(lambda request: LISTED) as server:
                pool_path.write_text(FILE.format(url=server.url))
                facts = {"base_url": "http://127.0.0.1:1/v1", "admin_url": "http://127.0.0.1:1", "pid": gateway.pid}
                facts |= {"pool_file": str(pool_path), "simulated": False, "conductor": "none", "admin_key": None}
                (tmp_path / "data" / "serve.json").write_text(json.dumps(facts))
                doctor = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "gateway", "doctor", "--json"), env=environ, stdout=subprocess.PIPE
                )
                out, _ = await doctor.communicate()
                requests = list(server.requests)
        finally:
            gateway.kill()
    found = {finding["name"]: finding for finding in json.loads(out)}
    assert found["pool"]["state"] == "ok"
    assert found["worker"]["what"].endswith(" has m")
    assert requests[0].headers["authorization"] == "Bearer its-key"
