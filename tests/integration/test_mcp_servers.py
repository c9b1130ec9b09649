"""MCP servers as they are, and as they should not be: what is offered, what a call answers, what is tried again."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.adapters.upstream.mcp import servers as module
from gateway.adapters.upstream.mcp.servers import RESULT_CHARS_MAX, Servers
from gateway.adapters.upstream.pooled import pooled_workers
from gateway.cli.process.check import tool_offers
from gateway.core.pool.revision import revision_of
from gateway.core.pool.workers import PoolFile, WorkerSpec
from gateway.errors import UpstreamError, UpstreamProtocol, UpstreamRefused, UpstreamTimeout
from gateway.service.ports.pools import LoadedPool
from gateway.service.ports.request import WorkerCall
from tests.redis_server import free_port
from tests.waiting import BOUND_S, until

PROGRAM = Path(__file__).parents[1] / "upstreams" / "mcp_program.py"
LIBRARY = Path(__file__).parents[1] / "upstreams" / "mcp_library.py"


def a_worker(way: str, note: str = "", **more: Any) -> WorkerSpec:
    spec = {
        "name": "w",
        "handle": "box",
        "kind": "mcp",
        "command": [sys.executable, str(PROGRAM), way, note],
        "tools": {"look": {}, "write": {}, "again": {}},
        "price": {"call_usd": "0.001"},
    }
    return WorkerSpec.model_validate(spec | more)


@asynccontextmanager
async def a_server(way: str, note: str = "", **more: Any) -> AsyncIterator[Servers]:
    servers = Servers([a_worker(way, note, **more)], {})
    await servers.start()
    try:
        yield servers
    finally:
        await servers.close()


async def test_tools_of_the_pool_file_are_offered_with_what_the_server_says_of_them() -> None:
    async with a_server(
        "answers", tools={"look": {}, "again": {}, "write": {"description": "Mine."}, "gone": {}}
    ) as servers:
        look, again, write = servers.tools("w")
        assert (look.side_effects, look.repeatable) == (False, True)
        assert (again.side_effects, again.idempotent) == (True, True)
        assert (write.side_effects, write.repeatable, write.description) == (True, False, "Mine.")
        assert look.signature == "look(text: string)"
        assert servers.problems("w") == ("gone: the server has no such tool",)
        assert await servers.call("w", "look", {"text": "hi"}, BOUND_S) == "heard hi"
        with pytest.raises(UpstreamRefused, match="has no tool gone"):
            await servers.call("w", "gone", {}, BOUND_S)


@pytest.mark.parametrize(
    ("way", "error", "words"),
    [
        ("hangs", UpstreamTimeout, "did not answer within"),
        ("dies", UpstreamProtocol, "hung up"),
        ("floods", UpstreamProtocol, "hung up"),
        ("chatters", UpstreamProtocol, "hung up"),
        ("fails", UpstreamRefused, "tool .* failed: heard"),
    ],
)
async def test_a_call_that_fails_is_tried_again_only_where_that_changes_nothing(
    way: str, error: type[UpstreamError], words: str
) -> None:
    seconds = 0.5 if way == "hangs" else BOUND_S
    async with a_server(way) as servers:
        for tool in ("look", "write", "again"):
            await until(lambda: bool(servers.tools("w")))
            with pytest.raises(error, match=words) as raised:
                await servers.call("w", tool, {"text": "x"}, seconds)
            assert raised.value.dispatched
            assert raised.value.retryable == (tool != "write" and error is not UpstreamRefused)


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("image", "(image/png, 3 bytes, left out)"),
        ("bytes", "caf\ufffd \ufffd"),
        ("long", "y" * RESULT_CHARS_MAX + f"\n(cut: {100_000 - RESULT_CHARS_MAX} more characters)"),
    ],
)
async def test_what_a_tool_answers_is_bounded_text(way: str, text: str) -> None:
    async with a_server(way) as servers:
        assert await servers.call("w", "look", {"text": "x"}, BOUND_S) == text


async def test_a_tool_that_changed_its_words_is_no_longer_offered() -> None:
    async with a_server("changes") as servers:
        await servers.call("w", "look", {"text": "x"}, BOUND_S)
        await until(lambda: not servers.tools("w"))
        assert "the server changed it since it was first read" in servers.problems("w")[0]
        with pytest.raises(UpstreamRefused, match="has no tool look"):
            await servers.call("w", "look", {"text": "x"}, BOUND_S)


async def test_a_server_that_is_not_there_offers_nothing_and_says_why() -> None:
    async with a_server("away") as servers:
        assert servers.tools("w") == ()
        assert "no licence" in servers.problems("w")[0]
        with pytest.raises(UpstreamError, match="its MCP server is not there") as raised:
            await servers.call("w", "look", {"text": "x"}, BOUND_S)
        assert not raised.value.dispatched
    async with a_server("x", command=["/no/such/program"]) as servers:
        assert servers.problems("w") == ("there is no program /no/such/program",)


async def test_a_silent_server_delays_the_start_by_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.3)
    async with a_server("silent") as servers:
        assert servers.tools("w") == ()


async def test_a_server_that_died_comes_back(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    async with a_server("answers", str(note)) as servers:
        os.kill(int(note.read_text().split()[0]), signal.SIGKILL)
        await until(lambda: len(note.read_text().split()) == 2 and bool(servers.tools("w")))
        assert await servers.call("w", "look", {"text": "x"}, BOUND_S) == "heard x"


@pytest.mark.parametrize(("longest_s", "pauses"), [(60.0, ["0.01", "0.02", "0.04"]), (0.0, ["0.01"] * 3)])
async def test_pauses_grow_until_a_connection_has_lasted(
    longest_s: float, pauses: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PAUSE_FIRST_S", 0.01)
    monkeypatch.setattr(module, "PAUSE_S_MAX", longest_s)

    def seen() -> list[str]:
        lines = (record.getMessage() for record in caplog.records)
        return [line.split("again in ")[1].removesuffix(" s") for line in lines if "again in" in line]

    async with a_server("leaves"):
        await until(lambda: len(seen()) >= 3)
    assert seen()[:3] == pauses


async def test_its_program_ends_with_the_connection(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    async with a_server("answers", str(note)):
        pid = int(note.read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_its_program_ends_with_a_killed_gateway(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    program = (
        "import asyncio\nfrom tests.integration.test_mcp_servers import a_server\n"
        "async def main():\n"
        f"    async with a_server('answers', {str(note)!r}):\n"
        "        print('ready', flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert parent.stdout is not None
    assert await parent.stdout.readline() == b"ready\n"
    pid = int(note.read_text())
    parent.kill()
    await parent.wait()

    def is_gone() -> bool:
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
        return True

    await until(is_gone)


# ---------------------------------------------------------------- the official library on the other side

SMALL: dict[str, Any] = {"add": {}, "fail": {}}


async def uses(servers: Servers) -> None:
    """Call both tools of `mcp_library.py`."""
    await until(lambda: bool(servers.tools("w")))
    add, fail = servers.tools("w")
    assert (add.side_effects, fail.side_effects) == (False, True)
    assert await servers.call("w", "add", {"a": 2, "b": 3}, BOUND_S) == "5"
    with pytest.raises(UpstreamRefused, match="tool fail failed"):
        await servers.call("w", "fail", {}, BOUND_S)
    with pytest.raises(UpstreamRefused, match="tool add failed"):
        await servers.call("w", "add", {"a": "x"}, BOUND_S)


async def test_the_official_library_over_stdio() -> None:
    async with a_server("", command=[sys.executable, str(LIBRARY)], tools=SMALL) as servers:
        await uses(servers)


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


async def test_the_official_library_over_http() -> None:
    port = free_port()
    server = await asyncio.create_subprocess_exec(
        sys.executable, str(LIBRARY), str(port), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await until(lambda: answers(port))
        async with a_server("", command=[], url=f"http://127.0.0.1:{port}/mcp", tools=SMALL) as servers:
            await uses(servers)
            server.kill()
            await server.wait()
            with pytest.raises(UpstreamError):
                await servers.call("w", "add", {"a": 2, "b": 3}, BOUND_S)
    finally:
        with suppress(ProcessLookupError):
            server.kill()
        await server.wait()


async def test_check_says_what_a_server_offers(tmp_path: Path) -> None:
    worker = a_worker("answers", tools={"look": {}, "write": {}, "again": {}, "gone": {}})
    pool = PoolFile(workers=(worker,), pools={"default": ("w",)})
    (offer,) = await asyncio.to_thread(tool_offers, pool, {})
    assert offer.line == (
        "w: look (reads), write (has side effects), again (repeatable); gone: the server has no such tool"
    )


# ---------------------------------------------------------------- among the workers of a pool


def a_call(spec: WorkerSpec, revision: str, name: str = "look") -> WorkerCall:
    body = {"messages": [], "max_tokens": 1, "tool_call": {"name": name, "arguments": {"text": "hi"}}}
    return WorkerCall(spec, body, BOUND_S, "rollout", "1.0", revision=revision)


async def test_each_pool_has_servers_of_its_own_until_its_requests_have_ended(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    old, new = a_worker("answers", str(note)), a_worker("answers", str(note), tools={"look": {}}, version="2")
    first, second = (PoolFile(workers=(one,), pools={"default": ("w",)}) for one in (old, new))
    workers = pooled_workers(first, {}, b"depth", keep_s=0.0)
    try:
        assert workers.tools(old, "") == ()
        await workers.start()
        assert [tool.name for tool in workers.tools(old, revision_of(first))] == ["look", "write", "again"]
        reply = await workers.complete(a_call(old, revision_of(first)))
        assert reply.body["choices"][0]["message"]["content"] == "heard hi"
        with pytest.raises(UpstreamRefused, match="by the name of a tool"):
            await workers.complete(WorkerCall(old, {"messages": []}, BOUND_S, "rollout", "1.0"))
        (await workers.prepare(LoadedPool(second, {}), revision_of(second))).take()
        assert [tool.name for tool in workers.tools(new, "")] == ["look"]
        assert (await workers.complete(a_call(new, revision_of(second)))).body["model"] == "w"
        gone, stays = map(int, note.read_text().split())
        await until(lambda: not Path(f"/proc/{gone}").exists())
        os.kill(stays, 0)
    finally:
        await workers.close()
    with pytest.raises(ProcessLookupError):
        os.kill(stays, 0)


def is_running(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


async def test_a_pool_that_is_not_taken_leaves_no_program(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    of = PoolFile(workers=(a_worker("answers", str(note)),), pools={"default": ("w",)})
    workers = pooled_workers(of, {}, b"depth")  # not started
    try:
        swap = await workers.prepare(LoadedPool(of, {}), revision_of(of))
        assert is_running(int(note.read_text()))
        await swap.close()
        assert not is_running(int(note.read_text()))
    finally:
        await workers.close()


async def test_a_pool_whose_preparation_is_cancelled_leaves_no_program(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    of = PoolFile(workers=(a_worker("silent", str(note)),), pools={"default": ("w",)})
    workers = pooled_workers(of, {}, b"depth")  # not started
    try:
        preparing = asyncio.create_task(workers.prepare(LoadedPool(of, {}), revision_of(of)))
        await until(lambda: note.exists() and note.read_text())
        preparing.cancel()
        await asyncio.gather(preparing, return_exceptions=True)
        assert not is_running(int(note.read_text()))
    finally:
        await workers.close()


async def test_programs_of_every_pool_end_with_the_gateway(tmp_path: Path) -> None:
    """A secret alone is another: the revision is the same, and its first programs serve until their calls ended."""
    note = tmp_path / "pids"
    of = PoolFile(workers=(a_worker("answers", str(note)),), pools={"default": ("w",)})
    workers = pooled_workers(of, {}, b"depth", keep_s=BOUND_S)
    try:
        await workers.start()
        (await workers.prepare(LoadedPool(of, {"w TOKEN": "x"}), revision_of(of))).take()
        assert [is_running(int(pid)) for pid in note.read_text().split()] == [True, True]
    finally:
        await workers.close()
    assert [is_running(int(pid)) for pid in note.read_text().split()] == [False, False]
