"""Debian's Prometheus for tests: `prometheus` scrapes a gateway, `promtool` tests rules. CI installs the package."""

from __future__ import annotations

import math
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.waiting import wait_until

RULES = Path(__file__).resolve().parent.parent / "deploy" / "prometheus"
START_S = 60.0


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; skips the test where the package is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name}: apt-get install prometheus")
    return path


class Prometheus:
    """A running server."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=30)

    def close(self) -> None:
        self._http.close()

    def ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def query(self, query: str) -> list[tuple[Mapping[str, str], float]]:
        """The series of an instant query, (labels, value), without values that are no number."""
        reply: dict[str, Any] = self._http.get("/api/v1/query", params={"query": query}).json()
        assert reply["status"] == "success", f"{query}: {reply.get('error')}"
        series = [(each["metric"], float(each["value"][1])) for each in reply["data"]["result"]]
        return [(labels, value) for labels, value in series if math.isfinite(value)]


@contextmanager
def scraping(directory: Path, target: str) -> Iterator[Prometheus]:
    """A Prometheus with the shipped rules that scrapes `target` (host:port) each second."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = directory / "prometheus.yaml"
    config.write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{RULES}/alerts.yaml]\n"
        f"scrape_configs: [{{job_name: baton, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    words = [
        f"--config.file={config}",
        f"--storage.tsdb.path={directory}/tsdb",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([program("prometheus"), *words], stdout=log, stderr=log)
    server = Prometheus(f"http://127.0.0.1:{port}")
    try:
        wait_until(lambda: server.ready() or process.poll() is not None, START_S)
        assert process.poll() is None, (directory / "prometheus.log").read_text()
        yield server
    finally:
        server.close()
        process.kill()
        process.wait()
