"""Trained weights as a policy directory: the files of the one that training began with, new weights, a new manifest."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gateway import __version__
from gateway.core.loop.plan import PlanLimits, plan_schema
from gateway.core.loop.prompt import Profile, render
from gateway.core.loop.shown import PromptInput, ShownWorker
from gateway.core.policies.manifest import ADAPTER_FILES, Manifest
from gateway.errors import VersionRefused
from policy.environments.base import rng_for
from policy.serve.manifest import GRAPH_FILE, REQUIRED_FILES, write_manifest
from policy.serve.tokens import Tokens
from policy.tensors import file_errors
from policy.train.run.initial import Initial
from policy.train.settings import Settings
from policy.train.sources.conductor import Decoded, Sampler
from policy.train.step.forward import token_logprobs
from policy.train.step.masks import Masks
from policy.train.weights.lora import plain_state, save_adapter
from policy.train.weights.small import Weights
from policy.train.weights.start import MODEL_FILES

PROBE_TOKENS_MAX = 64
GIT_TIMEOUT_S = 5.0
_PROBE = PromptInput(
    messages=({"role": "user", "content": "How many days are there from 3 March 2021 to 9 May 2021?"},),
    workers=(
        ShownWorker("atlas", "expert dates", ("dates",), 2, 8192, 0.4),
        ShownWorker("quill", "good writing", ("writing",), 1, 8192, 0.4),
    ),
    steps_max=3,
    depth_left=1,
)


def write(directory: Path, initial: Initial, manifest: Manifest, settings: Settings) -> Manifest:
    """Write a policy directory: an adapter over what training began with, or full weights. Raises OSError."""
    directory.mkdir(parents=True)
    if initial.lora and not settings.lora_merge:
        lineage = initial.lineage
        size = save_adapter(directory, initial.weights.model, lineage["base"], initial.lora.alpha)
        return write_manifest(directory, replace(manifest, kind="adapter", params=size, **lineage), ADAPTER_FILES)
    return _write_full(directory, initial, manifest)


def _write_full(directory: Path, initial: Initial, manifest: Manifest) -> Manifest:
    """Tensors as they were stored, the rest as in `initial`; with our runtime's graph where that had one."""
    for name in MODEL_FILES:
        if (initial.home / name).is_file():
            shutil.copyfile(initial.home / name, directory / name)
    if not (directory / GRAPH_FILE).is_file():
        with suppress(ModuleNotFoundError, VersionRefused):  # the embedded server runs no other kind of model
            import_module("policy.serve.graph").write_graph(directory)
    state = {name: value.cpu().contiguous() for name, value in plain_state(initial.weights.model).items()}
    tied = json.loads((directory / "config.json").read_text()).get("tie_word_embeddings", False)
    if tied:
        state.pop("lm_head.weight", None)
    with file_errors():
        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    written = replace(manifest, params=sum(value.numel() for value in state.values()))
    files = [name for name in REQUIRED_FILES if (directory / name).is_file()]
    return write_manifest(directory, written, files)


def revision() -> str:
    """Of the code: its git commit, else the release."""
    root = Path(__file__).parent
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command
            ["git", "-C", str(root), "rev-parse", "HEAD"],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=True,
        )
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return __version__


def now() -> str:
    """ISO 8601, UTC, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def probe_of(weights: Weights, tokens: Tokens, masks: Masks, profile: Profile) -> dict[str, Any]:
    """A fixed prompt, a plan for it, and the plan's log-probs under these weights without a mask at temperature 1."""
    messages = render(profile, _PROBE)
    prompt_ids = tuple(tokens.encode_chat(messages))
    schema = plan_schema(PlanLimits(tuple(worker.handle for worker in _PROBE.workers), _PROBE.steps_max))
    row = Decoded(prompt_ids, masks.root(schema), 1.0, PROBE_TOKENS_MAX, rng_for("probe"))
    Sampler(weights, tokens, masks, len(prompt_ids) + PROBE_TOKENS_MAX).decode([row])
    told = {"messages": messages, "prompt_ids": list(prompt_ids)}  # a server must make the same tokens of the messages
    return rescored(weights, told | {"token_ids": row.ids})


def rescored(weights: Weights, probe: Mapping[str, Any]) -> dict[str, Any]:
    """The same prompt and plan with the log-probs that these weights give."""
    with torch.no_grad():
        logits = weights.logits(weights.states([probe["prompt_ids"]], [0], [probe["token_ids"]]))
        logprobs = token_logprobs(logits, torch.tensor(probe["token_ids"], device=logits.device))
    return {**probe, "logprobs": logprobs.tolist()}


def as_plain(value: Any) -> Any:
    """JSON's own types."""
    return json.loads(json.dumps(value, default=str))
