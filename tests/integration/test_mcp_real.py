"""MCP servers that others wrote, from PyPI and npm. Skipped where they cannot be installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.adapters.upstream.mcp import servers as module
from gateway.adapters.upstream.mcp.servers import Servers
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import UpstreamRefused
from tests.waiting import BOUND_S, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
FROM_PYPI = ("mcp-server-time==2026.10.19", "mcp-server-git==2026.10.19")
FROM_NPM = (
    "@modelcontextprotocol/server-everything@2026.8.31",
    "@modelcontextprotocol/server-filesystem@2026.8.31",
)
INSTALL_S = 240.0


def install(*command: str, at: Path) -> None:
    """Run an installer, or skip the test."""
    program = shutil.which(command[0])
    if program is None:
        pytest.skip(f"no {command[0]} here")
    ended = subprocess.run([program, *command[1:]], cwd=at, capture_output=True, timeout=INSTALL_S, check=False)
    if ended.returncode:
        pytest.skip(f"{command[0]} cannot install here: {ended.stderr.decode(errors='replace')[-300:]}")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of servers from PyPI."""
    at, uv = tmp_path_factory.mktemp("pypi"), str(Path(sys.executable).with_name("uv"))
    install(uv, "venv", "--python", sys.executable, "own", at=at)
    install(uv, "pip", "install", "--python", "own/bin/python", *FROM_PYPI, at=at)
    return at / "own" / "bin"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of servers from npm."""
    at = tmp_path_factory.mktemp("npm")
    install("npm", "install", "--no-audit", "--no-fund", *FROM_NPM, at=at)
    return at / "node_modules" / "@modelcontextprotocol"


async def started(monkeypatch: pytest.MonkeyPatch, command: list[str], *tools: str) -> Servers:
    monkeypatch.setattr(module, "START_S", BOUND_S)
    names: dict[str, Any] = {name: {} for name in tools}
    spec = {"name": "w", "handle": "box", "kind": "mcp", "command": command, "tools": names, "price": {"call_usd": "0"}}
    servers = Servers([WorkerSpec.model_validate(spec)], {})
    await servers.start()
    await until(lambda: len(servers.tools("w")) == len(tools))
    return servers


async def test_the_time(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [str(python / "mcp-server-time"), "--local-timezone", "UTC"]
    servers = await started(monkeypatch, command, "get_current_time")
    try:
        assert "Asia/Tokyo" in await servers.call("w", "get_current_time", {"timezone": "Asia/Tokyo"}, BOUND_S)
        with pytest.raises(UpstreamRefused, match="failed"):
            await servers.call("w", "get_current_time", {"timezone": "Nowhere"}, BOUND_S)
    finally:
        await servers.close()


async def test_a_repository(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install("git", "init", "-q", ".", at=tmp_path)
    servers = await started(monkeypatch, [str(python / "mcp-server-git"), "--repository", str(tmp_path)], "git_status")
    try:
        assert "branch" in await servers.call("w", "git_status", {"repo_path": str(tmp_path)}, BOUND_S)
    finally:
        await servers.close()


async def test_everything(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["node", str(node / "server-everything" / "dist" / "index.js"), "stdio"]
    servers = await started(monkeypatch, command, "echo", "get-sum", "get-tiny-image")
    try:
        assert await servers.call("w", "echo", {"message": "hi"}, BOUND_S) == "Echo: hi"
        assert "is 3" in await servers.call("w", "get-sum", {"a": 1, "b": 2}, BOUND_S)
        assert "(image/png, 4033 bytes, left out)" in await servers.call("w", "get-tiny-image", {}, BOUND_S)
    finally:
        await servers.close()


async def test_files(node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["node", str(node / "server-filesystem" / "dist" / "index.js"), str(tmp_path)]
    servers = await started(monkeypatch, command, "read_text_file", "write_file")
    try:
        reads, writes = servers.tools("w")
        assert (reads.side_effects, writes.side_effects) == (False, True)
        await servers.call("w", "write_file", {"path": str(tmp_path / "a.txt"), "content": "words"}, BOUND_S)
        assert await servers.call("w", "read_text_file", {"path": str(tmp_path / "a.txt")}, BOUND_S) == "words"
        with pytest.raises(UpstreamRefused, match="outside allowed directories"):
            await servers.call("w", "read_text_file", {"path": "/etc/passwd"}, BOUND_S)
    finally:
        await servers.close()
