"""Codex CLI at its defaults, over `/v1/responses`, runs a command and reads its output."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.clients.agents import ENVIRONMENT, LIMIT_S, QUESTION, SECRET, program, workplace
from tests.clients.conftest import Facts

PROVIDER = 'model_providers.baton={{name="Baton",base_url="{url}",env_key="GATEWAY_KEY",wire_api="responses"}}'


@pytest.mark.parametrize("model", ["baton", "scribe"])
def test_a_tool_loop(facts: Facts, tmp_path: Path, model: str) -> None:
    """Planned by `baton`, and by a worker named as the model."""
    answer = tmp_path / "answer.txt"
    settings = ("-c", "model_provider=baton", "-c", PROVIDER.format(url=facts.base_url), "-m", model)
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-o", str(answer))
    done = subprocess.run(
        [str(program("codex")), "exec", *settings, *options, QUESTION],
        cwd=workplace(tmp_path), env=ENVIRONMENT | {"HOME": str(tmp_path), "GATEWAY_KEY": facts.key},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert SECRET in answer.read_text()
