"""docs/clients.md names the versions that `make test-clients` installs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
PYTHON = ("langchain-openai", "llama-index-llms-openai-like", "pydantic-ai-slim", "instructor", "openai-agents")
NODE = ("ai", "openai", "@ai-sdk/openai", "@ai-sdk/openai-compatible")


def pins(lock: str) -> dict[str, str]:
    text = (ROOT / "requirements" / f"{lock}.lock").read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.M))


NEWEST, OLDER = pins("clients"), pins("clients-openai2")


@pytest.mark.parametrize("name", PYTHON)
def test_python_versions(name: str) -> None:
    version = (NEWEST | OLDER)[name] if name in OLDER else NEWEST[name]
    assert re.search(rf"^\|[^|]*`{name}` \| {re.escape(version)} \|", PAGE, re.M)


def test_both_openai_sdks_for_python() -> None:
    assert f"| `openai` for Python | {NEWEST['openai']}, {OLDER['openai']} |" in PAGE
    assert f"run with {OLDER['openai']} beside it" in PAGE


@pytest.mark.parametrize("name", NODE)
def test_node_versions(name: str) -> None:
    lock = json.loads((ROOT / "tests/clients/node/package-lock.json").read_text(encoding="utf-8"))
    version = lock["packages"][f"node_modules/{name}"]["version"]
    assert re.search(rf"`{name}`( for Node)? \|? ?{re.escape(version)}", PAGE)
    wanted = json.loads((ROOT / "tests/clients/node/package.json").read_text(encoding="utf-8"))
    assert wanted["dependencies"][name] == version


def test_versions_of_coding_agents() -> None:
    lock = json.loads((ROOT / "tests/clients/agents/package-lock.json").read_text(encoding="utf-8"))
    for name in ("@anthropic-ai/claude-code", "@openai/codex", "@qwen-code/qwen-code"):
        assert f"`{name}` {lock['packages'][f'node_modules/{name}']['version']} |" in PAGE


def test_every_test_file_is_run() -> None:
    script = (ROOT / "scripts" / "test-clients").read_text(encoding="utf-8")
    files = [path.name for path in (ROOT / "tests" / "clients").glob("test_*.py")]
    assert len(files) > 8
    assert [name for name in files if name not in script] == []
