"""Where the coding agents are, which scripts/test-clients installs: native programs in npm packages."""

from __future__ import annotations

from pathlib import Path

MODULES = Path(__file__).parent / "node_modules"
PROGRAMS = {"claude-code": "@anthropic-ai/claude-code-linux-*/claude"}


def program(name: str) -> Path:
    """The program of an agent. Raises AssertionError where it is not installed for this machine."""
    paths = sorted(MODULES.glob(PROGRAMS[name]))
    assert paths, f"{name} is not installed; run scripts/test-clients"
    return paths[0]
