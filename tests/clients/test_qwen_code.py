"""Qwen Code, over `/v1/chat/completions`, runs a command and reads its output."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.clients.agents import ENVIRONMENT, LIMIT_S, QUESTION, SECRET, program, workplace
from tests.clients.conftest import Facts

# Qwen Code 0.24.4 stops to read when a command exits, and on a busy machine loses what it has not read until then
LINGERING = QUESTION.replace("secret.txt", "secret.txt && sleep 1")


@pytest.mark.parametrize("model", ["baton", "scribe"])
def test_a_tool_loop(facts: Facts, tmp_path: Path, pytestconfig: pytest.Config, model: str) -> None:
    """Planned by `baton`, and by a worker named as the model."""
    node = pytestconfig.getoption("--node")
    if node is None:
        pytest.skip("no Node")
    address = {"OPENAI_BASE_URL": facts.base_url, "OPENAI_API_KEY": facts.key, "OPENAI_MODEL": model}
    command = [node, str(program("qwen-code")), "-p", LINGERING, "--yolo", "--auth-type", "openai", "-o", "json"]
    done = subprocess.run(
        command, cwd=workplace(tmp_path), env=ENVIRONMENT | address | {"HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = [event for event in json.loads(done.stdout) if event["type"] == "result"]
    assert result["is_error"] is False
    assert SECRET in result["result"]
