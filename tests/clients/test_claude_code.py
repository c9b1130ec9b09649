"""Claude Code, over `/v1/messages`, runs a command and reads its output."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.agents import ENVIRONMENT, LIMIT_S, QUESTION, SECRET, program, workplace
from tests.clients.conftest import Facts

QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CODE_MAX_RETRIES": "0",
}
MODEL_NAMES = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")


def run(facts: Facts, home: Path, model: str, key: str) -> dict[str, Any]:
    """The result that the agent prints."""
    address = {"ANTHROPIC_BASE_URL": facts.base_url.removesuffix("/v1"), "ANTHROPIC_AUTH_TOKEN": key, "HOME": str(home)}
    done = subprocess.run(
        [str(program("claude-code")), "-p", QUESTION, "--output-format", "json", "--allowedTools", "Bash"],
        cwd=workplace(home), env=ENVIRONMENT | QUIET | address | dict.fromkeys(MODEL_NAMES, model),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        raise AssertionError(f"Claude Code printed no result:\n{done.stdout}{done.stderr}") from None


@pytest.mark.parametrize("model", ["baton", "scribe"])
def test_a_tool_loop(facts: Facts, tmp_path: Path, model: str) -> None:
    """Planned by `baton`, and by a worker named as the model."""
    done = run(facts, tmp_path, model, facts.key)
    assert (done["subtype"], done["is_error"]) == ("success", False)
    assert SECRET in done["result"]
    assert done["result"].startswith("The tool said: ")
    assert done["num_turns"] == 2
    assert done["stop_reason"] == "end_turn"
    assert done["usage"]["input_tokens"] > 0
    assert list(done["modelUsage"]) == [model]


def test_spent_money_is_told_and_asked_once(facts: Facts, tmp_path: Path) -> None:
    done = run(facts, tmp_path, "baton", facts.broke_key)
    assert done["is_error"] is True
    assert done["api_error_status"] == 402


def test_tokens_are_counted_by_the_whole_gateway(facts: Facts) -> None:
    """What the agent's `/context` asks; `count_tokens` spends nothing, so a key without money may ask it."""
    body = {"model": "scribe", "messages": [{"role": "user", "content": "one two three"}]}
    reply = httpx.post(f"{facts.base_url}/messages/count_tokens", json=body, headers={"x-api-key": facts.broke_key})
    assert reply.status_code == 200
    assert 3 <= reply.json()["input_tokens"] < 200
