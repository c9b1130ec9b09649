"""The gateways that the suite measures beside Baton: how each is installed, started on loopback, and called.

All have one worker and no store: no money, no keys, no log, no metrics that they do not always make.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.suite.client import Target
from policy.recipes.stack import ROOT, process, wait_until

NODE = ROOT / "bench" / "suite" / "peers" / "node"
INSTALL_S = 900.0
READY_PAUSE_S = 0.2
LITELLM = """\
model_list:
  - model_name: mock
    litellm_params: {{model: openai/m, api_base: "{url}/v1", api_key: none}}
litellm_settings: {{telemetry: false}}
"""
LITELLM_SETTINGS = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # without keys, which is its cheapest
}
TENSORZERO = """\
[gateway]
observability.enabled = false

[models.mock]
routing = ["mock"]

[models.mock.providers.mock]
type = "openai"
api_base = "{url}/v1/"
model_name = "m"
api_key_location = "none"
"""


class NotInstalled(Exception):
    """A program that does not install or does not start on this machine; the message is one line."""


@dataclass(frozen=True, slots=True)
class Running:
    """A program under test that serves."""

    name: str
    target: Target
    pid: int


def install(name: str) -> None:
    """Install a peer into its own environment, by `scripts/peers`. Raises NotInstalled with its last line."""
    try:
        done = subprocess.run(
            [ROOT / "scripts" / "peers", name], cwd=ROOT, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"{name} does not install within {INSTALL_S:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise NotInstalled(last)


def python_of(name: str) -> str:
    """The interpreter of a peer's environment."""
    return str(ROOT / f".venv-bench-{name}" / "bin" / "python")


def version_of(name: str, package: str) -> str:
    """The version of a package in a peer's environment."""
    lock = (ROOT / "requirements" / f"bench-{name}.lock").read_text(encoding="utf-8")
    found = re.search(rf"^{re.escape(package)}==(\S+)", lock, re.M)
    return found[1] if found else "?"


def portkey_version() -> str:
    """The version of Portkey's gateway with that of its HTTP server."""
    wanted = json.loads((NODE / "package.json").read_text(encoding="utf-8"))
    gateway, server = wanted["dependencies"]["@portkey-ai/gateway"], wanted["overrides"]["@hono/node-server"]
    return f"{gateway}, @hono/node-server {server}"


@contextmanager
def litellm(directory: Path, upstream: str) -> Iterator[Running]:
    """LiteLLM's proxy in its form without a database."""
    config, port = directory / "litellm.yaml", free_port()
    config.write_text(LITELLM.format(url=upstream))
    program = str(Path(python_of("litellm")).with_name("litellm"))
    command = [program, "--host", "127.0.0.1", "--port", str(port), "--config", str(config), "--num_workers", "1"]
    with _serving("litellm", command, directory, port, LITELLM_SETTINGS) as pid:
        yield Running("litellm", Target(f"http://127.0.0.1:{port}/v1", "mock"), pid)


@contextmanager
def portkey(directory: Path, upstream: str) -> Iterator[Running]:
    """Portkey's gateway."""
    port, node = free_port(), shutil.which("node")
    if node is None:
        raise NotInstalled("there is no node on this machine")
    start = NODE / "node_modules" / "@portkey-ai" / "gateway" / "build" / "start-server.js"
    command = [node, "-r", str(NODE / "loopback.cjs"), str(start), f"--port={port}", "--headless"]
    headers = {
        "x-portkey-provider": "openai",
        "x-portkey-custom-host": f"{upstream}/v1",
        "authorization": "Bearer none",
    }
    with _serving("portkey", command, directory, port, {"NODE_ENV": "production"}) as pid:
        yield Running("portkey", Target(f"http://127.0.0.1:{port}/v1", "m", headers), pid)


@contextmanager
def vllm_router(directory: Path, upstream: str) -> Iterator[Running]:
    """vLLM's router, in Rust."""
    port = free_port()
    program = str(Path(python_of("vllm-router")).with_name("vllm-router"))
    command = [program, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", upstream]
    command += ["--policy", "round_robin", "--prometheus-port", str(free_port())]
    with _serving("vllm-router", command, directory, port) as pid:
        yield Running("vllm-router", Target(f"http://127.0.0.1:{port}/v1", "m"), pid)


@contextmanager
def tensorzero(directory: Path, upstream: str) -> Iterator[Running]:
    """TensorZero's server, in Rust, as its Python package embeds it, without observability."""
    config, log = directory / "tensorzero.toml", directory / "tensorzero.log"
    config.write_text(TENSORZERO.format(url=upstream))
    script = ROOT / "bench" / "suite" / "peers" / "tensorzero_server.py"
    url_file = directory / "tensorzero.url"
    command = [python_of("tensorzero"), str(script), str(config), str(url_file)]
    with process(command, log, {"PYTHONPATH": ""}) as running:
        _wait("tensorzero", lambda: wait_until(url_file.is_file, running, log))
        url = url_file.read_text().strip().rstrip("/")
        yield Running("tensorzero", Target(url, "tensorzero::model_name::mock"), running.pid)


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def _serving(
    name: str, command: list[str], directory: Path, port: int, settings: dict[str, str] | None = None
) -> Iterator[int]:
    """Start a program and wait until it answers on `port`; its process id. Raises NotInstalled if it ends before."""
    log = directory / f"{name}.log"
    if not os.access(command[0], os.X_OK):
        raise NotInstalled(f"{name} is not installed")
    with process(command, log, {"PYTHONPATH": "", **(settings or {})}) as running:
        _wait(name, lambda: wait_until(lambda: _answers(port), running, log))
        yield running.pid


def _wait(name: str, ready: Callable[[], None]) -> None:
    try:
        ready()
    except SystemExit as error:
        last = (str(error).strip().splitlines() or ["it said nothing"])[-1]
        raise NotInstalled(f"{name} does not start on this machine: {last}") from None


def _answers(port: int) -> bool:
    """Whether an HTTP server answers anything at all."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2.0)
    try:
        connection.request("GET", "/")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        time.sleep(READY_PAUSE_S)
        return False
    finally:
        connection.close()
    return True
