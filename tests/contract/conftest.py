"""Servers that the contract suites share. One real vLLM serves all of them, with the weights that are shipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from policy.recipes.engines import EngineProcess
from tests.tiny_model import write_tiny_model

SHIPPED = Path(__file__).parents[2] / "policy" / "shipped" / "arena-3"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[EngineProcess]:
    """A vLLM that serves the shipped conductor and takes adapters and full weights, as deploy/vllm.sh starts it."""
    if request.config.option.markexpr != "vllm":
        pytest.skip("needs a real vLLM: make test-vllm")
    process = EngineProcess("vllm", SHIPPED, tmp_path_factory.mktemp("vllm"))
    process.start()
    yield process
    process.stop()


@pytest.fixture(scope="session")
def vllm_url(vllm: EngineProcess) -> str:
    return vllm.url
