"""docs/clients.md: every snippet, as it stands there but for the address and the key."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import Facts

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^### (.+?)\n\n```(python|js)\n(.+?)^```", re.MULTILINE | re.DOTALL)
SNIPPETS = {title: (language, code) for title, language, code in BLOCK.findall((ROOT / "docs/clients.md").read_text())}
LIMIT_S = 60


def filled(code: str, facts: Facts) -> str:
    assert "http://127.0.0.1:8080/v1" in code
    assert "bt_data_…" in code
    return code.replace("http://127.0.0.1:8080/v1", facts.base_url).replace("bt_data_…", facts.key)


def runs(language: str, code: str) -> bool:
    """Whether it is Python, and this environment has what it imports."""
    module = re.match(r"(?:from|import) (\w+)", code)
    return language == "python" and module is not None and importlib.util.find_spec(module[1]) is not None


def test_every_client_has_one() -> None:
    assert len(SNIPPETS) == 8


@pytest.mark.parametrize("title", [title for title, (language, code) in SNIPPETS.items() if runs(language, code)])
def test_python(facts: Facts, capsys: pytest.CaptureFixture[str], title: str) -> None:
    exec(compile(filled(SNIPPETS[title][1], facts), title, "exec"), {"__name__": "snippet"})  # noqa: S102  our own page
    assert re.search(r"You said: Say hello\.|hello='Paris'", capsys.readouterr().out)


@pytest.mark.parametrize("title", [title for title, (language, _) in SNIPPETS.items() if language == "js"])
def test_node(facts: Facts, pytestconfig: pytest.Config, title: str) -> None:
    node = pytestconfig.getoption("--node")
    if node is None:
        pytest.skip("no Node")
    command = [node, "--import", "./loopback.mjs", "--input-type=module", "-e", filled(SNIPPETS[title][1], facts)]
    done = subprocess.run(
        command,
        cwd=ROOT / "tests/clients/node",
        env={"PATH": os.defpath},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert "You said: Say hello." in done.stdout, done.stderr
