"""The conductors that the contract suite runs against: the scripted fake, the embedded server, and a real vLLM."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from gateway.adapters.upstream.client import Breaker
from gateway.adapters.upstream.conductor.client import HttpConductor
from gateway.service.ports.request import Conductor, ConductorCall, Sampling
from tests.fakes.conductor import ScriptedConductor

ROOT = Path(__file__).parents[2]
SERVE_BOOT_S = 30.0
HANDLES = ("atlas", "quill", "forge")


def text_schema(chars_max: int) -> dict[str, Any]:
    """One or two steps whose task is text of up to that many characters."""
    step = {
        "type": "object",
        "properties": {
            "worker": {"enum": list(HANDLES)},
            "task": {"anyOf": [{"type": "null"}, {"type": "string", "minLength": 2, "maxLength": chars_max}]},
        },
        "required": ["worker", "task"],
        "additionalProperties": False,
    }
    steps = {"type": "array", "items": step, "minItems": 1, "maxItems": 2}
    return {"type": "object", "properties": {"steps": steps}, "required": ["steps"], "additionalProperties": False}


SCHEMA = text_schema(12)
LONG_SCHEMA = {  # never over before its token bound
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 20_000}},
    "required": ["text"],
    "additionalProperties": False,
}


def planning_call(
    question: str = "Add 2 and 3.",
    *,
    temperature: float = 1.0,
    seed: int | None = None,
    schema: Mapping[str, Any] | None = None,
    tokens_max: int = 256,
    timeout_s: float = 60.0,
    hasty: bool = False,
) -> ConductorCall:
    """A planning call with defaults that any of the three conductors can meet."""
    messages = [{"role": "user", "content": question}]
    sampling = Sampling(temperature=temperature, tokens_max=tokens_max, seed=seed)
    return ConductorCall(messages, schema or SCHEMA, sampling, timeout_s, hasty=hasty)


def scripted_plan(call: ConductorCall) -> str:
    """A plan that follows SCHEMA, drawn from the call's seed as a sampler would."""
    draw = random.Random(call.sampling.seed if call.sampling.temperature else 0)
    steps = [{"worker": draw.choice(HANDLES), "task": draw.choice([None, "check", "add"])}]
    return json.dumps({"steps": steps * draw.randint(1, 2)}, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Served:
    """A conductor under test, how to read its tokens, and how to kill it."""

    conductor: Conductor
    text_of: Callable[[tuple[int, ...]], str]
    kill: Callable[[], None]


def fake() -> Served:
    conductor = ScriptedConductor(scripted_plan, gap_s=0.001)

    def kill() -> None:
        conductor.down = True

    return Served(conductor, conductor.text_of, kill)


def over_http(url: str, model_dir: Path, kill: Callable[[], None], **options: Any) -> Served:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    conductor = HttpConductor(f"{url}/v1", "conductor", breaker=Breaker(failures_max=10_000), **options)
    return Served(conductor, lambda ids: str(tokenizer.decode(ids)), kill)


@contextmanager
def embedded_server(model_dir: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`python -m policy.serve` on a free port; ends with the block."""
    with tempfile.TemporaryDirectory() as directory:
        port_file = Path(directory) / "port"
        command = [sys.executable, "-m", "policy.serve", "--model", str(model_dir), "--port-file", str(port_file)]
        with _process([*command, *options]) as process:
            _wait(port_file.is_file, process, SERVE_BOOT_S)
            yield f"http://127.0.0.1:{port_file.read_text().strip()}", process


@contextmanager
def _process(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, cwd=ROOT, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=120)


def _wait(ready: Callable[[], bool], process: subprocess.Popen[bytes], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not ready():
        if process.poll() is not None:
            pytest.fail(f"the server ended with status {process.returncode} before it was ready")
        if time.monotonic() > end:
            pytest.fail(f"the server was not ready after {timeout_s} s")
        time.sleep(0.05)
