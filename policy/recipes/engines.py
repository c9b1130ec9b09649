"""Engines to try versions on: the embedded server, and a real vLLM on CPU from `.venv-vllm` (scripts/test-vllm).

Both start on a port of their own, can be killed and started again on it, and end with us.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

from policy.recipes.stack import LAST_WORDS_CHARS, LEASH, ROOT, end

VLLM = ROOT / ".venv-vllm" / "bin" / "vllm"
# else a probe under traffic ends a Llama (docs/swap.md)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
START_S = {"embedded": 60.0, "vllm": 420.0}
VLLM_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


class EngineProcess:
    """A server of model versions as a process. `start` returns once it answers; `kill` is SIGKILL, to it and its own.

    Logs, and the tokenizer's folder for vLLM, are in `directory`."""

    def __init__(self, kind: str, base: Path, directory: Path, name: str = "conductor") -> None:
        self.kind = kind
        self.name = name
        self.base = base
        self.directory = directory
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.key = secrets.token_urlsafe(24)
        self.log = directory / f"{kind}.log"
        self.versions_max = 16
        self.options: list[str] = []  # added to its command line
        self._running: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Seconds until it answered; call it from the main thread, which the leash is tied to. Raises SystemExit with
        the end of its log if it does not answer."""
        self.stop()
        command, environment = self._vllm() if self.kind == "vllm" else self._embedded()
        leashed = [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), str(int(signal.SIGTERM)), "-", *command]
        began_s = time.monotonic()
        with self.log.open("ab") as output:
            running = subprocess.Popen(
                leashed, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        self._running = running
        while not answers(f"{self.url}/v1/models"):
            if running.poll() is not None or time.monotonic() - began_s > START_S[self.kind]:
                words = self.log.read_text(errors="replace")[-LAST_WORDS_CHARS:]
                self.stop()
                raise SystemExit(f"{self.kind} did not start (status {running.poll()}):\n{words}")
            time.sleep(0.1)
        return time.monotonic() - began_s

    def kill(self) -> None:
        """Kill the process and its whole session."""
        if self._running is not None:
            os.killpg(self._running.pid, signal.SIGKILL)
            self._running.wait()
            self._running = None

    def stop(self) -> None:
        """Ask it to end, then kill what is left of it."""
        if self._running is not None:
            pid = self._running.pid
            end(self._running)
            self._running = None
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    def alive(self) -> bool:
        """Return whether its health check passes."""
        return answers(f"{self.url}/health")

    def _embedded(self) -> tuple[list[str], Mapping[str, str]]:
        key_file = self.directory / "admin.key"
        key_file.write_text(self.key)
        key_file.chmod(0o600)
        command = [sys.executable, "-m", "policy.serve", "--model", str(self.base), "--served-model-name", self.name]
        command += ["--port", str(self.port), "--versions", str(self.versions_max), "--admin-key-file", str(key_file)]
        return [*command, *self.options], {"PATH": os.defpath}

    def _vllm(self) -> tuple[list[str], Mapping[str, str]]:
        if not VLLM.is_file():
            raise SystemExit("no .venv-vllm: `make test-vllm` makes it")
        structured = {"backend": "guidance", "disable_any_whitespace": True}
        command = [str(VLLM), "serve", str(self.base), "--served-model-name", self.name, "--host", "127.0.0.1"]
        command += ["--tokenizer", str(tokenizer_folder(self.base, self.directory / "tokenizer"))]
        command += ["--port", str(self.port), "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
        command += ["--block-size", "32", "--logprobs-mode", "processed_logprobs"]
        command += ["--generation-config", "vllm"]
        command += ["--structured-outputs-config", json.dumps(structured)]
        command += ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "4"]
        command += [
            "--lora-target-modules",
            *TARGETS,
        ]
        command += ["--max-cpu-loras", str(self.versions_max), *self.options]
        path = f"{VLLM.parent}:/usr/local/bin:/usr/bin:/bin"
        return command, {"PATH": path, "HOME": str(self.directory), **VLLM_ENVIRONMENT}


def tokenizer_folder(base: Path, folder: Path) -> Path:
    """The tokenizer's files alone: beside a config.json of Qwen2, transformers 5 puts Qwen2's own splitting in place of
    the one in tokenizer.json (docs/conductor.md)."""
    folder.mkdir(exist_ok=True)
    for path in (*base.glob("tokenizer*.json"), *base.glob("chat_template.jinja")):
        shutil.copy(path, folder)
    return folder


def answers(url: str) -> bool:
    """Return whether a GET gets 200 now."""
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def free_port() -> int:
    """Return a port that is free at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
