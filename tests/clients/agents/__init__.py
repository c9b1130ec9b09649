"""The coding agents that scripts/test-clients installs: where they are, and the question that each is asked.

The scripted model calls the agent's own shell with the command between `[[` and `]]` in the question, and then quotes
what came back. So the answer holds what only the command could know.
"""

from __future__ import annotations

from pathlib import Path

MODULES = Path(__file__).parent / "node_modules"
PROGRAMS = {
    "claude-code": "@anthropic-ai/claude-code-linux-*/claude",
    "codex": "@openai/codex-linux-*/vendor/*/bin/codex",
    "qwen-code": "@qwen-code/qwen-code/cli-entry.js",
}
LIMIT_S = 120
SECRET = "frogs-1742"
QUESTION = "Run [[cat secret.txt]] and tell me what it prints."
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HTTPS_PROXY": "http://127.0.0.1:9",  # nothing leaves this machine
    "NO_PROXY": "127.0.0.1",
}


def program(name: str) -> Path:
    """The program of an agent. Raises AssertionError where it is not installed for this machine."""
    paths = sorted(MODULES.glob(PROGRAMS[name]))
    assert paths, f"{name} is not installed; run scripts/test-clients"
    return paths[0]


def workplace(home: Path) -> Path:
    """A new directory with the file that QUESTION asks for."""
    work = home / "work"
    work.mkdir()
    (work / "secret.txt").write_text(SECRET)
    return work
