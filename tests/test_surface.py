"""What the packages load, open and call themselves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "vllm", "trl", "litellm", "transformers", "onnxruntime", "onnx", "tokenizers", "policy")
WATCH = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(event) if event.startswith("socket.") else None)
import {module}
loaded = [name for name in {heavy!r} if name in sys.modules]
spoken = [event for event in opened if event in ("socket.connect", "socket.bind", "socket.getaddrinfo")]
print(loaded, spoken)
"""


@pytest.mark.parametrize("module", ["gateway", "gateway.config.settings", "gateway.cli", "gateway.wiring.build"])
def test_importing_is_light_and_silent(module: str) -> None:
    script = WATCH.format(module=module, heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[] []"


def test_the_command_line_starts_without_the_web_framework() -> None:
    script = "import sys, gateway.cli; print('fastapi' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "False"


def test_the_module_is_the_program() -> None:
    command = [sys.executable, "-m", "gateway", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("usage: baton")
    assert re.findall(r"\n  ([a-z][a-z-]+) ", done.stdout) == [
        *("serve", "check", "doctor", "worker"),
        *("status", "rollouts", "explain", "spend", "audit"),
        *("keys", "orgs", "credits", "sessions", "pools", "workers", "alerts"),
        *("policy", "experience", "record", "evaluate", "train", "gate", "traces", "replay-workers"),
        *("migrate", "backup", "restore", "journal", "retention"),
    ]
