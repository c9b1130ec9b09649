"""Addresses and keys of the gateway under test, and the Node tests as pytest's own items."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.node_tests import NodeFile

if not Path(sys.prefix).name.startswith(".venv-clients"):
    collect_ignore_glob = ["test_*.py"]  # the ordinary run has none of these clients


@dataclass(frozen=True)
class Facts:
    """Where the gateway is. `broke_key` has no money, `slow_key` one request a minute."""

    base_url: str
    key: str
    broke_key: str
    slow_key: str


def pytest_addoption(parser: pytest.Parser) -> None:
    """Given by tests/clients/__main__.py."""
    parser.addoption("--facts", type=Path, help="JSON file: the gateway under test")
    parser.addoption("--node", help="the Node that runs the .mjs tests")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """`*.test.mjs`, where a Node was named."""
    node = parent.config.getoption("--node", None)
    if node and file_path.name.endswith(".test.mjs"):
        return NodeFile.from_parent(parent, path=file_path, node=node, facts=parent.config.getoption("--facts"))
    return None


@pytest.fixture(scope="session")
def facts(pytestconfig: pytest.Config) -> Facts:
    """The gateway under test."""
    return Facts(**json.loads(pytestconfig.getoption("--facts").read_text()))


@pytest.fixture
def weather() -> Callable[..., str]:
    """The tool that clients offer: a plain function whose answer no model could know."""

    def get_weather(city: str) -> str:
        """The weather in a city."""
        return f"{city}: {len(city)} degrees and frogs"

    return get_weather
